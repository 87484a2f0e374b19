"""Prefixes that many requests share, and when a copy of one is worth making. No I/O, no clock.

Whoever pulls a prefix leaves a copy on its node. For most prefixes pulls weigh more than their time, since
links are others' too. For one that keeps being asked for, a copy on a second node saves what later requests
would wait or pull, so the pull weighs only its time, and engines without the prefix are as good as the one that
has it. So that a burst does not copy it to every node at once, there is a limit to copies in a window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.scheduler.decay import Decaying


@dataclass(frozen=True, slots=True)
class SpreadRule:
    """per_copy: requests in a window that a copy is for; a prefix with more is spread. replicas_max: of one
    prefix that are ordered in a window for that. known_max: prefixes that are kept in mind.
    """

    per_copy: float = 8.0
    replicas_max: int = 4
    window_s: float = 30.0
    known_max: int = 4096

    def __post_init__(self) -> None:
        if not (self.per_copy > 0 and self.replicas_max >= 0 and self.window_s > 0):
            raise ConfigError("spreading needs per_copy and window_s above 0, replicas_max from 0")
        if self.known_max < 1:
            raise ConfigError("spreading needs to know at least one prefix")


class _Prefix:
    __slots__ = ("copies", "requests")

    def __init__(self, window_s: float) -> None:
        self.requests = Decaying(window_s)
        self.copies = Decaying(window_s)


class Spreading:
    """A prefix goes by its last block: where what the pool has of a prompt ends. Not thread-safe."""

    def __init__(self, rule: SpreadRule) -> None:
        self._rule = rule
        self._known: OrderedDict[Hashable, _Prefix] = OrderedDict()

    def asked(self, end: Hashable, now: float) -> None:
        """A request has the prefix that ends with this block."""
        self._prefix(end).requests.add(1.0, now)

    def should_spread(self, end: Hashable, holders: int, now: float) -> bool:
        """Whether one more copy is, where so many nodes hold it."""
        prefix = self._known.get(end)
        if prefix is None:
            return False
        if prefix.copies.sum(now) > self._rule.replicas_max - 1:
            return False
        return prefix.requests.sum(now) > self._rule.per_copy * holders

    def copied(self, end: Hashable, now: float) -> None:
        """A copy was ordered."""
        self._prefix(end).copies.add(1.0, now)

    def _prefix(self, end: Hashable) -> _Prefix:
        found = self._known.get(end)
        if found is None:
            found = self._known[end] = _Prefix(self._rule.window_s)
            if len(self._known) > self._rule.known_max:
                self._known.popitem(last=False)
        self._known.move_to_end(end)
        return found
