"""Calls to engines. A call that does not succeed has a whole HTTP answer (`EngineRefused`), or none (`EngineFailed`).

What that is evidence of is decided in `evidence.py`.

Closing a call's connection tells an engine to stop: cancelling a call closes it.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler

from kvpool.decoding import JsonDecoder
from kvpool.errors import KvpoolError, ProtocolError
from kvpool.router.http.memory import Held
from kvpool.router.upstream.engine_calls import bearer
from kvpool.router.upstream.engine_hosts import EngineResolver
from kvpool.router.upstream.specs import EngineSpec

IDLE_S = 3.0
"""How long an idle connection is kept: less than the 5 s after which vLLM closes it."""
REFUSAL_BYTES_MAX = 1 << 20
REFUSAL_S = 1.0
"""The longest wait for the rest of a refusal: an engine may leave it open."""
SHOWN_CHARACTERS = 500
SAID_CHARACTERS = 100
PIECE_BYTES = 1 << 16
HEADER_BYTES_MAX = 1 << 18
"""Of one header in an engine's answer."""
OWN_FAULTS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)
)
"""Why this process cannot connect to anyone."""

UNREACHABLE = "connect"
"""Reason of a call without a connection."""

WRONG_RANK = "rank"
"""Reason of a call for a rank that the engine does not have."""

CUT = "cut"
"""Reason of a call whose connection broke off before the answer was whole."""

GONE = "gone"
"""Reason of a call to an engine that was found dead, or was removed."""

TOO_LARGE = "too_large"
"""Reason of a failed call whose answer exceeds the limit: another engine would answer the same."""

GARBAGE = "garbage"
"""Reason of a failed call whose answer is none: not JSON, or no events."""

ApiKeys = Callable[[EngineSpec], str]


class EngineFailed(KvpoolError):
    """A call had no whole answer. reason: one word, for metrics."""

    code = "engine_failed"

    def __init__(self, engine: str, reason: str, message: str) -> None:
        super().__init__(f"engine {engine}: {message}")
        self.engine = engine
        self.reason = reason


class EngineRefused(KvpoolError):
    """An engine's whole answer to a request that it did not serve: a status other than 200, or an error event.

    headers: those of the answer that are for the client. sent_status: the status of the answer itself, if an event in it
    has the other one.
    """

    code = "engine_refused"
    reason = "status"

    def __init__(
        self,
        engine: str,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        sent_status: int | None = None,
    ) -> None:
        shown = body.decode(errors="replace")[:SHOWN_CHARACTERS]
        super().__init__(f"engine {engine}: HTTP {status}: {shown}")
        self.engine = engine
        self.status = status
        self.sent_status = sent_status or status
        self.body = body
        self.headers = headers


class Exhausted(KvpoolError):
    """This process lacks descriptors, ports or memory for a connection: no fault of the engine's."""

    code = "exhausted"


class Answer:
    """An answer of status 200 that has begun. headers: those that are for the client."""

    def __init__(self, engine: str, response: aiohttp.ClientResponse) -> None:
        self.engine = engine
        self.headers = _for_client(response.headers)
        self._content = response.content

    @property
    def content_type(self) -> str:
        return self.headers["Content-Type"]

    @property
    def streams(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    @property
    def ended(self) -> bool:
        """Whether all of it was read."""
        return self._content.at_eof()

    async def piece(self) -> bytes:
        """Received bytes, at most about `PIECE_BYTES`; empty at the end. Raises `EngineFailed`."""
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(self.engine, CUT, f"its answer broke off: {_said(error)}") from None

    async def whole(self, bytes_max: int, held: Held | None = None) -> bytes:
        """All of it. held: of its bytes. Raises `EngineFailed`, also if it is too large, and `NoRoom`."""
        found = bytearray()
        while piece := await self.piece():
            if held is not None:
                held.add(len(piece))
            found += piece
            if len(found) > bytes_max:
                raise EngineFailed(self.engine, TOO_LARGE, f"an answer above {bytes_max} bytes")
        return bytes(found)


class Upstream:
    """All calls go through one session. connect_s: the longest wait for a connection."""

    def __init__(self, session: aiohttp.ClientSession, api_key: ApiKeys, connect_s: float) -> None:
        self._session = session
        self._api_key = api_key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)

    @asynccontextmanager
    async def ask(
        self, engine: EngineSpec, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """Send a request and receive its answer in pieces; leaving early aborts it. Without a body it is a GET.

        It waits as long as the caller allows. Raises `EngineFailed`, `EngineRefused` and `Exhausted`.
        """
        try:
            response = await self._session.request(
                "POST" if body else "GET",
                engine.url + path,
                data=body or None,
                headers={**_JSON, **headers, **engine.rank_header, **self._login(engine)},
                timeout=self._timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise _unanswered(engine, error) from None
        try:
            if response.status != 200:
                raise await _turned_down(engine, response)
            yield Answer(engine.name, response)
        finally:
            # Closes the connection unless the answer was read to its end.
            response.release()

    async def get(self, engine: EngineSpec, path: str, within_s: float, bytes_max: int) -> bytes:
        """A small answer. Raises `EngineFailed` and `Exhausted`."""
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.get(
                    engine.url + path,
                    headers=self._login(engine),
                    timeout=self._timeout,
                    allow_redirects=False,
                ) as response,
            ):
                if response.status != 200:
                    raise EngineFailed(engine.name, "status", f"{path}: HTTP {response.status}")
                return await Answer(engine.name, response).whole(bytes_max)
        except TimeoutError:
            raise EngineFailed(
                engine.name, "timeout", f"{path}: no answer within {within_s} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unanswered(engine, error) from None

    def _login(self, engine: EngineSpec) -> dict[str, str]:
        return bearer(self._api_key(engine))


_JSON = {"Content-Type": "application/json"}
_NOT_FOR_CLIENTS = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
        *("content-length", "content-type", "date", "server", "set-cookie"),
    )
)
"""Headers of one connection or of a program; the router has its own of these."""


