"""Events: what happens to blocks, for features that observe it and decide nothing.

The rules emit what happens to blocks, and the request handlers what clients did: one event for all blocks of a call.
A feature subscribes to the kinds of event that it needs, and keeps state of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from kvpool.daemon.core.blocks import Block, Lease, NamespaceState, Origin, PartTable, Requests
from kvpool.daemon.core.idle_age import IdleAge
from kvpool.errors import KvpoolError, LimitExceeded, PoolFull, StaleEpoch
from kvpool.telemetry.memory_stats import Loads
from kvpool.telemetry.misses import Reason

Handlers = dict[type[Any], Callable[[Any], object]]
"""What a subscriber does with each kind of event."""

log = logging.getLogger("kvpool.daemon")


@dataclass(eq=False, slots=True)
class TierInfo:
    """The tier whose rules emit an event. Compared by identity: each disk has its own."""

    name: str
    ages: IdleAge
    """Converts ticks of these rules to ages."""
    room_for: str = ""
    """The namespace (its digest, in hex) whose put needs room, while room is made for it."""


class Stage(IntEnum):
    """How a read was requested. The requests of one read come in this order."""

    HERE = 1
    PULLED = 2
    AGAIN = 3


class Pulled(NamedTuple):
    """What a pull could have brought."""

    blocks: int
    """Of the prefix, those that were to be here at the end of the pull."""
    declined: bool = False
    """Further blocks were available that are computed sooner than they are loaded."""
    late: bool = False
    """The pull ended because its time was over."""


class PartRefused(NamedTuple):
    """A part of which only the first `taken` of some blocks were accepted."""

    part: int
    reason: str
    taken: int = 0


class Event(msgspec.Struct, gc=False, eq=False):
    """Something that happened. Subscribers must not change an event."""


class Came(Event):
    """New blocks of one table are readable."""

    tier: TierInfo
    table: PartTable
    blocks: Sequence[Block]
    origin: Origin


class Gone(Event):
    """Blocks of one table cannot be found any more; some may still be leased."""

    tier: TierInfo
    table: PartTable
    blocks: Sequence[Block]
    keys: Sequence[bytes]
    reason: Reason
    evicted: bool
    """They made room for others, so lower tiers keep their replicas."""


class Ended(Event):
    """The blocks of a table cannot be found any more, all at once: the epoch has ended, or the tier is lost."""

    tier: TierInfo
    table: PartTable


class Freed(Event):
    """A namespace that held nothing is forgotten."""

    tier: TierInfo
    namespace: NamespaceState


class Named(Event):
    """A client's request names these keys, packed."""

    namespace: NamespaceState
    packed: bytes


class Matched(Event):
    """A client has asked how many blocks of a prefix are in memory."""

    namespace: NamespaceState
    asked: int
    found: int


class Read(Event):
    """A client has requested blocks, and `found` of them are there: the first ones, unless `scattered`."""

    namespace: NamespaceState
    parts: Sequence[int]
    packed: bytes
    keys: Sequence[bytes]
    """The same keys, split."""
    found: int
    here: int
    """How many there were before anything was fetched."""
    stage: Stage
    pulled: Pulled | None
    """What the fetch could have brought, if there was one."""
    lease: Lease | None = None
    scattered: bool = False
    waited_s: float | None = None
    """How long the client waited for a fetch, or None without one."""


class Joined(Event):
    """The first process has joined a lease that its holder made for others: they read the blocks."""

    lease: Lease


class Put(Event):
    """A client has stored blocks of one part, `new` of which were not here."""

    table: PartTable
    keys: bytes | Sequence[bytes]
    new: int
    requests: Requests
    """Labels of the requests that the put belongs to, in the order of its keys."""
    indices: Sequence[int] = ()
    """Which of the keys that the labels cover are new, or empty if the first `new` ones are."""


class Refused(Event):
    """Of `count` blocks that a client wanted to store, these parts were not accepted as a whole."""

    namespace: NamespaceState
    parts: Sequence[PartRefused]
    count: int
    requests: Requests
    """Labels of the requests that the blocks belong to; what is left is one request without a label."""
    taken: int = 0
    """The most blocks that any part accepted, also one that is not among `parts`."""


class Loaded(Event):
    """A transfer into memory has ended."""

    namespace: NamespaceState
    source: str
    """The tier that the blocks came from."""
    loads: Loads


class Events:
    """Passes events to subscribers: one for all tiers of a daemon. Not thread-safe.

    An event is passed in the call that emits it, so a handler must be short, and must not call the rules.
    """

    def __init__(self) -> None:
        self._handlers: dict[type[Any], list[tuple[str, Callable[[Any], object]]]] = {}
        self.ended: Counter[str] = Counter()
        """Subscriptions that ended, by feature."""

    def subscribe(self, feature: str, handlers: Handlers) -> None:
        """Pass events of these kinds to the handlers of a feature, after those of earlier subscribers."""
        for kind, handler in handlers.items():
            self._handlers.setdefault(kind, []).append((feature, handler))

    def emit(self, event: Event) -> None:
        """Pass an event to its subscribers. An unexpected error ends the subscription of the feature that raised it."""
        for feature, handler in self._handlers.get(type(event), ()):
            try:
                handler(event)
            except Exception as error:  # noqa: BLE001  (a feature decides nothing, so no fault of it may fail a request)
                self._end(feature, error)

    def _end(self, feature: str, error: Exception) -> None:
        """Pass nothing to the feature any more: its state may be broken half-way."""
        self._handlers = {
            kind: [each for each in handlers if each[0] != feature]
            for kind, handlers in self._handlers.items()
        }
        self.ended[feature] += 1
        log.error(
            "%s met an unexpected error, and observes nothing more until the daemon restarts. Requests are served as "
            "before. This is a bug of kvpool: report it with this traceback",
            feature,
            exc_info=error,
        )


def why_refused(error: KvpoolError | None, namespace: NamespaceState, stride: int) -> str:
    """Return the reason of a refusal in one word. Without an error there was room for some blocks, and no more."""
    match error:
        case PoolFull() | None:
            over = namespace.quota and namespace.held_bytes + stride > namespace.quota
            return "quota" if over else "full"
        case LimitExceeded():
            return "limit"
        case StaleEpoch():
            return "epoch"
        case _:
            return "invalid"
