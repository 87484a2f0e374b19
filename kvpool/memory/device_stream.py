"""Copies that a device makes by itself, and the end of them.

Needs no torch: the caller gives its module of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def finished_stream(module: Any, stream: Any) -> Iterator[None]:
    """Queue work on `stream`; all of it has ended when the block ends, also when that raises.

    What was queued before a failure is still on its way, and its rows are given away as soon as the error
    arrives where they were reserved or leased. Waits for this stream alone, not for others' work on the device.

    module: torch's of the device (`torch.get_device_module`). An error of the wait is the driver's: it has
    ended the device's context, and all copies with it.
    """
    try:
        with module.stream(stream):
            yield
    finally:
        event = module.Event()
        event.record(stream)
        event.synchronize()
