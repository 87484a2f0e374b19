"""NIXL with peers that are dying, stopped or wrong: an answer, or the end of the process, never a wrong block."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from xxhash import xxh3_128_digest

from kvpool.errors import ConfigError, KvpoolError, Unavailable
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.handshake import admit, greet
from kvpool.transfer.memory import Memory
from kvpool.transfer.nixl import EXIT_STATUS, NixlTransport
from kvpool.transfer.nixl_agent import METADATA_BYTES_MAX, Agent, Read
from kvpool.transfer.stream import Stream
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from tests.contract.suites.transport import SECRET, SEGMENT, Side, key_of, order
from tests.support.fetches import fetch_of
from tests.support.servers.etcd import free_port
from tests.support.transfer_worker import MoverSide
from tests.support.waiting import PATIENCE_S

pytest.importorskip("nixl_cu12", reason="NIXL is not installed: pip install --no-deps nixl-cu12")

URL = "nixl://127.0.0.1:0"
NBYTES = 1 << 20
KEYS = [key_of(n) for n in range(8)]
UNTOUCHED = b"\xee" * (8 * NBYTES)


@pytest.fixture(autouse=True)
def tcp_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@contextmanager
def reader_here() -> Iterator[tuple[Side, list[str]]]:
    """A reader in this process, and why it would have ended it."""
    left: list[str] = []
    side = Side(URL)
    side.transport.close()
    memory = Memory()
    memory.attach(SEGMENT, side.bytes)
    identity = Identity("test", "node", "incarnation", ClusterSecrets.of(SECRET))
    side.transport = NixlTransport(memory, side.source, identity, TransferLimits(), left.append)
    side.bytes[: 8 * NBYTES] = UNTOUCHED
    try:
        yield side, left
    finally:
        side.transport.close()


# ---- reads that do not end: the process does -----------------------------------------------------------


@contextmanager
def idle_owner(driven: str = "1") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that lends, and lets some of its readers wait (`nixl_owner.py`), and its URL."""
    program = Path(__file__).with_name("nixl_owner.py")
    with subprocess.Popen(
        [sys.executable, str(program), driven],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_read_that_does_not_end_ends_its_process_and_nothing_is_written_afterwards() -> None:
    reader = MoverSide(URL)
    try:
        reader.bytes[: 8 * NBYTES] = UNTOUCHED
        reader.transport.listen(URL)  # loads NIXL, which takes a while
        with idle_owner() as (_, url):
            reader.transport.pull(order(url, NBYTES, KEYS[:1], [9]), Stop())  # they meet
            wanted = order(url, NBYTES, KEYS, list(range(8)), deadline_s=6.0)
            with pytest.raises(Unavailable, match=f"status {EXIT_STATUS}"):
                reader.transport.pull(wanted, Stop())
            assert reader.worker.process.stderr is not None
            said = reader.worker.process.stderr.read()
            assert b"kvpool: this process ends: 4 reads from a peer do not end" in said
            assert reader.bytes[: 8 * NBYTES] == UNTOUCHED
    finally:
        reader.transport.close()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [("cancelled", "reads from a peer do not end"), ("killed", "DISCONNECT")],
)
def test_what_happens_to_a_read_under_way(
    monkeypatch: pytest.MonkeyPatch, happens: str, reason: str
) -> None:
    stop = Stop()
    with idle_owner() as (owner, url), reader_here() as (reader, left):
        reader.transport.pull(order(url, NBYTES, KEYS[:1], [9]), stop)  # they meet
        begin = Agent.read

        def read(self: Agent, one: Read) -> None:
            begin(self, one)
            self.describe(Deadline(PATIENCE_S))  # asked after it, so answered when it has begun
            if happens == "cancelled":
                stop.set()
            else:
                owner.kill()

        monkeypatch.setattr(Agent, "read", read)
        pulled = reader.transport.pull(order(url, NBYTES, KEYS[:2], [0, 1]), stop)
        owner.kill()  # else the read would be under way for ever
        assert pulled.status == bytes([BlockStatus.LATE]) * 2
        assert pulled.error
        assert reason in left[0]
        assert reader.bytes[: 8 * NBYTES] == UNTOUCHED


