"""What the router tells daemons of sessions, beside what engines tell them of their turns.

An engine's plugin tells its daemon which blocks a turn has used. The router knows what the plugin does not: where the
session's turns before were served. A session that
goes on elsewhere has ended where it was: a node that no strand of it uses any more is told that it has ended there,
once the turn elsewhere is answered, so that its blocks have been loaded or computed there.

All of it is a hint, told once. What was not told changes nothing but the order in which daemons evict.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from kvpool.client import Client
from kvpool.errors import KvpoolError
from kvpool.router.daemon_link import DaemonLink
from kvpool.router.http.session_hints import SessionHint, session_name
from kvpool.router.records.metrics import Metrics

SESSIONS_MAX = 16_384  # of a tenant; beyond it those that were active longest ago are forgotten
AGENTS_MAX = 64  # of a session
NODES_MAX = 16  # that are told at a time
NEWS_MAX = 4096  # that wait; what comes beyond is lost, and counted


@dataclass(frozen=True, slots=True)
class News:
    """A session has ended on these nodes."""

    session: str
    nodes: tuple[str, ...]


class SessionBook:
    """The nodes that each session's last turns were served on, by agent. No I/O. Not thread-safe."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions_max = sessions_max
        self._tenants: dict[str, OrderedDict[str, OrderedDict[str, frozenset[str]]]] = {}

    def turn(self, tenant: str, session: str, agent: str, nodes: frozenset[str]) -> frozenset[str]:
        """A turn was served there; the nodes that the session has left by it."""
        sessions = self._tenants.setdefault(tenant, OrderedDict())
        agents = sessions.setdefault(session, OrderedDict())
        sessions.move_to_end(session)
        left = agents.pop(agent, frozenset()) - nodes
        agents[agent] = nodes
        if len(agents) > AGENTS_MAX:
            agents.popitem(last=False)
        if len(sessions) > self._sessions_max:
            sessions.popitem(last=False)
        return left.difference(*agents.values())

    def end(self, tenant: str, session: str) -> frozenset[str]:
        """The nodes of a session that has ended."""
        sessions = self._tenants.get(tenant)
        agents = None if sessions is None else sessions.pop(session, None)
        return frozenset() if agents is None else frozenset().union(*agents.values())


class Sessions:
    """See the module. link: to the daemon that passes news on; None: nobody is told. Event loop only."""

    def __init__(self, link: DaemonLink | None, metrics: Metrics) -> None:
        self._link = link
        self._metrics = metrics
        self._book = SessionBook()
        self._news: deque[News] = deque()
        self._telling: asyncio.Task[None] | None = None

    def noticed(self, hint: SessionHint) -> None:
        """A request has come with this."""
        if hint.session:
            self._metrics.session_requests.inc()
        if hint.bad:
            self._metrics.session_hints_ignored.inc(hint.bad)

    def answered(self, tenant: str, hint: SessionHint, nodes: frozenset[str]) -> None:
        """A turn was answered. nodes: of the engines with the plugin that served it.

        The session's name is the one that daemons know.
        """
        if not hint.session or not nodes:
            return
        if hint.ended:
            self._tell(News(hint.session, tuple(nodes | self._book.end(tenant, hint.session))))
            return
        left = self._book.turn(tenant, hint.session, hint.agent, nodes)
        if left and not hint.shared:  # otherwise another conversation may go on there
            self._tell(News(hint.session, tuple(left)))

    def end(self, tenant: str, session: str) -> bool:
        """A client says that its session has ended; whether this router knows of it."""
        name = session_name(tenant, session)
        nodes = self._book.end(tenant, name)
        if nodes:
            self._tell(News(name, tuple(nodes)))
        return bool(nodes)

    def _tell(self, news: News) -> None:
        if self._link is None:
            return
        if len(self._news) >= NEWS_MAX:
            self._metrics.session_news.labels("lost").inc()
            return
        self._news.append(news)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_all(self._link), name="tell of sessions")

    async def _tell_all(self, link: DaemonLink) -> None:
        """All that waits, in one call at a time."""
        while self._news:
            batch = tuple(self._news)
            self._news.clear()
            try:
                await link.ask(partial(_send, batch))
                self._metrics.session_news.labels("told").inc(len(batch))
            except KvpoolError:
                self._metrics.session_news.labels("lost").inc(len(batch))

    async def close(self) -> None:
        """What waits is lost."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)


def _send(batch: Iterable[News], client: Client) -> None:
    for news in batch:
        for at in range(0, len(news.nodes), NODES_MAX):
            client.sessions.end(news.session, news.nodes[at : at + NODES_MAX])
