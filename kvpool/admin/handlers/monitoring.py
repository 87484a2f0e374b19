"""Events, audit, history, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kvpool.admin import metrics
from kvpool.admin.cluster_view import Cluster
from kvpool.admin.event_feed import Events, Heard, Listener, Moment
from kvpool.admin.history import Sampler
from kvpool.admin.paging import pack_cursor, unpack_cursor
from kvpool.admin.problems import Refused
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import sees_event
from kvpool.admin.types import (
    EventsWanted,
    History,
    HistoryWanted,
    HotList,
    HotWanted,
    Listed,
    Nothing,
    Page,
)
from kvpool.telemetry.metrics import CONTENT_TYPE
from kvpool.telemetry.node_stats import HotPrefix, NodeStats
from kvpool.wire.answers import Event

AUDITED = {"change", "login failed"}
HEARTBEAT_S = 15.0
WRITE_S = 20.0
EVENT_STREAM = "text/event-stream"
LAST_EVENT_ID = "Last-Event-ID"
LAST_EVENT_ID_MAX = 128
RETRY_MS = 2000


class Dropped:
    """Counts the connections that this gateway closed because all places were taken."""

    count = 0

    def add(self) -> None:
        self.count += 1


@dataclass(eq=False, repr=False, slots=True)
class Watching:
    """Handlers."""

    _cluster: Cluster
    _events: Events
    _sampler: Sampler
    _dropped: Dropped

    @route("GET", "/metrics", "viewer", whole=True, media=CONTENT_TYPE)
    async def get_metrics(self, _call: Call, _: Nothing) -> web.Response:
        """This node's metrics, in Prometheus' text format."""
        view, answers = await self._cluster.view(), await self._cluster.stats()
        stats = answers.nodes.get(view.node)
        if stats is None:
            why = answers.unreachable.get(view.node, "no answer")
            raise Refused(503, "unavailable", f"the daemon did not report its statistics: {why}")
        stats.http_dropped = self._dropped.count
        return web.Response(body=metrics.render(stats), headers={"Content-Type": CONTENT_TYPE})

    @route("GET", "/v1/history", "viewer", whole=True)
    async def get_history(self, _call: Call, wanted: HistoryWanted) -> History:
        """Samples of the nodes' activity, for charts."""
        return self._sampler.history(wanted.seconds)

    @route("GET", "/v1/hot", "viewer")
    async def get_hot(self, call: Call, wanted: HotWanted) -> HotList:
        """The most read prefixes, or the tenants that read most, recently."""
        if wanted.by == "tenant":
            return self._sampler.hot(wanted.seconds, wanted.limit, call.who.sees)
        answers = await self._cluster.stats()
        found = hottest_prefixes(answers.nodes.values(), call.who.sees)
        return HotList("prefix", 0.0, found[: wanted.limit], answers.unreachable)

    @route("GET", "/v1/audit", "admin")
    async def list_audit(self, call: Call, wanted: Page) -> Listed[Event]:
        """Operators' changes and failed logins, newest first: as far as nodes remember them."""
        before = unpack_cursor(wanted.cursor, Moment) if wanted.cursor else None

        def keep(event: Event) -> bool:
            return event.kind in AUDITED and sees_event(call.who, event.details)

        found = await self._events.newest(keep, wanted.limit + 1, before)
        some = found[: wanted.limit]
        after = pack_cursor(*some[-1].moment) if len(found) > wanted.limit else None
        return Listed([heard.event for heard in some], after, dict(self._events.unreachable))

    @route("GET", "/v1/events", "viewer", media=EVENT_STREAM)
    async def stream_events(self, call: Call, wanted: EventsWanted) -> web.StreamResponse:
        """Events as they happen: server-sent events.

        Each has `event: KIND`, `id: NODE:NUMBER` and an `Event` as data. `Last-Event-ID` continues after that
        one; after a loss, `event: gap` marks events that may be missing or repeated.
        """
        last_seen = call.http.headers.get(LAST_EVENT_ID, "")
        if len(last_seen) > LAST_EVENT_ID_MAX:
            raise Refused(400, "invalid", f"{LAST_EVENT_ID} must be NODE:NUMBER")
        nodes = frozenset(name for name in wanted.nodes.split(",") if name)
        listener, whole = await self._events.listen(call.who, nodes, last_seen, wanted.replay)
        try:
            return await self._stream(call, listener, whole=whole)
        finally:
            self._events.leave(listener)

    async def _stream(self, call: Call, listener: Listener, *, whole: bool) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": EVENT_STREAM,
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                "X-Content-Type-Options": "nosniff",
                "Server": "kvpool",
                "x-request-id": call.request,
            }
        )
        try:
            await response.prepare(call.http)
            await _write(response, f"retry: {RETRY_MS}\n\n".encode())
            if not whole:
                await _write(response, _gap("what was seen last is not remembered here"))
            while True:
                found = await listener.take(HEARTBEAT_S)
                if not call.still():
                    break
                text = b"".join(map(_event, found)) if found else b": still here\n\n"
                await _write(response, text)
                if listener.lost:
                    await _write(response, _gap("events came faster than they were read"))
                    break
        except TimeoutError:
            if call.http.transport is not None:
                call.http.transport.abort()
        except ConnectionError:
            pass  # the client has left
        return response


def hottest_prefixes(stats: Iterable[NodeStats], sees: Callable[[str], bool]) -> list[HotPrefix]:
    """Each node's most read prefixes, merged, the most first."""
    reads: dict[tuple[str, str, str], HotPrefix] = {}
    for each in stats:
        for heat in each.hot:
            if sees(heat.tenant):
                name = (heat.tenant, heat.namespace, heat.key)
                more = reads[name].reads if name in reads else 0.0
                reads[name] = msgspec.structs.replace(heat, reads=round(heat.reads + more, 1))
    return sorted(reads.values(), key=lambda heat: (-heat.reads, heat.tenant, heat.key))


def _event(heard: Heard) -> bytes:
    kind = " ".join(heard.event.kind.split())  # a field of an event is one line
    head = f"event: {kind}\nid: {heard.name}\ndata: "
    return head.encode() + heard.data + b"\n\n"


def _gap(why: str) -> bytes:
    return f"event: gap\ndata: {msgspec.json.encode({'why': why}).decode()}\n\n".encode()


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Raises `TimeoutError` for a client that does not read."""
    async with asyncio.timeout(WRITE_S):
        await response.write(data)
