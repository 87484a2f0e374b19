"""How many engines compute prompts and how many decode, by load. No I/O, no clock.

The load of a role is the demand relative to its engines' capacity: for prefill, seconds of prompt work that
arrive in a second, per engine; for decode, memory reserved or requested in vain, relative to the memory there is
(or the time per token relative to its objective, if that is more). One engine changes its role if that clearly
reduces the larger of the two loads: from p engines at load x to p - 1 gives x p / (p - 1), and on the other side
y d / (d + 1). After a change nothing changes for `dwell_s`, to observe its effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.errors import ConfigError
from kvpool.scheduler.values import Engine, Role

REBALANCE_S = 1.0
"""How often the scheduler is asked whether an engine should change its role."""


@dataclass(frozen=True, slots=True)
class RoleRule:
    """gain: the share by which the larger load must fall for a change. busy: below that load nothing changes.
    dwell_s: between two changes of engines of one kind. smooth_s: averaging time of loads.
    """

    gain: float = 0.15
    busy: float = 0.5
    dwell_s: float = 60.0
    smooth_s: float = 30.0

    def __post_init__(self) -> None:
        if not (0 < self.gain < 1 and self.busy >= 0 and self.dwell_s >= 0 and self.smooth_s > 0):
            raise ConfigError(f"roles need a gain from 0 to 1 and non-negative times: {self}")


class Loads(NamedTuple):
    """1: the full capacity of its engines."""

    prefill: float
    decode: float


class RoleChange(NamedTuple):
    """An engine and its new role."""

    engine: Engine
    role: Role


def role_change(engines: Sequence[Engine], loads: Loads, rule: RoleRule) -> RoleChange | None:
    """Which engine should change its role, if any. engines: of one kind, in service."""
    computing = [engine for engine in engines if Role.PREFILL in engine.role]
    decoding = [engine for engine in engines if Role.DECODE in engine.role]
    largest = max(loads)
    if largest < rule.busy:
        return None
    if loads.decode > loads.prefill:
        giving, taking, target = computing, decoding, Role.DECODE
        give, take = loads.prefill, loads.decode
    else:
        giving, taking, target = decoding, computing, Role.PREFILL
        give, take = loads.decode, loads.prefill
    # An engine in both roles already serves either.
    able = [engine for engine in giving if engine.flexible and engine.role is not Role.BOTH]
    if not able or len(giving) < 2 or not taking:
        return None
    after = max(give * len(giving) / (len(giving) - 1), take * len(taking) / (len(taking) + 1))
    if after > largest * (1 - rule.gain):
        return None
    if target is Role.DECODE:
        return RoleChange(min(able, key=lambda e: (e.free_at, e.name)), target)
    return RoleChange(min(able, key=lambda e: (e.context_tokens, e.name)), target)


class Smoothed:
    """A sampled value, smoothed over time."""

    def __init__(self, smooth_s: float) -> None:
        self._smooth_s = smooth_s
        self._at = -math.inf
        self.value = 0.0

    def sample(self, value: float, now: float) -> float:
        """The first sample counts fully."""
        kept = math.exp((self._at - now) / self._smooth_s)
        self.value = value + kept * (self.value - value)
        self._at = now
        return self.value
