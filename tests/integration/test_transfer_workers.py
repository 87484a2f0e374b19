"""Transfer worker processes, killed, stopped, cancelled: real ones, moving bytes between real segments."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from xxhash import xxh3_128_digest

from kvpool.config import DaemonConfig
from kvpool.daemon.workers.transfer_workers import TransferWorkers
from kvpool.daemon.workers.turns import QUESTIONS
from kvpool.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    Unavailable,
)
from kvpool.security.cluster_secrets import ClusterSecrets, SecretSource
from kvpool.security.failed_logins import Failures
from kvpool.storage.dram import DramSegment
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import admit
from kvpool.transfer.stream import Stream
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from kvpool.wire.faults import Faults
from tests.contract.suites.transport import key_of
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S, until_async

SIZE = 32 << 20
NBYTES = 256 << 10
COUNT = 40
LISTEN = "tcp://127.0.0.1:0"


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(test)


SECRETS = ClusterSecrets(SecretSource("of this machine alone", local=True))


class Rules:
    """What the control process would answer: a few blocks, loans counted."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[int, bytes]] = {}
        self.loans: set[str] = set()
        self.lent = 0
        self.reports: list[peer_wire.Corrupt] = []
        self.error: Exception | None = None
        self.faults = Faults(time.monotonic)
        self.returned = asyncio.Event()
        self.committed = asyncio.Event()
        self.awaiting = 0
        self.failures: Failures = []

    def open_loan(self, request: worker_wire.OpenLoan) -> worker_wire.Loan:
        if self.error is not None:
            raise self.error
        rows, checksums = array("I"), []
        (part,) = request.parts
        for at in range(0, len(part.keys), 16):
            found = self.blocks.get(part.keys[at : at + 16])
            rows.append(frame.NO_ROW if found is None else found[0])
            if found is not None:
                checksums.append(found[1])
        self.lent += 1
        token = str(self.lent)
        self.loans.add(token)
        self.returned.clear()
        return worker_wire.Loan(token, 0, [part.nbytes], rows.tobytes(), b"".join(checksums))

    def give_back(self, token: str) -> None:
        self.loans.remove(token)
        if not self.loans:
            self.returned.set()

    def asked(self, question: peer_wire.Ask) -> frame.Done:
        if self.error is not None:
            raise self.error
        return frame.Done(len(question.keys) // 16)

    async def offered(self, offer: peer_wire.Offer) -> frame.Bytes:
        if self.error is not None:
            raise self.error
        return frame.Bytes(b"\1" * (len(offer.keys) // 16))

    async def answer_later(self, question: peer_wire.Await) -> frame.Bytes:
        self.awaiting += 1
        try:
            await self.committed.wait()
        finally:
            self.awaiting -= 1
        return frame.Bytes(b"\1" * (len(question.keys) // 16))

    def logins_failed(self, failures: Failures) -> None:
        self.failures += failures

    def corrupt(self, report: peer_wire.Corrupt) -> None:
        self.reports.append(report)
        self.returned.set()


class Daemon:
    """The control process's part of one daemon, as far as transfer workers need one."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.segment = DramSegment.create(SIZE)
        self.bytes = self.segment.map()
        self.rules = Rules()
        config = DaemonConfig(socket="unused", node=name, **settings)
        self.workers = TransferWorkers(config, f"{name}-1", SECRETS)

    def put(self, number: int, row: int) -> bytes:
        data = random.Random(number).randbytes(NBYTES)
        self.bytes[row * NBYTES : (row + 1) * NBYTES] = data
        self.rules.blocks[key_of(number)] = (row, xxh3_128_digest(data))
        return data

    def block(self, row: int) -> bytes:
        return self.bytes[row * NBYTES : (row + 1) * NBYTES]


@asynccontextmanager
async def daemons(*settings: dict[str, Any]) -> AsyncIterator[list[Daemon]]:
    made = [Daemon(f"node{number}", **each) for number, each in enumerate(settings)]
    try:
        for daemon in made:
            await daemon.workers.start(daemon.rules)
            await daemon.workers.attach_segment(0, daemon.segment)
        yield made
    finally:
        for daemon in made:
            await daemon.workers.stop()
            daemon.segment.close()


def order(
    url: str, keys: list[int], rows: list[int], deadline_s: float = 60.0
) -> worker_wire.PullBlocks:
    return worker_wire.PullBlocks(
        url=url,
        tenant="default",
        digest=b"d" * 16,
        segment=0,
        parts=[
            worker_wire.PartRows(
                0, NBYTES, NBYTES, b"".join(map(key_of, keys)), array("I", rows).tobytes()
            )
        ],
        deadline_s=deadline_s,
    )


@contextmanager
def silent_peer() -> Iterator[tuple[str, threading.Event]]:
    """A peer that takes requests and never answers; the event tells that one has come."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked = threading.Event()
    kept = []

    def serve() -> None:
        try:
            while True:
                kept.append(listener.accept()[0])
                sock = kept[-1]
                stream = Stream(sock, Deadline(60))
                admit(stream, Identity("kvpool", "silent", "1", SECRETS))
                stream.receive(1 << 20)
                asked.set()
        except (OSError, KvpoolError):
            pass  # closed by the test

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in kept:
            with suppress(OSError):  # its transfer worker has been killed
                sock.shutdown(
                    socket.SHUT_RDWR
                )  # wakes the thread, which then sees the listener closed
        thread.join()
        for sock in kept:
            sock.close()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_blocks_travel_from_daemon_to_daemon() -> None:
    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {"transfer_workers": 2}) as (owner, reader):
            data = [owner.put(number, 2 * number) for number in range(COUNT)]
            keys, rows = [*range(COUNT), 999], list(range(50, 50 + COUNT + 1))
            pulled = await reader.workers.pull(order(owner.workers.urls[0], keys, rows))
            assert pulled.error == ""
            assert pulled.status == b"\1" * COUNT + b"\0"
            assert [reader.block(row) for row in rows[:-1]] == data
            question = peer_wire.Ask("default", b"d" * 16, [], key_of(1) * 7)
            asked = worker_wire.AskPeer(owner.workers.urls[0], question, 30.0)
            assert await reader.workers.ask(asked) == frame.Done(7)
            await owner.rules.returned.wait()

    run(scenario())


def test_a_flipped_byte_is_reported_to_its_owner() -> None:
    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            for number in range(4):
                owner.put(number, number)
            owner.bytes[2 * NBYTES + 77] ^= 4
            pulled = await reader.workers.pull(
                order(owner.workers.urls[0], [0, 1, 2, 3], [4, 5, 6, 7])
            )
            assert list(pulled.status) == [
                BlockStatus.PRESENT,
                BlockStatus.PRESENT,
                BlockStatus.MISMATCH,
                BlockStatus.PRESENT,
            ]
            await until_async(lambda: bool(owner.rules.reports))
            assert owner.rules.reports[0].keys == key_of(2)

    run(scenario())


def test_the_owners_refusal_and_broken_orders() -> None:
    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            url = owner.workers.urls[0]
            owner.rules.error = InvalidRequest("other sizes here")
            pulled = await reader.workers.pull(order(url, [1], [1]))
            assert (pulled.status, "other sizes" in pulled.error) == (
                bytes([BlockStatus.LATE]),
                True,
            )
            with pytest.raises(InvalidRequest, match="outside"):
                await reader.workers.pull(order(url, [1], [1 << 20]))
            with pytest.raises(ConfigError, match="no transport"):
                await reader.workers.pull(order("pigeon://x", [1], [1]))

    run(scenario())


def test_an_unexpected_error_in_a_peers_read_ends_its_connection_and_no_process() -> None:
    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            url = owner.workers.urls[0]
            before = [worker.pid for worker in owner.workers.stats()]
            data = owner.put(1, 3)
            owner.rules.error = RuntimeError("a bug")
            asked = worker_wire.AskPeer(url, peer_wire.Ask("t", bytes(16), [], key_of(1)), 30.0)
            with pytest.raises(InternalError, match="RuntimeError"):
                await reader.workers.ask(asked)
            pulled = await reader.workers.pull(order(url, [1], [1]))
            assert pulled.refused and "RuntimeError" in pulled.error
            assert owner.rules.faults.counts == {"Ask": 1, "OpenLoan": 1}
            owner.rules.error = None
            assert await reader.workers.ask(asked) == frame.Done(1)
            assert (await reader.workers.pull(order(url, [1], [1]))).error == ""
            assert reader.block(1) == data
            assert [worker.pid for worker in owner.workers.stats()] == before

    run(scenario())


def test_an_unexpected_error_in_what_a_peer_has_changed_is_passed_on_to_the_loop() -> None:
    async def scenario() -> None:
        crashed = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda *_: crashed.set())
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            owner.rules.error = RuntimeError("a bug")
            offer = peer_wire.Offer(
                *("node1", "ab" * 8, "copy", "t", bytes(16), 0, b"{}", [(4096, "full", 0, 1)]),
                *(key_of(1), b"\1", 1, 0, 0.0, 60.0),
            )
            asking = asyncio.ensure_future(
                reader.workers.ask(worker_wire.AskPeer(owner.workers.urls[0], offer, 60.0))
            )
            await crashed.wait()
            asking.cancel()

    run(scenario())


def test_a_silent_peer_costs_its_deadline_and_no_more() -> None:
    async def scenario() -> None:
        async with daemons({}) as (reader,):
            with silent_peer() as (url, _):
                pulled = await reader.workers.pull(order(url, [1, 2], [1, 2], 0.2))
            assert pulled.status == bytes([BlockStatus.LATE]) * 2
            assert pulled.error
            assert reader.workers.stats()[0].alive

    run(scenario())


def test_cancellation_waits_for_the_transfer_workers_word() -> None:
    async def scenario() -> None:
        async with daemons({}) as (reader,):
            with silent_peer() as (url, asked):
                task = asyncio.create_task(reader.workers.pull(order(url, [1], [1])))
                await until_async(asked.is_set)
                task.cancel()
                task.cancel()  # a second one must not make it leave early
                with pytest.raises(asyncio.CancelledError):
                    await task
                (stats,) = reader.workers.stats()
                assert (stats.orders, stats.alive) == (0, True)

    run(scenario())


def test_a_killed_puller_fails_its_pulls_and_is_replaced() -> None:
    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            data = owner.put(1, 1)
            pid = reader.workers.stats()[0].pid
            with silent_peer() as (url, asked):
                task = asyncio.create_task(reader.workers.pull(order(url, [1], [1])))
                await until_async(asked.is_set)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(Unavailable, match="ended"):
                    await task
            assert gone(pid)
            await until_async(lambda: reader.workers.stats()[0].restarts == 1)
            await until_async(lambda: reader.workers.stats()[0].alive)
            pulled = await reader.workers.pull(order(owner.workers.urls[0], [1], [9]))
            assert (pulled.status, reader.block(9)) == (b"\1", data)

    run(scenario())


def test_a_killed_owner_returns_its_loans_and_keeps_its_address() -> None:
    """The peer stopped in the middle of reading; the owner's transfer worker dies with the loan."""

    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            for number in range(COUNT):
                owner.put(number, number)
            (url,) = owner.workers.urls
            reading = reader.workers.stats()[0].pid
            serving = owner.workers.stats()[0].pid
            warm = await reader.workers.pull(order(url, [0], [0]))
            assert warm.status == b"\1"
            # Stopped, so that it neither reads nor sends while the pull is under way.
            send(serving, signal.SIGSTOP)
            task = asyncio.create_task(
                reader.workers.pull(order(url, list(range(COUNT)), list(range(COUNT))))
            )
            await until_async(lambda: reader.workers.stats()[0].orders == 1)
            os.kill(serving, signal.SIGKILL)
            pulled = await task
            assert BlockStatus.PRESENT not in pulled.status
            assert pulled.error
            assert owner.workers.addresses == [url], "whether it runs at the moment or not"
            await until_async(lambda: owner.workers.stats()[0].restarts == 1)
            await until_async(lambda: owner.workers.urls == [url])
            assert not owner.rules.loans
            assert not gone(reading)
            pulled = await reader.workers.pull(order(url, list(range(COUNT)), list(range(COUNT))))
            assert pulled.status == b"\1" * COUNT

    run(scenario())


def await_of(url: str, number: int) -> worker_wire.AskPeer:
    question = peer_wire.Await("node1", "default", b"d" * 16, key_of(number), b"\0", 30.0)
    return worker_wire.AskPeer(url, question, 40.0)


def test_questions_that_wait_keep_nothing_from_going_on() -> None:
    """More of them than there are threads for pulls; those that are cancelled end at the owner too."""

    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            data = owner.put(7, 3)
            url = owner.workers.urls[0]
            asking = [asyncio.create_task(reader.workers.ask(await_of(url, n))) for n in range(40)]
            await until_async(lambda: owner.rules.awaiting == 40)
            async with asyncio.timeout(PATIENCE_S):
                pulled = await reader.workers.pull(order(url, [7], [5]))
            assert (pulled.status, reader.block(5)) == (b"\1", data)
            for task in asking[:30]:
                task.cancel()
            await asyncio.gather(*asking[:30], return_exceptions=True)
            await until_async(lambda: owner.rules.awaiting == 10)
            assert not any(task.done() for task in asking[30:])
            owner.rules.committed.set()
            assert await asyncio.gather(*asking[30:]) == [frame.Bytes(b"\1")] * 10
            await until_async(lambda: owner.rules.awaiting == 0)
            await until_async(lambda: owner.rules.awaiting == 0)

    run(scenario())


def test_what_a_silent_peer_is_asked_keeps_nothing_from_going_on() -> None:
    """Pulls and questions of every kind, more than one peer may have under way."""

    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            data = owner.put(7, 3)
            url = owner.workers.urls[0]
            with silent_peer() as (silent, asked):
                question = worker_wire.AskPeer(
                    silent, peer_wire.Ask("default", b"d" * 16, [], key_of(1)), 60.0
                )
                waiting: list[asyncio.Task[Any]] = []
                for _ in range(20):
                    waiting += [
                        asyncio.create_task(reader.workers.pull(order(silent, [1], [1]))),
                        asyncio.create_task(reader.workers.ask(question)),
                        asyncio.create_task(reader.workers.ask(await_of(silent, 1))),
                    ]
                await until_async(asked.is_set)
                async with asyncio.timeout(PATIENCE_S):
                    pulled = await reader.workers.pull(order(url, [7], [5]))
                    again = msgspec.structs.replace(question, url=url)
                    assert await reader.workers.ask(again) == frame.Done(1)
                assert (pulled.status, reader.block(5)) == (b"\1", data)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    run(scenario())


def test_a_question_that_does_not_get_its_turn_is_not_held_against_the_peer() -> None:
    async def scenario() -> None:
        async with daemons({}) as (reader,):
            with silent_peer() as (silent, asked):
                question = peer_wire.Ask("default", b"d" * 16, [], key_of(1))
                held = [
                    asyncio.create_task(
                        reader.workers.ask(worker_wire.AskPeer(silent, question, 60.0))
                    )
                    for _ in range(QUESTIONS.each)
                ]
                await until_async(asked.is_set)
                with pytest.raises(LimitExceeded, match="in progress"):
                    await reader.workers.ask(worker_wire.AskPeer(silent, question, 0.1))
                for task in held:
                    task.cancel()
                await asyncio.gather(*held, return_exceptions=True)

    run(scenario())


def test_questions_that_wait_end_with_either_transfer_worker() -> None:
    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}, {}) as (owner, reader):
            for killed in (owner, reader):
                asking = asyncio.create_task(reader.workers.ask(await_of(owner.workers.urls[0], 1)))
                await until_async(lambda: owner.rules.awaiting == 1)
                os.kill(killed.workers.stats()[0].pid, signal.SIGKILL)
                with pytest.raises(Unavailable):
                    await asking
                await until_async(lambda: owner.rules.awaiting == 0)
                await until_async(lambda one=killed: one.workers.stats()[0].alive)

    run(scenario())


def test_stop_leaves_no_process_behind() -> None:
    async def scenario() -> None:
        with silent_peer() as (url, asked):
            async with daemons({"listen": (LISTEN,), "transfer_workers": 3}) as (daemon,):
                pids = [each.pid for each in daemon.workers.stats()]
                task = asyncio.create_task(daemon.workers.pull(order(url, [1], [1])))
                await until_async(asked.is_set)
            assert all(gone(pid) for pid in pids)
            with pytest.raises(Unavailable):
                await task

    run(scenario())


def test_a_transfer_worker_ignores_the_signals_of_its_group() -> None:
    async def scenario() -> None:
        async with daemons({"listen": (LISTEN,)}) as (daemon,):
            pid = daemon.workers.stats()[0].pid
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            daemon.put(1, 1)
            pulled = await daemon.workers.pull(order(daemon.workers.urls[0], [1], [2]))
            assert pulled.status == b"\1"

    run(scenario())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("tcp://0.0.0.0:0", "no cluster secret"),
        ("pigeon://roof:1", "no transport"),
        ("tcp://192.0.2.1:7", "cannot listen|no cluster secret"),
    ],
)
def test_what_cannot_be_listened_on_is_told_at_the_start(url: str, reason: str) -> None:
    async def scenario() -> None:
        daemon = Daemon("node", listen=(LISTEN, url), transfer_workers=2)
        try:
            with pytest.raises(ConfigError, match=reason):
                await daemon.workers.start(daemon.rules)
            assert daemon.workers.stats() == []
        finally:
            await daemon.workers.stop()
            daemon.segment.close()

    run(scenario())


