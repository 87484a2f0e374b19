"""Object storage, below all other tiers: what is written there, what is there of a block, how it comes back.

It is cold, and shared by the nodes of a cluster: what one has written, all find by the catalog, also when the
one has died. Written is what memory is about to give up and somebody has read again since it was put. Every
block that was ever read again lies in memory after its last use, whichever tier it came from, so this misses
nothing; and a put or an eviction never waits for it. `remote.py` fetches from here as from one more node.

The catalog is a hint. An object that is gone, or holds something else, is a miss, and its entry is dropped.
An entry carries a seal made with the cluster's secret, so that whoever can write to Redis cannot pass off one
block as another.

Event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kvpool import wire
from kvpool.config import DaemonConfig
from kvpool.daemon.blocks import Block, Holder, NamespaceState, PartTable, Tenant, directory_digest
from kvpool.daemon.cluster import Cluster
from kvpool.daemon.joining import catalog_is_shared, open_catalog
from kvpool.daemon.node import Node
from kvpool.daemon.shelf import EMPTY_KEY
from kvpool.daemon.stores import Store, StoreProcess
from kvpool.daemon.tasks import Tasks
from kvpool.daemon.workers import Keeper
from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.catalog import PACK, Catalog
from kvpool.placement.directory import BATCH_MAX
from kvpool.placement.records import epoch_digest
from kvpool.segment import Segment
from kvpool.storage.remote_packing import in_chains
from kvpool.storage.remote_packs import LOCATION
from kvpool.storage.stack import WriteMode, worth_keeping
from kvpool.types import CHECKSUM_BYTES, PARTS_MAX, split_keys

log = logging.getLogger("kvpool.daemon")

PACK_BYTES = 16 << 20  # in one order, and about what an object holds
WRITES_MAX = 2  # orders to write at a time
READS_MAX = 8  # to read: as many as the process has threads for
HELD_SHARE = 1 / 16  # of a segment: what is being written cannot be evicted
COLD_SHARE = 1 / 4  # of a segment: its cold end, of which what is worth it is written
LOOK_BLOCKS = 4096  # of the cold end, in one look
LOOK_S = 0.5
AGE_S = 10.0  # blocks wait so long for others to share an object with
KEEP_S = 60.0  # for one order to write
TEND_S = 2.0
LISTEN_S = 1.0
CHECK_S, LIST_S, DROP_S = 10.0, 600.0, 60.0
RETRY_S = (1.0, 30.0)  # between attempts to use a store that failed
ENTRY_S = 7 * 86_400.0  # an entry of the catalog lives, unless it is listed again
SCAN_S, SCAN_ALONE_S = 86_400.0, 600.0  # between scans; with others whose catalog we do not see
SCAN_PAUSE_S = 60.0  # at least, should the catalog lose everything again and again
GARBAGE_MAX = 1024  # ended epochs whose objects are to be deleted
SCAN_CHORE = "store"
SEAL_BYTES = 16
ABSENT, PRESENT, MISMATCH, LATE, NO_SPACE = range(5)  # what a store says of a block

_ENTRY_BYTES = LOCATION.itemsize
_FIELDS = LOCATION.fields
assert _FIELDS is not None
_CHECKSUM = slice(_FIELDS["checksum"][1], _FIELDS["checksum"][1] + CHECKSUM_BYTES)


class StoreState(StrEnum):
    """What the store is good for at the moment."""

    OPENING = "opening"  # it has not answered yet
    SERVING = "serving"
    FAILING = "failing"  # the last requests failed; it is tried again now and then
    FAILED = "failed"  # its process does not run


class PackRecord(msgspec.Struct, array_like=True, frozen=True):
    """What a pack says of its blocks' namespace. ttl_s: of its settings then."""

    tenant: str
    base: bytes
    epoch: int
    ttl_s: float


