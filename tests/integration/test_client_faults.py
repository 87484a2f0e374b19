"""Processes that are killed, stopped, forked; daemons that go away and come back."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.client.puts import Reservations
from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LeaseLost,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
    UnknownReservation,
)
from kvpool.types import NamespaceRecord
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from tests.support.client_inside import connections_of
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord.simple("script", block_bytes=4096, block_tokens=16)
TIMEOUT_S = 2.0  # where it is tested; a busy machine answers sooner
SLACK_S = 20.0  # for a busy machine, where a deadline is measured
LEASE_S = 3.0  # of readers who are stopped under it; time enough to get so far


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> bytes:
    return bytes([number % 251]) * 4096


def put(client, ns, *numbers: int) -> int:
    return client.put(ns, [key(n) for n in numbers], [block(n) for n in numbers])


def wait_at_most(client: Client, seconds: float) -> None:
    """The time-out of its requests from now on."""
    connections_of(client).timeout_s = seconds


def used(client) -> int:
    return client.stats().tenants["default"].space.bytes_used


@pytest.fixture
def ns(client):
    return client.open(RECORD)


# ---- clients that end --------------------------------------------------------------------------------


def test_a_client_killed_between_reserve_and_commit(daemon, client, ns, until):
    before = used(client)
    victim = daemon.script(
        """
client = Client(SOCKET, timeout_s=60, connect=True)
reservation = client.reserve(client.open(RECORD), [key(n) for n in range(100)])
reservation.slots.view(0)[:] = block(1)
say("reserved")
hear()
"""
    )
    assert victim.hear() == "reserved"
    assert used(client) >= before + 100 * 4096
    victim.kill()
    until(lambda: used(client) == before, "the space of a dead client")
    assert client.stats().clients == 1
    assert put(client, ns, *range(100)) == 100


def test_a_client_killed_while_it_has_slots_for_small_puts(daemon, client, ns, until):
    victim = daemon.script(
        """
client = Client(SOCKET, timeout_s=60, connect=True)
ns = client.open(RECORD)
for n in range(20):
    client.put(ns, [key(n)], block(n))
say("put")
hear()
"""
    )
    assert victim.hear() == "put"
    victim.kill()
    until(lambda: used(client) == 20 * 4096, "the granted slots of a dead client")
    assert client.get(ns, [key(n) for n in range(20)]) == [block(n) for n in range(20)]
    assert client.stats().tenants["default"].granted_bytes == 0


def test_a_reader_killed_under_its_lease(daemon, client, ns, until):
    put(client, ns, 1)
    victim = daemon.script(
        """
client = Client(SOCKET, timeout_s=60, connect=True)
lease = client.acquire(client.open(RECORD), [key(1)], lease_s=60)
say("leased")
hear()
"""
    )
    assert victim.hear() == "leased"
    assert client.stats().leases == 1
    victim.kill()
    until(lambda: client.stats().leases == 0, "the lease", seconds=PATIENCE_S / 2)


def test_a_socket_that_closes_frees_nothing_while_its_process_lives(daemon, client, ns, until):
    victim = daemon.script(
        """
client = Client(SOCKET, timeout_s=60, connect=True)
ns = client.open(RECORD)
client.put(ns, [key(500)], block(5))
lease = client.acquire(ns, [key(500)], lease_s=60)
reservation = client.reserve(ns, [key(n) for n in range(10)])
client.close()
say("closed")
hear()
for slot in range(10):
    reservation.slots.view(slot)[:] = block(99)
say("written")
hear()
"""
    )
    assert victim.hear() == "closed"
    until(lambda: client.stats().connections == 1, what="the connections of the other one end")
    assert client.stats().leases == 1
    held = used(client)
    assert held >= 11 * 4096
    # All the rest of the pool is written again and again: nobody gets the reserved slots.
    for n in range(1000, 1000 + 2 * 8192, 64):
        put(client, ns, *range(n, n + 64))
    victim.say()
    assert victim.hear() == "written"
    there = range(1000, 1000 + 2 * 8192)
    read = client.get(ns, [key(n) for n in there])
    assert sum(one is not None for one in read) > 4000
    assert all(one is None or one == block(n) for n, one in zip(there, read, strict=True))
    victim.kill()
    until(lambda: client.stats().leases == 0 and client.stats().clients == 1)


def test_a_forked_child_is_refused(daemon, client, ns):
    put(client, ns, 1)
    with client.acquire(ns, [key(1)]) as lease:
        lease.slots[0].view(0)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                client.match(ns, [key(1)])
            except InvalidRequest as error:
                status = 0 if "before a fork" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert lease.slots[0].view(0) == block(1)
    assert client.match(ns, [key(1)]) == 1


def test_a_child_that_is_executed_inherits_no_descriptor(daemon):
    other = daemon.script(
        """
