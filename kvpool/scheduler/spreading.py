"""Prefixes that many requests share, and when a replica of one is worth making. No I/O, no clock.

A pull of a prefix leaves a replica on the node. For most prefixes pulls weigh more than their time, because
links are shared. For one that is requested often, a replica on a second node saves later requests
waiting or pulling, so the pull weighs only its time, and engines without the prefix are as good as the one that
has it. A limit per window prevents that a burst makes replicas on every node at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.scheduler.decay import Decaying


@dataclass(frozen=True, slots=True)
class SpreadRule:
    """per_replica: requests in a window per replica; a prefix with more is spread. replicas_max: of one
    prefix, ordered in a window for that. known_max: prefixes that are remembered.
    """

    per_replica: float = 8.0
    replicas_max: int = 4
    window_s: float = 30.0
    known_max: int = 4096

    def __post_init__(self) -> None:
        if not (self.per_replica > 0 and self.replicas_max >= 0 and self.window_s > 0):
            raise ConfigError(
                "spreading needs per_replica and window_s above 0, replicas_max from 0"
            )
        if self.known_max < 1:
            raise ConfigError("spreading needs known_max of at least 1")


class _Prefix:
    __slots__ = ("replicas", "requests")

    def __init__(self, window_s: float) -> None:
        self.requests = Decaying(window_s)
        self.replicas = Decaying(window_s)


class Spreading:
    """A prefix is identified by its last block that the pool has of a prompt. Not thread-safe."""

    def __init__(self, rule: SpreadRule) -> None:
        self._rule = rule
        self._known: OrderedDict[Hashable, _Prefix] = OrderedDict()

    def asked(self, end: Hashable, now: float) -> None:
        """A request has the prefix that ends with this block."""
        self._prefix(end).requests.add(1.0, now)

    def should_spread(self, end: Hashable, holders: int, now: float) -> bool:
        """Whether one more replica is worth making, with this many holders."""
        prefix = self._known.get(end)
        if prefix is None:
            return False
        if prefix.replicas.sum(now) > self._rule.replicas_max - 1:
            return False
        return prefix.requests.sum(now) > self._rule.per_replica * holders

    def replicated(self, end: Hashable, now: float) -> None:
        """A replica was ordered."""
        self._prefix(end).replicas.add(1.0, now)

    def _prefix(self, end: Hashable) -> _Prefix:
        found = self._known.get(end)
        if found is None:
            found = self._known[end] = _Prefix(self._rule.window_s)
            if len(self._known) > self._rule.known_max:
                self._known.popitem(last=False)
        self._known.move_to_end(end)
        return found
