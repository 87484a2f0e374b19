"""Disks of simulated machines: what lies on them outlives processes, which die in the middle of everything.

What a disk process promises is kept, and nothing more. An order to write makes its deletions durable, then
fills slots in any order; what is answered is durable. Of an order that never is, each block is left as it
was, torn, or whole with its entry. So an entry never answers for bytes that were not all written, unless
bits turn on the disk; then the checksum tells.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from xxhash import xxh3_128_digest

from kvpool.daemon.core.blocks import PIN_NONE, Block
from kvpool.daemon.tiers.ssd_books import Slots
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.workers.disk_proxy import Disk
from kvpool.daemon.workers.disk_worker import READ_JOBS, WRITE_JOBS
from kvpool.errors import LimitExceeded, Unavailable
from kvpool.storage.ssd.index import ENTRY, FORGET
from kvpool.types import BlockStatus, split_keys
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire
from tests.sim.simulation.memory import Memory, Use, Violation
from tests.sim.simulation.network import wire_rows
from tests.sim.simulation.threads import Threads

if TYPE_CHECKING:
    from tests.sim.simulation.nodes import Life

NO_SPACE = 4  # `Written.status`
GRACE_S = 0.5  # after an order's deadline; then its process is killed
KILL_S = 0.5  # for a killed process to end; then it is left alone
OPEN_AGAIN_S = 0.3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry of an index."""

    key: bytes
    parent: bytes
    checksum: bytes
    table: int
    nbytes: int
    depth: int
    generation: int
    pin: int


