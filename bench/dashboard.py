"""How heavy the dashboard is, and how soon it shows something.

A real daemon with its gateway, a real Chromium with an empty cache each time, both on this machine. `page_bytes` is all
that the page loads of its own files, as it comes over the wire. `first_paint_s` is the browser's own first contentful
paint since the navigation began; `map_s`, a row without a bound, is until the map of the nodes is there.

    .venv/bin/python bench/dashboard.py [--quick] [--json FILE]

Checks: page_bytes, first_paint_s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

from harness import daemon, median, parse_arguments

from kvpool.daemon.workers.gateway import TOKEN_FILE
from tests.support.servers.chromium import chromium
from tests.support.servers.etcd import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROUNDS, ROUNDS_QUICK = 20, 5
READY_S = 30.0
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def visit(browser: Browser, url: str, token: str) -> tuple[int, float, float]:
    """Bytes of the page's own files, seconds to its first paint, seconds to the map."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    loaded: list[int] = []
    page.on(
        "requestfinished",
        lambda request: (
            loaded.append(request.sizes()["responseBodySize"]) if "/ui" in request.url else None
        ),
    )
    begun = time.perf_counter()
    page.goto(f"{url}/ui/#token={token}")
    page.wait_for_selector(".node")
    seconds = time.perf_counter() - begun
    page.wait_for_function(f"{PAINT} !== null")
    painted = page.evaluate(PAINT) / 1000
    context.close()
    return sum(loaded), painted, seconds


def wait_ready(url: str) -> None:
    """The gateway is a process of its own, and may come up a little after its daemon."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urlopen(f"{url}/readyz", timeout=READY_S):
                return
        except OSError as error:  # nobody listens yet, or it is not ready (an `HTTPError` is one)
            if time.monotonic() > deadline:
                raise SystemExit(f"no gateway at {url} within {READY_S:g} s: {error}") from None
        time.sleep(0.05)


def main() -> int:
    report, _ = parse_arguments(__doc__ or "")
    rounds = ROUNDS_QUICK if report.quick else ROUNDS
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        with daemon(folder, "a", "64MiB", "--http", f"127.0.0.1:{port}"):
            wait_ready(url)
            token = (folder / TOKEN_FILE).read_text().strip()
            visit(browser, url, token)
            found = [visit(browser, url, token) for _ in range(rounds)]
    nbytes, painted, seconds = (list(each) for each in zip(*found, strict=True))
    report.row("page", rounds=rounds, bytes=max(nbytes))
    report.row("first paint", median_s=median(painted), worst_s=max(painted))
    report.row("map", median_s=median(seconds), worst_s=max(seconds))
    report.check("page_bytes", max(nbytes), at_most=300_000)
    report.check("first_paint_s", median(painted), at_most=1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
