"""Calls to engines over a real connection."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import (
    CUT,
    OWN_FAULTS,
    PIECE_BYTES,
    REFUSAL_BYTES_MAX,
    TOO_LARGE,
    UNREACHABLE,
    Answer,
    EngineFailed,
    EngineRefused,
    Exhausted,
    Upstream,
    open_session,
)
from tests.support.raw_engine import STREAM_HEAD, Asked, RawEngine, chunk, event
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S, until_async

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reader = Callable[[Answer], Awaitable[bytes]]


async def whole(answer: Answer) -> bytes:
    return await answer.whole(REFUSAL_BYTES_MAX)


async def ask(handler: Handler, rank: int | None = None, read: Reader = whole) -> bytes:
    """An engine's answer to a request, or what `Upstream` makes of it."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", handler)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        spec = EngineSpec(f"http://127.0.0.1:{runner.addresses[0][1]}", rank, name="a")
        async with open_session() as session:
            upstream = Upstream(session, lambda _: "", 20.0)
            async with upstream.ask(spec, "/v1/completions", b"{}", {}) as answer:
                return await read(answer)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("size", [7, REFUSAL_BYTES_MAX // 2])
def test_a_refusal_is_read_to_its_end_in_however_many_pieces_it_comes(size: int) -> None:
    said = bytes(n % 251 for n in range(size))

    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, body=said, content_type="text/plain")

    with pytest.raises(EngineRefused) as caught:
        asyncio.run(ask(refuse))
    assert caught.value.status == 400 and caught.value.body == said
    assert caught.value.headers == {"Content-Type": "text/plain"}


def test_headers_that_are_about_an_answer_are_for_the_client() -> None:
    large = "x" * 100_000

    async def refuse(_request: web.Request) -> web.StreamResponse:
        headers = [
            ("Metadata", large),
            ("Vary", "Origin"),
            ("Vary", "Accept"),
            ("Set-Cookie", "a=b"),
        ]
        return web.Response(status=400, body=b"{}", headers=headers)

    with pytest.raises(EngineRefused) as caught:
        asyncio.run(ask(refuse))
    assert caught.value.headers == {
        "Content-Type": "application/octet-stream",
        "Metadata": large,
        "Vary": "Origin, Accept",
    }


def test_no_more_of_a_refusal_is_kept_than_there_is_room_for() -> None:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=422, body=bytes(2 * REFUSAL_BYTES_MAX))

    with pytest.raises(EngineRefused) as caught:
        asyncio.run(ask(refuse))
    assert len(caught.value.body) == REFUSAL_BYTES_MAX


def test_a_refusal_that_does_not_end_is_what_has_come_of_it() -> None:
    async def go() -> None:
        async def refuse(asked: Asked) -> None:
            head = b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n"
            await asked.send(head + chunk(b"busy"))
            await asyncio.Event().wait()

        async with RawEngine(refuse) as engine, open_session() as session:
            upstream = Upstream(session, lambda _: "", PATIENCE_S)
            spec = EngineSpec(engine.url, name="a")
            with pytest.raises(EngineRefused) as caught:
                async with (
                    asyncio.timeout(PATIENCE_S),
                    upstream.ask(spec, "/v1/completions", b"{}", {}),
                ):
                    pass
        assert (caught.value.status, caught.value.body) == (503, b"busy")
        assert caught.value.headers["Retry-After"] == "7"

    asyncio.run(go())


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_a_request_is_for_the_rank_of_its_engine(rank: int | None) -> None:
    async def tell(request: web.Request) -> web.StreamResponse:
        return web.Response(text=str(request.headers.get("X-data-parallel-rank")))

    assert asyncio.run(ask(tell, rank)) == str(rank).encode()


def test_an_engine_without_the_rank_has_failed_and_the_request_is_not_to_blame() -> None:
    message = "data_parallel_rank 3 is out of range [0, 2)."

    async def refuse(request: web.Request) -> web.StreamResponse:
        said = {"message": message, "type": "BadRequestError", "code": 400}
        return web.json_response({"error": said}, status=400)

    with pytest.raises(EngineFailed) as failed:
        asyncio.run(ask(refuse, 3))
    assert failed.value.reason == "rank"
    # Another rank, or none, was not the router's choice.
    for rank in (2, None):
        with pytest.raises(EngineRefused):
            asyncio.run(ask(refuse, rank))
    message = f"your word: {message}"
    with pytest.raises(EngineRefused):
        asyncio.run(ask(refuse, 3))


def test_what_is_too_large_is_a_failure() -> None:
    async def large(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(REFUSAL_BYTES_MAX + 1))

    with pytest.raises(EngineFailed) as caught:
        asyncio.run(ask(large))
    assert caught.value.reason == TOO_LARGE


