"""The remote store over obstore's stores in memory and in a folder, against a dictionary of blocks."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from obstore.store import LocalStore, MemoryStore

from kvpool.errors import ConfigError, InvalidRequest, Unavailable
from kvpool.storage.object.client import Fault, Listed, ObstoreClient, StoreFault
from kvpool.storage.object.packs import LOCATION, ObjectTable, PackName, pack_size
from kvpool.storage.object.requests import ObjectLimits
from kvpool.storage.object.store import GetBatch, ObjectStore, PutBatch, PutResult
from kvpool.types import BlockStatus
from tests.support.waiting import PATIENCE_S

NODE, OTHER = b"node one", b"node two"
DIGESTS = (b"A" * 16, b"B" * 16)
NBYTES = 1000
LIMITS = ObjectLimits(
    bytes_max=1 << 30,
    pack_bytes=4 * NBYTES,
    range_bytes=3 * NBYTES,
    gap_bytes=0,
    backoff_s=0.0,
    failures_max=1000,
)


class Faulty:
    """An object store that can be told to fail. Whatever it is told holds for requests to come."""

    def __init__(self, store: object) -> None:
        self.inner = ObstoreClient(store)
        self.store = store
        self.fault: Callable[[str, str], Fault | None] = lambda verb, path: None
        self.lands = False  # a put that fails has arrived nevertheless
        self.shorten = 0
        self.asked: list[tuple[str, str]] = []

    def _say(self, verb: str, path: str) -> None:
        self.asked.append((verb, path))
        fault = self.fault(verb, path)
        if fault is not None:
            raise StoreFault(fault)

    async def put(self, path: str, body: np.ndarray) -> None:
        if self.lands:
            await self.inner.put(path, body)
        self._say("put", path)
        await self.inner.put(path, body)

    async def get(self, path: str, start: int, end: int) -> np.ndarray:
        self._say("get", path)
        found = await self.inner.get(path, start, end)
        return found[: len(found) - self.shorten]

    async def delete(self, path: str) -> None:
        self._say("delete", path)
        await self.inner.delete(path)

    async def pages(self, prefix: str) -> AsyncIterator[list[Listed]]:
        self._say("list", prefix)
        async for page in self.inner.pages(prefix):
            # One object a page: what happens between pages is seen.
            for listed in page:
                yield [listed]
                self._say("list", prefix)

    def paths(self) -> set[str]:
        store: Any = self.store
        return {meta["path"] for page in obstore.list(store) for meta in page}


class World:
    """A store, its objects, and rows to put from and get to."""

    def __init__(
        self, store: object, *, limits: ObjectLimits = LIMITS, node: bytes = NODE, seed: int = 1
    ) -> None:
        self.objects = Faulty(store)
        self.wall = 1000.0
        self.remote = ObjectStore(
            self.objects,
            node=node,
            limits=limits,
            wall=lambda: self.wall,
            rng=random.Random(seed),
            token=random.Random(seed).randbytes,
        )

    def put(
        self, digest: bytes, part: int, names: list[int], nbytes: int = NBYTES, **kwargs: float
    ) -> PutResult:
        source = np.random.default_rng(0).integers(0, 256, (2 * len(names) + 1, nbytes + 24))
        source = source.astype(np.uint8)
        rows = np.arange(len(names), dtype=np.intp)[::-1] * 2
        for row, name in zip(rows, names, strict=True):
            source[row, :nbytes] = content(digest, part, name, nbytes)
        batch = PutBatch(
            table=ObjectTable(digest, part, b"record " + digest),
            nbytes=nbytes,
            keys=b"".join(map(key, names)),
            parents=b"".join(key(name - 1) for name in names),
            depths=np.array(names, np.uint32),
            checksums=b"".join(
                xxhash.xxh3_128_digest(content(digest, part, name, nbytes).tobytes())
                for name in names
            ),
            source=source,
            rows=rows,
        )
        return self.remote.put(batch, timeout_s=kwargs.get("timeout_s", PATIENCE_S))

    def get(
        self, digest: bytes, part: int, locations: np.ndarray, nbytes: int = NBYTES, **kwargs: Any
    ) -> tuple[list[int], np.ndarray]:
        """keys: of encrypted blocks; others are found without."""
        n = len(locations)
        destination = np.full((n + 2, nbytes + 40), 7, np.uint8)
        rows = np.random.default_rng(n).permutation(n + 2)[:n].astype(np.intp)
        keys = kwargs.get("keys", bytes(16 * n))
        batch = GetBatch(digest, part, nbytes, keys, locations, destination, rows)
        statuses = self.remote.get(batch, timeout_s=kwargs.get("timeout_s", PATIENCE_S))
        untouched = np.ones(n + 2, np.bool_)
        untouched[rows] = False
        assert (destination[untouched] == 7).all() and (destination[:, nbytes:] == 7).all()
        return statuses.tolist(), destination[rows, :nbytes]

    def damage(self, path: str, at: int) -> None:
        body = bytearray(obstore.get(self.objects.store, path).bytes().to_bytes())
        body[at] ^= 16
        obstore.put(self.objects.store, path, bytes(body))


def key(name: int) -> bytes:
    return b"key " + (name + 1).to_bytes(12)


def content(digest: bytes, part: int, name: int, nbytes: int = NBYTES) -> np.ndarray:
    seed = int.from_bytes(digest[:1]) << 40 | part << 32 | name
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture(params=["memory", "folder"])
def world(request: pytest.FixtureRequest, tmp_path: Path):
    store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
    made = World(store)
    yield made
    made.remote.close()


@pytest.fixture
def make():
    """Worlds that end with the test."""
    made: list[World] = []

    def world(*args: object, **kwargs: object) -> World:
        made.append(World(*args, **kwargs))
        return made[-1]

    yield world
    for one in made:
        one.remote.close()


def test_blocks_come_back_in_any_order(world: World) -> None:
    names = list(range(10))
    put = world.put(DIGESTS[0], 3, names)
    assert put.statuses.tolist() == [BlockStatus.PRESENT] * 10 and not put.dropped
    assert len(world.objects.paths()) == 3  # four blocks a pack
    order = [7, 0, 9, 3, 3, 1]
    statuses, found = world.get(DIGESTS[0], 3, put.locations[order])
    assert statuses == [BlockStatus.PRESENT] * 6
    for row, name in zip(found, order, strict=True):
        assert (row == content(DIGESTS[0], 3, name)).all()
    stats = world.remote.stats()
    assert (stats.blocks_put, stats.bytes_put) == (10, 10 * NBYTES)
    assert (stats.blocks_got, stats.bytes_got) == (6, 6 * NBYTES)


@pytest.mark.parametrize("nbytes", [1, 2999, 3000, 3001, 12_345])
def test_blocks_of_every_size_come_back(world: World, nbytes: int) -> None:
    """Smaller than a range, as large, larger; larger than a pack."""
    put = world.put(DIGESTS[0], 0, [1, 2, 3], nbytes)
    statuses, found = world.get(DIGESTS[0], 0, put.locations, nbytes)
    assert statuses == [BlockStatus.PRESENT] * 3
    for row, name in zip(found, [1, 2, 3], strict=True):
        assert (row == content(DIGESTS[0], 0, name, nbytes)).all()


def test_nothing_at_all_is_fine(world: World) -> None:
    put = world.put(DIGESTS[0], 0, [])
    assert len(put.statuses) == 0
    assert world.get(DIGESTS[0], 0, put.locations)[0] == []
    assert world.remote.forget(DIGESTS[0], 0, put.locations, timeout_s=PATIENCE_S) == []
    assert list(world.remote.scan(timeout_s=PATIENCE_S)) == []
    assert not world.objects.paths()


def test_another_node_finds_blocks_by_their_locations(make: Callable[..., World]) -> None:
    store = MemoryStore()
    put = make(store).put(DIGESTS[0], 1, [4, 5])
    reader = make(store, node=OTHER)
    statuses, found = reader.get(DIGESTS[0], 1, put.locations)
    assert statuses == [BlockStatus.PRESENT, BlockStatus.PRESENT]
    assert (found[1] == content(DIGESTS[0], 1, 5)).all()
    # Neither another part nor another namespace is reached by them.
    assert reader.get(DIGESTS[0], 2, put.locations)[0] == [BlockStatus.ABSENT, BlockStatus.ABSENT]
    assert reader.get(DIGESTS[1], 1, put.locations)[0] == [BlockStatus.ABSENT, BlockStatus.ABSENT]


def test_two_nodes_may_pack_the_same_block(make: Callable[..., World]) -> None:
    store = MemoryStore()
    first, second = make(store, seed=1), make(store, node=OTHER, seed=1)
    locations = np.concatenate([w.put(DIGESTS[0], 0, [1, 2]).locations for w in (first, second)])
    assert first.get(DIGESTS[0], 0, locations)[0] == [BlockStatus.PRESENT] * 4
    first.remote.forget(DIGESTS[0], 0, locations, timeout_s=PATIENCE_S)
    assert first.get(DIGESTS[0], 0, locations)[0] == [
        BlockStatus.ABSENT,
        BlockStatus.ABSENT,
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
    ]


@pytest.mark.parametrize("nbytes", [NBYTES, 7000])
def test_no_flipped_bit_of_a_block_is_served(world: World, nbytes: int) -> None:
    put = world.put(DIGESTS[0], 0, [0], nbytes)
    (path,) = world.objects.paths()
    for at in (0, nbytes // 2, nbytes - 1):
        world.damage(path, at)
        assert world.get(DIGESTS[0], 0, put.locations, nbytes)[0] == [BlockStatus.MISMATCH]
        world.damage(path, at)
    assert world.get(DIGESTS[0], 0, put.locations, nbytes)[0] == [BlockStatus.PRESENT]
    assert world.remote.stats().mismatches == 3


def test_one_wrong_block_leaves_its_neighbours(world: World) -> None:
    put = world.put(DIGESTS[0], 0, [0, 1, 2, 3])
    (path,) = world.objects.paths()
    world.damage(path, NBYTES + 5)
    statuses, found = world.get(DIGESTS[0], 0, put.locations)
    assert statuses == [
        BlockStatus.PRESENT,
        BlockStatus.MISMATCH,
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
    ]
    assert (found[1] == 7).all(), "the row of a wrong block is not touched"


def test_an_object_that_is_too_short_is_no_failure_of_the_store(world: World) -> None:
    put = world.put(DIGESTS[0], 0, [0, 1, 2, 3])
    (path,) = world.objects.paths()
    obstore.put(world.objects.store, path, bytes(NBYTES))
    assert world.get(DIGESTS[0], 0, put.locations[1:])[0] == [BlockStatus.MISMATCH] * 3
    obstore.put(world.objects.store, path, bytes(NBYTES + 10))
    assert world.get(DIGESTS[0], 0, put.locations[1:2])[0] == [BlockStatus.MISMATCH]
    assert world.remote.stats().suspensions == 0


@pytest.mark.parametrize("nbytes", [NBYTES, 7000])
def test_an_answer_that_is_short_is_no_block(world: World, nbytes: int) -> None:
    put = world.put(DIGESTS[0], 0, [0], nbytes)
    world.objects.shorten = 1
    assert world.get(DIGESTS[0], 0, put.locations, nbytes)[0] == [BlockStatus.MISMATCH]


def test_locations_that_cannot_be_are_not_asked_for(world: World) -> None:
    put = world.put(DIGESTS[0], 0, [0, 1])
    raw = np.frombuffer(random.Random(1).randbytes(50 * 40), LOCATION)
    assert world.get(DIGESTS[0], 0, raw)[0] == [BlockStatus.MISMATCH] * 40
    assert (
        world.get(DIGESTS[0], 0, put.locations, nbytes=NBYTES - 1)[0] == [BlockStatus.MISMATCH] * 2
    )
    assert [verb for verb, _ in world.objects.asked] == ["put"]


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault.MISSING, BlockStatus.ABSENT),
        (Fault.RANGE, BlockStatus.MISMATCH),
        (Fault.BUSY, BlockStatus.FAILED),
        (Fault.UNREACHABLE, BlockStatus.FAILED),
        (Fault.DENIED, BlockStatus.FAILED),
        (Fault.REFUSED, BlockStatus.FAILED),
    ],
)
def test_every_fault_of_a_read_has_its_status(world: World, fault: Fault, status: int) -> None:
    put = world.put(DIGESTS[0], 0, list(range(6)))
    bad = PackName(DIGESTS[0], 0, put.locations[0]["pack"].tobytes()).path
    world.objects.fault = lambda verb, path: fault if path == bad else None
    statuses, _ = world.get(DIGESTS[0], 0, put.locations)
    # Credentials that are refused end everything; all else is the one pack's.
    assert statuses[:4] == [status] * 4
    if fault is not Fault.DENIED:
        assert statuses[4:] == [BlockStatus.PRESENT] * 2


def test_a_silent_store_costs_the_deadline_and_no_thread(make: Callable[..., World]) -> None:
    world = make(MemoryStore())
    put = world.put(DIGESTS[0], 0, list(range(8)))

    async def forever(path: str, start: int, end: int) -> np.ndarray:
        await asyncio.Event().wait()
        raise AssertionError

    world.objects.get = forever
    threads = set(threading.enumerate())
    for _ in range(20):
        assert (
            world.get(DIGESTS[0], 0, put.locations, timeout_s=0.01)[0] == [BlockStatus.FAILED] * 8
        )
    assert not set(threading.enumerate()) - threads
    del world.objects.get
    assert world.get(DIGESTS[0], 0, put.locations)[0] == [BlockStatus.PRESENT] * 8


def test_no_time_is_no_time(world: World) -> None:
    put = world.put(DIGESTS[0], 0, [1, 2])
    assert world.get(DIGESTS[0], 0, put.locations, timeout_s=0.0)[0] == [BlockStatus.FAILED] * 2
    assert world.put(DIGESTS[0], 0, [3], timeout_s=-1.0).statuses.tolist() in (
        [BlockStatus.FAILED],
        [BlockStatus.NO_SPACE],
    )
    assert len(world.objects.paths()) == 1


def test_a_put_that_failed_leaves_no_object_behind(world: World) -> None:
    world.objects.fault = lambda verb, path: Fault.UNREACHABLE if verb == "put" else None
    world.objects.lands = True
    put = world.put(DIGESTS[0], 0, [1])
    assert put.statuses.tolist() == [BlockStatus.FAILED]
    assert len(world.objects.paths()) == 1, "it arrived, and nobody said so"
    assert world.remote.usage().bytes == world.remote.usage().bytes_doomed > 0
    assert world.remote.sweep(timeout_s=PATIENCE_S)
    assert not world.objects.paths()
    assert world.remote.usage().bytes == 0


def test_a_put_into_a_suspended_store_drops_nothing(make: Callable[..., World]) -> None:
    size = pack_size(NBYTES, 4, b"record " + DIGESTS[0])
    limits = ObjectLimits(bytes_max=size, pack_bytes=4 * NBYTES, failures_max=1, retries=0)
    world = make(MemoryStore(), limits=limits)
    first = world.put(DIGESTS[0], 0, [0, 1, 2, 3])
    world.objects.fault = lambda verb, path: Fault.BUSY
    assert world.get(DIGESTS[0], 0, first.locations)[0] == [BlockStatus.FAILED] * 4
    put = world.put(DIGESTS[0], 0, [4, 5, 6, 7])
    assert put.statuses.tolist() == [BlockStatus.FAILED] * 4 and not put.dropped
    assert world.remote.stats().suspended_s > 0
    assert world.remote.usage().packs == 1


def test_the_coldest_packs_make_way(make: Callable[..., World]) -> None:
    size = pack_size(NBYTES, 4, b"record " + DIGESTS[0])
    limits = ObjectLimits(bytes_max=3 * size, pack_bytes=4 * NBYTES)
    world = make(MemoryStore(), limits=limits)
    packs = [world.put(DIGESTS[0], 0, [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]) for i in range(3)]
    world.get(DIGESTS[0], 0, packs[0].locations[:1])  # the oldest is not the coldest any more
    put = world.put(DIGESTS[0], 0, [20, 21, 22, 23])
    assert put.statuses.tolist() == [BlockStatus.PRESENT] * 4
    (dropped,) = put.dropped
    assert dropped.name.pack == packs[1].locations[0]["pack"].tobytes()
    assert dropped.keys == b"".join(map(key, [4, 5, 6, 7]))
    assert world.get(DIGESTS[0], 0, packs[1].locations)[0] == [BlockStatus.ABSENT] * 4
    assert world.get(DIGESTS[0], 0, packs[0].locations)[0] == [BlockStatus.PRESENT] * 4
    assert world.remote.usage().bytes == 3 * size


def test_space_that_cannot_be_freed_is_not_counted_on(make: Callable[..., World]) -> None:
    size = pack_size(NBYTES, 4, b"record " + DIGESTS[0])
    limits = ObjectLimits(bytes_max=size, pack_bytes=4 * NBYTES, failures_max=1000, backoff_s=0)
    world = make(MemoryStore(), limits=limits)
    world.put(DIGESTS[0], 0, [0, 1, 2, 3])
    world.objects.fault = lambda verb, path: Fault.BUSY if verb == "delete" else None
    put = world.put(DIGESTS[0], 0, [4, 5, 6, 7])
    assert put.statuses.tolist() == [BlockStatus.NO_SPACE] * 4
    assert len(put.dropped) == 1
    assert len(world.objects.paths()) == 1
    world.objects.fault = lambda verb, path: None
    assert world.put(DIGESTS[0], 0, [4, 5, 6, 7]).statuses.tolist() == [BlockStatus.PRESENT] * 4
    assert len(world.objects.paths()) == 1


def test_what_can_never_fit_is_told(make: Callable[..., World]) -> None:
    world = make(MemoryStore(), limits=ObjectLimits(bytes_max=3 * NBYTES, pack_bytes=2 * NBYTES))
    world.put(DIGESTS[0], 0, [0, 1])
    put = world.put(DIGESTS[0], 0, [2], nbytes=3 * NBYTES)
    assert put.statuses.tolist() == [BlockStatus.NO_SPACE] and not put.dropped
    assert world.remote.usage().packs == 1


def test_a_pack_goes_when_more_than_its_share_is_dead(world: World) -> None:
    put = world.put(DIGESTS[0], 0, [0, 1, 2, 3])
    forget = world.remote.forget
    assert forget(DIGESTS[0], 0, put.locations[[0, 0]], timeout_s=PATIENCE_S) == []
    assert forget(DIGESTS[0], 0, put.locations[[0, 2]], timeout_s=PATIENCE_S) == []
    assert world.remote.usage().bytes_dead == 2 * NBYTES  # half is not more than half
    # Neither another table's nor another offset's.
    assert forget(DIGESTS[1], 0, put.locations, timeout_s=PATIENCE_S) == []
    assert forget(DIGESTS[0], 1, put.locations, timeout_s=PATIENCE_S) == []
    elsewhere = put.locations.copy()
    elsewhere["offset"] += 1
    assert forget(DIGESTS[0], 0, elsewhere, timeout_s=PATIENCE_S) == []
    (dropped,) = forget(DIGESTS[0], 0, put.locations[[1]], timeout_s=PATIENCE_S)
    assert dropped.keys == key(3)
    assert not world.objects.paths()
    assert world.remote.usage() == world.remote.usage().__class__(0, 0, 0, 0, 0, 0, 1 << 30)


def test_a_namespace_is_cleared_whoever_wrote_it(make: Callable[..., World]) -> None:
    store = MemoryStore()
    one, two = make(store), make(store, node=OTHER)
    for world in (one, two):
        for digest in DIGESTS:
            for part in (0, 11):
                world.put(digest, part, [1, 2, 3, 4, 5])
    obstore.put(store, f"kvpool/1/{DIGESTS[0].hex()}/note.txt", b"somebody else's")
    assert one.remote.clear(DIGESTS[0], timeout_s=PATIENCE_S) == 8
    left = one.objects.paths()
    assert len(left) == 9
    assert sum(DIGESTS[0].hex() in path for path in left) == 1
    assert one.remote.usage().packs == 4 and one.remote.usage().bytes_doomed == 0


def test_clearing_that_cannot_be_completed_says_so(world: World) -> None:
    world.put(DIGESTS[0], 0, [1])
    world.objects.fault = lambda verb, path: Fault.REFUSED if verb == "delete" else None
    with pytest.raises(Unavailable):
        world.remote.clear(DIGESTS[0], timeout_s=PATIENCE_S)
    assert not world.remote.sweep(timeout_s=PATIENCE_S)
    world.objects.fault = lambda verb, path: None
    assert world.remote.sweep(timeout_s=PATIENCE_S)
    assert not world.objects.paths()


def test_a_scan_finds_all_again_and_its_own_to_keep(make: Callable[..., World]) -> None:
    store = MemoryStore()
    one, two = make(store), make(store, node=OTHER)
    expected = {}
    for world in (one, two):
        for digest in DIGESTS:
            put = world.put(digest, 5, [1, 2, 3, 4, 5])
            for name, location in zip([1, 2, 3, 4, 5], put.locations, strict=True):
                expected[location.tobytes()] = (digest, key(name), key(name - 1), name)
    again = make(store)
    found = {}
    reads = len(again.objects.asked)
    for table in again.remote.scan(timeout_s=PATIENCE_S):
        assert table.record == b"record " + table.name.digest and table.name.part == 5
        for entry, location in zip(table.entries, table.locations(), strict=True):
            found[location.tobytes()] = (
                table.name.digest,
                entry["key"].tobytes(),
                entry["parent"].tobytes(),
                int(entry["depth"]),
            )
    assert found == expected
    assert len([verb for verb, _ in again.objects.asked[reads:] if verb == "get"]) == 8
    assert again.remote.usage() == one.remote.usage()
    assert len(list(again.remote.scan(DIGESTS[0], timeout_s=PATIENCE_S))) == 4
    assert len(list(again.remote.scan(DIGESTS[0], 4, timeout_s=PATIENCE_S))) == 0
    assert again.remote.usage() == one.remote.usage(), "none is counted twice"


def test_a_scan_of_ones_own_reads_nothing_else(make: Callable[..., World]) -> None:
    store = MemoryStore()
    one, two = make(store), make(store, node=OTHER)
    for world in (one, two):
        world.put(DIGESTS[0], 5, [1, 2, 3, 4, 5])
    again = make(store)
    before, reads = time.time(), len(again.objects.asked)
    tables = list(again.remote.scan(timeout_s=PATIENCE_S, own=True))
    assert {table.name.node for table in tables} == {NODE} and len(tables) == 2
    assert len([verb for verb, _ in again.objects.asked[reads:] if verb == "get"]) == 2
    assert again.remote.usage() == one.remote.usage()
    assert all(abs(table.written_at - before) < PATIENCE_S for table in tables)


def test_ones_own_of_a_namespace_is_dropped_and_no_more(make: Callable[..., World]) -> None:
    store = MemoryStore()
    one, two = make(store), make(store, node=OTHER)
    for world in (one, two):
        for digest in DIGESTS:
            world.put(digest, 0, [1, 2])
    one.remote.drop(DIGESTS[0], timeout_s=PATIENCE_S)
    left = sorted((name.node, name.digest) for name in map(PackName.parse, one.objects.paths()))
    assert left == sorted([(NODE, DIGESTS[1]), (OTHER, DIGESTS[0]), (OTHER, DIGESTS[1])])


def test_a_read_that_nobody_waits_for_ends(make: Callable[..., World]) -> None:
    world = make(MemoryStore())
    put = world.put(DIGESTS[0], 0, [1, 2, 3, 4])
    stopped = threading.Event()

    async def never(path: str, start: int, end: int) -> np.ndarray:
        stopped.set()
        await asyncio.sleep(PATIENCE_S)
        raise AssertionError

    world.objects.get = never
    batch = GetBatch(
        DIGESTS[0],
        0,
        NBYTES,
        bytes(16 * 4),
        put.locations,
        np.full((4, NBYTES), 7, np.uint8),
        np.arange(4, dtype=np.intp),
    )
    statuses = world.remote.get(batch, timeout_s=10 * PATIENCE_S, stopped=stopped.is_set)
    assert statuses.tolist() == [BlockStatus.FAILED] * 4
    assert (batch.destination == 7).all()


def test_what_is_to_be_deleted_is_not_found_again(world: World) -> None:
    put = world.put(DIGESTS[0], 0, list(range(8)))
    world.objects.fault = lambda verb, path: Fault.REFUSED if verb == "delete" else None
    world.remote.forget(DIGESTS[0], 0, put.locations[:4], timeout_s=PATIENCE_S)
    before = world.remote.usage()
    assert before.bytes_doomed > 0
    assert [table.keys for table in world.remote.scan(timeout_s=PATIENCE_S)] == [
        b"".join(map(key, range(4, 8)))
    ]
    assert world.remote.usage() == before


def test_what_somebody_else_deleted_is_not_counted_any_more(world: World) -> None:
    put = world.put(DIGESTS[0], 0, list(range(8)))
    name = PackName(DIGESTS[0], 0, put.locations[0]["pack"].tobytes())
    obstore.delete(world.objects.store, name.path)
    assert (
        world.get(DIGESTS[0], 0, put.locations)[0]
        == [BlockStatus.ABSENT] * 4 + [BlockStatus.PRESENT] * 4
    )
    assert (world.remote.usage().packs, world.remote.usage().blocks) == (1, 4)


def test_what_is_gone_already_counts_as_deleted(world: World) -> None:
    put = world.put(DIGESTS[0], 0, [1, 2])
    (path,) = world.objects.paths()
    obstore.delete(world.objects.store, path)
    world.remote.forget(DIGESTS[0], 0, put.locations, timeout_s=PATIENCE_S)
    assert world.remote.usage().bytes == 0


def test_a_long_table_is_read_whole(world: World) -> None:
    put = world.put(DIGESTS[0], 0, list(range(2500)), nbytes=1)  # 185 kB of table
    assert put.statuses.tolist() == [BlockStatus.PRESENT] * 2500
    (table,) = world.remote.scan(timeout_s=PATIENCE_S)
    assert table.keys == b"".join(map(key, range(2500)))


def test_damaged_packs_are_left_out_and_ones_own_removed(make: Callable[..., World]) -> None:
    store = MemoryStore()
    one, two = make(store), make(store, node=OTHER, seed=2)
    for world in (one, two):
        world.put(DIGESTS[0], 0, list(range(8)))
    mine = sorted(path for path in one.objects.paths() if NODE.hex() in path)
    others = sorted(one.objects.paths() - set(mine))
    one.damage(mine[0], -30)
    one.damage(others[0], -30)
    obstore.put(store, others[1], b"")
    names = {table.name.path for table in one.remote.scan(timeout_s=PATIENCE_S)}
    assert names == {mine[1]}
    assert one.remote.stats().packs_unreadable == 3
    assert one.remote.sweep(timeout_s=PATIENCE_S)
    assert one.objects.paths() == {mine[1], *others}
    assert one.remote.usage().packs == 1 and one.remote.usage().blocks == 4


def test_a_scan_goes_on_where_a_page_failed_and_tells_nothing_twice(
    make: Callable[..., World],
) -> None:
    limits = ObjectLimits(bytes_max=1 << 30, pack_bytes=NBYTES, backoff_s=0)
    world = make(MemoryStore(), limits=limits)
    world.put(DIGESTS[0], 0, list(range(6)))
    lists = 0

    def fault(verb: str, path: str) -> Fault | None:
        nonlocal lists
        lists += verb == "list"
        return Fault.BUSY if verb == "list" and lists in (2, 6) else None

    world.objects.fault = fault
    names = [table.name for table in world.remote.scan(timeout_s=PATIENCE_S)]
    assert len(names) == len(set(names)) == 6
    assert lists > 8


def test_a_scan_is_whole_or_says_so(world: World) -> None:
    world.put(DIGESTS[0], 0, list(range(8)))
    for verb in ("list", "get"):
        world.objects.fault = lambda asked, path, verb=verb: (
            Fault.REFUSED if asked == verb else None
        )
        with pytest.raises(Unavailable):
            list(world.remote.scan(timeout_s=PATIENCE_S))
    world.objects.fault = lambda verb, path: Fault.MISSING if verb == "get" else None
    assert list(world.remote.scan(timeout_s=PATIENCE_S)) == [], (
        "deleted between listing and reading"
    )


def test_a_scan_knows_the_age_of_packs(make: Callable[..., World]) -> None:
    store = MemoryStore()
    one = make(store)
    for i in range(5):
        one.put(DIGESTS[0], 0, [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3])
    meta = {entry["path"]: entry for page in obstore.list(store) for entry in page}
    oldest = min(meta, key=lambda path: meta[path]["last_modified"])
    size = meta[oldest]["size"]
    again = make(store, limits=ObjectLimits(bytes_max=5 * size, pack_bytes=4 * NBYTES), seed=3)
    list(again.remote.scan(timeout_s=PATIENCE_S))
    again.wall = 1e12
    (dropped,) = again.put(DIGESTS[0], 0, [50, 51, 52, 53]).dropped
    assert dropped.name.path == oldest


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.DENIED, ConfigError),
        (Fault.REFUSED, ConfigError),
        (Fault.UNREACHABLE, Unavailable),
        (Fault.BUSY, Unavailable),
    ],
)
def test_a_check_tells_settings_from_weather(
    world: World, fault: Fault, error: type[Exception]
) -> None:
    world.remote.check(timeout_s=PATIENCE_S)
    world.objects.fault = lambda verb, path: fault
    with pytest.raises(error, match=fault.text):
        world.remote.check(timeout_s=PATIENCE_S)


def test_batches_are_checked(world: World) -> None:
    rows = np.arange(2, dtype=np.intp)
    space = np.zeros((2, 64), np.uint8)
    locations, keys = np.zeros(2, LOCATION), bytes(32)
    read_only = space.copy()
    read_only.flags.writeable = False
    for wrong in (
        (b"short", 0, 64, keys, locations, space, rows),
        (DIGESTS[0], 0, 65, keys, locations, space, rows),
        (DIGESTS[0], 0, 0, keys, locations, space, rows),
        (DIGESTS[0], 0, 64, keys, locations, space, rows + 1),
        (DIGESTS[0], 0, 64, keys, locations, space, rows - 1),
        (DIGESTS[0], 0, 64, keys, locations, space, rows * 0),
        (DIGESTS[0], 0, 64, keys, locations[:1], space, rows),
        (DIGESTS[0], 0, 64, keys[:16], locations, space, rows),
        (DIGESTS[0], 0, 64, keys, locations, read_only, rows),
        (DIGESTS[0], 0, 64, keys, locations, space[0], rows),
        (DIGESTS[0], 0, 64, keys, locations, space, rows.astype(np.uint8)),
    ):
        with pytest.raises(InvalidRequest):
            GetBatch(*wrong)
    table, depths = ObjectTable(DIGESTS[0], 0), np.zeros(2, np.uint32)
    PutBatch(table, 64, bytes(32), bytes(32), depths, bytes(32), space, rows)
    for named, parents, checksums in ((31, 32, 32), (48, 32, 32), (32, 16, 32), (32, 32, 48)):
        with pytest.raises(InvalidRequest):
            PutBatch(table, 64, bytes(named), bytes(parents), depths, bytes(checksums), space, rows)
    with pytest.raises(InvalidRequest):
        PutBatch(table, 64, bytes(32), bytes(32), depths[:1], bytes(32), space, rows)
    with pytest.raises(InvalidRequest, match="8 bytes"):
        ObjectStore(world.objects, node=b"short", limits=LIMITS)


def test_a_closed_store_says_so() -> None:
    world = World(MemoryStore())
    put = world.put(DIGESTS[0], 0, [1])
    world.remote.close()
    world.remote.close()
    with pytest.raises(Unavailable, match="closed"):
        world.get(DIGESTS[0], 0, put.locations)


def test_many_threads_share_a_store(world: World) -> None:
    wrong: list[object] = []

    def work(part: int) -> None:
        for turn in range(4):
            names = [100 * turn + i for i in range(6)]
            put = world.put(DIGESTS[0], part, names)
            statuses, found = world.get(DIGESTS[0], part, put.locations)
            if statuses != [BlockStatus.PRESENT] * 6:
                wrong.append(statuses)
            wrong.extend(
                name
                for row, name in zip(found, names, strict=True)
                if (row != content(DIGESTS[0], part, name)).any()
            )
            world.remote.forget(DIGESTS[0], part, put.locations, timeout_s=PATIENCE_S)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert world.remote.usage().bytes == 0
    assert not world.objects.paths()


class Machine(RuleBasedStateMachine):
    """Two nodes over one store. The model: every location that was ever given, and the bytes behind it.

    Whatever fails, a location gives its bytes or none, and a block that no one forgot, dropped or
    damaged is there once nothing fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        size = pack_size(NBYTES, 4, b"record " + DIGESTS[0])
        self.limits = ObjectLimits(
            bytes_max=4 * size,
            pack_bytes=4 * NBYTES,
            range_bytes=2 * NBYTES,
            gap_bytes=NBYTES,
            retries=1,
            backoff_s=0.0,
            failures_max=1 << 30,
            # One after the other, so that a seed always finds the same.
            reads=1,
            uploads=1,
        )
        self.opened = 0
        self.worlds = [self.world(NODE), self.world(OTHER)]
        # location -> digest, part, name; alive: those that must be readable
        self.known: dict[bytes, tuple[bytes, int, int]] = {}
        self.alive: set[bytes] = set()
        self.damaged: set[bytes] = set()
        self.names = 0

    def world(self, node: bytes) -> World:
        self.opened += 1
        return World(self.store, limits=self.limits, node=node, seed=self.opened)

    def teardown(self) -> None:
        for world in self.worlds:
            world.remote.close()

    def drop(self, dropped: list) -> None:
        for pack in dropped:
            there = {raw for raw in self.alive if raw[2:18] == pack.name.pack and raw in self.known}
            keys = {key(self.known[raw][2]) for raw in there}
            told = {pack.keys[i : i + 16] for i in range(0, len(pack.keys), 16)}
            assert told == keys
            self.alive -= there

    @rule(
        who=st.integers(0, 1),
        digest=st.sampled_from(DIGESTS),
        part=st.integers(0, 1),
        n=st.integers(1, 9),
        failing=st.sets(st.integers(0, 3), max_size=3),
        lands=st.booleans(),
    )
    def put(
        self, who: int, digest: bytes, part: int, n: int, failing: set[int], lands: bool
    ) -> None:
        world = self.worlds[who]
        puts = 0

        def fault(verb: str, path: str) -> Fault | None:
            nonlocal puts
            if verb != "put":
                return None
            puts += 1
            return Fault.BUSY if puts in failing else None

        names = list(range(self.names, self.names + n))
        self.names += n
        world.objects.fault, world.objects.lands = fault, lands
        result = world.put(digest, part, names)
        world.objects.fault, world.objects.lands = (lambda verb, path: None), False
        for name, status, location in zip(names, result.statuses, result.locations, strict=True):
            assert status in (
                (BlockStatus.PRESENT, BlockStatus.FAILED) if failing else (BlockStatus.PRESENT,)
            )
            if status == BlockStatus.PRESENT:
                self.known[location.tobytes()] = (digest, part, name)
                self.alive.add(location.tobytes())
        self.drop(result.dropped)

    @precondition(lambda self: self.known)
    @rule(who=st.integers(0, 1), failing=st.sets(st.integers(0, 5), max_size=4), data=st.data())
    def get(self, who: int, failing: set[int], data: st.DataObject) -> None:
        digest, part, _ = data.draw(st.sampled_from(sorted(self.known.values())))
        mine = sorted(raw for raw, (d, p, _) in self.known.items() if (d, p) == (digest, part))
        chosen = data.draw(st.lists(st.sampled_from(mine), max_size=12))
        asked = 0

        def fault(verb: str, path: str) -> Fault | None:
            nonlocal asked
            asked += 1
            return Fault.UNREACHABLE if asked in failing else None

        world = self.worlds[who]
        world.objects.fault = fault
        statuses, found = world.get(digest, part, np.frombuffer(b"".join(chosen), LOCATION))
        world.objects.fault = lambda verb, path: None
        for raw, status, row in zip(chosen, statuses, found, strict=True):
            if status == BlockStatus.PRESENT:
                assert raw not in self.damaged
                assert (row == content(*self.known[raw])).all()
            elif raw in self.alive and not failing:
                assert raw in self.damaged and status == BlockStatus.MISMATCH

    @precondition(lambda self: self.known)
    @rule(who=st.integers(0, 1), data=st.data())
    def forget(self, who: int, data: st.DataObject) -> None:
        digest, part, _ = data.draw(st.sampled_from(sorted(self.known.values())))
        mine = sorted(raw for raw, (d, p, _) in self.known.items() if (d, p) == (digest, part))
        chosen = data.draw(st.lists(st.sampled_from(mine), max_size=12))
        node = (NODE, OTHER)[who]
        self.alive -= {raw for raw in chosen if raw[2:10] == node}
        locations = np.frombuffer(b"".join(chosen), LOCATION)
        self.drop(self.worlds[who].remote.forget(digest, part, locations, timeout_s=PATIENCE_S))

    @precondition(lambda self: self.alive - self.damaged)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        raw = data.draw(st.sampled_from(sorted(self.alive - self.damaged)))
        digest, part, _ = self.known[raw]
        offset = int(np.frombuffer(raw, LOCATION)[0]["offset"])
        path = PackName(digest, part, raw[2:18]).path
        self.worlds[0].damage(path, offset + data.draw(st.integers(0, NBYTES - 1)))
        self.damaged.add(raw)

    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        """What was forgotten and not deleted is alive again: nobody remembers."""
        self.worlds[who].remote.close()
        world = self.worlds[who] = self.world((NODE, OTHER)[who])
        found = {
            location.tobytes()
            for table in world.remote.scan(timeout_s=PATIENCE_S)
            for location in table.locations()
        }
        assert self.alive <= found
        self.alive |= (
            found
            & self.known.keys()
            & {raw for raw in self.known if raw[2:10] == (NODE, OTHER)[who]}
        )
        # Objects of puts that were said to have failed may be there; then they are known now.
        for table in world.remote.scan(timeout_s=PATIENCE_S):
            for entry, location in zip(table.entries, table.locations(), strict=True):
                name = int.from_bytes(entry["key"].tobytes()[4:]) - 1
                raw = location.tobytes()
                if raw not in self.known and table.name.node == (NODE, OTHER)[who]:
                    self.known[raw] = (table.name.digest, table.name.part, name)
                    self.alive.add(raw)

    @rule(who=st.integers(0, 1))
    def sweep(self, who: int) -> None:
        assert self.worlds[who].remote.sweep(timeout_s=PATIENCE_S)

    @invariant()
    def the_books_are_right(self) -> None:
        sizes: dict[bytes, int] = {}
        for page in obstore.list(self.store):
            for meta in page:
                name = PackName.parse(meta["path"])
                assert name is not None
                sizes[name.node] = sizes.get(name.node, 0) + meta["size"]
        for node, world in zip((NODE, OTHER), self.worlds, strict=True):
            usage = world.remote.usage()
            assert usage.bytes >= sizes.get(node, 0)
            assert usage.bytes - usage.bytes_doomed <= sizes.get(node, 0)
            assert usage.bytes <= self.limits.bytes_max
            assert usage.bytes_reserved == 0
            assert usage.bytes_dead <= usage.bytes * self.limits.dead_share_max
            assert usage.blocks == sum(raw[2:10] == node for raw in self.alive)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
