"""Traffic that hurts: very many, very large, very slow, and engines that send anything. Memory and descriptors of the
router stay bounded, clients get right answers or clear errors, and nothing is tried again once an answer has begun.
"""

import asyncio
import contextlib
import hashlib
import json
import resource
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from kvpool.net import raise_descriptor_limit
from tests.support.raw_engine import (
    DONE,
    END,
    STREAM_HEAD,
    Asked,
    answer_rightly,
    chunk,
    completion,
    event,
    plain,
)

MIB = 1 << 20
STREAMS = 2000
SLOW_FLAGS = ("--prefill-tokens-s", "4000", "--decode-s", "0.005", "--step-tokens", "128")


class Raw(NamedTuple):
    """An answer as it came. head: in lower case."""

    status: int
    head: bytes
    body: bytes

    @property
    def text(self) -> str:
        """Of a completion: its text, or that of its events."""
        if b"event-stream" not in self.head:
            return str(json.loads(self.body)["choices"][0]["text"])
        return "".join(said["choices"][0]["text"] for said in self.events if "choices" in said)

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = self.body.split(b"\n")
        datas = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
        return [json.loads(data) for data in datas if data.strip() != b"[DONE]"]

    @property
    def done(self) -> bool:
        return self.body.endswith(DONE)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Connection:
    """A client's connection, with as little of its own as may be: thousands are open at a time."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rsplit(":", 1)[1])
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, body: bytes, path: str = "/v1/completions") -> Raw:
        """Connects if it is not connected, or was told that the connection ends."""
        if self._writer is None or self._reader is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._reader, self._writer
        writer.write(_head(body, path))
        writer.write(body)
        sending = asyncio.create_task(writer.drain())  # it may be refused before all is sent
        try:
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(answer.split()[1])
            if b"transfer-encoding: chunked" in answer:
                said = b"".join([piece async for piece in _chunks(reader)])
            else:
                length = answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                said = await reader.readexactly(int(length))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending
        if b"connection: close" in answer:
            self.close()
        return Raw(status, answer, said)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def _head(body: bytes, path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


async def ask(world: Any, **body: Any) -> Raw:
    """On a connection of its own."""
    return await send(world, body_of(**body))


async def send(world: Any, body: bytes, path: str = "/v1/completions") -> Raw:
    connection = Connection(world.url)
    try:
        return await connection.ask(body, path)
    finally:
        connection.close()


def body_of(**body: Any) -> bytes:
    return json.dumps({"model": "stub", "prompt": "x", "max_tokens": 4} | body).encode()


async def started(world: Any, **config: Any) -> Any:
    """A router that knows its engines."""
    router = await world.router(verified=False, **config)
    await world.until(lambda: serves(world), "the engines are known")
    return router


async def serves(world: Any) -> bool:
    return bool((await world.get("/v1/models"))["data"])


async def metric(world: Any, name: str) -> float:
    """The sum over all labels."""
    lines = [
        line
        for line in (await world.get("/metrics")).splitlines()
        if line.startswith((f"kvpool_router_{name} ", f"kvpool_router_{name}{{"))
    ]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def free(world: Any) -> bool:
    """Whether nothing is left of any request."""
    return not await metric(world, "active_requests") and not await metric(world, "held_bytes")


def memory_of(router: Any, what: str = "VmRSS") -> int:
    """Bytes; `VmHWM`: the most that there were."""
    status = Path(f"/proc/{router.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def descriptors_of(router: Any) -> int:
    return len(list(Path(f"/proc/{router.process.pid}/fd").iterdir()))


async def few_descriptors(router: Any, most: int) -> bool:
    return descriptors_of(router) <= most


@contextlib.contextmanager
def soft_limit(descriptors: int) -> Any:
    """Of what is started meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- very many ---------------------------------------------------------------------------------------


