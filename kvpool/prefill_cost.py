"""How fast an engine computes prompts, learned from its steps. No I/O, no clock.

A step that computes `tokens` tokens of prompts takes about

    seconds = a + b x tokens + c x attended

where `attended` sums for each token those that it attends to: a constant, a part that grows
with the tokens (the matrices), and one that grows with the depth too (attention). None of the three is negative.
The result is the price of one more block in a step, so it does not include `a`: a prompt whose blocks
were all loaded still takes a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from kvpool.types import Recompute

KEEP = 0.98
"""The factor that a step applies to the weight of all earlier ones: some fifty of them count."""
STEPS_MIN = 3
"""No estimate before this many steps."""
REACH = 2.0
"""Beyond this multiple of the deepest token seen, blocks are assumed to cost no more."""
PRIOR = 1e-2
"""Weight of the assumption that a and c are 0, relative to the measurements: identical steps
cannot separate the terms, which then go to `b`.
"""
SECONDS_MIN = 1e-6
"""Minimum duration if the clock has not moved."""

_SCALE = np.array([1.0, 1e3, 1e6])  # so that the three columns are of one size
_COLUMNS = [subset for size in (1, 2, 3) for subset in combinations(range(3), size)]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The prompt work of one step.

    tokens: of all its requests, decoded ones included. attended: how many tokens the prompts' ones attend
        to, summed up. deepest: the position at which the deepest of these ends.
    """

    tokens: int
    attended: float
    deepest: int


class PrefillFit:
    """Learns a, b and c by least squares of *relative* errors, with older steps weighing less.

    Relative, because short steps should count as much as long ones, and because then one step that takes
    100 times too long, because something is compiled in it, weighs 10,000 times less than the others. The
    price: with steps that scatter by a share x, the estimate is about x squared too low. Not thread-safe.
    """

    def __init__(self) -> None:
        self._squares = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._steps = 0
        self._deepest = 0
        self._fitted: npt.NDArray[np.float64] | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """A measured step."""
        seconds = max(seconds, SECONDS_MIN)
        row = np.array([1.0, work.tokens, work.attended]) / _SCALE / seconds
        self._squares = self._squares * KEEP + np.outer(row, row)
        self._sums = self._sums * KEEP + row
        self._steps += 1
        self._deepest = max(self._deepest, work.deepest)
        self._fitted = None

    @property
    def known(self) -> bool:
        """Whether there are enough measurements."""
        return self._steps >= STEPS_MIN

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """a, b and c: seconds a step, seconds a token, seconds a token attended to."""
        if self._fitted is None:
            self._fitted = self._solve() / _SCALE
        a, b, c = self._fitted.tolist()
        return a, b, c

    def recompute(self, start: int, tokens: int, blocks: int) -> Recompute | None:
        """The price of this many blocks of this many tokens, the first of which begins at token `start`.

        None: not known yet.
        """
        if not self.known:
            return None
        _, b, c = self.coefficients

        def block_s(index: int) -> float:
            context = min(start + index * tokens, REACH * self._deepest)
            return tokens * (b + c * (context + tokens / 2))

        first, last = block_s(0), block_s(max(0, blocks - 1))
        if not first > 0:
            return None  # the measurements did not depend on the tokens
        return Recompute(first, (last - first) / max(1, blocks - 1))

    def _solve(self) -> npt.NDArray[np.float64]:
        """The best of all solutions in which some of the three are 0 and the others are not negative."""
        squares = self._squares + np.diag(PRIOR * np.diag(self._squares) * np.array([1, 1e-6, 1]))
        best, best_gain = np.zeros(3), 0.0
        for columns in _COLUMNS:
            chosen = list(columns)
            found = np.linalg.solve(squares[np.ix_(chosen, chosen)], self._sums[chosen])
            gain = float(found @ self._sums[chosen])
            if gain > best_gain and (found >= 0).all():
                best, best_gain = np.zeros(3), gain
                best[chosen] = found
        return best
