"""A Redis that is none: errors, garbage, half answers, silence, at every call."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import pytest
import uvloop

from kvpool.errors import ConfigError, KvpoolError, NotAuthenticated, Unavailable
from kvpool.placement.directory.base import TIERS
from kvpool.placement.directory.redis import RedisDirectory, open_directory
from kvpool.placement.redis.connection import UNANSWERED_MAX
from kvpool.placement.redis.settings import parse_url
from tests.contract.suites.directory import NAMESPACE, keys_of, node
from tests.support.waiting import PATIENCE_S

KEYS = keys_of(range(100))
SHORT_S, LONG_S = 0.3, PATIENCE_S
INFO = b"run_id:0123456789abcdef\r\nrole:master\r\n"

Answer = Callable[[list[Any]], bytes | None]
"""What a command is answered with; None: the connection is closed."""


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def healthy(command: list[Any]) -> bytes:
    """Like a Redis that is empty, and stays so."""
    match command[0]:
        case b"INFO":
            return bulk(INFO)
        case b"MGET":
            return b"*%d\r\n" % (len(command) - 1) + b"$-1\r\n" * (len(command) - 1)
        case b"SCAN":
            return b"*2\r\n" + bulk(b"0") + b"*0\r\n"
        case _:
            return b"+OK\r\n"


class FakeRedis:
    """Answers as it is told. `answer` may be changed while it runs."""

    def __init__(self) -> None:
        self.answer: Answer = healthy
        self.commands = 0
        self.connections = 0
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        parser, more = hiredis.Reader(notEnoughData=(end := object())), end
        try:
            while data := await reader.read(1 << 16):
                parser.feed(data)
                while (command := parser.gets()) is not more:
                    self.commands += 1
                    answer = self.answer(command)
                    if answer is None:
                        return
                    writer.write(answer)
        except ConnectionError:
            pass  # whoever asked has left
        finally:
            writer.close()


@asynccontextmanager
async def fake() -> AsyncIterator[FakeRedis]:
    server = FakeRedis()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for writer in server.writers:
            writer.close()
        await asyncio.gather(
            *[writer.wait_closed() for writer in server.writers], return_exceptions=True
        )


@asynccontextmanager
async def directory_on(
    server: FakeRedis, timeout_s: float = LONG_S, scheme: str = "redis"
) -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory(
        parse_url(f"{scheme}://127.0.0.1:{server.port}"),
        cluster="c",
        timeout_s=timeout_s,
        publish_timeout_s=timeout_s,
    )
    try:
        yield directory
    finally:
        await directory.close()


def calls_of(directory: RedisDirectory) -> list[Callable[[], Awaitable[Any]]]:
    return [
        lambda: directory.locate(NAMESPACE, 8, KEYS),
        lambda: directory.publish(NAMESPACE, 8, node(1), TIERS["dram"], KEYS, [1] * 100),
        directory.marks,
        lambda: directory.sweep([node(1)], b"", 100),
    ]


def but(command: bytes, answer: bytes | None) -> Answer:
    """Healthy, but for one command."""
    return lambda asked: answer if asked[0] == command else healthy(asked)


def always(answer: bytes | None, *, greeting: bool = True) -> Answer:
    """The same to everything, perhaps after a proper greeting."""
    return lambda asked: bulk(INFO) if greeting and asked[0] == b"INFO" else answer


WRONG = {
    "an error": always(b"-ERR something is wrong\r\n"),
    "loading": always(b"-LOADING Redis is loading the dataset in memory\r\n"),
    "no room": always(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
    "a disk error": always(b"-MISCONF Redis is configured to save RDB snapshots\r\n"),
    "a replica now": always(b"-READONLY You can't write against a read only replica.\r\n"),
    "logged out": always(b"-NOAUTH Authentication required.\r\n"),
    "elsewhere": always(b"-MOVED 77 127.0.0.1:1\r\n"),
    "busy": always(b"-BUSY Redis is busy running a script.\r\n"),
    "a number": always(b":7\r\n"),
    "a status": always(b"+OK\r\n"),
    "an empty list": always(b"*0\r\n"),
    "a list of numbers": always(b"*100\r\n" + b":1\r\n" * 100),
    "nested lists": always(b"*2\r\n*1\r\n*0\r\n*0\r\n"),
    "nothing of that": always(b"$-1\r\n"),
    "garbage": always(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "zeros": always(bytes(1000)),
    "two answers": always(b"+OK\r\n+OK\r\n+OK\r\n"),
    "the end": always(None),
    "an end at once": always(None, greeting=False),
    "garbage at once": always(b"SSH-2.0-OpenSSH_9.2\r\n", greeting=False),
    "an error at once": always(b"-ERR max number of clients reached\r\n", greeting=False),
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_wrong_answers_are_unavailable_and_pass(answer: Answer) -> None:
    async def main() -> None:
        async with fake() as server, directory_on(server) as directory:
            assert await directory.locate(NAMESPACE, 8, KEYS) == [[]] * 100
            for number, call in enumerate(calls_of(directory)):
                server.answer = answer
                tried = server.commands
                said = (await asyncio.gather(call(), return_exceptions=True))[0]
                if isinstance(said, Unavailable):
                    assert str(server.port) in str(said)
                else:  # a publish asks for no particular answer; all others do
                    assert (number, said) == (1, None)
                assert server.commands - tried <= 20, "it does not try forever"
                server.answer = healthy
                await healthy_again(directory)

    uvloop.run(main())


async def healthy_again(directory: RedisDirectory) -> None:
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            assert await directory.locate(NAMESPACE, 8, KEYS) == [[]] * 100
            await directory.publish(NAMESPACE, 8, node(1), 1, KEYS, [1] * 100)
        except Unavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        else:
            return


SLOW = {
    "silence": always(b""),
    "silence at once": always(b"", greeting=False),
    "half a list": always(b"*100\r\n$-1\r\n$5\r\nab"),
    "half a number": always(b":12"),
    "a list without end": always(b"*1000000\r\n" + b"$-1\r\n" * 5),
    "a huge string": always(b"$500000000\r\nab"),
}


@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW.keys())
def test_answers_that_never_end_keep_the_deadline(answer: Answer) -> None:
    async def main() -> None:
        async with fake() as server, directory_on(server, SHORT_S) as directory:
            for call in calls_of(directory):
                server.answer = answer
                with pytest.raises(Unavailable):
                    await asyncio.wait_for(call(), LONG_S)
                began = time.monotonic()
                for _ in range(300):  # 90 s, if each waited
                    with pytest.raises(Unavailable):
                        await call()
                assert time.monotonic() - began < LONG_S
                server.answer = healthy
                await healthy_again(directory)

    uvloop.run(main())


def test_nobody_waits_for_one_that_is_known_to_be_away() -> None:
    """It is tried again in the background; a call that waited for that would take all its time."""

    async def main() -> None:
        async with fake() as server, directory_on(server) as directory:
            server.answer = always(None, greeting=False)
            with pytest.raises(Unavailable):
                await directory.marks()
            server.answer = always(b"", greeting=False)
            tried, began = server.connections, time.monotonic()
            while server.connections < tried + 2:  # for reading, and for writing
                for call in calls_of(directory):
                    with pytest.raises(Unavailable):
                        await call()
                await asyncio.sleep(0.001)
                assert time.monotonic() - began < LONG_S / 2
            for call in calls_of(directory) * 10:
                with pytest.raises(Unavailable):
                    await call()
            assert time.monotonic() - began < LONG_S / 2

    uvloop.run(main())


VERDICTS: list[tuple[bytes, type[KvpoolError] | None]] = [
    (b"-NOAUTH Authentication required.\r\n", NotAuthenticated),
    (b"-WRONGPASS invalid username-password pair\r\n", NotAuthenticated),
    (b"-ERR invalid password\r\n", NotAuthenticated),
    (b"-NOPERM this user has no permissions\r\n", ConfigError),
    (b"-ERR unknown command 'EVAL'\r\n", ConfigError),
    (b"-DENIED Redis is running in protected mode\r\n", ConfigError),
    (b"-MOVED 1 127.0.0.1:1\r\n", ConfigError),
    (b"HTTP/1.1 400 Bad Request\r\n", ConfigError),
    (b"-LOADING wait\r\n", None),
    (b"-OOM full\r\n", None),
    (b"-READONLY replica\r\n", None),
    (b"-MASTERDOWN Link with MASTER is down\r\n", None),
    (b"-CLUSTERDOWN The cluster is down\r\n", None),
]


@pytest.mark.parametrize("command", [b"MGET", b"EVAL"])
@pytest.mark.parametrize(("answer", "verdict"), VERDICTS, ids=str)
def test_the_first_contact_tells_mistakes_from_what_passes(
    command: bytes, answer: bytes, verdict: type[KvpoolError] | None
) -> None:
    async def main() -> None:
        async with fake() as server:
            server.answer = but(command, answer)
            settings = parse_url(f"redis://127.0.0.1:{server.port}")
            if verdict is None:
                directory = await open_directory(settings, cluster="c", timeout_s=LONG_S)
                server.answer = healthy
                await healthy_again(directory)
                await directory.close()
            else:
                with pytest.raises(verdict, match=str(server.port)):
                    await open_directory(settings, cluster="c", timeout_s=LONG_S)

    uvloop.run(main())


@pytest.mark.parametrize(("answer", "verdict"), VERDICTS[:6], ids=str)
def test_mistakes_that_show_before_the_first_call(
    answer: bytes, verdict: type[KvpoolError]
) -> None:
    async def main() -> None:
        async with fake() as server:
            server.answer = but(b"INFO", answer)
            settings = parse_url(f"redis://127.0.0.1:{server.port}")
            with pytest.raises(verdict, match=str(server.port)):
                await open_directory(settings, cluster="c", timeout_s=LONG_S)

    uvloop.run(main())


@pytest.mark.parametrize("info", [b"redis_version:7.0.15\r\n", b"", b"run_id:1\r\n"], ids=str)
def test_one_that_does_not_say_who_it_is(info: bytes) -> None:
    async def main() -> None:
        async with fake() as server, directory_on(server) as directory:
            server.answer = but(b"INFO", bulk(info))
            with pytest.raises(Unavailable, match="INFO"):
                await directory.marks()
            with pytest.raises(Unavailable):
                await directory.locate(NAMESPACE, 8, KEYS)
            server.answer = healthy
            await healthy_again(directory)

    uvloop.run(main())


def test_a_cluster_that_sends_everyone_elsewhere() -> None:
    """Each call is tried twice at most, and the nodes are asked less and less often where things are."""

    async def main() -> None:
        async with fake() as server:
            port = b":%d\r\n" % server.port
            slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n" + bulk(b"") + port

            def answer(command: list[Any]) -> bytes:
                if command[0] == b"CLUSTER":
                    return slots
                return bulk(INFO) if command[0] == b"INFO" else b"-MOVED 1 127.0.0.1:1\r\n"

            server.answer = answer
            async with directory_on(server, scheme="redis+cluster") as directory:
                for _ in range(200):
                    with pytest.raises(Unavailable, match="MOVED"):
                        await directory.locate(NAMESPACE, 8, KEYS[:1])
                assert directory.stats["renewals"] < 100
                assert server.commands < 3 * 200
                server.answer = lambda c: slots if c[0] == b"CLUSTER" else healthy(c)
                await healthy_again(directory)

    uvloop.run(main())


def test_marks_that_somebody_else_was_faster_to_make() -> None:
    """Between our look and our own marks another node's appear: those hold, for both."""

    async def main() -> None:
        async with fake() as server, directory_on(server) as directory:
            kept: dict[bytes, bytes] = {}

            def answer(command: list[Any]) -> bytes:
                match command:
                    case [b"MGET", *names]:
                        found = [bulk(kept[name]) if name in kept else b"$-1\r\n" for name in names]
                        for name in names:
                            kept.setdefault(name, b"of-other")
                        return b"*%d\r\n" % len(names) + b"".join(found)
                    case [b"SET", name, value, b"NX"] if name in kept:
                        return b"$-1\r\n"
                    case [b"SET", name, value, *_]:
                        kept[name] = value
                return healthy(command)

            server.answer = answer
            marks = await directory.marks()
            assert {mark[-8:] for mark in marks} == {b"of-other"}
            assert await directory.marks() == marks

    uvloop.run(main())


