"""What clients report of their sessions, and the eviction order that follows from it.

A router knows of sessions on all nodes, and is a client of one: ends of sessions on other nodes are passed on to them.
Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.daemon.core.blocks import Holder, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.sessions import Sessions
from kvpool.daemon.fetch.ports import ClusterView, PeerTransport
from kvpool.daemon.ops.commands import namespace_for
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.tasks import Tasks
from kvpool.types import split_keys
from kvpool.waits import wait_for
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

TICK_S = 0.25
TOGETHER = 256  # blocks take the event loop about a millisecond
NAME_MAX = 256
NODES_MAX = 16  # that are told of one session at a time
PASSED_ON_MAX = 64  # at a time; what is told beyond is not passed on, and counted
PASS_ON_S = 2.0


@dataclass(eq=False)
class SessionTurns:
    """Passes turns to the rules, and applies these piece by piece."""

    name: str
    node: Node
    ssd: SsdTier
    cluster: ClusterView
    transport: PeerTransport
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._passing = Tasks()
        self._told = asyncio.Event()
        self.known = Sessions(self.node, self.ssd.expend)

    def turn(self, holder: Holder, m: client_wire.SessionTurn) -> frame.Done:
        """See `Sessions.turn`; 1 if the session goes on. Raises `InvalidRequest`."""
        namespace = namespace_for(self.node, holder, m.ns, m.keys)
        split_keys(m.keys)  # whole ones
        _check(m.session, m.agent)
        session = self.known.turn(
            *(holder.tenant, namespace, m.session, m.agent, m.keys, self.clock()),
            ended=m.ended,
            shared=m.shared,
        )
        self._told.set()
        return frame.Done(int(session is not None))

    def end(self, tenant: Tenant, name: str) -> bool:
        """See `Sessions.end`."""
        known = self.known.end(tenant, name)
        self._told.set()
        return known

    def ended_elsewhere(self, news: peer_wire.SessionEnded) -> bool:
        """A client of another node reports the end of a session here. Returns whether it was known.

        Raises `InvalidRequest`.
        """
        tenant = self.node.tenants.get(news.tenant)
        if tenant is None:
            raise InvalidRequest(f"there is no tenant {news.tenant!r:.80} here")
        _check(news.session)
        return self.end(tenant, news.session)

    def end_on(self, holder: Holder, m: client_wire.EndSessionOn) -> frame.Done:
        """End a session on these nodes, or on this one if there are none. Each living node is told once.

        Raises `InvalidRequest`.
        """
        if len(m.nodes) > NODES_MAX:
            raise InvalidRequest(f"at most {NODES_MAX} nodes are told of a session")
        _check(m.session)
        for name in dict.fromkeys(m.nodes or (self.name,)):
            if name == self.name:
                self.end(holder.tenant, m.session)
                continue
            url = self._url(name)
            if not url or len(self._passing) >= PASSED_ON_MAX:
                self.node.counters.session_news_lost += 1
                continue
            news = peer_wire.SessionEnded(holder.tenant.name, m.session, name)
            self._passing.begin(self._pass_on(url, news))
        return frame.Done()

    def _url(self, name: str) -> str:
        """Of a living node; empty: there is none of this name."""
        for other in self.cluster.living.values():
            if other.record.node == name:
                return other.url
        return ""

    async def _pass_on(self, url: str, news: peer_wire.SessionEnded) -> None:
        order = worker_wire.AskPeer(url, news, PASS_ON_S, background=True)
        try:
            await self.transport.ask(order)
        except KvpoolError:
            self.node.counters.session_news_lost += 1

    async def run(self) -> None:
        """Until cancelled."""
        sessions = self.known
        while True:
            await wait_for(self._told, TICK_S if sessions.settling else None)
            self._told.clear()
            sessions.settle(self.clock())
            due = self.clock() + TICK_S
            more = True
            while more:
                more = sessions.work(TOGETHER)
                await asyncio.sleep(0)
                if self.clock() >= due:  # somebody's long chains keep nobody else waiting
                    sessions.settle(self.clock())
                    due = self.clock() + TICK_S


def _check(session: str, agent: str = "") -> None:
    """Raises `InvalidRequest` for names that no session or agent can have."""
    for text, what in ((session, "a session"), (agent, "an agent")):
        if len(text) > NAME_MAX or not text.isprintable():
            raise InvalidRequest(
                f"the name of {what} must be at most {NAME_MAX} printable characters, not {text!r:.100}"
            )
    if not session:
        raise InvalidRequest("a session needs a name")
