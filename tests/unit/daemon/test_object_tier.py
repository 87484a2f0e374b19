"""Object storage: what is written there when, what is believed of the catalog, what happens when things fail."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpool.config import DaemonConfig
from kvpool.daemon.core.blocks import OWN, Origin
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.object_books import RETRY_S, PackRecord
from kvpool.daemon.tiers.object_tier import ObjectTier, folder_url
from kvpool.daemon.tiers.object_write import AGE_S
from kvpool.errors import Unavailable
from kvpool.placement.catalog.embedded import EmbeddedCatalog
from kvpool.placement.records import NamespaceSettings, View
from kvpool.storage.eviction import policy_maker
from kvpool.storage.object.packs import CODEC_NONE, CODEC_SEALED, LOCATION
from kvpool.types import BlockStatus, PartSpec, split_keys
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire
from tests.sim.simulation.loop import run_alone

PAGE = 4096
FIELDS = b"{}"
BASE = hashlib.sha256(FIELDS).digest()[:16]
MEMORY = 128  # blocks; 4 of them at a time are written in one order, in two orders
ABSENT, PRESENT, MISMATCH, LATE = range(4)


run = partial(run_alone, steps_max=500_000)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def numbers_of(packed: bytes) -> list[int]:
    return [int.from_bytes(one, "big") for one in split_keys(packed)]


def location(number: int, pack: bytes = b"pack" * 4, *, encrypted: bool = False) -> bytes:
    found = np.zeros(1, LOCATION)
    found["codec"] = CODEC_SEALED if encrypted else CODEC_NONE
    found["version"], found["pack"], found["offset"] = 1, np.void(pack), number
    found["checksum"] = np.void(key(number))
    return found.tobytes()


class ScriptedStore:
    """One life of an object process that does what a test tells it. No bytes are moved."""

    def __init__(self) -> None:
        self.kept: list[storage_wire.PutObjects] = []
        self.loaded: list[storage_wire.GetObjects] = []
        self.dropped: list[storage_wire.DropPacks] = []
        self.listed: list[storage_wire.ListPacks] = []
        self.packs_there: list[tuple[bytes, int, bytes, float, bytes, bytes]] = []
        self.statuses: deque[bytes] = deque()  # of the next answers
        self.made_way: list[tuple[bytes, int, bytes, bytes]] = []
        self.away = False
        self.checks = 0

    def _come(self) -> None:
        if self.away:
            raise Unavailable("the store cannot be reached")

    async def check(self, order: storage_wire.CheckObjects) -> None:
        self.checks += 1
        self._come()

    async def put(self, order: storage_wire.PutObjects) -> storage_wire.ObjectsPut:
        self.kept.append(order)
        await asyncio.sleep(0.01)
        self._come()
        numbers = numbers_of(order.keys)
        status = (
            self.statuses.popleft()
            if self.statuses
            else bytes((BlockStatus.PRESENT,)) * len(numbers)
        )
        made_way, self.made_way = self.made_way, []
        return storage_wire.ObjectsPut(status, b"".join(map(location, numbers)), made_way)

    async def get(self, order: storage_wire.GetObjects) -> worker_wire.Pulled:
        self.loaded.append(order)
        await asyncio.sleep(0.01)
        self._come()
        count = len(order.locations) // LOCATION.itemsize
        status = self.statuses.popleft() if self.statuses else bytes((BlockStatus.PRESENT,)) * count
        return worker_wire.Pulled(
            status, b"", 0.01, "it failed" if BlockStatus.FAILED in status else ""
        )

    async def packs(self, order: storage_wire.ListPacks) -> storage_wire.PackList:
        self._come()
        self.listed.append(order)
        return storage_wire.PackList(self.packs_there if order.first else [])

    async def drop(self, order: storage_wire.DropPacks) -> None:
        self._come()
        self.dropped.append(order)

    async def usage(self) -> storage_wire.ObjectUsage:
        return storage_wire.ObjectUsage()

    def written(self) -> list[int]:
        return [number for order in self.kept for number in numbers_of(order.keys)]


class AbsentCatalog(EmbeddedCatalog):
    """One that can be away."""

    away = False

    async def find(self, *args: Any) -> list[bytes | None]:
        if self.away:
            raise Unavailable("Redis is away")
        return await super().find(*args)

    async def add(self, *args: Any) -> None:
        if self.away:
            raise Unavailable("Redis is away")
        await super().add(*args)


class Bench:
    """Memory of `MEMORY` blocks of one page, and a store below it."""

    def __init__(
        self, *, alone: bool = True, leads: bool = True, secrets: tuple[bytes, ...] = ()
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.config = DaemonConfig(
            socket="/kvpool.sock",
            object_store="s3://bucket/prefix",
            join="" if alone else "etcd://x",
            directory="" if alone else "redis://x",
        )
        self.node = Node(make_policy=policy_maker("lru"))
        self.tenant = self.node.add_tenant("default", 0, MEMORY * PAGE, PAGE)
        self.holder = self.node.holders.add("default", "engine")
        self.namespace = self.node.namespaces.open(self.tenant, BASE, FIELDS, [PartSpec(PAGE)])
        self.namespaces: dict[tuple[str, str], Any] = {}
        self.leads = leads
        membership: Any = SimpleNamespace(view=View(namespaces=self.namespaces), lead=self._lead)
        self.catalog = AbsentCatalog(self.loop.time)
        self.catalog.shared = not alone
        self.secrets = secrets
        self.encryption: list[bytes] = []
        self.tier = ObjectTier(
            self.config,
            self.node,
            membership,
            self.catalog,
            self.loop.time,
            lambda: self.secrets,
            lambda: self.encryption,
        )
        self.store = ScriptedStore()
        self.tickets = 0

    async def _lead(self, _: str) -> bool:
        return self.leads

    async def begin(self) -> None:
        self.tier.serve(self.store)
        self.tier.begin()
        await asyncio.sleep(0.1)

    def put(
        self,
        numbers: Iterable[int],
        *,
        parent: bytes = b"",
        origin: Origin = OWN,
        read: bool = True,
    ) -> None:
        numbers = list(numbers)
        self.tickets += 1
        packed = b"".join(map(key, numbers))
        self.node.puts.reserve(
            self.holder, self.namespace, 0, self.tickets, split_keys(packed), parent
        )
        count = len(self.holder.reservations[self.tickets].rows)
        self.node.puts.commit(self.holder, self.tickets, bytes(16 * count), None, origin)
        if read:
            self.read(numbers)

    def read(self, numbers: Iterable[int]) -> None:
        packed = b"".join(map(key, numbers))
        lease = self.node.leases.acquire(
            self.holder, self.namespace, [0], split_keys(packed), None, 0.0, scattered=True
        )
        assert lease is not None
        self.node.leases.release(self.holder, lease.token)

    async def found(self, numbers: Iterable[int]) -> set[int]:
        """Which of them the tier says it has."""
        listed = list(numbers)
        masks = await self.tier.where(self.namespace, self.namespace.tables, [*map(key, listed)])
        return {number for number in listed if masks.get(key(number))}

    async def load(self, numbers: Iterable[int]) -> worker_wire.Pulled:
        listed = list(numbers)
        rows = list(range(len(listed)))
        return await self.tier.load(self.namespace.tables[0], [*map(key, listed)], rows, 5.0)


# ---- what is written -----------------------------------------------------------------------------------


def test_what_memory_gives_up_next_is_written_if_it_was_read_again() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        for at in range(0, 120, 8):
            bench.put(range(at, at + 8), read=at % 16 == 0)
        await asyncio.sleep(2 * AGE_S)
        written = set(bench.store.written())
        assert written, "memory is nearly full"
        assert all(number % 16 < 8 for number in written), "nobody read the others again"
        assert max(written) < 60, "only the cold end"
        assert len(bench.store.written()) == len(written), "each once"
        assert await bench.found(range(120)) == written
        assert bench.tier.stats()[0].written_blocks == len(written)

    run(main())


def test_memory_with_room_gives_nothing_up() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        bench.put(range(90))
        await asyncio.sleep(2 * AGE_S)
        assert not bench.store.kept
        bench.put(range(90, 120))
        await asyncio.sleep(2 * AGE_S)
        assert bench.store.written()

    run(main())


def test_copies_that_others_keep_and_namespaces_that_do_not_want_it() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        bench.put(range(60), origin=Origin(secondary=True))
        bench.namespace.settings = NamespaceSettings(write_object="none")
        bench.put(range(60, 120))
        await asyncio.sleep(2 * AGE_S)
        assert not bench.store.kept
        bench.namespace.settings = NamespaceSettings(write_object="back")
        await asyncio.sleep(2 * AGE_S)
        assert set(bench.store.written()) and min(bench.store.written()) >= 60

    run(main())


def test_what_is_there_already_is_not_written_and_not_asked_for_again() -> None:
    async def main() -> None:
        bench, other = Bench(), Bench()
        other.catalog = other.tier.catalog = bench.catalog
        await bench.begin()
        await other.begin()
        bench.put(range(120))
        await asyncio.sleep(2 * AGE_S)
        other.put(range(120))
        await asyncio.sleep(2 * AGE_S)
        assert bench.store.written() and not other.store.kept
        known = other.tier.counted.known_blocks
        assert known == len(bench.store.written())
        await asyncio.sleep(2 * AGE_S)
        assert other.tier.counted.known_blocks == known

    run(main())


def test_chains_lie_together() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        for at in range(0, 120, 2):  # two chains, put in turns
            bench.put([at], parent=key(at - 2) if at else b"")
            bench.put([at + 1], parent=key(at - 1) if at else b"")
        assert not bench.store.kept
        await asyncio.sleep(2 * AGE_S)
        numbers = bench.store.written()
        assert len(numbers) > 6
        broken = sum(after != before + 2 for before, after in pairwise(numbers))
        assert broken <= 2, "one chain, then the other"

    run(main())


def test_no_more_is_held_than_a_share_of_memory() -> None:
    async def main() -> None:
        bench = Bench()
        gate = asyncio.Event()
        put = bench.store.put

        async def slow(order: storage_wire.PutObjects) -> storage_wire.ObjectsPut:
            await gate.wait()
            return await put(order)

        bench.store.put = slow
        await bench.begin()
        bench.put(range(124))
        await asyncio.sleep(2 * AGE_S)
        held = bench.tier.stats()[0].writing_blocks
        assert 0 < held <= MEMORY // 16
        bench.put(range(200, 300), read=False)  # a put finds room beside them
        gate.set()
        await asyncio.sleep(AGE_S)
        assert bench.tier.stats()[0].writing_blocks == 0
        assert bench.node.leases.count == 0
        assert not any(block.leases for block in bench.namespace.tables[0].blocks.values())

    run(main())


# ---- failures ------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_left_alone_and_tried_again() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        bench.store.away = True
        bench.put(range(120))
        await asyncio.sleep(2 * AGE_S)
        (said,) = bench.tier.stats()
        assert said.state == "failing" and "reached" in said.error
        await asyncio.sleep(280)
        assert bench.store.checks < 30, "ever less often"
        tries = len(bench.store.kept)
        assert tries <= 2, "what was under way when it failed"
        assert not await bench.found(range(120))
        bench.store.away = False
        await asyncio.sleep(RETRY_S[1] + 2 * AGE_S)
        assert bench.tier.stats()[0].state == "serving"
        assert await bench.found(range(120))

    run(main())


def test_blocks_that_failed_are_written_later_and_those_without_room_are_not() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        bench.store.statuses += [
            bytes(
                (BlockStatus.FAILED, BlockStatus.PRESENT, BlockStatus.NO_SPACE, BlockStatus.PRESENT)
            )
        ]
        bench.put(range(120))
        await asyncio.sleep(4 * RETRY_S[1])
        first = numbers_of(bench.store.kept[0].keys)
        later = [number for order in bench.store.kept[1:] for number in numbers_of(order.keys)]
        assert first[0] in later
        assert not {first[1], first[2], first[3]} & set(later)
        assert first[2] not in await bench.found(first)

    run(main())


def test_without_the_catalog_nothing_is_written_and_nothing_believed() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        bench.put(range(120))
        bench.catalog.away = True
        await asyncio.sleep(2 * AGE_S)
        assert not bench.store.kept
        with pytest.raises(Unavailable):
            await bench.tier.where(bench.namespace, bench.namespace.tables, [key(1)])
        bench.catalog.away = False
        await asyncio.sleep(2 * AGE_S)
        assert bench.store.written()

    run(main())


def test_what_could_not_be_listed_is_listed_by_the_next_look_at_ones_own() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        put = bench.store.put

        async def keep_and_lose(order: storage_wire.PutObjects) -> storage_wire.ObjectsPut:
            kept = await put(order)
            bench.catalog.away = True
            places = b"".join(map(location, numbers_of(order.keys)))
            found = (order.digest, 0, order.record, 1.0, order.keys, places)
            bench.store.packs_there.append(found)
            return kept

        bench.store.put = keep_and_lose
        bench.put(range(120))
        await asyncio.sleep(2 * AGE_S)
        (said,) = bench.tier.stats()
        assert said.unlisted_blocks and not said.stocked
        assert said.state == "serving", "it did nothing wrong"
        numbers = bench.store.written()
        bench.store.put = put
        bench.catalog.away = False
        await asyncio.sleep(5)
        assert bench.store.listed[-2].own
        assert await bench.found(numbers) == set(numbers)

    run(main())


def test_the_end_of_the_process_is_the_end_of_reads() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        assert bench.tier.serving
        bench.tier.ended("its process ended")
        assert not bench.tier.serving
        assert await bench.found(range(4)) == set()
        with pytest.raises(Unavailable):
            await bench.load([1])
        assert bench.tier.stats()[0].state == "failed"

    run(main())


# ---- reading -------------------------------------------------------------------------------------------


async def listed(bench: Bench, numbers: Iterable[int], pack: bytes = b"pack" * 4) -> None:
    """Have the catalog say where these are, as this cluster says it."""
    chosen = list(numbers)
    places = b"".join(location(number, pack) for number in chosen)
    digest = bench.namespace.directory_digest
    await bench.tier.enlist(digest, 0, [*map(key, chosen)], places, 100.0)


def test_blocks_come_with_the_checksums_of_their_locations() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        await listed(bench, [1, 2, 4])
        pulled = await bench.load([1, 2, 3, 4])
        assert pulled.status == bytes(
            (BlockStatus.PRESENT, BlockStatus.PRESENT, BlockStatus.ABSENT, BlockStatus.PRESENT)
        )
        assert pulled.checksums == key(1) + key(2) + bytes(16) + key(4)
        (order,) = bench.store.loaded
        assert np.frombuffer(order.rows, np.uint32).tolist() == [0, 1, 3]
        assert 0 < order.deadline_s <= 5

    run(main())


def test_stale_and_damaged_ones_are_found_no_more_and_late_ones_still_are() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        await listed(bench, range(4))
        bench.store.statuses.append(
            bytes(
                (BlockStatus.PRESENT, BlockStatus.ABSENT, BlockStatus.MISMATCH, BlockStatus.FAILED)
            )
        )
        pulled = await bench.load(range(4))
        assert (
            pulled.status
            == bytes(
                (BlockStatus.PRESENT, BlockStatus.ABSENT, BlockStatus.MISMATCH, BlockStatus.FAILED)
            )
            and pulled.error
        )
        await asyncio.sleep(1)
        assert await bench.found(range(4)) == {0, 3}
        (said,) = bench.tier.stats()
        assert (said.stale_blocks, said.mismatches, said.read_errors) == (1, 1, 1)

    run(main())


@pytest.mark.parametrize("change", ["block", "location", "secret"])
def test_entries_that_this_cluster_did_not_make_are_none(change: str) -> None:
    async def main() -> None:
        bench, other = Bench(secrets=(b"a" * 16,)), Bench(secrets=(b"b" * 16,))
        await bench.begin()
        digest = bench.namespace.directory_digest
        await (other if change == "secret" else bench).tier.enlist(
            digest, 0, [key(1)], location(1), 100.0
        )
        maker = other if change == "secret" else bench
        [entry] = await maker.catalog.find(digest, 0, [key(1)])
        assert entry is not None
        if change == "location":
            entry = location(2) + entry[LOCATION.itemsize :]
        name = key(2) if change == "block" else key(1)
        await bench.catalog.add(digest, 0, [name], [entry], 100.0)
        assert await bench.found([2] if change == "block" else [1]) == set()
        await bench.tier.enlist(digest, 0, [key(1)], location(1), 100.0)
        assert await bench.found([1]) == {1}

    run(main())


def test_entries_of_an_older_secret_are_found_as_long_as_it_is_accepted() -> None:
    async def main() -> None:
        bench = Bench(secrets=(b"old" * 8,))
        await bench.begin()
        digest = bench.namespace.directory_digest
        await bench.tier.enlist(digest, 0, [key(1)], location(1), 100.0)
        bench.secrets = (b"new" * 8, b"old" * 8)
        await bench.tier.enlist(digest, 0, [key(2)], location(2), 100.0)
        assert await bench.found([1, 2]) == {1, 2}
        bench.secrets = (b"new" * 8,)
        assert await bench.found([1, 2]) == {2}

    run(main())


@pytest.mark.parametrize("encrypts", [True, False])
def test_blocks_that_were_written_the_other_way_are_written_anew_and_left_to_others(
    encrypts: bool,
) -> None:
    """While a cluster begins, or ends, to encrypt, some of its nodes do and some do not."""

    async def main() -> None:
        bench = Bench()
        bench.encryption = [b"s" * 32] if encrypts else []
        await bench.begin()
        digest = bench.namespace.directory_digest
        for number in (1, 2):
            place = location(number, encrypted=encrypts == (number == 2))
            await bench.tier.enlist(digest, 0, [key(number)], place, 100.0)
        assert await bench.found([1, 2]) == {2}
        assert (await bench.load([1])).status == bytes([BlockStatus.ABSENT])
        assert not bench.store.loaded
        assert None not in await bench.catalog.find(digest, 0, [key(1), key(2)])
        bench.put([1, 2])
        status = await bench.tier.store(list(bench.namespace.tables[0].blocks.values()))
        assert status == bytes([BlockStatus.PRESENT] * 2)
        assert bench.store.written() == [1]
        packed = key(1) + key(2)
        assert len(await bench.tier.remove(bench.namespace, packed)) == 2
        assert await bench.catalog.find(digest, 0, [key(1), key(2)]) == [None, None]

    run(main())


def test_packs_that_made_way_are_found_no_more_but_copies_elsewhere_are() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        await listed(bench, range(1000, 1004), b"old " * 4)
        await listed(bench, [1003], b"new " * 4)
        gone = b"".join(map(key, range(1000, 1004)))
        bench.store.made_way = [(bench.namespace.directory_digest, 0, b"old " * 4, gone)]
        bench.put(range(120))
        await asyncio.sleep(2 * AGE_S)
        assert await bench.found(range(1000, 1004)) == {1003}

    run(main())


# ---- scans and garbage ---------------------------------------------------------------------------------


def pack_of(
    bench: Bench, number: int, *, epoch: int = 0, ttl_s: float = 0.0, age_s: float = 1.0
) -> Any:
    record = msgspec.msgpack.encode(PackRecord("default", BASE, epoch, ttl_s))
    return (bench.namespace.directory_digest, 0, record, age_s, key(number), location(number))


def test_a_lone_node_lists_all_at_its_start() -> None:
    async def main() -> None:
        bench = Bench()
        bench.store.packs_there = [
            pack_of(bench, 1),
            pack_of(bench, 2, ttl_s=100.0, age_s=50.0),
            pack_of(bench, 3, ttl_s=100.0, age_s=150.0),
            (b"other namespace!", 0, pack_of(bench, 4)[2], 1.0, key(4), location(4)),
            (bench.namespace.directory_digest, 0, b"of another version", 1.0, key(5), location(5)),
        ]
        await bench.begin()
        assert await bench.found(range(10)) == {1, 2}
        assert [order.own for order in bench.store.listed if order.first] == [False]
        await asyncio.sleep(60)
        assert await bench.found(range(10)) == {1}, "that one's time is over"

    run(main())


@pytest.mark.parametrize("leads", [True, False])
def test_of_many_nodes_one_lists_all_and_the_others_their_own(leads: bool) -> None:
    async def main() -> None:
        bench = Bench(alone=False, leads=leads)
        await bench.begin()
        assert [order.own for order in bench.store.listed if order.first] == [not leads]
        assert await bench.catalog.complete() is leads
        await asyncio.sleep(100)
        assert len(bench.store.listed) == 1, "once is enough"
        bench.catalog.lose()
        await asyncio.sleep(100)
        assert len(bench.store.listed) == 1 + leads

    run(main())


def test_nothing_is_written_before_it_is_known_what_is_there() -> None:
    async def main() -> None:
        bench = Bench()
        bench.store.away = True
        await bench.begin()
        bench.put(range(120))
        await asyncio.sleep(2 * AGE_S)
        assert not bench.store.kept
        assert bench.tier.stats()[0].state == "failing"

    run(main())


@pytest.mark.parametrize("leads", [True, False])
def test_objects_of_ended_epochs_are_deleted_by_their_writers_and_by_one_for_all(
    leads: bool,
) -> None:
    async def main() -> None:
        bench = Bench(leads=leads)
        old = bench.namespace.directory_digest
        bench.store.away = True
        await bench.begin()
        living = bench.node.namespaces.set_epoch(bench.namespace, 1, 0)
        bench.tier.enter(living)
        await asyncio.sleep(5)
        bench.store.away = False
        await asyncio.sleep(2 * RETRY_S[1])
        assert [(order.digest, order.own) for order in bench.store.dropped] == [(old, not leads)]
        assert not bench.tier.stats()[0].garbage

    run(main())


def test_a_scan_finds_garbage_of_epochs_that_others_ended() -> None:
    async def main() -> None:
        bench = Bench()
        bench.store.packs_there = [pack_of(bench, 1)]
        settings = NamespaceSettings()
        bench.namespaces["default", BASE.hex()] = SimpleNamespace(epoch=3, settings=settings)
        await bench.begin()
        await asyncio.sleep(10)
        assert [order.digest for order in bench.store.dropped] == [bench.namespace.directory_digest]
        assert await bench.found([1]) == set()

    run(main())


# ---- its end -------------------------------------------------------------------------------------------


def test_a_flush_writes_all_that_is_worth_it_the_last_used_first() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        bench.put(range(20))
        bench.put(range(20, 40))
        bench.put(range(40, 60), read=False)
        bench.put(range(60, 70), origin=Origin(secondary=True))
        bench.read(range(30, 34))
        await bench.tier.flush(20.0)
        assert sorted(bench.store.written()) == list(range(40))
        assert set(bench.store.written()[:20]) == set(range(20, 40))

    run(main())


def test_a_flush_ends_by_its_time() -> None:
    async def main() -> None:
        bench = Bench()

        async def never(_: storage_wire.PutObjects) -> storage_wire.ObjectsPut:
            await asyncio.sleep(1e6)
            raise AssertionError

        bench.store.put = never  # type: ignore[assignment]
        await bench.begin()
        bench.put(range(40))
        begun = bench.loop.time()
        await bench.tier.flush(3.0)
        assert bench.loop.time() - begun == pytest.approx(3.0)

    run(main())


def test_who_shares_a_folder_agrees_about_epochs() -> None:
    config = DaemonConfig(socket="/s", object_store="s3://b/p/", cluster="c", node="n")
    assert folder_url(config) == "s3://b/p/node/c/n"
    together = DaemonConfig(
        socket="/s", object_store="s3://b/p", cluster="c", node="n", join="etcd://x"
    )
    assert folder_url(together) == "s3://b/p/cluster/c"