client = Client(SOCKET, timeout_s=60, connect=True)
client.put(client.open(RECORD), [key(1)], block(1))
found = []
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        if fd > 2 and os.get_inheritable(fd):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass  # the one that listed them
say(" ".join(found) or "none")
"""
    )
    assert other.hear() == "none"


# ---- readers that are late -----------------------------------------------------------------------------


OVERWRITTEN = 8192 + 64  # blocks: more than the pool has


def overwrite(client, ns) -> None:
    for n in range(10_000, 10_000 + OVERWRITTEN, 64):
        put(client, ns, *range(n, n + 64))


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("when", ["before", "after"])
def test_get_into_stopped_past_its_lease_uses_nothing(daemon, client, ns, until, when):
    """The reader is stopped right before or after its copy, with the lease in hand."""
    put(client, ns, 1, 2, 3)
    reader = daemon.script(
        f"""
import numpy as np
real = kvpool.client.copying.read_rows
def stop_and_read(*args):
    if "{when}" == "after":
        real(*args)
    say("copying")
    os.kill(os.getpid(), signal.SIGSTOP)
    if "{when}" == "before":
        real(*args)
kvpool.client.copying.read_rows = stop_and_read
client = Client(SOCKET, timeout_s=60, connect=True)
out = np.zeros((3, 4096), np.uint8)
here = client.get_into(client.open(RECORD), [key(1), key(2), key(3)], out, lease_s={LEASE_S})
say(str(here.tolist()))
kvpool.client.copying.read_rows = real
here = client.get_into(client.open(RECORD), [key(4)], out[:1])
say(str(here.tolist()) + str(out[0].tobytes() == block(4)))
"""
    )
    assert reader.hear() == "copying"
    until(lambda: stopped(reader.pid))
    until(lambda: client.stats().leases == 0, what="the lease ends by its deadline")
    client.remove(ns, [key(1), key(2), key(3)])
    overwrite(client, ns)
    put(client, ns, 4)
    reader.signal(signal.SIGCONT)
    assert reader.hear() == "[False, False, False]"
    assert reader.hear() == "[True]True", "and the next read is right"


def test_a_lease_holder_stopped_past_its_deadline(daemon, client, ns, until):
    put(client, ns, 1)
    reader = daemon.script(
        f"""
from kvpool.errors import LeaseLost
client = Client(SOCKET, timeout_s=60, connect=True)
lease = client.acquire(client.open(RECORD), [key(1)], lease_s={LEASE_S})
say("leased")
os.kill(os.getpid(), signal.SIGSTOP)
copy = bytes(lease.slots[0].view(0))
try:
    lease.check()
except LeaseLost:
    say(f"lost {{lease.valid}} {{copy == block(1)}}")
"""
    )
    assert reader.hear() == "leased"
    until(lambda: stopped(reader.pid))
    until(lambda: client.stats().leases == 0)
    client.remove(ns, [key(1)])
    overwrite(client, ns)
    reader.signal(signal.SIGCONT)
    assert reader.hear() == "lost False False", "the copy was not the block any more"


def test_an_answer_that_was_read_late(daemon, client, ns, until):
    """Stopped between question and answer: the lease counts from the question."""
    put(client, ns, 1)
    reader = daemon.script(
        """
real = kvpool.client.connection.Connection.receive
def stop_first(self, request, timeout_s):
    if stopping:
        stopping.clear()
        say("asked")
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(self, request, timeout_s)
kvpool.client.connection.Connection.receive = stop_first
stopping = []
client = Client(SOCKET, timeout_s=60, connect=True)
ns = client.open(RECORD)
for wait_s in (0.0, 5.0):
    stopping.append(1)
    lease = client.acquire(ns, [key(1)], lease_s=0.2, wait_s=wait_s)
    say(str(lease is None or lease.valid))
