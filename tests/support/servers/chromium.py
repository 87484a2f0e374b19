"""A real, headless Chromium, driven by Playwright: `with chromium() as browser: browser.new_page()`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from tests.support.servers.find import find_server

START_MS = 60_000.0


@contextmanager
def chromium() -> Iterator[Browser]:
    """Find or fetch it, start it, end it with the block. One thread, and none with an event loop.

    Raises `ConfigError` when it cannot be had. Root has no sandbox to put it into, so it shows root no page but ours.
    """
    program = find_server("chromium")
    sandbox = os.geteuid() != 0
    with sync_playwright() as playwright:
        # "--headless=new" is the browser as it is with a window; Playwright's own flag means the older shell.
        browser = playwright.chromium.launch(
            executable_path=program,
            headless=False,
            chromium_sandbox=sandbox,
            args=["--headless=new", "--disable-gpu", "--hide-scrollbars"],
            timeout=START_MS,
        )
        try:
            yield browser
        finally:
            browser.close()