@pytest.mark.parametrize("status", [204, 301, 401, 408, 425, 429, 500, 501, 503])
def test_a_whole_answer_is_what_the_engine_says_whatever_its_status(status: int) -> None:
    async def busy(_request: web.Request) -> web.StreamResponse:
        said = b"" if status == 204 else b"busy"
        return web.Response(status=status, body=said, headers={"Retry-After": "3"})

    with pytest.raises(EngineRefused) as caught:
        asyncio.run(ask(busy))
    assert caught.value.status == status and caught.value.headers["Retry-After"] == "3"
    assert caught.value.body == (b"" if status == 204 else b"busy")


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_connection_that_is_lost_is_another_thing_than_none(when: str) -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        if when == "within":
            response.content_length = 100
            await response.prepare(request)
            await response.write(b"part")
        assert request.transport is not None
        request.transport.abort()
        return response

    with pytest.raises(EngineFailed) as caught:
        asyncio.run(ask(hang_up))
    assert caught.value.reason == CUT


def test_bytes_that_cannot_be_parsed_end_an_answer() -> None:
    """They close the connection, and whoever waits for the rest is to know."""

    async def go() -> None:
        waits = asyncio.Event()

        async def garbage(asked: Asked) -> None:
            await asked.send(STREAM_HEAD + chunk(event("good")))
            await waits.wait()
            await asked.send(b"zz\r\nwhat\r\n")

        async with RawEngine(garbage) as engine, open_session() as session:
            upstream = Upstream(session, lambda _: "", PATIENCE_S)
            spec = EngineSpec(engine.url, name="a")
            async with upstream.ask(spec, "/v1/completions", b"{}", {}) as answer:
                assert await answer.piece() == event("good")
                waits.set()
                with pytest.raises(EngineFailed) as caught:
                    await asyncio.wait_for(answer.piece(), PATIENCE_S)
        assert caught.value.reason == CUT

    asyncio.run(go())


def test_nothing_of_a_request_is_read_without_a_connection() -> None:
    async def call() -> None:
        spec = EngineSpec(f"http://127.0.0.1:{free_port()}", name="a")
        async with (
            open_session() as session,
            Upstream(session, lambda _: "", 20.0).ask(spec, "/v1/completions", b"{}", {}),
        ):
            pass

    with pytest.raises(EngineFailed, match="refused") as caught:
        asyncio.run(call())
    assert caught.value.reason == UNREACHABLE


@pytest.mark.parametrize("chunked", [True, False])
def test_an_answer_that_nobody_reads_waits_at_the_engine_until_somebody_does(chunked: bool) -> None:
    said = os.urandom(1 << 20) * 16

    async def tell(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if not chunked:
            response.content_length = len(said)
        await response.prepare(request)
        for at in range(0, len(said), 1000):
            await response.write(said[at : at + 1000])
        return response

    async def read(answer: Answer) -> bytes:
        found = bytearray()
        content = answer._content
        while piece := await answer.piece():
            found += piece
            if len(found) < 1 << 20:
                await until_async(lambda: content._protocol._reading_paused, "it is held")
                assert content._size < 8 * PIECE_BYTES
        assert answer.ended
        return bytes(found)

    assert asyncio.run(ask(tell, read=read)) == said


class Unconnected:
    """A session that has no connection, and cannot make one."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def request(self, *_: object, **__: object) -> None:
        raise self._error

    def get(self, *_: object, **__: object) -> "Unconnected":
        return self

    async def __aenter__(self) -> None:
        raise self._error

    async def __aexit__(self, *_: object) -> None: ...


def connector_error(number: int) -> aiohttp.ClientConnectorError:
    key = ConnectionKey("10.0.0.7", 8000, False, True, None, None, None)
    return aiohttp.ClientConnectorError(key, OSError(number, os.strerror(number)))


URL = "http://10.0.0.7:8000/v1/completions"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        *((connector_error(number), os.strerror(number)) for number in OWN_FAULTS),
        (connector_error(errno.ECONNREFUSED), "refused"),
        (aiohttp.ClientOSError(errno.EPIPE, f"Can not write request body for {URL}"), "pipe"),
        (aiohttp.ConnectionTimeoutError(f"Connection timeout to host {URL}"), "in time"),
        (aiohttp.ServerDisconnectedError(f"from {URL}"), "closed"),
        (aiohttp.ClientConnectionError(f"of {URL}"), "ClientConnectionError"),
        (aiohttp.ClientConnectionError("Connection closed"), "Connection closed"),
    ],
)
def test_why_there_is_no_answer_is_told_without_the_engines_address(
    error: Exception, said: str
) -> None:
    spec = EngineSpec(url="http://10.0.0.7:8000", name="a")
    upstream = Upstream(cast(Any, Unconnected(error)), lambda _: "", 20.0)

    async def call() -> None:
        async with upstream.ask(spec, "/v1/completions", b"{}", {}):
            pass

    own = isinstance(error, OSError) and error.errno in OWN_FAULTS
    asks = [call]
    if not isinstance(error, TimeoutError):  # a probe has its own words for that
        asks.append(lambda: cast(Any, upstream.get(spec, "/health", 20.0, 100)))
    for asking in asks:
        with pytest.raises(Exhausted if own else EngineFailed, match=said) as caught:
            asyncio.run(asking())
        assert "10.0.0.7" not in str(caught.value)
