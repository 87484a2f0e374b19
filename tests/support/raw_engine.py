"""An engine that sends what it is told to, byte for byte, right or wrong.

It answers `/health` and `/v1/models` as an engine does, leaves completions to its script, and knows nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

SCRIPTED = ("/v1/completions", "/v1/chat/completions")
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the connection on which it is answered."""

    path: str
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def value(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    async def send(self, data: bytes) -> None:
        """Returns when there is room for more. Raises `ConnectionError` if the router has left."""
        self.writer.write(data)
        await self.writer.drain()

    def close(self) -> None:
        """The connection ends behind what was sent, whether the router expects that or not."""
        self.writer.close()


Script = Callable[[Asked], Awaitable[None]]
"""Answers a request. The connection goes on unless it is closed."""


def event(text: str) -> bytes:
    said = {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def plain(body: bytes, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    """An answer in one piece."""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def completion(text: str) -> bytes:
    return json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": text}]}).encode()


async def answer_rightly(asked: Asked) -> None:
    """What the prompt's length is, streamed or not."""
    said = str(len(asked.value["prompt"]))
    if asked.value.get("stream"):
        await asked.send(STREAM_HEAD + chunk(event(said)) + chunk(DONE) + END)
    else:
        await asked.send(plain(completion(said)))


class RawEngine:
    """`async with RawEngine(script) as engine:` serves at `engine.url`. script: may be replaced.

    asked: how many requests the script has got; open: how many of them it has not left.
    """

    def __init__(self, script: Script = answer_rightly, model: str = "stub") -> None:
        self.script = script
        self.url = ""
        self.asked = self.open = 0
        self._models = json.dumps({"data": [{"id": model, "max_model_len": 1 << 30}]}).encode()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Handled here: one that asyncio starts would complain of its cancellation.
        task = asyncio.create_task(self._answer_all(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer(reader, writer):
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether another request may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        path = head.split(b" ", 2)[1].decode()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        body = await reader.readexactly(int(length or b"0"))
        if path == "/health":
            writer.write(plain(b""))
        elif path == "/v1/models":
            writer.write(plain(self._models))
        elif path not in SCRIPTED:
            writer.write(plain(b'{"detail":"Not Found"}', "404 Not Found"))
        else:
            self.asked += 1
            self.open += 1
            try:
                await self.script(Asked(path, body, reader, writer))
            finally:
                self.open -= 1
        return not writer.is_closing()
