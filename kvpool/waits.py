"""Waits for events with a deadline."""

from __future__ import annotations

import asyncio


async def wait_for(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until an event is set, at most this long, or without a limit if `seconds` is None; return whether it is."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