"""
    )
    for answered in (1, 2):
        assert reader.hear() == "asked"
        until(lambda: stopped(reader.pid))
        until(lambda n=answered: client.stats().counters.acquired == n)
        until(lambda: client.stats().leases == 0)
        reader.signal(signal.SIGCONT)
        assert reader.hear() == "False"


def test_a_lease_that_has_ended_says_so(client, ns):
    put(client, ns, 1)
    lease = client.acquire(ns, [key(1)], lease_s=60)
    lease.check()
    lease.deadline = time.monotonic()
    with pytest.raises(LeaseLost, match="discard"):
        lease.check()


# ---- daemons that end ------------------------------------------------------------------------------------


def test_no_daemon_at_all(folder):
    client = Client(str(folder / "nobody.sock"))
    ns = client.open(RECORD)
    assert client.match(ns, [key(1)]) == 0
    assert client.get(ns, [key(1)]) == [None]
    assert client.contains(ns, [key(1)]).tolist() == [False]
    assert client.acquire(ns, [key(1)]) is None
    assert client.join("token") is None
    assert not client.available
    with pytest.raises(Unavailable):
        put(client, ns, 1)
    with pytest.raises(Unavailable):
        client.stats()
    with pytest.raises(Unavailable, match="kvpool serve"):
        Client(str(folder / "nobody.sock"), connect=True)
    client.close()


def test_a_daemon_killed_and_started_again(daemon, start, until):
    with daemon.client() as client:
        ns = client.open(RECORD)
        put(client, ns, 1, 2)
        lease = client.acquire(ns, [key(1)], lease_s=60)
        reservation = client.reserve(ns, [key(3)])
        first = client.incarnation
        daemon.kill()
        began = time.monotonic()
        assert client.match(ns, [key(1)]) == 0
        assert client.get(ns, [key(1)]) == [None]
        with pytest.raises(Unavailable):
            put(client, ns, 4)
        assert time.monotonic() - began < SLACK_S
        # What was leased stays readable: the segment lives while it is mapped.
        assert lease.slots[0].view(0) == block(1)
        lease.release()
        start("--socket", daemon.socket, name="second")
        until(lambda: client.match(ns, [key(1)]) == 0 and client.incarnation != first)
        with pytest.raises(UnknownReservation):
            client.commit(reservation)
        client.abort(reservation)
        assert client.match(ns, [key(1)]) == 0
        assert put(client, ns, 1, 5) == 2
        assert client.get(ns, [key(1), key(5)]) == [block(1), block(5)]


def test_reads_while_the_daemon_is_killed_are_right_or_missing(daemon, start, until):
    """Threads that put and get all the time; the daemon is killed under them and comes back."""
    wrong: list[str] = []
    after: list[int] = []
    done: list[int] = []
    stop = threading.Event()
    with daemon.client(timeout_s=TIMEOUT_S) as client:
        ns = client.open(RECORD)

        def work(seed: int) -> None:
            n = seed * 100_000
            while not stop.is_set():
                n += 1
                began = time.monotonic()
                try:
                    put(client, ns, n)
                except Unavailable:
                    pass
                [got] = client.get(ns, [key(n)])
                if got is not None and got != block(n):
                    wrong.append(f"{n}")
                if restarted.is_set() and got is not None:
                    after.append(n)
                done.append(n)
                if time.monotonic() - began > 2 * TIMEOUT_S + SLACK_S:
                    wrong.append("a request hung")

        restarted = threading.Event()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        try:
            running = daemon
            for turn in range(2):
                enough = len(done) + 50
                until(lambda n=enough: len(done) >= n, "some traffic")
                running.kill()
                running = start("--socket", daemon.socket, name=f"again{turn}")
            restarted.set()
            until(lambda: len(after) >= 20, "the same client works with the new daemon")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not wrong


def test_a_stopped_daemon(daemon, until):
    """Requests end at their deadline, later ones at once, and nothing is leaked."""
    with daemon.client(connect=True) as client, daemon.client() as observer:
        ns = client.open(RECORD)
        client.put(ns, [key(n) for n in range(8)], [block(n) for n in range(8)])
        reserve_only = client.reserve(ns, [key(50)])
        client.abort(reserve_only)
        until(lambda: observer.stats().counters.aborted == 1)
        before = observer.stats().tenants["default"]
        wait_at_most(client, TIMEOUT_S)
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.reserve(ns, [key(n) for n in range(100, 200)])
        assert 0.8 * TIMEOUT_S < time.monotonic() - began < TIMEOUT_S + SLACK_S
        # Between attempts to reconnect, which end at the deadline too, there is nothing to wait for.
        instant = 0
        began = time.monotonic()
        for _ in range(200):
            available = client.available
            asked = time.monotonic()
            assert client.match(ns, [key(1)]) == 0
            if not available:
                instant += time.monotonic() - asked < TIMEOUT_S / 2
        assert instant > 150
        assert time.monotonic() - began < 10 * TIMEOUT_S + SLACK_S
        daemon.signal(signal.SIGCONT)
        until(lambda: client.match(ns, [key(1)]) == 1, what="it works again")
        until(
            lambda: observer.stats().tenants["default"].space.bytes_used <= before.space.bytes_used,
            what="what the client gave up on comes back",
        )
        wait_at_most(client, PATIENCE_S)
        assert client.put(ns, [key(n) for n in range(100, 200)], bytes(100 * 4096)) == 100


def test_one_thread_at_a_time_finds_out_whether_a_stopped_daemon_is_back(
    daemon, until, monkeypatch
):
    with daemon.client(connect=True) as client:
        ns = client.open(RECORD)
        wait_at_most(client, TIMEOUT_S)
        daemon.signal(signal.SIGSTOP)
        assert client.match(ns, [key(1)]) == 0
        time.sleep(max(0.0, connections_of(client)._backoff.retry_at - time.monotonic()))
        answered: list[int] = []
        trying: list[int] = []
        dialer = connections_of(client).dialer
        introduce = dialer.introduce

        def counted(*given, **settings):
            trying.append(1)
            until(lambda: len(answered) == 7, "the others have their answers")
            return introduce(*given, **settings)

        monkeypatch.setattr(dialer, "introduce", counted)

        def ask() -> None:
            answered.append(client.match(ns, [key(1)]))

        began = time.monotonic()
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        assert (len(trying), answered) == (1, [0] * 8)


def test_a_put_on_a_daemon_that_stops_between_reserve_and_commit(daemon, until, monkeypatch):
    """The client gives up, and what it reserved comes back when the daemon does."""
    with daemon.client(timeout_s=TIMEOUT_S, connect=True) as client, daemon.client() as observer:
        ns = client.open(NamespaceRecord.simple("large", block_bytes=1 << 20, block_tokens=16))
        real = Reservations.commit

        def stop_first(*args):
            daemon.signal(signal.SIGSTOP)
            return real(*args)

        monkeypatch.setattr(Reservations, "commit", stop_first)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.put(ns, [key(n) for n in range(8)], np.ones((8, 1 << 20), np.uint8))
        assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S
        monkeypatch.undo()
        daemon.signal(signal.SIGCONT)

        def settled() -> bool:
            there = client.match(ns, [key(n) for n in range(8)])
            space = observer.stats().tenants["default"].space
            return space.bytes_used == there << 20

        until(settled, what="each slot is either a block or free")
        for one in client.get(ns, [key(n) for n in range(8)]):
            assert one is None or one == b"\1" * (1 << 20)


# ---- daemons that are none ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError, None),
        (frame.encode(frame.Done(1), 1), ProtocolError, "not a Welcome"),
        (frame.encode(client_wire.Welcome(1, "n", "i", 0, 4096), 1), ProtocolError, "segment"),
        (
            frame.encode(client_wire.Welcome(2, "n", "i", 0, 4096), 1),
            ProtocolError,
            "the daemon speaks protocol 2 .*this side 1 .*install the same version",
        ),
        (frame.encode(frame.Error("not_authenticated", "no"), 1), NotAuthenticated, "no"),
        (frame.encode(frame.Error("limit", "full"), 0), Unavailable, "full"),
        (b"", Unavailable, None),
        (b"\x01", Unavailable, None),
    ],
)
def test_strange_first_answers(folder, answer, error, match):
    path = str(folder / "strange.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            sock.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=match):
        Client(path, timeout_s=PATIENCE_S, connect=True)
    thread.join()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_segment_that_is_not_sealed_is_refused(folder):
    path = str(folder / "strange.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            welcome = frame.encode(
                client_wire.Welcome(frame.PROTOCOL_VERSION, "n", "i", 0, 4096), 1
            )
            socket.send_fds(sock, [welcome], [fd])

    thread = threading.Thread(target=serve)
    thread.start()
    before = len(os.listdir("/proc/self/fd"))
    client = Client(path, timeout_s=PATIENCE_S)
    with pytest.raises(KvpoolError, match=r"sealed|segment"):
        client.stats()
    client.close()
    thread.join()
    listener.close()
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e12])
def test_time_outs_that_make_no_sense(timeout_s):
    with pytest.raises(InvalidRequest):
        Client("/nowhere", timeout_s=timeout_s)


def test_small_puts_on_a_stopped_daemon_leak_nothing(daemon, until):
    """They are given slots ahead; those whose answer nobody heard come back too."""
    with daemon.client() as observer:
        with daemon.client(connect=True) as client:
            ns = client.open(RECORD)
            put(client, ns, 0)
            wait_at_most(client, TIMEOUT_S)
            for turn in range(3):
                daemon.signal(signal.SIGSTOP)
                with pytest.raises(Unavailable):
                    put(client, ns, *range(turn * 100 + 100, turn * 100 + 164))
                daemon.signal(signal.SIGCONT)
                until(lambda: client.match(ns, [key(0)]) == 1)
        until(lambda: observer.stats().connections == 1)
        mine = observer.stats().tenants["default"]
        assert mine.granted_bytes == 0
        assert mine.space.bytes_used == mine.blocks * 4096