async def test_two_thousand_streams_at_once(world: Any) -> None:
    """From one address, as a proxy has it, and with the low soft limit of descriptors that is usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * STREAMS:
        pytest.skip(f"{hard} open files are too few for clients and engines in this process")
    gate = asyncio.Event()

    async def slowly(asked: Asked) -> None:
        said = asked.value["prompt"]
        await asked.send(STREAM_HEAD + chunk(event(f"{said} ")))
        await gate.wait()
        await asked.send(chunk(event(said)) + chunk(DONE) + END)

    engines = [await world.raw(name, slowly) for name in "ab"]
    with soft_limit(256):
        router = await started(world)
    before = descriptors_of(router)
    raise_descriptor_limit()
    try:
        asking = [
            asyncio.create_task(ask(world, prompt=f"number {number}", stream=True))
            for number in range(STREAMS)
        ]

        async def all_are_open() -> bool:
            return sum(engine.open for engine in engines) + sum(t.done() for t in asking) >= STREAMS

        await world.until(all_are_open, "all have begun")
        assert sum(engine.open for engine in engines) == STREAMS, Counter(
            task.result().status for task in asking if task.done()
        )
        assert descriptors_of(router) >= 2 * STREAMS
        gate.set()
        answers = await asyncio.gather(*asking)
    finally:
        gate.set()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(each.status == 200 and each.done for each in answers)
    assert [each.text for each in answers] == [f"number {n} number {n}" for n in range(STREAMS)]
    assert await metric(world, "connections_dropped_total") == 0
    assert "receives no requests" not in router.said
    assert memory_of(router, "VmHWM") < 400 * MIB
    # Probes, ten a second here, keep some of the connections to engines open.
    await world.until(lambda: few_descriptors(router, before + 100), "connections are closed")
    await world.until(lambda: free(world))


async def test_too_few_descriptors_refuse_requests_and_blame_no_engine(world: Any) -> None:
    gate = asyncio.Event()

    async def waits(asked: Asked) -> None:
        await gate.wait()
        await answer_rightly(asked)

    engine = await world.raw("a", waits)
    few = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    router = await started(world, prefix=few)
    asking: list[asyncio.Task[Raw]] = []

    async def decided() -> bool:
        return engine.open + sum(task.done() for task in asking) >= len(asking)

    for _ in range(6):
        asking += [asyncio.create_task(ask(world, prompt="xyz")) for _ in range(50)]
        await world.until(decided, "all are served or refused")
    assert engine.open >= 16
    gate.set()
    answers = await asyncio.gather(*asking)
    served = [each for each in answers if each.status == 200]
    assert len(served) == engine.asked
    assert {each.text for each in served} == {"3"}
    refused = [each for each in answers if each.status != 200]
    assert {(each.status, each.error["type"]) for each in refused} == {(429, "requests_max")}
    assert all(b"retry-after: " in each.head for each in refused)
    assert await metric(world, "engine_up") == 1
    assert "open files" in router.said and "LimitNOFILE" in router.said
    assert "Too many open files" not in router.said


# ---- engines that send anything ----------------------------------------------------------------------

SAID = chunk(event("so far"))
BEFORE = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "no HTTP": b"\x00\xff\x16\x03\x01 hello\r\n\r\n",
    "HTTP 500": plain(b'{"error":"out of memory"}', "500 Internal Server Error"),
    "HTTP 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "a page": plain(b"<html>bad gateway</html>", content_type="text/html"),
    "no JSON": plain(b"\x00\xff{{{"),
    "empty": plain(b""),
    "half JSON": plain(completion("lost")[:-5]),
    "fewer bytes than said": plain(completion("lost"))[:-5],
    "a bad chunk": STREAM_HEAD + b"zz\r\nwhat\r\n",
    "no event": STREAM_HEAD + chunk(b"\x00\xff\xfe\n\n") + SAID + chunk(DONE) + END,
    "a long header": b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 10_000,
}
IN_BETWEEN = {
    "closed": b"",
    "ended without its end": END,
    "a bad chunk": b"zz\r\nwhat\r\n",
    "no event": chunk(b"\x00\xff\xfe\n\n") + SAID + chunk(DONE) + END,
    "half an event": chunk(event("cut")[:-9]) + END,
}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_sends_in_place_of_an_answer_reaches_no_client(
    world: Any, stream: bool
) -> None:
    bad, good = await world.raw("bad"), await world.raw("good")
    router = await started(world, failures_max=1000)
    for name, data in BEFORE.items():

        async def send(asked: Asked, data: bytes = data) -> None:
            await asked.send(data)
            asked.close()

        bad.script = send
        before = bad.asked
        while bad.asked == before:  # engines are chosen at random
            said = await ask(world, prompt="x" * 7, stream=stream)
            assert (said.status, said.text) == (200, "7"), name
        assert said.done == stream, name
    assert good.asked >= len(BEFORE)
    await world.until(lambda: free(world))
    assert "Traceback" not in router.said


async def test_when_all_engines_send_garbage_the_error_is_short_and_clear(world: Any) -> None:
    bad = await world.raw("bad")
    await started(world, failures_max=1000)
    for name, data in BEFORE.items():

        async def send(asked: Asked, data: bytes = data) -> None:
            await asked.send(data)
            asked.close()

        bad.script, before = send, bad.asked
        said = await ask(world)
        if name == "HTTP 500":
            assert (said.status, said.body) == (500, b'{"error":"out of memory"}')
            assert bad.asked - before == 1, "there is no other engine"
            continue
        assert (said.status, said.error["type"]) == (502, "engine_failed"), name
        assert "engine bad: " in said.error["message"], name
        assert len(said.error["message"]) < 600, name
        assert bad.url.removeprefix("http://") not in said.error["message"], (
            "it is nobody's business"
        )
        # Once, and two retries; one may be lost on a connection that it has just closed. Whole answers come once.
        if name in {"HTTP 204", "elsewhere"}:
            assert bad.asked - before == 1, name
        else:
            assert 2 <= bad.asked - before <= 3, name


async def test_what_breaks_in_between_is_an_error_and_is_not_tried_again(world: Any) -> None:
    bad, good = await world.raw("bad"), await world.raw("good")
    await started(world, failures_max=1000)
    begun = asyncio.Event()
    for name, data in IN_BETWEEN.items():

        async def send(asked: Asked, data: bytes = data) -> None:
            await asked.send(STREAM_HEAD + SAID)
            await begun.wait()  # the client has it
            await asked.send(data)
            asked.close()

        bad.script = send
        before = bad.asked
        while bad.asked == before:
            begun.clear()
            others = good.asked
            body = {"model": "stub", "prompt": "x", "stream": True}
            async with world.opened("/v1/completions", body) as response:
                first = await response.content.readuntil(b"\n\n")
                begun.set()
                rest = await response.content.read()
        assert response.status == 200
        assert first == event("so far"), name
        assert good.asked == others, name
        error = json.loads(rest.removeprefix(b"data: "))["error"]
        assert error["message"].startswith("engine bad: "), name
        assert len(error["message"]) < 300
    assert await metric(world, "requests_total") >= len(IN_BETWEEN)


async def test_an_event_or_an_answer_without_end_takes_bounded_memory(world: Any) -> None:
    """As fast as the engine can, from several at a time."""
    sent = Counter[str]()

    async def endless(asked: Asked) -> None:
        streams = bool(asked.value.get("stream"))
        head = (
            STREAM_HEAD + SAID
            if streams
            else STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
        )
        await asked.send(head)
        piece = chunk(b"data: " + b"a" * 65536)
        while True:
            await asked.send(piece)
            sent["streamed" if streams else "whole"] += len(piece)

    await world.raw("a", endless)
    router = await started(
        world,
        failures_max=1000,
        retries_max=0,
        memory_bytes_max=24 * MIB,
        answer_bytes_max=16 * MIB,
    )
    idle = memory_of(router)
    answers = await asyncio.gather(*(ask(world, stream=bool(n % 2)) for n in range(12)))
    for said in answers:
        if b"event-stream" in said.head:
            assert said.status == 200 and not said.done
            assert said.text == "so far"
            message = said.events[-1]["error"]["message"]
        else:
            assert said.status in (429, 502)
            message = said.error["message"]
        assert "more than 16 MiB" in message or "above" in message or "no room" in message
    assert any("no room" in str(said.body) for said in answers), "the sum is limited, too"
    assert sent["whole"] and sent["streamed"]
    await world.until(lambda: free(world))
    assert memory_of(router, "VmHWM") - idle < 150 * MIB


# ---- slow readers, and engines that stop -------------------------------------------------------------


async def test_slow_readers_hold_up_their_engines_and_not_the_routers_memory(world: Any) -> None:
    sent = Counter[int]()
    gone = asyncio.Event()
    readers = 24

    async def fast(asked: Asked) -> None:
        if not asked.value.get("stream"):
            await answer_rightly(asked)
            return
        number = asked.value["max_tokens"]
        piece = chunk(event("x" * 8000))
        await asked.send(STREAM_HEAD)
        try:
            while True:
                await asked.send(piece)
                sent[number] += len(piece)
                await asyncio.sleep(0)
        finally:
            gone.set()

    engine = await world.raw("a", fast)
    router = await started(world, client_stall_s=3.0, stall_s=60.0, failures_max=1000)
    idle = memory_of(router)
    port = int(world.url.rsplit(":", 1)[1])
    socks = []
    try:
        for number in range(readers):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            body = body_of(stream=True, max_tokens=number + 1)
            await asyncio.get_running_loop().sock_sendall(sock, _head(body) + body)
            socks.append(sock)
        await world.until(lambda: _all_begun(sent, readers), "all are answered")
        for _ in range(5):
            assert (await ask(world, prompt="xyz")).text == "3"
        await asyncio.wait_for(gone.wait(), 60.0)
        await world.until(lambda: _left(engine), "all are given up")
    finally:
        for sock in socks:
            sock.close()
    # Beside the kernel's buffers, which are some MiB a connection at most.
    assert max(sent.values()) < 16 * MIB
    assert memory_of(router, "VmHWM") - idle < (readers + 16) * MIB
    await world.until(lambda: free(world))


async def _all_begun(sent: Counter[int], count: int) -> bool:
    return len(sent) == count


async def _left(engine: Any) -> bool:
    return not engine.open


async def test_an_engine_that_is_stopped_is_found_by_its_probes(world: Any) -> None:
    process = await world.process("a", *SLOW_FLAGS)
    await world.process("b")
    await world.router(stall_s=2.0, failures_max=2, probe_timeout_s=1.0, retries_max=16)
    await world.call("POST", "/engines/b/drain")
    prompts = [world.prompt(number, 1000) for number in range(6)]
    long = world.prompt(99, 64)
    body = {"model": "stub", "prompt": long, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with world.opened("/v1/completions", body) as response:
        await response.content.readline()
        asking = [asyncio.create_task(world.complete(p, max_tokens=5)) for p in prompts]
        await world.until(lambda: _asked(world, 3), "it has some of them")
        process.signal(signal.SIGSTOP)
        await world.call("DELETE", "/engines/b/drain")
        rest = await response.content.read()
    assert [a.text for a in await asyncio.gather(*asking)] == [world.right(p, 5) for p in prompts]
    last = rest.rstrip().rpartition(b"\n")[2]
    assert "engine a: it stopped" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
    process.signal(signal.SIGCONT)


async def _asked(world: Any, count: int) -> bool:
    return len((await world.state("a"))["requests"]) >= count


# ---- very large --------------------------------------------------------------------------------------


async def test_prompts_of_ten_megabytes_arrive_as_they_are(world: Any) -> None:
    seen: list[tuple[int, str]] = []

    async def count(asked: Asked) -> None:
        seen.append((len(asked.body), hashlib.sha256(asked.body).hexdigest()))
        await asked.send(plain(completion("read")))

    engine = await world.raw("a", count)
    await started(world)
    bodies = [
        body_of(prompt="word " * (2 * MIB)),
        body_of(prompt=[n * 7 % 30_000 for n in range(1_800_000)]),
        json.dumps(
            {"model": "stub", "messages": [{"role": "user", "content": "é" * (2 * MIB)}]}
        ).encode(),
    ]
    for path, data in zip(("completions", "completions", "chat/completions"), bodies, strict=True):
        assert len(data) > 10 * MIB
        said = await send(world, data, f"/v1/{path}")
        assert (said.status, said.text) == (200, "read")
        assert seen[-1] == (len(data), hashlib.sha256(data).hexdigest())
    assert engine.asked == 3
    assert (await ask(world, prompt="x" * (17 * MIB))).status == 413
    await world.until(lambda: free(world))


async def test_many_large_prompts_take_no_more_than_they_may(world: Any) -> None:
    gate = asyncio.Event()

    async def waits(asked: Asked) -> None:
        if len(asked.body) > MIB:
            await gate.wait()
        await answer_rightly(asked)

    engine = await world.raw("a", waits)
    router = await started(world, memory_bytes_max=64 * MIB)
    idle = memory_of(router)
    large = body_of(prompt="word " * (2 * MIB))

    asking = [asyncio.create_task(send(world, large)) for _ in range(20)]

    async def decided() -> bool:
        return engine.open + sum(task.done() for task in asking) >= len(asking)

    await world.until(decided, "each is served or refused")
    assert 0 < await metric(world, "held_bytes") <= 64 * MIB
    # Small ones are served meanwhile.
    assert {(await ask(world, prompt="x" * 5)).text for _ in range(10)} == {"5"}
    assert 1 <= engine.open <= 3, "each holds its body and its text"
    gate.set()
    answers = await asyncio.gather(*asking)
    assert memory_of(router, "VmHWM") - idle < 4 * 64 * MIB
    served = [each for each in answers if each.status == 200]
    assert {each.text for each in served} == {str(10 * MIB)}
    refused = [each for each in answers if each.status != 200]
    assert {(each.status, each.error["type"]) for each in refused} == {(429, "memory")}
    assert all(b"retry-after: 1\r\n" in each.head for each in refused)
    await world.until(lambda: free(world), "all of it is given back")
    assert (await send(world, large)).status == 200


async def test_small_values_count_by_what_they_take(world: Any) -> None:
    """Parsed, ten megabytes of `[],` are three hundred."""
    await world.raw("a")
    router = await started(world, memory_bytes_max=64 * MIB)
    idle = memory_of(router)
    for value in (b"[],", b'{"":0},', b"{},"):
        nested = (
            b'{"model":"stub","prompt":"x","metadata":[' + value * (10 * MIB // len(value)) + b"0]}"
        )
        said = await send(world, nested)
        assert (said.status, said.error["type"]) == (429, "memory")
    assert memory_of(router, "VmHWM") - idle < 64 * MIB
    assert (await ask(world, prompt="xyz")).text == "3"


# ---- restarts ----------------------------------------------------------------------------------------


class Traffic:
    """Clients that ask one stream after the other, each on a connection that it keeps."""

    def __init__(self, world: Any, clients: int) -> None:
        self.answers: list[Raw] = []
        self.broken: list[str] = []
        self._url = world.url
        self._stop = asyncio.Event()
        self._clients = clients

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _ask(self, number: int) -> None:
        connection = Connection(self._url)
        body = body_of(prompt="x" * number, stream=True)
        while not self._stop.is_set():
            try:
                self.answers.append(await connection.ask(body))
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.broken.append(repr(error))
                connection.close()
            await asyncio.sleep(0)
        connection.close()

    async def more(self, count: int) -> bool:
        return len(self.answers) >= count


async def _takes_a_while(asked: Asked) -> None:
    said = str(len(asked.value["prompt"]))
    await asked.send(STREAM_HEAD)
    for _ in range(5):
        await asked.send(chunk(event(said)))
        await asyncio.sleep(0.02)
    await asked.send(chunk(DONE) + END)


def _right(answer: Raw) -> bool:
    texts = [said["choices"][0]["text"] for said in answer.events]
    return answer.status == 200 and answer.done and len(texts) == 5 and len(set(texts)) == 1


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
async def test_a_router_that_ends_under_traffic_refuses_clearly_and_finishes_the_rest(
    world: Any, numbers: list[signal.Signals]
) -> None:
    await world.raw("a", _takes_a_while)
    router = await started(world)
    async with Traffic(world, 20) as traffic:
        await world.until(lambda: traffic.more(40), "there is traffic")
        assert all(_right(each) for each in traffic.answers)
        traffic.answers.clear()
        for number in numbers:
            router.signal(number)
        assert await router.ended() == 0
        said = list(traffic.answers)
    served = [each for each in said if each.status == 200]
    assert served and all(_right(each) for each in served)
    refused = [each for each in said if each.status != 200]
    assert {(each.status, each.error["type"]) for each in refused} <= {(503, "draining")}
    assert all(b"connection: close" in each.head for each in refused)
    assert all(b"retry-after: 1\r\n" in each.head for each in refused)
    assert "Traceback" not in router.said


async def test_a_router_is_replaced_under_traffic_and_no_client_notices(world: Any) -> None:
    await world.raw("a", _takes_a_while)
    first = await started(world, reuse_port=True)
    async with Traffic(world, 20) as traffic:
        await world.until(lambda: traffic.more(40), "there is traffic")
        second = await started(world, reuse_port=True, listen=world.url.removeprefix("http://"))
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
        count = len(traffic.answers)
        await world.until(lambda: traffic.more(count + 40), "the second one serves")
        assert second.process.poll() is None
    assert traffic.broken == []
    wrong = [each for each in traffic.answers if not _right(each)]
    assert not wrong, (len(wrong), wrong[0].body)
    assert await metric(world, "requests_total") >= 40
