"""How long requests wait for loads from the node's memory, learned from loads. No I/O, no clock.

A load of so many blocks takes about a + b x blocks: a step, a hop between threads and processes, then copies. That is
the form of a step's time too, so the same fit finds it.
"""

from __future__ import annotations

import math

from kvpool.prefill_cost import PrefillFit, StepWork

KEEP_S = 30.0
"""No estimate when the last load was longer ago: what is never loaded is never measured."""


class LoadCost:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._fit = PrefillFit()
        self._last = -math.inf

    def observe(self, blocks: int, seconds: float, now: float) -> None:
        self._fit.observe(StepWork(blocks, blocks, blocks), seconds)
        self._last = now

    def seconds(self, blocks: int, now: float) -> float | None:
        """For so many blocks; None: not known, or not any more."""
        if not self._fit.known or now - self._last > KEEP_S:
            return None
        a, b, c = self._fit.coefficients
        return a + (b + c) * blocks
