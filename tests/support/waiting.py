"""How tests wait: one patience for whatever has to happen, and polls that grow further apart.

A wait that succeeds costs nothing, so the patience is that of a slow machine with much to do. A shorter limit
belongs into a test only where the limit itself is tested.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

PATIENCE_S = 60.0
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str = "", *, seconds: float = PATIENCE_S) -> Found:
    """Poll until the condition gives something true, and return that. Raises `AssertionError`."""
    for pause_s in _pauses(seconds):
        if found := condition():
            return found
        time.sleep(pause_s)
    return _last(condition, what, seconds)


async def until_async(
    condition: Callable[[], Found], what: str = "", *, seconds: float = PATIENCE_S
) -> Found:
    """The same while the event loop goes on."""
    for pause_s in _pauses(seconds):
        if found := condition():
            return found
        await asyncio.sleep(pause_s)
    return _last(condition, what, seconds)


def _pauses(seconds: float) -> Iterator[float]:
    pause_s, end = FIRST_PAUSE_S, time.monotonic() + seconds
    while time.monotonic() < end:
        yield pause_s
        pause_s = min(LONGEST_PAUSE_S, 1.2 * pause_s)


def _last(condition: Callable[[], Found], what: str, seconds: float) -> Found:
    found = condition()
    assert found, f"not within {seconds:g} s: {what or condition}"
    return found
