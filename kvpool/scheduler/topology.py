"""The distance of two engines, by the labels of their nodes. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.scheduler.values import Engine

NODE = "node"


Place = str | tuple[str]


def place(engine: Engine) -> Place:
    """Its node; an engine without a known node is alone at its place."""
    return engine.node or (engine.name,)


def together(one: Engine, other: Engine) -> bool:
    """Whether they are at one place."""
    return one is other or (one.node == other.node and one.node != "")


@dataclass(frozen=True, slots=True)
class Topology:
    """Cost of a transfer between two engines relative to the average.

    levels: labels from the nearest to the farthest, each with the factor for pairs that agree on it and on
    none before it; `far` for pairs that have labels and agree on none. If nothing is known of either,
    the factor is 1. Within a node nothing needs to be transferred. require: a label that both engines of a
    pair on different nodes must have and agree on; `node` allows none. "": any pair is allowed.
    """

    levels: tuple[tuple[str, float], ...] = (("rack", 1.0), ("zone", 1.5))
    far: float = 4.0
    require: str = ""

    def __post_init__(self) -> None:
        if min(self.far, *(factor for _, factor in self.levels)) < 0:
            raise ConfigError("the factors of a topology must not be negative")
        if self.require not in ("", NODE, *(label for label, _ in self.levels)):
            raise ConfigError(f"there is no level {self.require!r} in the topology")

    def factor(self, one: Engine, other: Engine) -> float:
        """How many times longer than average a transfer takes; 0 within a node."""
        return 0.0 if together(one, other) else self.apart(one, other)

    def apart(self, one: Engine, other: Engine) -> float:
        """The same for two on different nodes."""
        if not one.labels or not other.labels:
            return 1.0
        known = False
        for label, factor in self.levels:
            mine, theirs = one.labels.get(label), other.labels.get(label)
            if mine is not None and theirs is not None:
                known = True
                if mine == theirs:
                    return factor
        return self.far if known else 1.0

    def allowed(self, one: Engine, other: Engine) -> bool:
        """Whether these may be a pair."""
        return together(one, other) or self.allowed_apart(one, other)

    def allowed_apart(self, one: Engine, other: Engine) -> bool:
        """The same for two on different nodes."""
        if not self.require:
            return True
        mine = one.labels.get(self.require)
        return mine is not None and mine == other.labels.get(self.require)
