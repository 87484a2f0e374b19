"""What commands say while they wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAY_S = 10.0


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Say what is waited for, and every few seconds for how long."""
    ended = threading.Event()
    begun = time.monotonic()

    def say() -> None:
        while not ended.wait(SAY_S):
            print(f"{what}: {time.monotonic() - begun:.0f} s so far", flush=True)

    print(what, flush=True)
    thread = threading.Thread(target=say)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
