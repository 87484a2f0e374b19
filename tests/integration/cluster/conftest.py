"""Whole clusters: real etcd, real Redis, real daemons, and clients that know what each block has to hold.

etcd and Redis are shared by a file's tests, which have a cluster of their own each, by its name. Tests
that break a server start their own (`start_cluster(own_servers=True)`), or have their file's to
themselves and leave them well.
"""

import contextlib
import itertools
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvpool.client import Lease
from kvpool.errors import KvpoolError, LeaseLost
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import NamespaceRecord, PartKind, PartSpec
from tests.support.local_cluster import UNHURRIED, LocalCluster, LocalNode
from tests.support.servers.etcd import Etcd
from tests.support.servers.redis import Redis
from tests.support.waiting import PATIENCE_S, until

NBYTES = 32 << 10
PLAIN = NamespaceRecord.simple("cluster", block_bytes=NBYTES, block_tokens=16)
HYBRID = NamespaceRecord(
    {"model": "hybrid"},
    (
        PartSpec(NBYTES),
        PartSpec(4096, PartKind.WINDOW, window_blocks=3),
        PartSpec(8192, stride=4),
        PartSpec(2048, PartKind.WINDOW, window_blocks=1, stride=4),
    ),
)
SETTINGS = {
    "replicas",
    "write",
    "ttl_s",
    "ssd_codec",
    "write_remote",
}  # what a namespace is opened with
PAUSE_S = 0.005


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def block(number: int, part: int = 0, nbytes: int = NBYTES, version: int = 0) -> bytes:
    """What is right for a part of a block; a version is what a model with other weights computes."""
    return np.random.default_rng([version, part, number]).bytes(nbytes)


class Seat:
    """A client at one node. Whatever it reads, it compares with what is right.

    version: of the weights, which what it puts and expects depends on.
    """

    def __init__(self, node: LocalNode, record: NamespaceRecord = PLAIN, **settings: Any) -> None:
        wished = {name: settings.pop(name) for name in SETTINGS & settings.keys()}
        self.node = node
        self.name = node.name
        self.record = record
        self.version = 0
        self.client = node.client(connect=True, **settings)
        self.ns = self.client.open(record, **wished)

    def put(self, numbers: Iterable[int], **settings: Any) -> int:
        """Put blocks, all parts."""
        listed = list(numbers)
        stored = 0
        for part, spec in enumerate(self.record.parts):
            chosen = [n for n in listed if (n + 1) % spec.stride == 0]
            if chosen:
                data = [block(n, part, spec.nbytes, self.version) for n in chosen]
                stored = self.client.put(self.ns, keys_of(chosen), data, part=part, **settings)
        return stored

    def read(self, numbers: Iterable[int], wait_s: float = PATIENCE_S) -> int:
        """Acquire, copy out, compare: the blocks of the prefix that were there, all of them right."""
        listed = list(numbers)
        lease = self.client.acquire(self.ns, keys_of(listed), wait_s=wait_s)
        if lease is None:
            return 0
        with lease:
            found = self._copied(lease)
            try:
                lease.check()
            except LeaseLost:
                return 0
            for (part, index), data in found.items():
                nbytes = self.record.parts[part].nbytes
                right = block(listed[index], part, nbytes, self.version)
                assert data == right, (
                    f"part {part} of block {listed[index]} is wrong at {self.name}"
                )
            return lease.blocks

    def _copied(self, lease: Lease) -> dict[tuple[int, int], bytes]:
        found = {}
        for part, slots in lease.slots.items():
            stride = self.record.parts[part].stride
            for at in range(len(slots)):
                found[part, slots.first + (at + 1) * stride - 1] = bytes(slots.view(at))
        return found

    def get(self, numbers: Iterable[int]) -> int:
        """How many of the blocks are here, in any order, all of them right; part 0."""
        listed = list(numbers)
        count = 0
        for at in range(0, len(listed), 512):
            some = listed[at : at + 512]
            for number, data in zip(some, self.client.get(self.ns, keys_of(some)), strict=True):
                if data is not None:
                    right = block(number, 0, self.record.parts[0].nbytes, self.version)
                    assert data == right, f"block {number} is wrong at {self.name}"
                    count += 1
        return count

    def match(self, numbers: Iterable[int]) -> int:
        return self.client.match(self.ns, keys_of(numbers))

    def here(self, numbers: Iterable[int]) -> int:
        """How many of the blocks this node has, by its word."""
        return int(self.client.contains(self.ns, keys_of(numbers)).sum())

    def holders(self, number: int) -> set[str]:
        """The nodes that have a block whole, as this one sees it."""
        found = self.client.locate(keys_of([number]), digest=self.ns.digest)
        return {
            replica.node
            for entry in found
            for replica in entry.replicas
            if replica.parts == entry.parts
        }

    def replicas(self, numbers: Iterable[int]) -> list[int]:
        """How many nodes have each of the blocks."""
        listed = list(numbers)
        found = self.client.locate(keys_of(listed), digest=self.ns.digest)
        counts = {entry.key: len(entry.replicas) for entry in found}
        return [counts.get(key(number).hex(), 0) for number in listed]

    @property
    def stats(self) -> NodeStats:
        return self.client.stats()

    @property
    def settings(self) -> dict[str, Any]:
        """Of the namespace, as this node follows them."""
        mine = self.stats.tenants["default"].namespaces[self.ns.digest.hex()]
        return mine.settings

    def counter(self, name: str) -> int:
        """Of the node's rules, or of its pulls, or of its copies."""
        stats = self.stats
        branches = (stats.counters, stats.fetch, stats.replication)
        return next(getattr(one, name) for one in branches if hasattr(one, name))

    @property
    def announced(self) -> bool:
        """Whether the directory lists all blocks of this node under its present incarnation.

        An empty queue does not say that: a new incarnation drops the queue, and lists all blocks by a walk.
        """
        return self.stats.cluster.directory.settled

    @property
    def incarnation(self) -> str:
        """As which the node is a member now."""
        found: str = self.stats.cluster.incarnation
        return found

    @property
    def standing(self) -> str:
        found: str = self.stats.cluster.standing
        return found

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """The records of the nodes, by name, as this one sees them."""
        return {record["node"]: record for record in self.client.cluster()["nodes"]}

    @property
    def lives(self) -> dict[str, str]:
        """The incarnations of the nodes, by name, as this one sees them."""
        return {name: record["incarnation"] for name, record in self.members.items()}

    def close(self) -> None:
        self.client.close()