def test_a_transfer_worker_ends_with_its_control_process() -> None:
    """Control is killed with SIGKILL: nothing tells the transfer worker but the kernel."""
    program = """
import asyncio, sys
from kvpool.security.cluster_secrets import ClusterSecrets, SecretSource
from kvpool.config import DaemonConfig
from kvpool.daemon.workers.transfer_workers import TransferWorkers
from kvpool.daemon.workers.turns import QUESTIONS
async def main():
    workers = TransferWorkers(DaemonConfig(socket="unused", node="n", listen=("tcp://127.0.0.1:0",)), "1", ClusterSecrets(SecretSource("of these tests alone")))
    await workers.start(None)
    print(workers.stats()[0].pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as control:
        assert control.stdout is not None
        worker = os.pidfd_open(int(control.stdout.readline()))
        control.kill()
        control.wait()
    try:
        ended = asyncio.run(_readable(worker))
    finally:
        os.close(worker)
    assert ended


async def _readable(fd: int) -> bool:
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(fd, seen.set)
    async with asyncio.timeout(PATIENCE_S):
        await seen.wait()
    loop.remove_reader(fd)
    return True


def test_a_transfer_worker_alone_ends_when_its_channel_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [
            sys.executable,
            "-m",
            "kvpool.daemon.workers.transfer_worker",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        ours.close()
        assert process.wait(PATIENCE_S) == 0
