"""The gateway's way to its daemon: requests over the control socket, many at a time. Event loop only.

As an operator's client, but none that reads blocks: the segment that comes with the Welcome is closed at once. A
connection that fails is made again by the next request, so a daemon may be restarted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any, cast

from kvpool.errors import KvpoolError, LimitExceeded, ProtocolError, Unavailable
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.command import answer_of

CONNECT_S = 3.0
ASK_S = 5.0  # for what the daemon has to say by itself
UNDER_WAY_MAX = 48  # of one connection; the daemon has as many as 64 wait for other nodes
LINKS_MAX = 8
INSTANCE = "gateway"


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where the daemon is, and what it wants to see."""

    socket: str
    tenant: str
    token: str | None = field(repr=False)
    operator_token: str = field(repr=False)


class Daemon:
    """Requests of an operator. `ask` may be called by many tasks at a time."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance
        self._client = secrets.token_hex(16)
        self._links: list[_Link] = []
        self._connecting = asyncio.Lock()
        self._closed = False

    async def ask(
        self,
        message: frame.Message,
        *,
        node: str = "",
        tenant: str = "",
        by: str = "",
        wait_s: float = 0.0,
        within_s: float = ASK_S,
    ) -> frame.Done | frame.Bytes:
        """What a node of the cluster answers; `node` empty: the daemon itself.

        wait_s: how long the answer may take beyond the usual. Raises what is answered, and `Unavailable` after
        `within_s` and that.
        """
        payload = frame.encode(message, 0)[frame.HEADER.size :]
        order = operator_wire.OnNode(node, payload, wait_s, tenant or self._entrance.tenant, by)
        try:
            async with asyncio.timeout(wait_s + within_s):
                link = await self._link()
                answer = await link.ask(order)
        except TimeoutError:
            whom = f"node {node}" if node else "the daemon"
            raise Unavailable(f"{whom} did not answer within {wait_s + within_s:g} s") from None
        if isinstance(answer, frame.Error):
            frame.raise_error(answer)
        if not isinstance(answer, (frame.Done, frame.Bytes)):
            raise ProtocolError(f"an operator was answered with a {type(answer).__name__}")
        return answer

    async def get(self, message: frame.Message, kind: Any = None, **more: Any) -> Any:
        """A node's answer: an `int`, or the JSON as values of type `kind`, by default of the type that is declared."""
        return answer_of(message, await self.ask(message, **more), kind)

    def close(self) -> None:
        """Requests under way fail. Idempotent."""
        self._closed = True
        for link in list(self._links):
            link.close()

    async def _link(self) -> _Link:
        """A connection with room for one more request."""
        while True:
            if self._closed:
                raise Unavailable("the gateway is closing")
            best = min(self._links, key=lambda link: link.under_way, default=None)
            if best is not None and best.under_way < UNDER_WAY_MAX:
                return best
            async with self._connecting:
                room = any(link.under_way < UNDER_WAY_MAX for link in self._links)
                if not room and len(self._links) >= LINKS_MAX:
                    raise LimitExceeded(
                        f"{LINKS_MAX * UNDER_WAY_MAX} requests to the daemon are in progress, the limit: try again"
                    )
                if not room:
                    await self._connect()

    async def _connect(self) -> None:
        sock = await asyncio.to_thread(_introduce, self._entrance, self._client)
        try:
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(lambda: _Link(self._links), sock=sock)
        except BaseException:
            sock.close()
            raise
        self._links.append(link)


class _Link(asyncio.Protocol):
    """One connection; it leaves the list when it ends."""

    def __init__(self, links: list[_Link]) -> None:
        self._links = links
        self._reader = frame.FrameReader()
        self._waiting: dict[int, asyncio.Future[frame.Message]] = {}
        self._last = 0
        self._transport: asyncio.Transport | None = None

    @property
    def under_way(self) -> int:
        return len(self._waiting)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, message: frame.Message) -> frame.Message:
        if self._transport is None or self._transport.is_closing():
            raise Unavailable("the daemon has closed the connection")
        self._last = request = self._last % 0xFFFFFFFF + 1
        answer: asyncio.Future[frame.Message] = asyncio.get_running_loop().create_future()
        self._waiting[request] = answer
        try:
            self._transport.write(frame.encode(message, request))
            return await answer
        finally:
            self._waiting.pop(request, None)

    def data_received(self, data: bytes) -> None:
        try:
            for request, payload in self._reader.feed(data):
                answer = self._waiting.get(request)
                # Nobody waits any more for what comes late.
                if answer is not None and not answer.done():
                    answer.set_result(client_wire.decode_daemon(payload))
        except ProtocolError as error:
            self._fail(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._links:
            self._links.remove(self)
        self._fail(Unavailable("the daemon has ended, or closed the connection"))

    def _fail(self, error: KvpoolError) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    def close(self) -> None:
        if self in self._links:
            self._links.remove(self)
        if self._transport is not None:
            self._transport.abort()


def _introduce(entrance: Entrance, client: str) -> socket.socket:
    """A connection that has been welcomed. Blocks; for a thread. Raises `KvpoolError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(entrance.socket)
        hello = client_wire.Hello(
            frame.PROTOCOL_VERSION,
            entrance.tenant,
            INSTANCE,
            client,
            entrance.token,
            entrance.operator_token,
        )
        try:
            sock.sendall(frame.encode(hello, 1))
        except BrokenPipeError:
            pass  # turned away at the door; the reason is there to be read
        data, fds, _, _ = socket.recv_fds(sock, frame.HELLO_BYTES_MAX, 2)
        for fd in fds:
            os.close(fd)
        frames = frame.FrameReader(frame.HELLO_BYTES_MAX).feed(data)
        if not frames:
            raise Unavailable("the daemon closed the connection before its Welcome")
        welcome = client_wire.decode_daemon(frames[0][1])
        if isinstance(welcome, frame.Error):
            frame.raise_error(welcome)
        if not isinstance(welcome, client_wire.Welcome):
            raise ProtocolError("the daemon's first message is not a Welcome")
        frame.agree(welcome.version, welcome.version, "the daemon")
    except OSError as error:
        sock.close()
        raise Unavailable(f"the daemon does not answer: {error.strerror or error}") from None
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