class Load:
    """Readers and writers in threads, while a test does something to the cluster.

    Each call of `work` is one operation, with a pause after it, in which daemons have the machine;
    `AssertionError` (a wrong read) ends the test, `KvpoolError` is counted. slowest_s: of all operations.
    """

    def __init__(self, *work: Callable[[int], None]) -> None:
        self.done = [0] * len(work)
        self.slowest_s = 0.0
        self.failures: list[KvpoolError] = []
        self.wrong: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(at, one)) for at, one in enumerate(work)
        ]

    def _run(self, at: int, work: Callable[[int], None]) -> None:
        for turn in itertools.count():
            if self._stop.is_set():
                return
            begun = time.monotonic()
            try:
                work(turn)
            except KvpoolError as error:
                self.failures.append(error)
            except AssertionError as error:
                self.wrong.append(error)
                return
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            self.done[at] += 1
            self._stop.wait(PAUSE_S)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if kind is None and self.wrong:
            raise self.wrong[0]


class World(LocalCluster):
    """A cluster, and seats at its nodes. environ: beside `UNHURRIED`."""

    def __init__(
        self, folder: Path, *, environ: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(folder, environ={**UNHURRIED, **(environ or {})}, **settings)
        self._seats: list[Seat] = []

    def __exit__(self, *error: object) -> None:
        for seat in self._seats:
            seat.close()
        super().__exit__(*error)

    def seat(self, name: str, record: NamespaceRecord = PLAIN, **settings: Any) -> Seat:
        """A new client at a node; closed with the cluster."""
        self._seats.append(Seat(self.node(name), record, **settings))
        return self._seats[-1]

    def seats(self, record: NamespaceRecord = PLAIN, **settings: Any) -> list[Seat]:
        """One at each node, once all of them see all of them."""
        seats = [self.seat(node.name, record, **settings) for node in self.nodes]
        self.until_all_see(seats)
        return seats

    def until_all_see(self, seats: list[Seat]) -> None:
        """Until all nodes, each of which has a seat here, know all of them as who they are now."""

        def seen() -> bool:
            lives = {seat.name: seat.incarnation for seat in seats}
            return all(seat.lives == lives for seat in seats)

        until(seen, "all are members")


Start = Callable[..., World]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Etcd, Redis]]:
    """For tests that leave them alone."""
    with tempfile.TemporaryDirectory(prefix="kvpool-servers-") as folder:
        path = Path(folder)
        with Etcd(path / "etcd") as etcd, Redis(path / "redis") as redis:
            yield etcd, redis


@pytest.fixture
def start_cluster(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a cluster; all ends with the test. Settings: those of `LocalCluster`.

    own_servers: an etcd and a Redis for this one alone.
    """
    with contextlib.ExitStack() as stack:

        def start(*, own_servers: bool = False, **settings: Any) -> World:
            path = Path(tempfile.mkdtemp(prefix="kvpool-cluster-"))
            stack.callback(shutil.rmtree, path)
            settings.setdefault("memory", "16MiB")
            settings.setdefault("name", f"test-{secrets.token_hex(4)}")
            if not own_servers:
                settings["etcd"], settings["redis"] = request.getfixturevalue("servers")
            return stack.enter_context(World(path, **settings))

        yield start


@pytest.fixture(scope="module")
def shared_cluster(servers: tuple[Etcd, Redis]) -> Callable[..., Any]:
    """`with shared_cluster(...) as world`: for the tests of a file that break nothing."""

    @contextlib.contextmanager
    def start(**settings: Any) -> Iterator[World]:
        etcd, redis = servers
        settings.setdefault("name", f"test-{secrets.token_hex(4)}")
        with (
            tempfile.TemporaryDirectory(prefix="kvpool-cluster-") as folder,
            World(Path(folder), etcd=etcd, redis=redis, **settings) as world,
        ):
            yield world

    return start


@pytest.fixture(scope="module")
def shared(shared_cluster: Callable[..., Any]) -> Iterator[World]:
    """Three nodes for the tests of a file that break nothing. Use `numbers` for their blocks."""
    with shared_cluster(memory="64MiB") as world:
        yield world


@pytest.fixture
def hybrid() -> NamespaceRecord:
    """A namespace with all kinds of parts: full, window, strided, and both."""
    return HYBRID


_taken = itertools.count(1)


@pytest.fixture
def numbers() -> Callable[[int], range]:
    """`numbers(n)`: n block numbers that no other test uses, beginning at a multiple of 2**20."""

    def take(count: int) -> range:
        first = next(_taken) << 20
        return range(first, first + count)

    return take


@pytest.fixture
def load() -> type[Load]:
    """`with load(work, ...) as going`: see `Load`."""
    return Load
