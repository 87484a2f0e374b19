"""A node's events for operators: the last ones, numbered. One event loop.

Events are rare: nodes that join and leave, jobs, operators' changes, disks that fail. Each is also one
line of the log `kvpool.events`; changes and failed logins are lines of `kvpool.audit`, and of the audit file.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvpool.placement.records import NodeChange, NodeRecord, View
from kvpool.waits import wait_for
from kvpool.wire.answers import Event

EVENTS_MAX = 4096
AUDIT = "change"
"""The kind of events that record an operator's change."""
LOGIN_FAILED = "login failed"
AUDITED = frozenset({AUDIT, LOGIN_FAILED})
"""The kinds of events that the audit file has."""

KINDS = (
    *("node joined", "node state", "node left", "engine announced"),
    *("drain wanted", "drain taken back", "namespace deleted"),
    *("job began", "job ended"),
    *(AUDIT, LOGIN_FAILED),
)
"""All kinds of events."""

events_log = logging.getLogger("kvpool.events")
audit_log = logging.getLogger("kvpool.audit")


@dataclass(eq=False)
class EventLog:
    """wall: seconds since 1970. audit: gets each event of a kind in `AUDITED`."""

    _node: str
    _wall: Callable[[], float]
    _audit: Callable[[Event], object] | None = None

    def __post_init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._news: asyncio.Event = asyncio.Event()
        self.last = 0

    def note(self, kind: str, /, **details: Any) -> None:
        """kind: one of `KINDS`. Details are plain values without secrets."""
        self.last += 1
        event = Event(self.last, self._wall(), self._node, kind, details)
        self._events.append(event)
        if self._audit is not None and kind in AUDITED:
            self._audit(event)
        log = audit_log if kind in AUDITED else events_log
        if log.isEnabledFor(logging.INFO):
            fields = {"number": event.number, "node": event.node, "details": event.details}
            log.info("%s", kind, extra=fields)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def audit(self, by: str, what: str, /, **details: Any) -> None:
        """Note an operator's change. by: who made it."""
        self.note(AUDIT, by=by, what=what, **details)

    @property
    def first(self) -> int:
        """The number of the oldest event that is remembered, or of the next one."""
        return self.last - len(self._events) + 1

    def after(self, number: int, most: int) -> list[Event]:
        """Those after this number, oldest first."""
        skip = max(0, number + 1 - self.first)
        return list(islice(self._events, skip, skip + most))

    async def wait(self, number: int, wait_s: float) -> None:
        """Until there is an event after this number, or the time is over."""
        if self.last > number or wait_s <= 0:
            return
        await wait_for(self._news, wait_s)


def membership_news(
    before: View, after: View, nodes: Iterable[NodeChange]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The differences between two views: (kind, details). nodes: those that have changed."""
    gone: list[NodeRecord] = []
    for old, new in nodes:
        same_life = old is not None and new is not None and old.incarnation == new.incarnation
        if old is not None and not same_life:
            gone.append(old)
        if new is None:
            continue
        known = old if same_life else None
        if known is None:
            yield "node joined", {"of": new.node, "incarnation": new.incarnation}
        elif known.state is not new.state:
            yield "node state", {"of": new.node, "state": str(new.state)}
        if known is not None and known.engines == new.engines:
            continue
        engines = {engine.url for engine in known.engines} if known else set()
        for engine in new.engines:
            if engine.url not in engines:
                yield "engine announced", {"of": new.node, "engine": engine.url}
    for record in gone:
        yield "node left", {"of": record.node, "incarnation": record.incarnation}
    yield from _deleted_namespaces(before, after)
    if before.drains is after.drains:
        return
    for node in sorted(after.drains - before.drains):
        yield "drain wanted", {"of": node}
    for node in sorted(before.drains - after.drains):
        yield "drain taken back", {"of": node}


def _deleted_namespaces(before: View, after: View) -> Iterator[tuple[str, dict[str, Any]]]:
    if not before.namespaces.keys() <= after.namespaces.keys():
        for tenant, digest in sorted(before.namespaces.keys() - after.namespaces.keys()):
            yield "namespace deleted", {"tenant": tenant, "namespace": digest}
