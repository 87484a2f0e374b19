"""How many engines compute prompts and how many decode, after the load. No I/O, no clock.

The load of a role is what is asked of its engines as a share of what they can do: for prefill, seconds of
prompts that come in a second, per engine; for decode, memory that is reserved or asked for in vain, per memory
there is (and the time a token, per its objective, if that is more). One engine changes sides when the larger of
the two loads falls by that, and clearly: from p engines at load x to p - 1 it is x p / (p - 1), and on the other
side y d / (d + 1). In between nothing is changed for `dwell_s`, and what the change did is waited for.
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
    """gain: by which share the larger load must fall for a change. busy: below that load nothing changes.
    dwell_s: between two changes of engines of one kind. smooth_s: over what time loads are taken.
    """

    gain: float = 0.15
    busy: float = 0.5
    dwell_s: float = 60.0
    smooth_s: float = 30.0

    def __post_init__(self) -> None:
        if not (0 < self.gain < 1 and self.busy >= 0 and self.dwell_s >= 0 and self.smooth_s > 0):
            raise ConfigError(
                f"roles need a gain from 0 to 1 and times that are not negative: {self}"
            )


class Loads(NamedTuple):
    """1: all that its engines can do."""

    prefill: float
    decode: float


class RoleChange(NamedTuple):
    """An engine, and the role that it is to take."""

    engine: Engine
    role: Role


def role_change(engines: Sequence[Engine], loads: Loads, rule: RoleRule) -> RoleChange | None:
    """Which engine is to change sides, if any. engines: of one kind, those that are in service."""
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
    # An engine in both roles is there for either side already.
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
    """A value that is sampled now and then, over some time."""

    def __init__(self, smooth_s: float) -> None:
        self._smooth_s = smooth_s
        self._at = -math.inf
        self.value = 0.0

    def sample(self, value: float, now: float) -> float:
        """The first one counts fully."""
        kept = math.exp((self._at - now) / self._smooth_s)
        self.value = value + kept * (self.value - value)
        self._at = now
        return self.value