def _for_client(received: Mapping[str, str]) -> dict[str, str]:
    """An engine's headers that a client gets: what it says of its answer. What is repeated is joined."""
    headers = {"Content-Type": received.get("Content-Type", "application/json")}
    for name, text in received.items():
        if name.lower() not in _NOT_FOR_CLIENTS:
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers


class _Connection(ResponseHandler):
    """Resumes only what was paused: aiohttp does it for each chunk that is read, for the price of forwarding an event.

    Tells whoever reads an answer that its connection is lost: aiohttp does not, after bytes that it cannot parse.
    """

    def connection_lost(self, exc: BaseException | None) -> None:
        payload = self._payload
        super().connection_lost(exc)
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("the connection was lost"))

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:
            super().resume_reading(resume_parser)


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        connection: type[ResponseHandler] = _Connection
        self._factory = partial(connection, loop=self._loop)


def open_session() -> aiohttp.ClientSession:
    """The one session of a router. The number of calls is bounded by the requests in flight."""
    connector = _Connector(limit=0, keepalive_timeout=IDLE_S, resolver=EngineResolver())
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        # Answers are forwarded as received, without decoding.
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        # Embeddings as bytes are described in a header.
        max_field_size=HEADER_BYTES_MAX,
        trust_env=False,
        # An answer whose client does not read waits here: as little as keeps a fast one flowing.
        read_bufsize=PIECE_BYTES,
    )


def _unanswered(engine: EngineSpec, error: aiohttp.ClientError | OSError) -> KvpoolError:
    if isinstance(error, OSError) and error.errno in OWN_FAULTS:
        return Exhausted(f"the router cannot connect to an engine: {_said(error)}")
    # Of these the engine has read nothing: no connection was made, or not in time.
    unread = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    reason = UNREACHABLE if unread else CUT
    return EngineFailed(engine.name, reason, f"no answer: {_said(error)}")


async def _turned_down(engine: EngineSpec, response: aiohttp.ClientResponse) -> KvpoolError:
    status = response.status
    try:
        body = await _beginning(response.content, REFUSAL_BYTES_MAX)
    except (aiohttp.ClientError, OSError) as error:
        return EngineFailed(engine.name, CUT, f"HTTP {status} broke off: {_said(error)}")
    if _unknown_rank(engine, body):
        return EngineFailed(engine.name, WRONG_RANK, f"it has no rank {engine.rank}: HTTP {status}")
    return EngineRefused(engine.name, status, body, _for_client(response.headers))


def _unknown_rank(engine: EngineSpec, body: bytes) -> bool:
    """Whether an engine refused the router's choice of a rank, and not the request: it has fewer ranks than thought."""
    if engine.rank is None:
        return False
    try:
        message = _decode_refusal(body).error.message
    except ProtocolError:
        return False
    return message.startswith(f"data_parallel_rank {engine.rank} is out of range")


class _Said(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Said


_decode_refusal = JsonDecoder[_Refusal](_Refusal, "an error")


async def _beginning(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """Return up to so many bytes, as far as they come within `REFUSAL_S`: a read has no more than what has come."""
    found = bytearray()
    with suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_S):
            while len(found) < bytes_max and (piece := await content.read(bytes_max - len(found))):
                found += piece
    return bytes(found)


def _said(error: Exception) -> str:
    """An error in a few words, for logs and clients: without the engine's address, and what it has sent."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection ended before it was complete"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"not HTTP: {error.message.splitlines()[0][:SAID_CHARACTERS].rstrip(':')}"
    if isinstance(error, TimeoutError):
        return "it did not accept the connection in time"
    if isinstance(error, OSError) and error.errno:
        # aiohttp puts the URL into some of these; a number below 0 is the resolver's.
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    said = str(error)[:SAID_CHARACTERS]
    return said if said and "://" not in said else type(error).__name__
