"""A connection between two routers: messages in order, or its end. WebSocket, in either role.

One event loop, one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
import msgspec

from kvpool.errors import ProtocolError
from kvpool.router.group.messages import PROTOCOL, Hello, Message, decode, encode

HEARTBEAT_S = 1.0
"""A router is asked so often whether it is there, and lost if it does not answer within half of it."""
HELLO_S = 2.0
QUEUED_MAX = 1 << 16
"""Messages that wait for a slow router; then the connection ends."""
FRAME_MESSAGES = 32
CLOSE_S = 1.0


class Socket(Protocol):
    """The used interface of aiohttp's two kinds of WebSocket."""

    async def receive(self) -> aiohttp.WSMessage: ...
    async def send_bytes(self, data: bytes) -> None: ...
    async def close(self) -> Any: ...


class Link:
    """See the module. hello: the other router's; known once `greet` has returned. alive: until its end."""

    hello: Hello

    def __init__(self, socket: Socket) -> None:
        self.alive = True
        self._socket = socket
        self._queued: list[msgspec.Raw] = []
        self._more = asyncio.Event()

    @property
    def ident(self) -> str:
        return self.hello.ident

    async def greet(self, mine: Hello) -> Hello:
        """Raises `ProtocolError` for a router of another version, or what is none; `TimeoutError`."""
        async with asyncio.timeout(HELLO_S):
            await self._socket.send_bytes(encode([mine]))
            messages = await self._frame()
        if not messages or not isinstance(messages[0], Hello):
            raise ProtocolError("it did not greet as a router of this version does")
        if messages[0].protocol != PROTOCOL:
            raise ProtocolError(f"it speaks version {messages[0].protocol}, not {PROTOCOL}")
        self.hello = messages[0]
        return self.hello

    def send(self, message: Message) -> None:
        """Soon, in order; dropped once the connection has ended.

        Encoded here, so that what cannot be is its sender's error, and not the end of the link.
        """
        if self.alive and len(self._queued) < QUEUED_MAX:
            self._queued.append(msgspec.Raw(encode(message)))
        else:
            self.alive = False
        self._more.set()

    async def run(self, heard: Callable[[Message], None]) -> None:
        """Until its end. heard: may raise `ProtocolError`, which is raised here."""
        writing = asyncio.create_task(self._write())
        try:
            while self.alive and (messages := await self._frame()) is not None:
                for message in messages:
                    heard(message)
        finally:
            self.alive = False
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def close(self) -> None:
        """Idempotent. What was sent before may be lost."""
        self.alive = False
        self._more.set()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close()
        except (TimeoutError, OSError, aiohttp.ClientError):
            pass  # it had ended

    async def _frame(self) -> list[Message] | None:
        """None: it has ended. Raises `ProtocolError`."""
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.BINARY:
            return None
        return decode(received.data)

    async def _write(self) -> None:
        while self.alive:
            await self._more.wait()
            self._more.clear()
            queued, self._queued = self._queued, []
            try:
                for at in range(0, len(queued), FRAME_MESSAGES):
                    await self._socket.send_bytes(encode(queued[at : at + FRAME_MESSAGES]))
            except (OSError, aiohttp.ClientError, RuntimeError):
                break  # it has ended
        await self.close()