def test_a_peer_to_which_there_is_no_way_costs_no_process_and_is_tried_again() -> None:
    """Nothing of importance is read of a peer before something of no importance was."""
    with idle_owner("001") as (_, url), reader_here() as (reader, left):
        wanted = order(url, NBYTES, KEYS[:2], [0, 1], deadline_s=30.0)
        for _ in range(2):
            pulled = reader.transport.pull(wanted, Stop())
            assert pulled.status == bytes([BlockStatus.LATE]) * 2
            assert "NIXL finds no way" in pulled.error
        assert reader.bytes[: 8 * NBYTES] == UNTOUCHED
        pulled = reader.transport.pull(wanted, Stop())
        assert (pulled.status, pulled.error) == (bytes([BlockStatus.MISMATCH]) * 2, ""), (
            "there is a way now"
        )
        assert left == []


def test_an_owner_that_is_killed_while_it_is_not_read_costs_one_pull() -> None:
    """And another life of it at the same address is met anew, whatever it was called before."""
    reader = Side(URL)
    url = f"nixl://127.0.0.1:{free_port()}"
    try:
        for life in range(3):
            owner = MoverSide(URL)
            owner.source.stride = NBYTES
            for n, key in enumerate(KEYS):
                owner.source.put(key, n, bytes([life * 16 + n]) * NBYTES)
            url = owner.transport.listen(url)
            pulled = reader.transport.pull(order(url, NBYTES, KEYS, list(range(8))), Stop())
            assert (pulled.status, pulled.error) == (bytes([BlockStatus.PRESENT]) * 8, "")
            assert reader.block(5, NBYTES, NBYTES) == bytes([life * 16 + 5]) * NBYTES
            assert owner.source.wait_until_returned()
            os.kill(owner.worker.process.pid, signal.SIGKILL)
            owner.transport.close()
            pulled = reader.transport.pull(order(url, NBYTES, KEYS, list(range(8))), Stop())
            assert pulled.status == bytes([BlockStatus.LATE]) * 8
            assert url in pulled.error
    finally:
        reader.transport.close()


def test_a_reader_that_is_killed_gives_its_loan_back() -> None:
    owner, reader = Side(URL), MoverSide(URL)
    try:
        owner.source.stride = NBYTES
        owner.source.hold = threading.Event()
        owner.source.put(KEYS[0], 0, b"x" * NBYTES)
        url = owner.transport.listen(URL)
        failures: list[KvpoolError] = []

        def pull() -> None:
            try:
                reader.transport.pull(order(url, NBYTES, KEYS[:1], [0]), Stop())
            except KvpoolError as error:
                failures.append(error)

        thread = threading.Thread(target=pull)
        thread.start()
        assert owner.source.entered.wait(PATIENCE_S)
        reader.worker.process.kill()
        thread.join()
        assert failures
        owner.source.hold.set()
        owner.transport.close()  # waits for its threads
        assert (owner.source.lent, owner.source.loans) == (1, set())
    finally:
        reader.transport.close()
        owner.transport.close()


