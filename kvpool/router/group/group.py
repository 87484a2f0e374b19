"""Which routers there are, and which of them schedules: the one that has run for longest.

Every router connects to all others, and follows the leader by its own connection to it. Two that cannot see each other
may both lead for a while; then each knows only of the orders of its own followers. All of it is soft state.

One event loop, one thread.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from kvpool.errors import ProtocolError
from kvpool.router.group.addresses import CONNECT_S, ROUTERS_MAX, Addresses, Target
from kvpool.router.group.group_orders import GroupOrders
from kvpool.router.group.leader import Books, LedRouter
from kvpool.router.group.links import HEARTBEAT_S, Link
from kvpool.router.group.messages import (
    FRAME_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    Answer,
    Blamed,
    Hello,
    Learned,
    Message,
    Operated,
    Prefixes,
    Question,
    Reaches,
    RequestRow,
    Retires,
    Served,
)
from kvpool.router.group.rows import packed, request_row
from kvpool.router.records.metrics import Metrics
from kvpool.router.requests.calls import ClientGone
from kvpool.router.upstream.engine_calls import bearer
from kvpool.scheduler.values import Request

log = logging.getLogger("kvpool.router")

PATH = "/group"
KNOWN_S = 30.0
"""Until an address is tried again at which this router is itself, or one that is known by another address."""
SHARE_S = 1.0
ASK_S = 1.0
OPERATED_MAX = 4096
LATER_S = 1e-3


class Questions(Protocol):
    """Answers for other routers. learned: what the next leader is to know."""

    def answer(self, question: Question) -> bytes: ...
    def learned(self) -> Learned: ...
    def learn(self, learned: Learned) -> None: ...
    def operate(self, operated: Operated) -> None: ...


@dataclass(slots=True, eq=False)
class _Router:
    """Another router, by the connection from here."""

    link: Link
    retires: bool = False
    _number: int = 0
    _asked: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)

    async def ask(self, what: str, **more: Any) -> bytes:
        """Return the router's answer, or an empty one if it has none, or none in time."""
        self._number = number = self._number + 1
        asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self.link.send(Question(number, what, **more))
        try:
            async with asyncio.timeout(ASK_S):
                return await asked
        except TimeoutError:
            return b""
        finally:
            self._asked.pop(number, None)

    def answered(self, answer: Answer) -> None:
        """Hand an answer to the question of its number."""
        asked = self._asked.pop(answer.number, None)
        if asked is not None and not asked.done():
            asked.set_result(answer.body)

    def gone(self) -> None:
        """Note that the connection has ended: the router answers nothing more."""
        self.link.alive = False
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(b"")


@dataclass(slots=True, eq=False)
class Operators:
    """Words of operators on engines, said to any router. The latest word on each engine counts."""

    _wall: Callable[[], float]
    """Seconds since 1970."""
    _said: dict[str, Operated] = field(default_factory=dict, init=False)

    def say(self, engine: str, drains: bool, weight: float) -> Operated:
        """Note what an operator has told this router."""
        known = self._said.get(engine)
        # Clocks differ: what is said later counts, if the earlier word is known here.
        at = self._wall() if known is None else max(self._wall(), known.at + LATER_S)
        said = Operated(engine, drains, weight, at)
        if len(self._said) < OPERATED_MAX or engine in self._said:
            self._said[engine] = said
        return said

    def hear(self, said: Operated) -> bool:
        """Note what another router was told. Returns whether that is new."""
        known = self._said.get(said.engine)
        new = len(self._said) < OPERATED_MAX if known is None else known.at < said.at
        if new:
            self._said[said.engine] = said
        return new

    def send_all(self, link: Link) -> None:
        """Repeat all words to another router."""
        for said in self._said.values():
            link.send(said)


def senior(hello: Hello) -> tuple[float, str]:
    """The least leads."""
    return hello.since, hello.ident


