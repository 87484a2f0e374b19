"""Clients' requests: passed to whatever answers them, and those about namespaces and engines. Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpool.daemon.cluster.engine_registry import EngineRegistry, describe
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import Holder, NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_counts, parse_parts, parse_wish
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.ops.commands import asking_others, handlers_of, namespace_for
from kvpool.daemon.ops.intents import Intents, parse_wanted
from kvpool.daemon.ops.operators import Operators
from kvpool.daemon.ops.peer_requests import ANSWER_S
from kvpool.daemon.ops.pins import pin_in_all_tiers
from kvpool.daemon.ops.presence import Presences
from kvpool.daemon.ops.removals import Removals
from kvpool.daemon.server.loop_shares import LoopShares
from kvpool.daemon.server.reads import Reads
from kvpool.daemon.server.tracing import TRACED, traced
from kvpool.daemon.server.writes import Writes
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.placement.records import NamespaceSettings
from kvpool.telemetry.spans import Spans
from kvpool.types import split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.faults import Faults

BESIDE_S = 0.05  # the longest wait of a removal for what others know of the keys beside it
_INDIFFERENT_TO_RELEASES = {
    client_wire.Acquire,
    client_wire.Match,
    client_wire.Present,
    client_wire.Join,
    client_wire.Release,
}


@dataclass(eq=False, repr=False, slots=True)
class ClientRequests:
    """Answers requests. Work that need not precede the answer is done soon after it: see `settle_soon`."""

    _node: Node
    _cluster: ClusterMember
    _ssd: SsdTier
    _fetcher: BlockFetcher
    _engines: Engines
    _registry: EngineRegistry
    _presences: Presences
    _removals: Removals
    _intents: Intents
    _operators: Operators
    _reads: Reads
    _writes: Writes
    _others: Sequence[object]
    """Further parts with methods that answer clients."""
    _may_free: Callable[[NamespaceState], bool]
    """Whether nothing but memory and clients could need a namespace."""
    _spans: Spans
    _loop_shares: LoopShares | None
    """As for `ClientConnections`."""
    faults: Faults
    """Takes the unexpected errors of requests from the caller of `handle`."""
    _clock: Callable[[], float]
    _settling: bool = field(default=False, init=False)
    _settled_for: Counter[str] = field(default_factory=Counter, init=False)
    """Requests since the last settling, by tenant."""
    _handlers: dict[type, Callable[[Holder, Any], Any]] = field(init=False)

    def __post_init__(self) -> None:
        parts = (self, self._reads, self._writes, self._presences, self._operators, *self._others)
        self._handlers = self._operators.requests | handlers_of(Holder, *parts)
        if self._spans.on:
            for kind, name in TRACED.items():
                self._handlers[kind] = traced(self._spans, name, self._handlers[kind])

    def handle(self, holder: Holder, message: frame.Message) -> Any:
        """Return the answer to one request, or a coroutine that returns it. Raises `KvpoolError`, and unexpected errors,
        which are for `faults`.
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(
                f"a {type(message).__name__} is only allowed at the start of a connection"
            )
        if self._reads.released and type(message) not in _INDIFFERENT_TO_RELEASES:
            self._reads.release()
        return handler(holder, message)

    def _opened(self, holder: Holder, number: int) -> NamespaceState:
        """One that stays in use: this client may be a new one to the daemon, after all its connections had closed."""
        namespace = self._node.namespaces.by_number(holder.tenant, number)
        self._node.namespaces.opened(holder, namespace)
        return namespace

    def _open_namespace(
        self, holder: Holder, m: client_wire.OpenNamespace
    ) -> Coroutine[Any, Any, client_wire.Opened]:
        specs, wish = parse_parts(m.digest, m.fields, m.parts), parse_wish(m)
        namespace = self._node.namespaces.open(
            holder.tenant, m.digest, m.fields, specs, may_free=self._may_free
        )
        self._node.namespaces.opened(holder, namespace)
        return self._agree(namespace, wish, m.generation)

    async def _agree(
        self, namespace: NamespaceState, wish: NamespaceSettings, generation: int
    ) -> client_wire.Opened:
        if self._cluster.config.join:
            known = await self._cluster.namespaces.register(namespace, wish)
        else:
            known = await self._cluster.namespaces.fill_in(namespace, wish)
        return await self._cluster.namespaces.opened(known, generation)

    def _remove(
        self, holder: Holder, m: client_wire.Remove
    ) -> frame.Bytes | Coroutine[Any, Any, frame.Bytes]:
        check_counts(len(m.namespaces), m.keys, m.beside)
        namespaces = [namespace_for(self._node, holder, each, m.keys) for each in m.namespaces]
        below = m.beside and self._fetcher.active  # where the keys beside are may take a while
        if below or not self._removals.at_once(namespaces, m.keys, m.others_s):
            return self._remove_in_turns(namespaces, m)
        besides = self._presences.in_memory(namespaces[:1], 0, m.beside).data
        return frame.Bytes(_flags(m.keys, self._removals.now(namespaces, m.keys)) + besides)

    async def _remove_in_turns(
        self, namespaces: Sequence[NamespaceState], m: client_wire.Remove
    ) -> frame.Bytes:
        others_s = min(max(0.0, m.others_s), self._node.limits.lease_s_max)
        deadline = self._clock() + min(others_s, BESIDE_S)
        looking = asyncio.ensure_future(
            self._presences.below(namespaces[0].table(0), split_keys(m.beside), deadline)
        )
        try:
            gone = await self._removals.everywhere(namespaces, m.keys, others_s)
            return frame.Bytes(_flags(m.keys, gone) + await looking)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _pin(self, holder: Holder, m: client_wire.Pin) -> frame.Done:
        namespaces = [namespace_for(self._node, holder, m.ns, m.keys)]
        return frame.Done(await pin_in_all_tiers(self._node, self._ssd, namespaces, m.keys, m.kind))

    async def _intend(self, holder: Holder, m: client_wire.Intend) -> Any:
        if not m.digest:
            namespace = namespace_for(self._node, holder, m.ns, m.keys)
            wanted = parse_wanted(m.intent, hard=m.hard, for_s=m.for_s, dry_run=m.dry_run)
            answer = await self._intents.answer(holder.tenant, namespace, m.keys, m.session, wanted)
            return frame.Bytes(msgspec.json.encode(answer))
        if m.session:
            raise InvalidRequest("a session is named with a namespace that the client has opened")
        order = operator_wire.IntendBlocks(
            *(m.intent, m.digest, m.keys, "", m.hard, m.for_s, m.dry_run)
        )
        return await self._operators.for_client(holder, m.node, order)

    def _close_namespace(self, holder: Holder, m: client_wire.CloseNamespace) -> frame.Done:
        namespace = self._node.namespaces.by_number(holder.tenant, m.ns)
        self._node.namespaces.closed(holder, namespace)
        return frame.Done()

    def _follow_events(self, holder: Holder, m: client_wire.FollowEvents) -> frame.Done:
        namespace = self._opened(holder, m.ns)
        return frame.Done(int(self._engines.follow(holder, namespace, m)))

    def _announce_engine(self, holder: Holder, m: client_wire.AnnounceEngine) -> frame.Done:
        namespace = self._opened(holder, m.ns)
        self._registry.announce(holder, namespace, m.engine)
        return frame.Done(int(m.engine is not None))

    def _describe_engines(self, holder: Holder, _: client_wire.Engines) -> frame.Bytes:
        nodes, here = self._cluster.view.nodes.values(), self._cluster.record()
        return frame.Bytes(msgspec.json.encode(describe(nodes, here, holder.tenant.name)))

    async def _why_missing(self, holder: Holder, m: client_wire.WhyMissing) -> Any:
        asked = msgspec.structs.replace(m, node="")
        return await self._operators.for_client(holder, m.node, asked, ANSWER_S)

    async def _reset(self, holder: Holder, m: client_wire.Reset) -> client_wire.Opened:
        namespace = self._opened(holder, m.ns)
        with asking_others():
            return await self._cluster.namespaces.reset(namespace, m.generation)

    async def _clear(self, holder: Holder, m: client_wire.ClearNamespace) -> Any:
        namespace = self._opened(holder, m.ns)
        return await self._operators.own(holder, operator_wire.Clear(namespace.base))

    # ---- what nobody waits for -----------------------------------------------------------------------

    def settle_soon(self, who: str, requests: int) -> None:
        """Update the policies once the answers of this round are written. who: made so many requests in it."""
        if self._loop_shares is not None:
            self._settled_for[who] += requests
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        self._settling = False
        if self._loop_shares is None:
            self._settle_all()
            return
        began = time.monotonic()
        self._settle_all()
        now = time.monotonic()
        self._loop_shares.used_together(self._settled_for, now, now - began)
        self._settled_for.clear()

    def _settle_all(self) -> None:
        self._reads.release()
        self._node.settle()
        if self._writes.wanted:
            self._writes.grant_ahead()


def _flags(packed: bytes, chosen: set[bytes]) -> bytes:
    """One byte a key, 1 for those that were chosen."""
    return bytes([key in chosen for key in split_keys(packed)])