def test_a_loan_ends_with_its_deadline_though_the_reader_says_nothing() -> None:
    owner = Side(URL)
    try:
        owner.source.stride = NBYTES
        owner.source.put(KEYS[0], 0, b"x" * NBYTES)
        port = int(owner.transport.listen(URL).rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            stream = Stream(sock, Deadline(PATIENCE_S))
            greet(stream, Identity("test", "silent", "1", ClusterSecrets.of(SECRET)))
            stream.send(fetch_of(b"d" * 16, NBYTES, KEYS[0], 2.0), 1)
            answer = peer_wire.decode_peer(stream.receive(1 << 20)[1])
            assert isinstance(answer, peer_wire.Readable)
            assert owner.source.wait_until_returned()
    finally:
        owner.transport.close()


def test_strangers_are_told_nothing_of_the_memory() -> None:
    """Neither before they have introduced themselves, nor outside of a loan."""
    owner = Side(URL)
    try:
        port = int(owner.transport.listen(URL).rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            stream = Stream(sock, Deadline(PATIENCE_S))
            stream.send(peer_wire.Describe(), 1)
            assert isinstance(peer_wire.decode_peer(stream.receive(1 << 20)[1]), frame.Error)
        with socket.create_connection(("127.0.0.1", port)) as sock:
            stream = Stream(sock, Deadline(PATIENCE_S))
            greet(stream, Identity("test", "peer", "1", ClusterSecrets.of(SECRET)))
            stream.send(peer_wire.Describe(), 1)
            answer = peer_wire.decode_peer(stream.receive(1 << 20)[1])
            assert isinstance(answer, frame.Error)
            assert answer.code == "protocol"
    finally:
        owner.transport.close()


# ---- answers that are wrong ----------------------------------------------------------------------------

Change = Callable[[peer_wire.Readable], peer_wire.Readable]


class Liar:
    """A peer with real memory that answers one `Fetch` as a test wants it to."""

    def __init__(self, change: Change, metadata: Callable[[bytes], bytes] = lambda m: m) -> None:
        memory = Memory()
        self.bytes = bytearray(16 * NBYTES)
        for n in range(16):
            self.bytes[n * NBYTES : (n + 1) * NBYTES] = bytes([65 + n]) * NBYTES
        memory.attach(0, self.bytes)
        self.agent = Agent("liar", memory)
        self.agent.start(loopback=True)
        self._change = change
        self._metadata = metadata
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.said: list[frame.Message] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"nixl://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock, self.agent.serving():
            stream = Stream(sock, Deadline(PATIENCE_S))
            admit(stream, Identity("test", "liar", "1", ClusterSecrets.of(SECRET)))
            request, _ = stream.receive(1 << 20)
            blocks = [self.bytes[n * NBYTES : (n + 1) * NBYTES] for n in range(8)]
            sums = b"".join(map(xxh3_128_digest, blocks))
            rows = b"".join(n.to_bytes(4, "little") for n in range(8))
            base = self.agent.place(0, Deadline(PATIENCE_S))
            honest = peer_wire.Readable(b"\1" * 8, sums, rows, base, NBYTES, self.agent.name, 1)
            stream.send(self._change(honest), request)
            try:
                while True:
                    request, payload = stream.receive(1 << 20)
                    self.said.append(peer_wire.decode_peer(payload))
                    if isinstance(self.said[-1], peer_wire.Describe):
                        stream.send(
                            frame.Bytes(self._metadata(self.agent.describe(Deadline(PATIENCE_S)))),
                            request,
                        )
            except KvpoolError:
                pass  # the reader has left

    def wait(self) -> None:
        """Until its reader has left."""
        self._thread.join()

    def close(self) -> None:
        self._thread.join()
        self._listener.close()
        self.agent.close()


@contextmanager
def lied_to(
    change: Change, metadata: Callable[[bytes], bytes] = lambda m: m
) -> Iterator[tuple[Side, Liar, worker_wire.Pulled, list[str]]]:
    """The reader, the liar, what came of a pull, and why the process would have ended."""
    liar = Liar(change, metadata)
    try:
        with reader_here() as (reader, left):
            pulled = reader.transport.pull(order(liar.url, NBYTES, KEYS, list(range(8))), Stop())
            reader.transport.close()
            liar.wait()
            yield reader, liar, pulled, left
    finally:
        liar.close()


def test_the_liar_is_believed_when_it_is_right() -> None:
    with lied_to(lambda honest: honest) as (reader, liar, pulled, left):
        assert (pulled.status, pulled.error, left) == (bytes([BlockStatus.PRESENT]) * 8, "", [])
        assert reader.bytes[: 8 * NBYTES] == liar.bytes[: 8 * NBYTES]
        assert [type(m) for m in liar.said] == [peer_wire.Describe, peer_wire.Taken]


def test_slots_that_hold_other_blocks_by_now() -> None:
    """As when a reader comes after its lease: the right slots, of another generation."""

    def move(honest: peer_wire.Readable) -> peer_wire.Readable:
        rows = honest.rows[:4] + (9).to_bytes(4, "little") + honest.rows[8:]
        return replace(honest, rows=rows)

    with lied_to(move) as (_, liar, pulled, left):
        assert list(pulled.status) == [
            BlockStatus.PRESENT,
            BlockStatus.MISMATCH,
            *[BlockStatus.PRESENT] * 6,
        ]
        assert pulled.checksums[16:32] == bytes(16)
        assert liar.said[-1] == peer_wire.Corrupt("default", b"namespace-digest", 0, KEYS[1])
        assert left == []


@pytest.mark.parametrize(
    "change",
    [
        lambda h: replace(h, present=b"\1" * 7),
        lambda h: replace(h, present=b"\1" * 7 + b"\2"),
        lambda h: replace(h, checksums=h.checksums[:-1]),
        lambda h: replace(h, rows=h.rows[:-4]),
        lambda h: replace(h, base=0),
        lambda h: replace(h, base=1 << 63),
        lambda h: replace(h, stride=NBYTES - 1),
        lambda h: replace(h, stride=1 << 41),
        lambda h: replace(h, base=h.base + (32 << 20)),
        lambda h: replace(h, rows=b"\xff" * 32),
        lambda h: replace(h, agent="somebody else"),
        lambda h: peer_wire.Fetched(h.present, h.checksums),
    ],
    ids=[
        "few",
        "flags",
        "sums",
        "rows",
        "null",
        "high",
        "stride",
        "far",
        "out",
        "wild",
        "name",
        "type",
    ],
)
def test_an_answer_that_does_not_fit(change: Change) -> None:
    with lied_to(change) as (reader, _, pulled, left):
        assert pulled.status == bytes([BlockStatus.LATE]) * 8
        assert pulled.error
        assert reader.bytes[: 8 * NBYTES] == UNTOUCHED
        assert left == [], "nothing had begun"


def test_a_peer_that_describes_another() -> None:
    with lied_to(lambda honest: replace(honest, agent="somebody else")) as (_, _, pulled, _):
        assert "peer 'somebody else' sent the memory description" in pulled.error


@pytest.mark.parametrize(
    "metadata",
    [
        lambda m: b"",
        lambda m: b"garbage" * 10,
        lambda m: m[:100],
        lambda m: m + bytes(METADATA_BYTES_MAX),
    ],
    ids=["none", "garbage", "cut", "long"],
)
def test_a_description_that_is_none(metadata: Callable[[bytes], bytes]) -> None:
    with lied_to(lambda honest: honest, metadata) as (reader, _, pulled, left):
        assert pulled.status == bytes([BlockStatus.LATE]) * 8
        assert pulled.error
        assert (reader.bytes[: 8 * NBYTES], left) == (UNTOUCHED, [])


# ---- what is there to work with ------------------------------------------------------------------------


def in_a_process(code: str, **environ: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if not k.startswith("UCX_")} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


START = """
import os
from kvpool.errors import ConfigError
from kvpool.transfer.memory import Memory
from kvpool.transfer.nixl_agent import Agent
agent = Agent("node", Memory())
for _ in range(2):
    try:
        agent.start(loopback={loopback})
        print("started")
    except ConfigError as error:
        print(error)
inodes = {{os.readlink(f"/proc/self/fd/{{fd}}")[8:-1] for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{fd}}") and "socket" in os.readlink(f"/proc/self/fd/{{fd}}")}}
for line in open("/proc/net/tcp").readlines()[1:]:
    words = line.split()
    if words[9] in inodes and words[3] == "0A":
        print("listens", words[1].split(":")[0])
agent.close()
"""


def test_on_loopback_ucx_listens_there_alone() -> None:
    said = in_a_process(START.format(loopback=True))
    assert said.splitlines() == ["started", "started", "listens 0100007F"]


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA devices")
def test_off_loopback_ucxs_tcp_is_not_used() -> None:
    first, second = in_a_process(START.format(loopback=False)).splitlines()
    assert "needs an RDMA device" in first
    assert first == second


def test_without_nixl_the_message_says_what_to_install() -> None:
    said = in_a_process("import sys; sys.modules['nixl_cu12'] = None" + START.format(loopback=True))
    assert "pip install '.[nixl]'" in said.splitlines()[0]


def test_an_agent_that_is_closed() -> None:
    agent = Agent("node", Memory())
    agent.start(loopback=True)
    agent.close()
    agent.close()
    with pytest.raises(Unavailable, match="closing"):
        agent.describe(Deadline(1))
    unused = Agent("node", Memory())
    unused.close()
    with pytest.raises((Unavailable, ConfigError)):
        unused.start(loopback=True)