class StoreTier:
    """See the module. Without a URL in the configuration there is nothing here, and nothing is done."""

    def __init__(
        self, config: DaemonConfig, node: Node, cluster: Cluster, clock: Callable[[], float]
    ) -> None:
        self.node = node
        self.state = StoreState.OPENING
        self.error = ""
        self.catalog: Catalog
        self._config = config
        self._cluster = cluster
        self._clock = clock
        self._store: Store | None = None
        self._keeper: Keeper[StoreProcess] | None = None
        self._tasks = Tasks()
        self._writes = asyncio.Semaphore(WRITES_MAX)
        self._reads = asyncio.Semaphore(READS_MAX)
        self._forgets = asyncio.Lock()
        self._under_way: set[tuple[PartTable, bytes]] = set()
        self._since: dict[PartTable, float] = {}
        self._garbage: OrderedDict[bytes, None] = OrderedDict()
        self._stocked = False  # what this node wrote in former lives is known, and its size counts
        self._scan_at = 0.0
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._said: dict[str, Any] = {}
        self._seal_key = hashlib.sha256(
            b"kvpool catalog\0" + config.cluster_secret.encode()
        ).digest()
        self.counters = {
            "written_blocks": 0,
            "written_bytes": 0,
            "read_blocks": 0,
            "read_bytes": 0,
            "known_blocks": 0,  # not written, since they were there already
            "stale_blocks": 0,  # whose object was gone
            "mismatches": 0,
            "read_errors": 0,
            "write_errors": 0,
            "no_space_blocks": 0,
            "unlisted_blocks": 0,  # written, while the catalog did not answer
            "lookups_failed": 0,
            "dropped_packs": 0,
        }

    # ---- life --------------------------------------------------------------------------------------

    async def start(self, segments: Mapping[int, Segment]) -> None:
        """Start the process. Raises `ConfigError` for settings that can never work.

        A store that does not answer is told, and tried again now and then.
        """
        config = self._config
        if not config.remote:
            return
        order = wire.StoreStart(
            folder_url(config),
            hashlib.sha256(f"{config.cluster}\0{config.node}".encode()).digest()[:8],
            config.remote_bytes_max,
            config.remote_instance_credentials,
        )
        self.catalog = open_catalog(config, self._clock)
        keeper = Keeper(lambda: StoreProcess(order, segments), self.serve, self.ended, None)
        self._keeper = keeper
        await keeper.start()
        self.begin()

    def begin(self) -> None:
        """Begin what is done beside the requests."""
        for work in (self._write(), self._tend(), self._listen()):
            self._tasks.begin(work)

    def serve(self, store: Store) -> None:
        """A new life of the process serves."""
        self._store, self._stocked, self._said = store, False, {}
        self.state, self.error, self._retry_at = StoreState.OPENING, "", 0.0

    def ended(self, error: str) -> None:
        """The process is dead, or cannot be started."""
        self._store, self._said = None, {}
        self.state, self.error = StoreState.FAILED, error

    async def close(self) -> None:
        """End the process. Idempotent."""
        await self._tasks.end()
        if self._keeper is not None:
            await self._keeper.stop()
            self._keeper = None
            await self.catalog.close()

    # ---- what is there -----------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether anything can be read from here."""
        return self._store is not None

    async def where(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        *,
        prefix: bool = False,
    ) -> dict[bytes, int]:
        """Which parts of these keys are here, as masks; without those of which nothing is.

        prefix: the keys are one; it is not asked on where it ends. Raises `Unavailable`.
        """
        masks: dict[bytes, int] = {}
        if self._store is None:
            return masks
        for at in range(0, len(keys), BATCH_MAX):
            some = keys[at : at + BATCH_MAX]
            found = await asyncio.gather(
                *[self._find(namespace.directory_digest, table.part, some) for table in tables]
            )
            for table, locations in zip(tables, found, strict=True):
                for key, location in zip(some, locations, strict=True):
                    if location is not None:
                        masks[key] = masks.get(key, 0) | 1 << table.part
            last = some[-1]
            if prefix and last not in masks and not any(last in table.blocks for table in tables):
                break
        return masks

    async def _find(self, digest: bytes, part: int, keys: Sequence[bytes]) -> list[bytes | None]:
        """The locations of blocks. What was not sealed by this cluster is none. Raises `Unavailable`."""
        found: list[bytes | None] = []
        for at in range(0, len(keys), BATCH_MAX):
            some = keys[at : at + BATCH_MAX]
            entries = await self.catalog.find(digest, part, some)
            for key, entry in zip(some, entries, strict=True):
                location = None if entry is None else entry[:_ENTRY_BYTES]
                sealed = location is not None and self._seal(digest, part, key, location) == entry
                found.append(location if sealed else None)
            await asyncio.sleep(0)  # the seals of so many take milliseconds
        return found

    async def _list(
        self, digest: bytes, part: int, keys: Sequence[bytes], packed: bytes, ttl_s: float
    ) -> None:
        """Have the catalog know where blocks are. packed: their locations. Raises `Unavailable`."""
        entries = [
            self._seal(digest, part, key, packed[at * _ENTRY_BYTES : (at + 1) * _ENTRY_BYTES])
            for at, key in enumerate(keys)
        ]
        for at in range(0, len(keys), BATCH_MAX):
            chosen = slice(at, at + BATCH_MAX)
            await self.catalog.add(digest, part, keys[chosen], entries[chosen], ttl_s)

    def _seal(self, digest: bytes, part: int, key: bytes, location: bytes) -> bytes:
        """An entry of the catalog: the location, and a proof that it is this block's."""
        said = digest + part.to_bytes(2, "little") + key + location
        return location + hashlib.blake2b(said, digest_size=SEAL_BYTES, key=self._seal_key).digest()

    async def _unlist(
        self, digest: bytes, part: int, keys: Sequence[bytes], packs: Sequence[bytes]
    ) -> None:
        """These blocks are not in these objects any more. Best effort: an entry too many is a miss later."""
        try:
            await self._drop(digest, part, keys, packs)
        except Unavailable:
            self.counters["lookups_failed"] += 1

    async def _drop(
        self, digest: bytes, part: int, keys: Sequence[bytes], packs: Sequence[bytes]
    ) -> None:
        for at in range(0, len(keys), BATCH_MAX):
            chosen = slice(at, at + BATCH_MAX)
            await self.catalog.drop(digest, part, keys[chosen], packs[chosen])

    # ---- up ------------------------------------------------------------------------------------------

    async def read(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> wire.Pulled:
        """Read blocks into reserved rows of their table in memory: as `Movers.pull`.

        When this ends, however it does, nothing writes to the rows any more.
        """
        store, namespace = self._store, table.namespace
        if store is None:
            raise Unavailable(f"the object store is {self.state}: {self.error}")
        digest, started = namespace.directory_digest, self._clock()
        try:
            # The process would not answer before the deadline for what waits there for a thread.
            async with asyncio.timeout(seconds):
                await self._reads.acquire()
        except TimeoutError:
            late = bytes([LATE]) * len(keys)
            return wire.Pulled(
                late, b"".join([EMPTY_KEY] * len(keys)), seconds, "not begun in time"
            )
        try:
            return await self._read(store, table, keys, rows, digest, started, seconds)
        finally:
            self._reads.release()

    async def _read(
        self,
        store: Store,
        table: PartTable,
        keys: Sequence[bytes],
        rows: Sequence[int],
        digest: bytes,
        started: float,
        seconds: float,
    ) -> wire.Pulled:
        namespace = table.namespace
        status, checksums = bytearray(len(keys)), [EMPTY_KEY] * len(keys)
        found = await self._find(digest, table.part, keys)
        at = [index for index, location in enumerate(found) if location is not None]
        if not at:
            return wire.Pulled(bytes(status), b"".join(checksums), self._clock() - started)
        locations = [location for location in found if location is not None]
        pulled = await store.load(
            wire.LoadBlocks(
                digest=digest,
                part=table.part,
                nbytes=table.spec.nbytes,
                locations=b"".join(locations),
                segment=namespace.tenant.segment,
                stride=table.stride,
                rows=wire.pack_rows([rows[index] for index in at]),
                deadline_s=max(0.0, seconds - (self._clock() - started)),
            )
        )
        stale: list[tuple[bytes, bytes]] = []
        for index, location, said in zip(at, locations, pulled.status, strict=True):
            status[index] = said
            if said == PRESENT:
                checksums[index] = location[_CHECKSUM]
            elif said != LATE:
                stale.append((keys[index], location[PACK]))
        self._count_read(pulled, table.spec.nbytes)
        if stale:
            gone, packs = zip(*stale, strict=True)
            self._tasks.begin(self._unlist(digest, table.part, gone, packs))
        if pulled.error:
            self._failed(pulled.error)
        else:
            self._answered()
        seconds_taken = self._clock() - started
        return wire.Pulled(bytes(status), b"".join(checksums), seconds_taken, pulled.error)

    def _count_read(self, pulled: wire.Pulled, nbytes: int) -> None:
        came = pulled.status.count(PRESENT)
        self.counters["read_blocks"] += came
        self.counters["read_bytes"] += came * nbytes
        self.counters["stale_blocks"] += pulled.status.count(ABSENT)
        self.counters["mismatches"] += pulled.status.count(MISMATCH)
        self.counters["read_errors"] += pulled.status.count(LATE)

    # ---- down ----------------------------------------------------------------------------------------

    def mode(self, namespace: NamespaceState) -> WriteMode:
        """Whether blocks of a namespace are written here: `BACK` or `NONE`."""
        return WriteMode(namespace.settings.write_remote or WriteMode.BACK)

    def _is_worthy(self, block: Block) -> bool:
        table = block.table
        return (
            (table, block.key) not in self._under_way
            and not block.secondary  # whoever keeps it writes it
            and worth_keeping(block.put, block.used, block.kept)
            and self.mode(table.namespace) is not WriteMode.NONE
        )

    def _may_write(self) -> bool:
        return self.state is StoreState.SERVING and self._stocked

    async def _write(self) -> None:
        """Have what memory gives up next in the store before it goes, as far as that is worth it."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._may_write():
                continue
            now = self._clock()
            found: dict[PartTable, list[Block]] = {}
            for tenant in self.node.tenants.values():
                for block in self._cold(tenant):
                    found.setdefault(block.table, []).append(block)
            self._since = {table: self._since.get(table, now) for table in found}
            for table, blocks in found.items():
                most = _together(table)
                if len(blocks) >= most or now - self._since[table] >= AGE_S:
                    del self._since[table]
                    for batch in _batches(table, blocks):
                        await self._begin(table, batch)

    def _cold(self, tenant: Tenant) -> list[Block]:
        """What is worth writing of the cold end of a segment."""
        found: dict[Block, None] = {}  # where a namespace has a quota, its blocks may be met twice
        for _, free, victims, held in self.node.next_victims(tenant, LOOK_BLOCKS, COLD_SHARE):
            window = victims[: max(1, int(held * (COLD_SHARE - free)))]
            found.update(dict.fromkeys(filter(self._is_worthy, window)))
        return list(found)

    async def _begin(self, table: PartTable, blocks: Sequence[Block]) -> None:
        """Write blocks of one table in the background, as soon as there is a permit."""
        await self._writes.acquire()
        # They may have gone, or been written, while the permit was waited for.
        blocks = [
            block
            for block in blocks
            if table.blocks.get(block.key) is block and self._is_worthy(block)
        ]
        store = self._store
        if not blocks or store is None or not self._may_write():
            self._writes.release()
            return
        holder = self._holder(table.namespace.tenant.name)
        lease = self.node.hold(holder, blocks)
        _, held = lease.parts[table.part]
        self._under_way.update((table, block.key) for block in held)
        self._tasks.begin(self._keep(store, table, held, holder, lease.token))

    async def _keep(
        self, store: Store, table: PartTable, blocks: Sequence[Block], holder: Holder, token: str
    ) -> None:
        try:
            lacking = await self._not_there(table, blocks)
            if lacking:
                ticks = [block.used for block in lacking]
                kept = await store.keep(_order(table, lacking))
                await self._kept(table, lacking, ticks, kept)
        except KvpoolError as error:
            if self._store is store:
                self._failed(str(error))
        finally:
            self._under_way.difference_update((table, block.key) for block in blocks)
            self.node.release(holder, token)
            self._writes.release()

    async def _not_there(self, table: PartTable, blocks: Sequence[Block]) -> list[Block]:
        """Those that the catalog does not know; none when it does not answer: they are looked at again."""
        ticks = [block.used for block in blocks]
        keys = [block.key for block in blocks]
        try:
            found = await self._find(table.namespace.directory_digest, table.part, keys)
        except Unavailable:
            self.counters["lookups_failed"] += 1
            return []
        lacking = []
        for block, tick, location in zip(blocks, ticks, found, strict=True):
            if location is None:
                lacking.append(block)
            else:
                block.kept = tick
                self.counters["known_blocks"] += 1
        return lacking

    async def _kept(
        self, table: PartTable, blocks: Sequence[Block], ticks: Sequence[int], kept: wire.Kept
    ) -> None:
        """Make what was written findable, and what made way for it be found no more."""
        namespace = table.namespace
        # What was removed meanwhile is not to be found again.
        done = [
            at for at, status in enumerate(kept.status) if status == PRESENT and not blocks[at].gone
        ]
        for at, status in enumerate(kept.status):
            if status in {PRESENT, NO_SPACE}:
                blocks[at].kept = ticks[at]
        self.counters["written_blocks"] += len(done)
        self.counters["written_bytes"] += len(done) * table.spec.nbytes
        self.counters["no_space_blocks"] += kept.status.count(NO_SPACE)
        failed = kept.status.count(LATE)
        self.counters["write_errors"] += failed
        if failed:
            self._failed(f"{failed} blocks could not be written")
        elif done:
            self._answered()
        await self._made_way(kept)
        keys = [blocks[at].key for at in done]
        size = _ENTRY_BYTES
        locations = b"".join([kept.locations[at * size : (at + 1) * size] for at in done])
        try:
            ttl_s = min(ENTRY_S, namespace.settings.ttl_s or ENTRY_S)
            await self._list(namespace.directory_digest, table.part, keys, locations, ttl_s)
            gone = [at for at in done if blocks[at].gone]
            if gone:
                packs = [kept.locations[at * size : (at + 1) * size][PACK] for at in gone]
                gone_keys = [blocks[at].key for at in gone]
                await self._unlist(namespace.directory_digest, table.part, gone_keys, packs)
        except Unavailable:
            self.counters["unlisted_blocks"] += len(keys)
            self._stocked = False  # they are listed when this node looks at its own once more

    async def _made_way(self, kept: wire.Kept) -> None:
        """What was in packs that went is found no more."""
        self.counters["dropped_packs"] += len(kept.dropped)
        for digest, part, pack, packed in kept.dropped:
            gone = split_keys(packed)
            await self._unlist(digest, part, gone, [pack] * len(gone))

    async def remove(self, namespace: NamespaceState, packed: bytes) -> int:
        """Have blocks found no more, all their parts; how many there were.

        Their bytes go when little else in their objects is wanted. Raises `Unavailable` when the catalog
        does not answer: then they may be found still.
        """
        digest, keys = namespace.directory_digest, split_keys(packed)
        gone: set[bytes] = set()
        for table in namespace.tables:
            found = await self._find(digest, table.part, keys)
            there = {key: at for key, at in zip(keys, found, strict=True) if at is not None}
            if not there:
                continue
            gone |= there.keys()
            packs = [location[PACK] for location in there.values()]
            await self._drop(digest, table.part, list(there), packs)
            order = wire.ForgetBlocks(digest, table.part, b"".join(there.values()), DROP_S)
            self._tasks.begin(self._forget(order))
        return len(gone)

    async def _forget(self, order: wire.ForgetBlocks) -> None:
        store = self._store
        if store is not None:
            try:
                async with self._forgets:
                    await self._made_way(await store.forget(order))
            except KvpoolError as error:
                if self._store is store:
                    self._failed(str(error))

    async def flush(self, seconds: float) -> None:
        """Write what is worth it of all that is in memory, about what was used last first. Ends by `seconds`."""
        if not self._may_write() or seconds <= 0:
            return
        worthy = self.node.last_used_first(self._is_worthy)
        try:
            async with asyncio.timeout(seconds):
                for at in range(0, len(worthy), LOOK_BLOCKS):
                    found: dict[PartTable, list[Block]] = {}
                    for block in worthy[at : at + LOOK_BLOCKS]:
                        found.setdefault(block.table, []).append(block)
                    for table, blocks in found.items():
                        for batch in _batches(table, blocks):
                            await self._begin(table, batch)
                for _ in range(WRITES_MAX):
                    await self._writes.acquire()
        except TimeoutError:
            log.warning("not all could be written to the object store in %g s", seconds)

    def _holder(self, tenant: str) -> Holder:
        return self.node.own_holder(tenant, "store")

    # ---- what nobody waits for ---------------------------------------------------------------------

    def enter(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch: the objects of the former ones are garbage."""
        for former in namespace.tenant.epochs[namespace.base][:-1]:
            self._throw_away(former.directory_digest)

    def _throw_away(self, digest: bytes) -> None:
        if self._config.remote and len(self._garbage) < GARBAGE_MAX:
            self._garbage[digest] = None

    async def _tend(self) -> None:
        """Know whether the store answers, what is in it, and have it rid of garbage."""
        while True:
            store = self._store
            if store is not None and self._clock() >= self._retry_at:
                try:
                    if self.state is not StoreState.SERVING:
                        await store.check(wire.CheckStore(CHECK_S))
                        self._answered()
                    await self._take_stock(store)
                    await self._collect(store)
                except KvpoolError as error:
                    if self._store is store:
                        self._failed(str(error))
            await asyncio.sleep(TEND_S)

    async def _take_stock(self, store: Store) -> None:
        """List this node's own objects once a life, and all of them when the catalog lacks some."""
        everything = await self._must_scan()
        if self._stocked and not everything:
            return
        first = True
        while True:
            started = self._clock()
            packs = (await store.packs(wire.ListPacks(first, not everything, LIST_S))).packs
            if self._store is not store or not packs:
                break
            try:
                for pack in packs:
                    await self._enter(*pack)
            except Unavailable:
                self.counters["lookups_failed"] += 1  # of the catalog; begun anew when it answers
                return
            first = False
            await asyncio.sleep(self._clock() - started)  # half of the store's time is others'
        self._stocked = self._store is store
        if everything and self._stocked:
            self._scan_at = self._clock() + SCAN_PAUSE_S
            seen_by_all = catalog_is_shared(self._config) or not self._config.join
            try:
                await self.catalog.completed(SCAN_S if seen_by_all else SCAN_ALONE_S)
            except Unavailable:
                self.counters["lookups_failed"] += 1

    async def _must_scan(self) -> bool:
        if self._clock() < self._scan_at:
            return False
        try:
            if await self.catalog.complete():
                return False
            return not catalog_is_shared(self._config) or await self._leads()
        except Unavailable:
            return False

    async def _leads(self) -> bool:
        return await self._cluster.membership.lead(SCAN_CHORE)

    async def _enter(
        self, digest: bytes, part: int, data: bytes, age_s: float, packed: bytes, locations: bytes
    ) -> None:
        """A pack, or a piece of one, was found: list it, unless its epoch is over. Raises `Unavailable`."""
        try:
            record = msgspec.msgpack.decode(data, type=PackRecord)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # of another version
        if not 0 <= record.epoch < 1 << 64:
            return
        named = directory_digest(record.tenant, epoch_digest(record.base, record.epoch))
        if digest != named or part >= PARTS_MAX:
            return
        known = self._cluster.view.namespaces.get((record.tenant, record.base.hex()))
        if known is not None and known.epoch > record.epoch:
            self._throw_away(digest)
            return
        wished_s = record.ttl_s if known is None else known.settings.ttl_s
        left_s = min(ENTRY_S, wished_s - age_s if wished_s else ENTRY_S)
        if left_s > 0:
            await self._list(digest, part, split_keys(packed), locations, left_s)

    async def _collect(self, store: Store) -> None:
        """Delete objects of ended epochs: each node its own, and one of them all."""
        for digest in list(self._garbage):
            try:
                leads = await self._leads()
            except Unavailable:
                leads = False
            await store.drop(wire.DropPacks(digest, not leads, DROP_S))
            self._garbage.pop(digest, None)

    async def _listen(self) -> None:
        """Know what the process counts."""
        while True:
            store = self._store
            if store is not None:
                try:
                    said = msgspec.json.decode(await store.stats())
                except KvpoolError:
                    said = {}
                if self._store is store:
                    self._said = said
            await asyncio.sleep(LISTEN_S)

    def _answered(self) -> None:
        if self.state is StoreState.FAILING:
            log.warning("the object store at %s answers again", self._config.remote)
        self.state, self.error, self._retry_s = StoreState.SERVING, "", RETRY_S[0]
        self._retry_at = 0.0

    def _failed(self, error: str) -> None:
        """A request failed: nothing is written for a while."""
        if self.state is StoreState.FAILED:
            return
        if self.state is StoreState.FAILING and self._clock() < self._retry_at:
            return  # it was known already, and is to be tried again in time
        if self.state is not StoreState.FAILING:
            log.warning("the object store at %s fails: %s", self._config.remote, error)
            self.error = error  # of the first one: later ones may only say that it is left alone
        self.state = StoreState.FAILING
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    # ---- the operator's view -----------------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        """Plain values; empty without a store. What is used counts this node's objects only."""
        if not self._config.remote:
            return []
        said = self._said
        return [
            {
                "path": self._config.remote,
                "state": str(self.state),
                "error": self.error,
                "size_bytes": self._config.remote_bytes_max,
                "used_bytes": said.get("used_bytes", 0),
                "blocks": said.get("blocks", 0),
                "packs": said.get("packs", 0),
                "stocked": self._stocked,
                "garbage": len(self._garbage),
                "writing_blocks": len(self._under_way),
                "restarts": 0 if self._keeper is None else self._keeper.restarts,
                "attempts": said.get("attempts", 0),
                "faults": said.get("faults", {}),
                "suspended_s": said.get("suspended_s", 0.0),
                **self.counters,
            }
        ]


def folder_url(config: DaemonConfig) -> str:
    """Where the objects lie: nodes share a folder only if they agree about the epochs of namespaces."""
    folder = f"cluster/{config.cluster}" if config.join else f"node/{config.cluster}/{config.node}"
    return f"{config.remote.rstrip('/')}/{folder}"


def _together(table: PartTable) -> int:
    """Blocks of a table that go into one order."""
    held = int(table.namespace.tenant.allocator.size * HELD_SHARE) // WRITES_MAX
    return max(1, min(BATCH_MAX, min(PACK_BYTES, held) // table.stride))


def _batches(table: PartTable, blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks of one table in orders, so that chains lie together."""
    order = in_chains([block.key for block in blocks], [block.parent for block in blocks])
    most = _together(table)
    return [[blocks[at] for at in order[i : i + most]] for i in range(0, len(order), most)]


def _order(table: PartTable, blocks: Sequence[Block]) -> wire.KeepBlocks:
    namespace = table.namespace
    record = PackRecord(
        namespace.tenant.name, namespace.base, namespace.epoch, namespace.settings.ttl_s
    )
    return wire.KeepBlocks(
        digest=namespace.directory_digest,
        part=table.part,
        record=msgspec.msgpack.encode(record),
        nbytes=table.spec.nbytes,
        keys=b"".join([block.key for block in blocks]),
        parents=b"".join([block.parent or EMPTY_KEY for block in blocks]),
        depths=array("I", [block.depth for block in blocks]).tobytes(),
        checksums=b"".join([block.checksum for block in blocks]),
        segment=namespace.tenant.segment,
        stride=table.stride,
        rows=wire.pack_rows([block.row for block in blocks]),
        deadline_s=KEEP_S,
    )