class DurableMedia:
    """What lies on one disk: bytes, and the index that says whose they are.

    pace_s: what a step of an order takes at most. troubles: what is wrong with it at present: see
    `Nemesis`. bad_pages: those that keep nothing. holds_on: while it does not move, its processes cannot be ended.
    """

    def __init__(
        self, pages: int, page: int, entries_max: int, pace_s: float, *, holds_on: bool = False
    ) -> None:
        self.page = page
        self.pace_s = pace_s
        self.entries_max = entries_max
        self.surface = Memory(pages * page, page)
        self.entries: dict[int, Stored] = {}
        self.tables: dict[int, bytes] = {}
        self.troubles: set[str] = set()
        self.bad_pages: set[int] = set()
        self.moving = asyncio.Event()
        self.moving.set()
        self.holds_on = holds_on
        self._owner: list[int | None] = [None] * pages  # the entry that a page belongs to
        self._next_table = 1
        self._generation = 0

    def empty(self) -> DurableMedia:
        """Another one, as this one was when it was new."""
        pages = self.size // self.page
        return DurableMedia(pages, self.page, self.entries_max, self.pace_s, holds_on=self.holds_on)

    @property
    def size(self) -> int:
        return len(self.surface.data)

    def slot(self, nbytes: int) -> int:
        return -(-nbytes // self.page) * self.page

    def _pages(self, offset: int, nbytes: int) -> range:
        return range(offset // self.page, (offset + self.slot(nbytes)) // self.page)

    def use(self, what: str, nbytes: int, offsets: Iterable[int], now: float, writes: bool) -> Use:
        # By pages: a tenant's part of the disk need not begin at a multiple of its slots.
        pages = [page for offset in offsets for page in self._pages(offset, nbytes)]
        return self.surface.use(what, self.page, pages, now, writes=writes)

    def table(self, record: bytes, instead: int = 0) -> int:
        """The number of a table; a new one for a record that is new, unless it replaces another's."""
        if instead:
            self.tables[instead] = record
            return instead
        for number, known in self.tables.items():
            if known == record:
                return number
        self.tables[self._next_table] = record
        self._next_table += 1
        return self._next_table - 1

    def forget(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            stored = self.entries.pop(offset, None)
            if stored is not None:
                for page in self._pages(offset, stored.nbytes):
                    self._owner[page] = None

    def pin(self, offsets: Iterable[int], level: int) -> None:
        for offset in offsets:
            if offset in self.entries:
                self.entries[offset] = replace(self.entries[offset], pin=level)

    def check_free(self, offset: int, nbytes: int) -> None:
        """Raises `Violation` if the index has a block here, which something is to be written over."""
        for page in self._pages(offset, nbytes):
            held = self._owner[page]
            if held is not None:
                raise Violation(
                    f"a slot at {offset} is written over block {self.entries[held].key[:4].hex()} "
                    f"at {held}, which the index has still"
                )

    def write(self, offset: int, data: bytes) -> None:
        """Fill a slot, or some of it, that nothing answers for."""
        self.check_free(offset, len(data))
        self.surface.write(offset, data)

    def keeps(self, offset: int, nbytes: int) -> bool:
        """Whether all of a slot can be read."""
        return self.bad_pages.isdisjoint(self._pages(offset, nbytes))

    def enter(self, offset: int, stored: Callable[[int], Stored]) -> bool:
        """Answer for what was written; False if the index has no room."""
        if len(self.entries) >= self.entries_max:
            return False
        self._generation += 1
        entry = self.entries[offset] = stored(self._generation)
        for page in self._pages(offset, entry.nbytes):
            self._owner[page] = offset
        return True

    def is_right(self, offset: int) -> bool:
        """Whether what lies there is what the index says."""
        stored = self.entries[offset]
        right = xxh3_128_digest(self.surface.read(offset, stored.nbytes)) == stored.checksum
        return right and self.keeps(offset, stored.nbytes)

    def packed(self) -> np.ndarray[Any, Any]:
        """All entries, as an index tells them."""
        entries = np.zeros(len(self.entries), ENTRY)
        for at, (offset, stored) in enumerate(self.entries.items()):
            entry = entries[at]
            entry["offset"], entry["generation"] = offset, stored.generation
            entry["table"], entry["nbytes"] = stored.table, stored.nbytes
            entry["depth"], entry["pin"] = stored.depth, stored.pin
            for name in ("key", "parent", "checksum"):
                entry[name] = np.frombuffer(getattr(stored, name), np.uint8)
        return entries


@dataclass(eq=False, slots=True)
class Writing:
    """An order to write that is not answered.

    number: of its deletions. left: blocks that are not durable. operations: pin levels of its slots that
    came while it was under way, or FORGET. begun: a thread has it.
    """

    order: storage_wire.WriteBlocks
    number: int
    offsets: list[int]
    rows: list[int]
    left: dict[int, None]
    operations: dict[int, int] = field(default_factory=dict)
    begun: bool = False


class SimulatedDisk:
    """One life of a disk process: a `Disk`. Its work is done in a domain of its own."""

    def __init__(self, life: Life, media: DurableMedia, rng: random.Random, name: str) -> None:
        self.world = life.world
        self.media = media
        self.name = name
        self.alive = True  # takes orders
        self.killed = self.gone = False
        self.ended = asyncio.Event()  # or it was killed, and left alone
        self.ready: storage_wire.DiskReady
        self._life = life
        self._rng = rng
        self._orders: dict[asyncio.Task[Any], None] = {}
        self._uses: dict[Use, Memory] = {}
        self._writes: dict[Writing, None] = {}
        self._queued = self._durable = 0
        # By number, what is queued and not durable: slots, and their pin level or FORGET.
        self._operations: list[tuple[int, list[int], int]] = []
        self._scanned = 0
        limits = life.world.plan.limits
        self._main = Threads(1)
        self._readers = Threads(limits.get("loads", READ_JOBS))
        self._writers = Threads(limits.get("disk_writers", WRITE_JOBS))
        self._reads = 0  # under way

    # ---- life and death ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Raises `Unavailable`, and the process has ended."""
        await asyncio.sleep(self._rng.uniform(0.001, 0.05))
        if "closed" in self.media.troubles:
            self.die("cannot open its folder")
            raise Unavailable(f"{self.name} cannot be opened")
        tables = list(self.media.tables.items())
        self.ready = storage_wire.DiskReady(self.media.size, self.media.entries_max, False, tables)

    def die(self, why: str) -> None:
        """It is killed, and leaves what it was at as a crash does, if it can be ended. Idempotent."""
        if self.gone or self.killed:
            return
        self.killed = True
        if self.media.holds_on and not self.media.moving.is_set():
            self.world.note(f"the process of {self.name} does not end: {why}")
            self.world.loop.call_later(KILL_S, self._leave_alone, context=self._life.disk.context)
        else:
            self.perish(why)

    def _leave_alone(self) -> None:
        """It hangs in the kernel: what it may still write to is not touched until it has ended."""
        if not self.gone:
            self.world.count("disk processes that could not be ended")
            self.alive = False
            self.ended.set()

    def perish(self, why: str) -> None:
        """It is gone. Idempotent."""
        if self.gone:
            return
        self.gone, self.alive = True, False
        self.world.note(f"the process of {self.name} ends: {why}")
        self._commit_up_to(self._rng.randint(self._durable, self._queued))
        for writing in self._writes:
            if writing.begun and writing.number <= self._durable:
                self._break_off(writing)
        for use, memory in self._uses.items():
            memory.end(use)
        for task in self._orders:
            task.cancel()
        self.ended.set()

    def _break_off(self, writing: Writing) -> None:
        rng, nbytes = self._rng, writing.order.nbytes
        for index in list(writing.left):
            outcome = rng.choice(("untouched", "torn", "whole"))
            self.world.count(f"writes broken off: {outcome}")
            if outcome == "torn":
                self.media.write(writing.offsets[index], rng.randbytes(rng.randint(1, nbytes)))
            elif outcome == "whole":
                self._store(writing, index)

    # ---- orders --------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if not self.alive:
            raise Unavailable(f"the process of {self.name} has ended")

    async def _order(
        self,
        threads: Threads,
        work: Callable[[asyncio.Event], Coroutine[Any, Any, T]],
        deadline_s: float,
        uses: Iterable[tuple[Memory, Use]] = (),
        *,
        fills: bool = False,
    ) -> T:
        """As `Worker.order`: ends, however it does, when the process has nothing to do with it any more.

        work: is given what is set when nobody waits for it any more. fills: it writes to memory, so that a process that
        cannot be ended keeps it.
        """
        self._uses.update((use, memory) for memory, use in uses)
        stop, begun = asyncio.Event(), asyncio.Event()

        async def in_a_thread() -> T:
            self.world.count("orders that waited for a thread of a disk", not threads.free)
            async with threads.one():
                begun.set()
                return await work(stop)

        loop = self.world.loop
        task = loop.create_task(in_a_thread(), context=self._life.disk.context)
        left = loop.create_task(self.ended.wait()) if self.media.holds_on else None
        self._orders[task] = None
        seconds = deadline_s + GRACE_S
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            waited_for = [task] if left is None or fills or left.done() else [task, left]
            try:
                await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    cancelled = error
                    seconds = GRACE_S
                    stop.set()
                    if threads is self._readers and not begun.is_set():
                        task.cancel()
                continue
            if left is not None and left.done() and not self.gone and not fills:
                break  # left alone
            if not task.done():
                self.die("it does not answer")
        if left is not None:
            left.cancel()
        if task.done():
            del self._orders[task]
        for memory, use in uses:
            # What it may still do to its disk, it may.
            if task.done() or memory is not self.media.surface:
                memory.end(use)
                del self._uses[use]
        if cancelled is not None:
            if task.done() and not task.cancelled():
                task.exception()  # seen
            raise cancelled
        if not task.done() or task.cancelled():
            raise Unavailable(f"the process of {self.name} ended")
        return task.result()

    async def _take_time(self) -> None:
        media, rng = self.media, self._rng
        slow = "slow" in media.troubles
        await asyncio.sleep(rng.uniform(0.05, 0.6) if slow else rng.uniform(0.0001, media.pace_s))
        await media.moving.wait()
        if self.killed:
            self.perish("its disk moves again")
            await asyncio.sleep(0)  # cancelled
        if "doomed" in media.troubles:
            media.troubles.discard("doomed")
            self.die("in the middle of an order")
            await asyncio.sleep(0)  # cancelled

    def _drawn(self, trouble: str) -> bool:
        return trouble in self.media.troubles and self._rng.random() < 0.5

    # ---- the index -----------------------------------------------------------------------------------

    async def scan(self, count: int) -> storage_wire.Scanned:
        self._check_alive()

        async def scan(_: asyncio.Event) -> storage_wire.Scanned:
            await self._take_time()
            found = self.media.packed()[self._scanned : self._scanned + count]
            self._scanned += len(found)
            return storage_wire.Scanned(found.tobytes())

        return await self._order(self._main, scan, GRACE_S)

    async def entries_of(self, order: storage_wire.ReadEntries) -> storage_wire.Scanned:
        self._check_alive()

        async def read(_: asyncio.Event) -> storage_wire.Scanned:
            await self._take_time()
            found = self.media.packed()
            asked = np.frombuffer(order.slots, dtype=np.uint64)
            return storage_wire.Scanned(found[np.isin(found["offset"], asked)].tobytes())

        return await self._order(self._readers, read, order.deadline_s)

    async def add_table(self, record: bytes, table: int = 0) -> int:
        self._check_alive()

        async def add(_: asyncio.Event) -> int:
            await self._take_time()
            if self._drawn("keeps"):
                raise LimitExceeded(f"the index of {self.name} takes nothing new")
            return self.media.table(record, table)

        return await self._order(self._main, add, GRACE_S)

    async def drop_tables(self, tables: list[int]) -> None:
        self._check_alive()

        async def drop(_: asyncio.Event) -> None:
            await self._take_time()
            if self._drawn("keeps"):
                raise Unavailable(f"the index of {self.name} takes no changes")
            for stored in self.media.entries.values():
                if stored.table in tables:
                    raise Violation(
                        f"{self.name} drops the table of block {stored.key[:4].hex()}, which it has"
                    )
            for number in tables:
                self.media.tables.pop(number, None)

        await self._order(self._main, drop, GRACE_S)

    async def forget(self, order: storage_wire.ForgetSlots) -> None:
        await self._operate(order.slots, FORGET, order.deadline_s)

    async def pin(self, order: storage_wire.PinSlots) -> None:
        await self._operate(order.slots, order.level, order.deadline_s)

    async def _operate(self, slots: bytes, operation: int, deadline_s: float) -> None:
        self._check_alive()
        number = self._queue(slots, operation)

        async def wait(_: asyncio.Event) -> None:
            await self._take_time()
            if not self._commit(number):
                raise Unavailable(f"the index of {self.name} takes no changes")

        await self._order(self._writers, wait, deadline_s)

    def _queue(self, packed: bytes, operation: int) -> int:
        """Have entries changed soon; the number to wait for. Entries that are being made are changed too."""
        offsets = _slots(packed)
        if offsets:
            self._queued += 1
            self._operations.append((self._queued, offsets, operation))
            for writing in self._writes:
                for offset in set(offsets).intersection(writing.offsets):
                    writing.operations[offset] = operation
        return self._queued

    def _commit(self, number: int) -> bool:
        """Make changes up to this one durable; False if the index refuses. It keeps them then."""
        if number > self._durable:
            if self._drawn("keeps"):
                self.world.count("changes refused by an index")
                return False
            self._commit_up_to(self._rng.randint(number, self._queued))
        return True

    def _commit_up_to(self, number: int) -> None:
        while self._operations and self._operations[0][0] <= number:
            _, offsets, operation = self._operations.pop(0)
            if operation == FORGET:
                self.media.forget(offsets)
            else:
                self.media.pin(offsets, operation)
        self._durable = max(self._durable, number)

    # ---- bytes ---------------------------------------------------------------------------------------

    async def write(self, order: storage_wire.WriteBlocks) -> storage_wire.Written:
        self._check_alive()
        number, offsets, rows = (
            self._queue(order.forget, FORGET),
            _slots(order.slots),
            wire_rows(order.rows),
        )
        memory, now = self._life.segments[order.segment], self.world.now()
        what = f"an order to write to {self.name}"
        uses = [
            (memory, memory.use(what, order.stride, rows, now, writes=False)),
            (
                self.media.surface,
                self.media.use(what, order.nbytes, offsets, now, writes=True),
            ),
        ]
        left = dict.fromkeys(range(len(offsets)))
        writing = Writing(order, number, offsets, rows, left)
        self._writes[writing] = None
        try:
            return await self._order(
                self._writers, lambda _: self._write(writing), order.deadline_s, uses
            )
        finally:
            self._writes.pop(writing)

    async def _write(self, writing: Writing) -> storage_wire.Written:
        rng, media = self._rng, self.media
        writing.begun = True
        n = len(writing.offsets)
        await self._take_time()
        if not self._commit(writing.number):
            return storage_wire.Written(bytes([BlockStatus.FAILED]) * n, 0.0)
        status = bytearray(n)
        order = rng.sample(range(n), n)
        middle = rng.randrange(n + 1)
        for group in (order[:middle], order[middle:]):
            if group:
                await self._take_time()
            for index in group:
                if self._drawn("refuses"):
                    media.write(writing.offsets[index], rng.randbytes(writing.order.nbytes))
                    status[index] = rng.choice((BlockStatus.FAILED, BlockStatus.NO_SPACE))
                else:
                    status[index] = self._store(writing, index)
                del writing.left[index]
        self.world.count("blocks written down", status.count(BlockStatus.PRESENT))
        keys = " ".join(key[:4].hex() for key in split_keys(writing.order.keys))
        self.world.note(f"{self.name} takes {keys}: {status.hex()[1::2]}")
        if self.world.may_die("an index commit and its answer"):
            if rng.random() < 0.5:
                self.die("it has written, and not answered")
            else:
                self.world.dies(self._life)
            await asyncio.sleep(0)  # cancelled
        return storage_wire.Written(bytes(status), 0.0)

    def _store(self, writing: Writing, index: int) -> int:
        """One block becomes durable, with its entry; its status."""
        order, offset = writing.order, writing.offsets[index]
        memory = self._life.segments[order.segment]
        data = memory.read(writing.rows[index] * order.stride, order.nbytes)
        key, parent, checksum = (
            packed[16 * index : 16 * index + 16]
            for packed in (order.keys, order.parents, order.checksums)
        )
        if xxh3_128_digest(data) != checksum:
            raise Violation(
                f"{self.name} is to keep {key[:4].hex()}, and is given "
                f"{self.world.contents.recognise(data)}"
            )
        if order.table not in self.media.tables:
            raise Violation(f"{self.name} has no table {order.table}")
        self._put(offset, data)
        depth = wire_rows(order.depths)[index]
        operation = writing.operations.get(offset, PIN_NONE)
        entered = operation == FORGET or self.media.enter(
            offset,
            lambda generation: Stored(
                key, parent, checksum, order.table, order.nbytes, depth, generation, operation
            ),
        )
        return BlockStatus.PRESENT if entered else BlockStatus.NO_SPACE

    def _put(self, offset: int, data: bytes) -> None:
        """Write a block, as this disk writes."""
        media = self.media
        if self._drawn("loses"):
            media.check_free(offset, len(data))
            self.world.count("writes lost by disks")
        elif self._drawn("misdirects"):
            media.check_free(offset, len(data))
            slot = media.slot(len(data))
            media.surface.write(slot * self._rng.randrange(media.size // slot), data)
            self.world.count("writes misdirected by disks")
        else:
            media.write(offset, data)

    async def read(self, order: storage_wire.ReadBlocks) -> worker_wire.Pulled:
        self._check_alive()
        offsets, rows = _slots(order.slots), wire_rows(order.rows)
        memory, now = self._life.segments[order.segment], self.world.now()
        what = f"an order to read from {self.name}"
        uses = [
            (memory, memory.use(what, order.stride, rows, now, writes=True)),
            (
                self.media.surface,
                self.media.use(what, order.nbytes, offsets, now, writes=False),
            ),
        ]
        places = [row * order.stride for row in rows]
        deadline = now + order.deadline_s

        async def read(stop: asyncio.Event) -> worker_wire.Pulled:
            await self._take_time()
            if stop.is_set() or self.world.now() >= deadline:
                late = bytes([BlockStatus.LATE]) * len(rows)
                return worker_wire.Pulled(late, b"", 0.0, "not begun in time")
            into = (memory, places)
            status = await self._read(offsets, order.nbytes, order.checksums, into)
            self.world.count("blocks read from disks", status.count(BlockStatus.PRESENT))
            return worker_wire.Pulled(status, b"", self.world.now() - now)

        if self._reads >= self._readers.count:
            raise Violation(f"more is to be read from {self.name} at a time than it can")
        self._reads += 1
        try:
            return await self._order(self._readers, read, order.deadline_s, uses, fills=True)
        finally:
            self._reads -= 1

    async def scrub(self, order: storage_wire.ScrubBlocks) -> storage_wire.Written:
        self._check_alive()
        offsets = _slots(order.slots)
        surface, now = self.media.surface, self.world.now()
        what = f"an order to scrub {self.name}"
        use = self.media.use(what, order.nbytes, offsets, now, writes=False)

        async def scrub(_: asyncio.Event) -> storage_wire.Written:
            return storage_wire.Written(
                await self._read(offsets, order.nbytes, order.checksums), 0.0
            )

        return await self._order(self._writers, scrub, order.deadline_s, [(surface, use)])

    async def _read(
        self,
        offsets: list[int],
        nbytes: int,
        checksums: bytes,
        into: tuple[Memory, list[int]] | None = None,
    ) -> bytes:
        """Statuses. into: which memory, and where to in it; None: nowhere."""
        status = bytearray(len(offsets))
        cut = self._rng.randrange(nbytes + 1)
        wanted = split_keys(checksums)
        for index, offset in enumerate(offsets):
            stored = self.media.entries.get(offset)
            if stored is None or stored.checksum != wanted[index]:
                raise Violation(
                    f"a slot at {offset} of {self.name} is read, and the index knows of no such block"
                )
            if into is not None:
                into[0].write(into[1][index], self.media.surface.read(offset, cut))
        await self._take_time()
        for index, offset in enumerate(offsets):
            data = self.media.surface.read(offset, nbytes)
            if self._drawn("unreadable") or not self.media.keeps(offset, nbytes):
                data, status[index] = self._rng.randbytes(nbytes), BlockStatus.FAILED
            else:
                status[index] = (
                    BlockStatus.PRESENT
                    if xxh3_128_digest(data) == wanted[index]
                    else BlockStatus.MISMATCH
                )
                self.world.count("blocks broken on disks", status[index] == BlockStatus.MISMATCH)
            if into is not None:
                into[0].write(into[1][index], data)
        return bytes(status)

    async def stats(self) -> bytes:
        self._check_alive()
        return b"{}"


class Drive:
    """Keeps one disk of a life of a node running: what `WorkerSupervisor` does with real processes."""

    def __init__(
        self, life: Life, device: SsdDevice, media: DurableMedia, rng: random.Random
    ) -> None:
        self.life = life
        self.device = device
        self.media = media
        self.disk: SimulatedDisk | None = None
        self._rng = rng
        self._starts = 0

    def die(self, why: str) -> None:
        if self.disk is not None:
            self.disk.die(why)

    def perish(self) -> None:
        """With its node."""
        if self.disk is not None:
            self.disk.perish("its node does")

    async def run(self) -> None:
        rng, device = self._rng, self.device
        while True:
            self._starts += 1
            name = f"{self.life.name}{device.path}.{self._starts}"
            draws = random.Random(rng.random())
            disk = self.disk = SimulatedDisk(self.life, self.media, draws, name)
            try:
                await disk.open()
            except Unavailable as error:
                device.ended(str(error))
                await asyncio.sleep(OPEN_AGAIN_S)
                continue
            restore = self.life.server.daemon.ssd.processes.restore(device, cast(Disk, disk))
            self.life.world.spawn(restore, self.life.control)
            await disk.ended.wait()
            # Whoever waits for an order may hear of the end first, or later.
            await asyncio.sleep(rng.choice((0.0, 0.0005)))
            device.ended("its process ended")
            if not disk.gone:
                await self.media.moving.wait()
                disk.perish("its disk moves again")
            await asyncio.sleep(rng.choice((0.005, 0.1, 0.5)) * rng.random() + 0.001)


def offsets(device: SsdDevice) -> dict[int, Block]:
    """Where the blocks of a device lie, as its rules know it."""
    device.rules.settle()
    return {
        device.bases[name] + block.row * table.stride: block
        for name, tenant in device.rules.tenants.items()
        for namespace in tenant.namespaces.values()
        for table in namespace.tables
        for block in table.blocks.values()
    }


def unsettled(device: SsdDevice, media: DurableMedia) -> str:
    """What is not as it has to be where nothing is under way: the rules, and the disk, say the same."""
    node = device.rules
    if device.state in {TierState.OPENING, TierState.FAILED}:
        return f"is {device.state}: {device.error}"
    if device.counted.writing_bytes or node.leases.count:
        return f"is at {device.counted.writing_bytes} bytes of writes and {node.leases.count} reads"
    if node.ended_epochs or device.given_up:
        return f"is to forget {len(device.given_up)} slots"
    for tenant in node.tenants.values():
        used = sum(
            block.table.stride
            for block in offsets(device).values()
            if block.table.namespace.tenant is tenant
        )
        assert isinstance(tenant.allocator, Slots)
        used += tenant.allocator.retired_bytes
        if tenant.allocator.bytes_used != used:
            return f"has {tenant.allocator.bytes_used} bytes in use, and blocks of {used}"
    there = {
        offset: (block.key, block.pin, block.depth) for offset, block in offsets(device).items()
    }
    known = {
        offset: (stored.key, stored.pin, stored.depth) for offset, stored in media.entries.items()
    }
    if there != known:
        wrong = sorted(there.items() ^ known.items())
        return f"has other blocks than its index, {len(wrong)} differences, at {wrong[0][0]}"
    return ""


def _slots(packed: bytes) -> list[int]:
    return list(memoryview(packed).cast("Q"))