@dataclass(eq=False, repr=False, slots=True)
class Group:
    """See the module. me: this router. urls: of the others, and maybe of this one. token: the operator's."""

    _me: Hello
    _urls: Sequence[str]
    _orders: GroupOrders
    _books: Books
    _questions: Questions
    _session: aiohttp.ClientSession
    _token: str
    _tls: ssl.SSLContext | None
    _metrics: Metrics
    _operated: Operators
    _others: dict[str, _Router] = field(default_factory=dict, init=False)
    _followers: dict[Link, LedRouter] = field(default_factory=dict, init=False)
    _retires: bool = field(default=False, init=False)
    _addresses: Addresses = field(init=False)
    _sharing: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._addresses = Addresses(self._urls, self._connect)
        self._count()

    # ---- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns once each router that can be reached at once is known."""
        self._sharing = asyncio.create_task(self._share(), name="share what was learned")
        await self._addresses.start()

    def retire(self) -> None:
        """It schedules no new requests of others, and goes on with its own."""
        self._retires = True
        self._send_all(Retires())

    async def close(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
        await self._addresses.close()
        await asyncio.gather(*(link.close() for link in list(self._followers)))

    # ---- the others --------------------------------------------------------------------------------

    async def _connect(self, target: Target, tried: asyncio.Event) -> None:
        async with asyncio.timeout(CONNECT_S):
            socket_ = await self._session.ws_connect(
                target.url + PATH,
                headers={"Host": target.host, **bearer(self._token)},
                heartbeat=HEARTBEAT_S,
                max_msg_size=FRAME_BYTES_MAX,
                ssl=True if self._tls is None else self._tls,
                server_hostname=urlsplit(f"//{target.host}").hostname
                if target.url.startswith("https")
                else None,
            )
        link = Link(socket_)
        try:
            hello = await link.greet(self._me)
            if hello.ident == self._me.ident or hello.ident in self._others:
                tried.set()
                await link.close()
                await asyncio.sleep(KNOWN_S)
                return
            self._others[hello.ident] = other = _Router(link)
            log.info("router %s at %s is connected", hello.ident, target.url)
            self._operated.send_all(link)
            link.send(self._reaches())
            self._changed()
            tried.set()
            try:
                await link.run(lambda message: self._heard(other, message))
            finally:
                other.gone()
                del self._others[hello.ident]
                log.info("router %s is disconnected", hello.ident)
                self._changed()
        finally:
            await link.close()

    def _heard(self, other: _Router, message: Message) -> None:
        match message:
            case Retires():
                other.retires = True
                self._changed(leaving=other.link)
            case Operated():
                self._operate(message)
            case Learned():
                if other.link is self._orders.leader:
                    self._questions.learn(message)
            case Answer():
                other.answered(message)
            case _:
                self._orders.heard(other.link, message)

    def _changed(self, leaving: Link | None = None) -> None:
        """The senior router leads, of those that stay."""
        candidates = [other.link for other in self._others.values() if not other.retires]
        first = min(candidates, key=lambda link: senior(link.hello), default=None)
        mine = not self._retires and (first is None or senior(self._me) < senior(first.hello))
        leader = None if mine else first
        if leader is not self._orders.leader:
            self._metrics.leader_changes.inc()
            who = "this router" if leader is None else f"router {leader.ident}"
            log.info("%s schedules from now on", who)
        self._orders.follow(leader, leaving=leaving)
        self._count()

    def _count(self) -> None:
        self._metrics.routers.set(1 + len(self._others))
        self._metrics.leader.set(self._orders.leader is None)

    # ---- those who follow --------------------------------------------------------------------------

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Another router has connected; its requests get orders here."""
        if len(self._followers) >= ROUTERS_MAX:
            raise web.HTTPServiceUnavailable(reason="there are too many routers")
        socket_ = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, max_msg_size=FRAME_BYTES_MAX, compress=False
        )
        try:
            await socket_.prepare(request)
        except ConnectionError:
            raise ClientGone("the other router has disconnected") from None
        link = Link(socket_)
        try:
            hello = await link.greet(self._me)
            self._forget(hello.ident)
            self._followers[link] = leading = LedRouter(hello.ident, self._books, link.send)
            self._operated.send_all(link)
            if self._retires:
                link.send(Retires())
            try:
                await link.run(lambda message: self._asked(link, leading, message))
            finally:
                self._followers.pop(link, None)
                leading.close()
        except (ProtocolError, TimeoutError) as error:
            log.warning("a router that follows is disconnected: %s", error)
        except ConnectionError:
            pass  # it has left
        finally:
            await link.close()
        return socket_

    def _forget(self, ident: str) -> None:
        """Its earlier connection, whose end was not noticed here: its requests come again, by the same numbers."""
        for link in [link for link in self._followers if link.ident == ident]:
            link.alive = False
            self._followers.pop(link).close()

    def _asked(self, link: Link, leading: LedRouter, message: Message) -> None:
        match message:
            case Question():
                link.send(Answer(message.number, self._questions.answer(message)))
            case Operated():
                self._operate(message)
            case Retires():
                pass  # it still follows
            case _:
                leading.heard(message)

    async def _share(self) -> None:
        """What a leader learns, its followers know."""
        while True:
            await asyncio.sleep(SHARE_S)
            if not self._followers:
                continue
            # Changed or not: routers, and engines of theirs, come at any time.
            learned = self._questions.learned()
            for link in self._followers:
                link.send(learned)

    # ---- what operators want -----------------------------------------------------------------------

    def operated(self, engine: str, drains: bool, weight: float) -> None:
        """An operator has told this router."""
        self._send_all(self._operated.say(engine, drains, weight))

    def _operate(self, said: Operated) -> None:
        if self._operated.hear(said):
            self._questions.operate(said)

    def _send_all(self, message: Message) -> None:
        for link in (*(other.link for other in self._others.values()), *self._followers):
            link.send(message)

    def served(self, engine: str) -> None:
        """An engine has served a request of this router: the leader is to know."""
        if self._orders.leader is not None:
            self._orders.leader.send(Served(engine))

    def blamed(self, engine: str, request: int) -> None:
        """A request of this router has failed by an engine's fault: the leader is to know."""
        if self._orders.leader is not None:
            self._orders.leader.send(Blamed(engine, request))

    def reached(self) -> None:
        """An engine gets this router's requests, or no more."""
        if self._others:
            reaches = self._reaches()
            for other in self._others.values():
                other.link.send(reaches)

    def _reaches(self) -> Reaches:
        return Reaches(sorted(self._books.orders.engines))

    def told(
        self, namespace: bytes, keys: Sequence[int], lengths: Mapping[str, tuple[int, ...]]
    ) -> None:
        """The pool has answered this router: the leader is to know."""
        if self._orders.leader is not None:
            self._orders.leader.send(Prefixes(namespace, packed(keys), dict(lengths)))

    # ---- questions ---------------------------------------------------------------------------------

    @property
    def is_led(self) -> bool:
        """Whether another router schedules."""
        return self._orders.leader is not None

    async def explained(self, request: Request, model: str) -> bytes:
        """Where the leader would send it; empty: this router schedules."""
        if not self.is_led:
            return b""
        return await self.ask_leader("explain", request_row(request, model, self._books.clock()))

    async def ask_leader(self, what: str, request: RequestRow | None = None) -> bytes:
        """Its answer; empty: it has none, or there is no other leader."""
        leader = self._orders.leader
        other = None if leader is None else self._others.get(leader.ident)
        return b"" if other is None else await other.ask(what, request=request)

    async def ask_all(self, what: str, name: str, tenant: str | None) -> bytes:
        """The first answer that any other router has."""
        if len(name) > NAME_CHARACTERS_MAX:
            return b""  # nothing has such a name
        others = list(self._others.values())
        asked = (other.ask(what, name=name, tenant=tenant) for other in others)
        found = await asyncio.gather(*asked)
        return next(filter(None, found), b"")

    def plain(self) -> dict[str, Any]:
        """For operators."""
        leader = self._orders.leader
        routers = [self._me, *(other.link.hello for other in self._others.values())]
        return {
            "router": self._me.ident,
            "leader": self._me.ident if leader is None else leader.ident,
            "routers": [hello.ident for hello in sorted(routers, key=senior)],
        }
