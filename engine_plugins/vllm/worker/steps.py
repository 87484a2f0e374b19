"""Measures the duration of a step's forward pass, where it runs.

The scheduler cannot measure it: with asynchronous scheduling it plans a step while the previous one still runs,
and on an accelerator a worker's own clock shows only how long submitting takes.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class StepTimer(Protocol):
    """For the engine's thread of one rank."""

    def mark(self) -> Any:
        """This moment, behind all that was submitted so far."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two moments; None while the second is yet to come."""


class HostTimer:
    """For engines that compute in the thread that submits."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class DeviceTimer:
    """For engines on accelerators: events on the engine's own stream. Nothing here waits for the device.

    module: of torch, for the device.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        return float(begin.elapsed_time(end)) / 1e3 if end.query() else None
