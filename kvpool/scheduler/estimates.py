"""Time estimates, learned from measured times. No I/O, no clock.

Three questions, each with a fit of its own: how long an engine computes a prompt, how long blocks take to
reach it from a tier or a peer, how long a token takes to decode. All start from assumptions about an
engine's kind, and forget slowly. Each records its own error. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.prefill_cost import PrefillFit, StepWork

REFRESH = 32
"""Coefficients are recomputed after this many steps; that takes 0.2 ms."""
WARM, SAMPLE = 256, 8
"""After this many steps only one in so many teaches the fit; all count in its error."""
KEEP = 0.98
"""The factor that each transfer applies to the weight of all earlier ones."""
ERROR_WEIGHT = 0.02
PRIOR_WEIGHT = 2.0
"""Weight of the assumption, in transfers."""


@dataclass(slots=True)
class Error:
    """Relative errors of estimates. Recent ones count more.

    mean: of the absolute value. bias: with the sign; above 0, the estimates were too long.
    """

    mean: float = 0.0
    bias: float = 0.0
    count: int = 0

    def note(self, expected_s: float, took_s: float) -> None:
        off = (expected_s - took_s) / max(took_s, 1e-9)
        self.count += 1
        weight = max(ERROR_WEIGHT, 1 / self.count)
        self.mean += weight * (abs(off) - self.mean)
        self.bias += weight * (off - self.bias)


class StepEstimate:
    """Seconds of an engine's steps: a + b x tokens + c x attended tokens, as `PrefillFit` has it.

    For prefill, tokens are those that are computed, and each attends to those before it. For decode, each
    request is one token, and attends to its whole context: the same three terms.
    """

    def __init__(self, assumed: tuple[float, float, float]) -> None:
        """assumed: a, b and c, until steps are measured."""
        self._fit = PrefillFit()
        self._coefficients = assumed
        self._unused = 0
        self.error = Error()

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds a step, a token, and a token attended to."""
        return self._coefficients

    def assume(self, coefficients: tuple[float, float, float]) -> None:
        """What was measured elsewhere counts instead of all that was seen here."""
        if coefficients != self._coefficients:
            self._coefficients = coefficients
            self._fit = PrefillFit()
            self._unused = 0

    def observe(self, tokens: int, attended: float, deepest: int, seconds: float) -> None:
        """A measured step."""
        self.error.note(self.step_s(tokens, attended), seconds)
        if self.error.count > WARM and self.error.count % SAMPLE:
            return
        self._fit.observe(StepWork(tokens, attended, deepest), seconds)
        self._unused += 1
        if self._unused >= REFRESH:
            self._unused = 0
            self._coefficients = self._fit.coefficients

    def step_s(self, tokens: int, attended: float) -> float:
        """Seconds of one step."""
        a, b, c = self._coefficients
        return a + b * tokens + c * attended

    def prefill_s(self, start: int, end: int, step_tokens: int) -> float:
        """Seconds to compute tokens `start` to `end` of a prompt, in steps of this many tokens."""
        _, b, c = self._coefficients
        tokens = end - start
        return self.steps_s(tokens, step_tokens) + b * tokens + c * tokens * (start + end) / 2

    def steps_s(self, tokens: int, step_tokens: int) -> float:
        """What of this is the steps' own, whatever is in them: all that is computed in one of them shares it."""
        return self._coefficients[0] * max(1, -(-tokens // step_tokens))


class LoadEstimate:
    """Seconds to bring bytes from one kind of source: latency + seconds a byte x bytes ahead and own.

    Bytes that were under way on the same link at its start count as ahead, so that a busy link is told
    from a slow one.
    """

    def __init__(self, latency_s: float, bytes_s: float) -> None:
        """Assumptions until transfers are measured."""
        self._latency_s = latency_s
        self._weight = PRIOR_WEIGHT
        self._per_byte = 1 / bytes_s
        self.error = Error()

    @property
    def latency_s(self) -> float:
        return self._latency_s

    @property
    def per_byte_s(self) -> float:
        return self._per_byte

    @property
    def learned(self) -> bool:
        """Whether transfers were measured."""
        return self._weight != PRIOR_WEIGHT

    def assume(self, per_byte_s: float) -> None:
        """As measured elsewhere."""
        self._per_byte = max(per_byte_s, 0.0)

    def seconds(self, nbytes: float, ahead: float = 0.0) -> float:
        if nbytes <= 0:
            return 0.0
        return self._latency_s + (nbytes + ahead) * self._per_byte

    def observe(self, nbytes: float, ahead: float, seconds: float) -> None:
        """A measured transfer; `ahead` as of its start. Latency stays as assumed."""
        self.error.note(self.seconds(nbytes, ahead), seconds)
        self._weight = self._weight * KEEP + 1
        seen = max(seconds - self._latency_s, 0.0) / (nbytes + ahead)
        self._per_byte += (seen - self._per_byte) / self._weight


@dataclass(slots=True)
class KindEstimates:
    """For engines of one kind. loads: by tier of the own node (`dram`, `ssd`), and `peer`."""

    prefill: StepEstimate
    decode: StepEstimate
    loads: dict[str, LoadEstimate]
    step_tokens: int
    block_tokens: int
    block_bytes: int
