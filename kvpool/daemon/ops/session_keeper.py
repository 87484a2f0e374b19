"""What clients tell of their sessions, and what follows from it for the eviction order. Event loop only.

A router knows of sessions on all nodes, and is a client of one: what it tells of others is passed on to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.ports import ClusterView, PeerTransport
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.types import PauseKind
from kvpool.wire import client as client_wire
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

TICK_S = 0.25
TOGETHER = 256  # blocks take the event loop about a millisecond
NAME_MAX = 256
PAUSE_MAX_S = 7 * 86_400.0
NODES_MAX = 16  # that are told of one session at a time
PASSED_ON_MAX = 64  # at a time; what is told beyond is not passed on, and counted
PASS_ON_S = 2.0
SESSIONS_SINCE = 10  # the protocol of the first version whose nodes are told of sessions by others
_PAUSES = {"": None, **{str(kind): kind for kind in PauseKind}}


class SessionKeeper:
    """Passes turns to the rules, and applies these piece by piece."""

    def __init__(
        self,
        name: str,
        node: Node,
        ssd: SsdTier,
        cluster: ClusterView,
        transport: PeerTransport,
        clock: Callable[[], float],
    ) -> None:
        """name: this node's."""
        self._name = name
        self._node = node
        self._cluster = cluster
        self._transport = transport
        self._clock = clock
        self._passing: set[asyncio.Task[None]] = set()
        self._told = asyncio.Event()
        node.sessions.follow(ssd.expend)

    def turn(
        self,
        tenant: Tenant,
        namespace: NamespaceState | None,
        name: str,
        agent: str,
        keys: bytes,
        pause_s: float | None,
        pause: str,
        *,
        ended: bool,
    ) -> bool:
        """See `Sessions.turn`; whether the session goes on. Raises `InvalidRequest`."""
        for text, what in ((name, "a session"), (agent, "an agent")):
            if len(text) > NAME_MAX or not text.isprintable():
                raise InvalidRequest(
                    f"the name of {what} must be at most {NAME_MAX} printable characters, not {text!r:.100}"
                )
        if not name:
            raise InvalidRequest("a session needs a name")
        if pause not in _PAUSES:
            raise InvalidRequest(f"a session waits for a tool or a person, not {pause!r:.100}")
        if pause_s is not None and not 0 <= pause_s <= PAUSE_MAX_S:
            raise InvalidRequest(
                f"a pause must be from 0 to {PAUSE_MAX_S:.0f} seconds, not {pause_s:g}"
            )
        session = self._node.sessions.turn(
            tenant,
            namespace,
            name,
            agent,
            keys,
            self._clock(),
            pause_s=pause_s,
            pause=_PAUSES[pause],
            ended=ended,
        )
        self._told.set()
        return session is not None

    def told(self, news: peer_wire.SessionNews) -> bool:
        """Another node's client knows this of a session here; whether the session goes on. Raises `InvalidRequest`."""
        tenant = self._node.tenants.get(news.tenant)
        if tenant is None:
            raise InvalidRequest(f"there is no tenant {news.tenant!r:.80} here")
        return self.turn(
            tenant,
            None,
            news.session,
            news.agent,
            b"",
            news.pause_s,
            news.pause,
            ended=news.ended,
        )

    def tell_nodes(self, tenant: Tenant, told: client_wire.SessionTurn) -> None:
        """Have these nodes know what is told without a turn. A hint: it is told once, to those that live.

        Raises `InvalidRequest`.
        """
        if len(told.nodes) > NODES_MAX:
            raise InvalidRequest(f"at most {NODES_MAX} nodes are told of a session")
        said = (told.session, told.agent, told.pause_s, told.pause)
        for name in dict.fromkeys(told.nodes):
            if name == self._name:
                self.turn(tenant, None, told.session, told.agent, b"", *said[2:], ended=told.ended)
                continue
            url = self._url(name)
            if not url or len(self._passing) >= PASSED_ON_MAX:
                self._node.counters.session_news_lost += 1
                continue
            session, agent, pause_s, pause = said
            news = peer_wire.SessionNews(
                tenant.name, session, name, agent, pause_s, pause, told.ended
            )
            task = asyncio.get_running_loop().create_task(self._pass_on(url, news))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)

    def _url(self, name: str) -> str:
        """Of a living node; empty: there is none of this name that can be told."""
        for other in self._cluster.living.values():
            if other.record.node == name and other.record.protocol >= SESSIONS_SINCE:
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
            if sessions.expecting:
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._told.wait()
                except TimeoutError:
                    pass
            else:
                await self._told.wait()
            self._told.clear()
            sessions.keep_ahead(self._clock())
            more = True
            while more:
                more = sessions.work(TOGETHER)
                await asyncio.sleep(0)