def test_what_is_unanswered_has_a_limit() -> None:
    async def main() -> None:
        async with fake() as server, directory_on(server) as directory:
            await directory.locate(NAMESPACE, 8, KEYS)
            server.answer = always(b"")
            waiting = [
                asyncio.ensure_future(directory.locate(NAMESPACE, 8, KEYS[:1]))
                for _ in range(UNANSWERED_MAX)
            ]
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="behind"):
                await directory.locate(NAMESPACE, 8, KEYS[:1])
            for task in waiting:
                task.cancel()
            done = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(answer) for answer in done} == {asyncio.CancelledError}
            assert server.connections == 1

    uvloop.run(main())


def test_a_server_that_reads_nothing_has_a_limit_too() -> None:
    """Bytes that the kernel takes no more of are kept up to a bound."""

    async def main() -> None:
        async with fake() as server, directory_on(server) as directory:
            await directory.locate(NAMESPACE, 8, KEYS)
            for writer in server.writers:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            large = keys_of(range(1000))
            waiting: list[asyncio.Future[Any]] = []
            while len(waiting) < UNANSWERED_MAX and not any(task.done() for task in waiting[-1:]):
                waiting.append(asyncio.ensure_future(directory.locate(NAMESPACE, 8, large)))
                await asyncio.sleep(0)
            assert len(waiting) < UNANSWERED_MAX
            with pytest.raises(Unavailable, match="behind"):
                await waiting.pop()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    uvloop.run(main())
