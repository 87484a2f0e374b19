"""What clients tell of their sessions, and what follows from it: the eviction order, and what is brought ahead.

A router knows of sessions on all nodes, and is a client of one: what it tells of others is passed on to them. Event loop
only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.keeps import block_bytes
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.sessions import Chain
from kvpool.daemon.fetch.ports import ClusterView, PeerTransport
from kvpool.daemon.ops.prefetcher import LEAD_MAX_S, Prefetcher
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.types import KEY_BYTES, PauseKind
from kvpool.wire import client as client_wire
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

TICK_S = 0.25
OVERDUE_S = 5.0  # a session that is later than this is not prepared for
TOGETHER = 256  # blocks take the event loop about a millisecond
NAME_MAX = 256
PAUSE_MAX_S = 7 * 86_400.0
NODES_MAX = 16  # that are told of one session at a time
PASSED_ON_MAX = 64  # at a time; what is told beyond is not passed on, and counted
PASS_ON_S = 2.0
_Told = client_wire.SessionTurn | peer_wire.SessionNews
_PAUSES = {"": None, **{str(kind): kind for kind in PauseKind}}


class SessionTurns:
    """Passes turns to the rules, applies these piece by piece, and has blocks brought for sessions that return."""

    def __init__(
        self,
        name: str,
        node: Node,
        ssd: SsdTier,
        prefetcher: Prefetcher,
        cluster: ClusterView,
        transport: PeerTransport,
        clock: Callable[[], float],
    ) -> None:
        """name: this node's."""
        self._name = name
        self._node = node
        self._prefetcher = prefetcher
        self._cluster = cluster
        self._transport = transport
        self._clock = clock
        self._passing: set[asyncio.Task[None]] = set()
        self._told = asyncio.Event()
        node.sessions.follow(ssd.expend)

    def turn(
        self,
        tenant: Tenant,
        namespace: NamespaceState,
        told: client_wire.SessionTurn,
    ) -> bool:
        """See `Sessions.turn`; whether the session goes on. Raises `InvalidRequest`."""
        return self._take_in(tenant, namespace, told, told.keys, shared=told.shared)

    def news(self, tenant: Tenant, told: _Told) -> bool:
        """The same of what is told without a turn."""
        return self._take_in(tenant, None, told, b"")

    def _take_in(
        self,
        tenant: Tenant,
        namespace: NamespaceState | None,
        told: _Told,
        keys: bytes,
        *,
        shared: bool = False,
    ) -> bool:
        _check(told)
        session = self._node.sessions.turn(
            *(tenant, namespace, told.session, told.agent, keys, self._clock()),
            pause_s=told.pause_s,
            pause=_PAUSES[told.pause],
            ended=told.ended,
            shared=shared,
        )
        if keys or told.ended:
            self._prefetcher.returned(tenant.name, told.session)
        self._told.set()
        return session is not None

    def end(self, tenant: Tenant, name: str) -> bool:
        """See `Sessions.end`."""
        known = self._node.sessions.end(tenant, name)
        self._prefetcher.returned(tenant.name, name)
        self._told.set()
        return known

    def told(self, news: peer_wire.SessionNews) -> bool:
        """Another node's client knows this of a session here; whether the session goes on. Raises `InvalidRequest`."""
        tenant = self._node.tenants.get(news.tenant)
        if tenant is None:
            raise InvalidRequest(f"there is no tenant {news.tenant!r:.80} here")
        return self.news(tenant, news)

    def tell_nodes(self, tenant: Tenant, told: client_wire.SessionTurn) -> None:
        """Have these nodes know what is told without a turn. A hint: it is told once, to those that live.

        Raises `InvalidRequest`.
        """
        if len(told.nodes) > NODES_MAX:
            raise InvalidRequest(f"at most {NODES_MAX} nodes are told of a session")
        _check(told)
        for name in dict.fromkeys(told.nodes):
            if name == self._name:
                self.news(tenant, told)
                continue
            url = self._url(name)
            if not url or len(self._passing) >= PASSED_ON_MAX:
                self._node.counters.session_news_lost += 1
                continue
            news = peer_wire.SessionNews(
                *(tenant.name, told.session, name, told.agent),
                *(told.pause_s, told.pause, told.ended),
            )
            task = asyncio.get_running_loop().create_task(self._pass_on(url, news))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)

    def _url(self, name: str) -> str:
        """Of a living node; empty: there is none of this name."""
        for other in self._cluster.living.values():
            if other.record.node == name:
                return other.url
        return ""

    async def _pass_on(self, url: str, news: peer_wire.SessionNews) -> None:
        order = worker_wire.AskPeer(url, news, PASS_ON_S, background=True)
        try:
            await self._transport.ask(order)
        except KvpoolError:
            self._node.counters.session_news_lost += 1

    async def run(self) -> None:
        """Until cancelled."""
        sessions = self._node.sessions
        while True:
            if sessions.expecting or self._prefetcher.judging:
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._told.wait()
                except TimeoutError:
                    pass
            else:
                await self._told.wait()
            self._told.clear()
            self._tick()
            due = self._clock() + TICK_S
            more = True
            while more:
                more = sessions.work(TOGETHER)
                await asyncio.sleep(0)
                if self._clock() >= due:  # somebody's long chains keep nobody else waiting
                    self._tick()
                    due = self._clock() + TICK_S

    def _tick(self) -> None:
        now = self._clock()
        self._node.sessions.keep_ahead(now)
        self._look_ahead(now)
        self._prefetcher.judge_due(now)

    def _look_ahead(self, now: float) -> None:
        """Have the blocks brought of sessions that will soon be back, or should be."""
        sessions = self._node.sessions
        for session in sessions.expected(now - OVERDUE_S, now + LEAD_MAX_S):
            if session.back_at is None or session.prefetch_at == math.inf:
                continue
            if session.prefetch_at is None:
                # As if all of it had to be brought: what is here now may go before.
                nbytes = sum(_nbytes(chain) for chain in session.chains.values())
                session.prefetch_at = session.back_at - self._prefetcher.lead_s(nbytes)
            if session.prefetch_at <= now:
                session.prefetch_at = math.inf
                sessions.recall(session)
                for chain in session.chains.values():
                    if not chain.namespace.retired:
                        self._prefetcher.order(
                            chain.namespace, chain.keys, _nbytes(chain), session.name
                        )


def _check(told: _Told) -> None:
    """Raises `InvalidRequest` for what nobody can mean of a session."""
    for text, what in ((told.session, "a session"), (told.agent, "an agent")):
        if len(text) > NAME_MAX or not text.isprintable():
            raise InvalidRequest(
                f"the name of {what} must be at most {NAME_MAX} printable characters, not {text!r:.100}"
            )
    if not told.session:
        raise InvalidRequest("a session needs a name")
    if told.pause not in _PAUSES:
        raise InvalidRequest(f"a session waits for a tool or a person, not {told.pause!r:.100}")
    if told.pause_s is not None and not 0 <= told.pause_s <= PAUSE_MAX_S:
        raise InvalidRequest(
            f"a pause must be from 0 to {PAUSE_MAX_S:.0f} seconds, not {told.pause_s:g}"
        )


def _nbytes(chain: Chain) -> int:
    return len(chain.keys) // KEY_BYTES * block_bytes(chain.namespace)
