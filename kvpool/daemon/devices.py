"""A tier of spare device memory on this node: what is copied up to it, and what it gives back.

Blocks that this node's engines read again are copied up in the background, from a bounded queue. Memory may
then give up its copy as any other. Clients that have attached to the device read there directly, by leases on both
(`DeviceTier.acquire`). For others, and for peers, what is only on the device comes back through memory:
`remote.py` fetches it as it fetches from disks.

The rules of its slots are those of memory: a `Node` of its own. All of it ends with the process that owns the
memory, so a new life begins empty.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from kvpool import wire
from kvpool.config import DeviceConfig
from kvpool.daemon.blocks import Beside, Block, Holder, Lease, NamespaceState, PartTable, Tenant
from kvpool.daemon.node import Node
from kvpool.daemon.shelf import EMPTY_KEY, MISMATCH, PRESENT, ShelfState
from kvpool.daemon.space import Origin
from kvpool.daemon.tasks import Tasks
from kvpool.daemon.workers import START_S, Keeper, Worker
from kvpool.errors import (
    ConfigError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    PoolFull,
    StaleEpoch,
    Unavailable,
)
from kvpool.life import Life
from kvpool.placement.prefix import AnyOf, first_needed, needed, usable
from kvpool.placement.records import TierRecord
from kvpool.segment import Segment
from kvpool.types import PartSpec, split_keys

log = logging.getLogger("kvpool.daemon")

GRAIN = 2 << 20  # parts of tenants are whole numbers of it
PART_MIN = 20 << 20
"""The smallest part on a CUDA device. Torch cuts smaller ones from allocations that they share, and whoever
is handed a part can reach all of its allocation."""
QUEUED_MAX = 1 << 16  # blocks that were read and may be copied up
ORDER_BLOCKS, ORDER_BYTES = 256, 16 << 20  # in one order
HELD_SHARE = 1 / 32  # of a segment: what is being copied cannot be evicted, and puts need room
LIFT_S = 30.0
EXPORT_S = 1.0
TIDY_EVERY_S = 1.0
GARBAGE_BLOCKS = 500  # of ended epochs, given back in one go


def check_environment() -> None:
    """Raises `ConfigError` where there can be no such tier."""
    if find_spec("torch") is None:
        raise ConfigError(
            "device: a segment of device memory needs torch in the daemon's environment"
        )


class Device(Protocol):
    """One life of a device process, as the tier uses it. All raise `Unavailable` once it has ended.

    An order returns, raises or is cancelled only when nothing touches its rows any more, on either side.

    life: names this life; drawn at random, so that no other daemon's is called the same. life_fd: tells of its
    end (`kvpool.life`); not to be closed.
    """

    life: int

    @property
    def life_fd(self) -> int: ...

    async def lift(self, order: wire.LiftBlocks) -> None: ...

    async def lower(self, order: wire.LowerBlocks) -> wire.Pulled: ...

    async def export(self, segment: int) -> bytes: ...


class DeviceProcess(Worker):
    """The real one."""

    module = "kvpool.daemon.device"
    kind = "device"
    decode = wire.decode_device

    def __init__(self, start: wire.DeviceStart, segments: Mapping[int, Segment]) -> None:
        super().__init__()
        self._begin = start
        self._segments = segments
        self.life = secrets.randbits(63) | 1
        self._page: Life | None = None

    async def _prepare(self) -> None:
        try:
            page = self._page = Life()
        except OSError as error:
            raise Unavailable(f"no page to tell of its life: {error.strerror}") from None
        for segment_id, segment in self._segments.items():
            await self.attach(segment_id, segment)
        await self._ask(self._begin, START_S, page.fd)

    def _bury(self) -> None:
        """Whoever waits for an order hears of it; so do readers of its memory."""
        if self._page is not None:
            self._page.end()
            self._page = None

    @property
    def life_fd(self) -> int:
        if self._page is None:
            raise Unavailable("the device process has ended")
        return self._page.fd

    async def export(self, segment: int) -> bytes:
        answer = await self.order(wire.ExportSegment(segment), EXPORT_S)
        assert isinstance(answer, wire.Bytes), f"ExportSegment was answered with {answer!r}"
        return answer.data

    async def lift(self, order: wire.LiftBlocks) -> None:
        await self.order(order, order.deadline_s)

    async def lower(self, order: wire.LowerBlocks) -> wire.Pulled:
        answer = await self.order(order, order.deadline_s)
        assert isinstance(answer, wire.Pulled), f"LowerBlocks was answered with {answer!r}"
        return answer


class DeviceTier:
    """See the module. A `Lower` of `remote.py`, and the `Holdings` of the announcer of tier device.

    make_rules: rules of a tier, with nothing in them.
    """

    def __init__(
        self,
        config: DeviceConfig,
        node: Node,
        clock: Callable[[], float],
        make_rules: Callable[[], Node],
    ) -> None:
        self.node = node
        self.config = config
        self.state = ShelfState.OPENING
        self.error = ""
        self.rules = make_rules()  # of this life of the process; those of a former one bind nobody
        self._make_rules = make_rules
        self._clock = clock
        self._sizes: dict[str, int] = {}  # of each tenant's part
        self._process: Device | None = None
        self._keeper: Keeper[DeviceProcess] | None = None
        self._tasks = Tasks()
        self._queue: deque[Sequence[Block]] = deque()
        self._queued = 0
        self._awake = asyncio.Event()
        self._holders: dict[str, Holder] = {}  # of the device
        self._tickets = 0
        self._notify: Callable[[], object] = lambda: None
        self._following = False
        self.counters = {
            "written_blocks": 0,
            "written_bytes": 0,
            "read_blocks": 0,
            "read_bytes": 0,
            "leased_blocks": 0,
            "leased_bytes": 0,
            "mismatches": 0,
            "read_errors": 0,
            "write_errors": 0,
            "not_queued_blocks": 0,
        }

    # ---- life --------------------------------------------------------------------------------------

    def start(self, segments: Mapping[int, Segment]) -> None:
        """Run the process. The node serves meanwhile, and when it cannot be started.

        segments: of the tenants, by number.
        """
        self.divide()
        sizes = {tenant.segment: self._sizes[name] for name, tenant in self.node.tenants.items()}
        order = wire.DeviceStart(self.config.device, [sizes[number] for number in sorted(sizes)])
        self._tasks.begin(self._run(order, segments))
        self.begin()

    def divide(self) -> None:
        """Give tenants parts in proportion to their memory."""
        tenants = self.node.tenants.values()
        total = sum(tenant.allocator.size for tenant in tenants)
        for tenant in tenants:
            share = tenant.allocator.size / total
            size = int(self.config.size * share) // GRAIN * GRAIN
            if size < PART_MIN and self.config.device != "cpu":
                size = 0
            self._sizes[tenant.name] = size
        if not any(self._sizes.values()):
            raise ConfigError(
                f"device: {self.config.size} bytes of {self.config.device} leave no tenant a part of "
                f"{PART_MIN >> 20} MiB: give it more, or none"
            )

    def begin(self) -> None:
        """Begin what is done beside the requests."""
        self._tasks.begin(self._lift_what_is_read())
        self._tasks.begin(self._tidy())

    async def _run(self, order: wire.DeviceStart, segments: Mapping[int, Segment]) -> None:
        keeper = Keeper(lambda: DeviceProcess(order, segments), self.began, self.ended, None)
        self._keeper = keeper
        await keeper.insist(f"memory of {self.config.device}")

    def began(self, process: Device) -> None:
        """A new life of the process serves; nothing is in its memory."""
        self._renew()
        for name, size in self._sizes.items():
            if size:
                self.rules.add_tenant(name, self.node.tenants[name].segment, size)
                self._holders[name] = self.rules.add_holder(name, "", "device")
        self._process = process
        self.state, self.error = ShelfState.SERVING, ""

    def ended(self, error: str) -> None:
        """The process is dead, or cannot be started: nothing is here any more."""
        self._renew()
        self.state, self.error = ShelfState.FAILED, error

    def _renew(self) -> None:
        self._process = None
        self._holders = {}
        former, self.rules = self.rules, self._make_rules()
        if self._following:
            self.rules.follow_changes(self._notify)
        self.rules.tell_of_end(former)

    async def close(self) -> None:
        """End the process. Idempotent."""
        await self._tasks.end()
        if self._keeper is not None:
            await self._keeper.stop()

    # ---- namespaces --------------------------------------------------------------------------------

    def _open(self, namespace: NamespaceState) -> NamespaceState | None:
        """The rules' own state of a namespace; None where its blocks cannot be here."""
        known = self.rules.by_directory(namespace.directory_digest)
        if known is not None:
            return None if known.retired else known
        tenant = self.rules.tenants.get(namespace.tenant.name)
        if tenant is None or namespace.retired:
            return None
        specs = [PartSpec(table.stride) for table in namespace.tables]
        try:
            state = self.rules.open_namespace(tenant, namespace.base, namespace.fields, specs)
        except (InvalidRequest, LimitExceeded):
            return None
        state = self.rules.set_epoch(state, namespace.epoch, 0, namespace.generation)
        return state if state.epoch == namespace.epoch else None

    def _table(self, table: PartTable) -> PartTable | None:
        """What is here of a table in memory."""
        space = self.rules.by_directory(table.namespace.directory_digest)
        return None if space is None or space.retired else space.tables[table.part]

    def enter(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch: what was here of it is found no more."""
        tenant = self.rules.tenants.get(namespace.tenant.name)
        epochs = None if tenant is None else tenant.epochs.get(namespace.base)
        if epochs is not None:
            self.rules.set_epoch(epochs[-1], namespace.epoch, 0, namespace.generation)

    # ---- up ------------------------------------------------------------------------------------------

    def was_read(self, lease: Lease) -> None:
        """An engine of this node reads these. Never waits; what finds the queue full is not copied up."""
        if self.state is not ShelfState.SERVING:
            return
        for _, blocks in lease.parts.values():
            if self._queued + len(blocks) > QUEUED_MAX:
                self.counters["not_queued_blocks"] += len(blocks)
            elif blocks:
                self._queue.append(blocks)
                self._queued += len(blocks)
        self._awake.set()

    async def _lift_what_is_read(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._queue:
                blocks = self._queue.popleft()
                self._queued -= len(blocks)
                for some in self._orders(blocks):
                    await self._lift(some)
                await asyncio.sleep(0)

    def _orders(self, blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
        """Blocks of one table, so many together as go into one order."""
        table = blocks[0].table
        held = int(table.namespace.tenant.allocator.size * HELD_SHARE)
        step = max(1, min(ORDER_BLOCKS, min(ORDER_BYTES, held) // table.stride))
        for at in range(0, len(blocks), step):
            yield blocks[at : at + step]

    async def _lift(self, blocks: Sequence[Block]) -> None:
        """Copy up what is in memory still and not here; what is here counts as used."""
        table = blocks[0].table
        space = self._open(table.namespace)
        process, rules = self._process, self.rules
        if space is None or process is None or space.tables[table.part].stride != table.stride:
            return
        reader, holder = self._reader(table), self._holders[space.tenant.name]
        lease = self.node.hold(reader, blocks)
        self._tickets += 1
        ticket = self._tickets
        try:
            _, held = lease.parts[table.part]
            if not held:
                return
            keys = b"".join([block.key for block in held])
            try:
                rules.reserve(holder, space, table.part, ticket, keys)
            except (PoolFull, LimitExceeded, StaleEpoch, InvalidRequest):
                return  # no room that could be made, or the epoch has just ended
            reservation = holder.reservations.get(ticket)
            if reservation is None:
                return
            chosen = [held[index] for index in reservation.indices]
            reservation.parents = [block.parent for block in chosen]
            await process.lift(
                wire.LiftBlocks(
                    table.namespace.tenant.segment,
                    table.stride,
                    wire.pack_rows([block.row for block in chosen]),
                    wire.pack_rows(reservation.rows),
                    LIFT_S,
                )
            )
            # What was removed meanwhile is not to be found again.
            kept = [
                (index, block)
                for index, block in zip(reservation.indices, chosen, strict=True)
                if not block.gone
            ]
            if kept:
                new = rules.commit(
                    holder,
                    ticket,
                    b"".join([block.checksum for _, block in kept]),
                    [index for index, _ in kept],
                    Origin(depths=[block.depth for _, block in kept]),
                )
                rules.settle()
                self.counters["written_blocks"] += new
                self.counters["written_bytes"] += new * table.stride
        except KvpoolError as error:
            self.counters["write_errors"] += 1
            log.warning("blocks were not copied to %s: %s", self.config.device, error)
        finally:
            rules.abort(holder, ticket)
            self.node.release(reader, lease.token)

    def _reader(self, table: PartTable) -> Holder:
        return self.node.own_holder(table.namespace.tenant.name, "lifts")

    async def _tidy(self) -> None:
        """Give slots of ended epochs back."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            while self.rules.has_garbage:
                self.rules.reclaim_garbage(GARBAGE_BLOCKS)
                await asyncio.sleep(0)

    # ---- read where it is ----------------------------------------------------------------------------

    @property
    def life(self) -> int:
        """Of the process that serves; 0: none does."""
        return 0 if self._process is None else self._process.life

    async def export(self, tenant: Tenant) -> tuple[bytes, int, int] | None:
        """A handle of the tenant's part, of which life it is, and what tells of that one's end.

        The descriptor is the tier's, and good until the event loop goes on. None if there is nothing to attach to.
        """
        process = self._process
        if process is None or not self._sizes.get(tenant.name):
            return None
        try:
            handle = await process.export(tenant.segment)
            life_fd = process.life_fd
        except KvpoolError as error:
            log.warning("memory of %s was not handed to a client: %s", self.config.device, error)
            return None
        return (handle, process.life, life_fd) if process is self._process else None

    def acquire(
        self,
        holder: Holder,
        namespace: NamespaceState,
        parts: Sequence[int],
        packed: bytes,
        lease_s: float,
        now: float,
    ) -> Lease | None:
        """As `Node.acquire` of memory, for a client that reads the device by itself: a lease on both.

        What is on the device is leased there, whether it is in memory as well or not. What is leased here
        ends with the lease, however that does.
        """
        rules, node, life = self.rules, self.node, self.life
        node.settle()
        rules.settle()
        keys = split_keys(packed)
        tables = node.tables_of(namespace, parts)
        lifted = [self._lifted(table) for table in tables]
        specs = [table.spec for table in tables]
        held = [AnyOf((table.blocks, above)) for table, above in zip(tables, lifted, strict=True)]
        n = usable(specs, held, keys)
        here: dict[int, list[Block | None]] = {}
        below: dict[int, tuple[int, list[Block]]] = {}
        chosen: dict[int, tuple[int, list[Block]]] = {}
        for table, above in zip(tables, lifted, strict=True):
            part, wanted = table.part, needed(table.spec, keys[:n])
            first = first_needed(table.spec, n) - table.spec.stride + 1
            here[part] = [above.get(key) for key in wanted]
            chosen[part] = first, [block for block in here[part] if block is not None]
            below[part] = first, [table.blocks[key] for key in wanted if key not in above]
        if not any(blocks for _, blocks in chosen.values()):
            return node.acquire(holder, namespace, parts, packed, lease_s, now)
        own = self._holders[namespace.tenant.name]
        try:
            direct = rules.lease(own, chosen, n, None, now)
        except LimitExceeded:  # very many readers of the device at a time: then without
            return node.acquire(holder, namespace, parts, packed, lease_s, now)
        try:
            lease = node.lease(holder, below, n, lease_s, now)
        except KvpoolError:
            rules.release(own, direct.token)
            raise
        nbytes = sum(block.table.spec.nbytes for _, blocks in chosen.values() for block in blocks)
        lease.beside = Beside(life, here, lambda: rules.release(own, direct.token), nbytes)
        self.counters["leased_blocks"] += sum(len(blocks) for _, blocks in chosen.values())
        self.counters["leased_bytes"] += nbytes
        return lease

    def _lifted(self, table: PartTable) -> Mapping[bytes, Block]:
        """What is here of a table in memory, by settled books."""
        own = self._table(table)
        return own.blocks if own is not None and own.stride == table.stride else {}

    # ---- back ----------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether there is anything to be had from here."""
        return self.state is ShelfState.SERVING

    def held(self, table: PartTable) -> list[Container[bytes]]:
        """See `Tiers.held`."""
        own = self._table(table)
        return [own.blocks] if own is not None and own.blocks else []

    async def read(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> wire.Pulled:
        """Copy blocks into reserved rows of their table in memory: as `Movers.pull`.

        When this ends, however it does, nothing writes to the rows any more. What does not match its
        checksum is not found here again.
        """
        status, checksums = bytearray(len(keys)), [EMPTY_KEY] * len(keys)
        rules, process, own = self.rules, self._process, self._table(table)
        lease = None
        if own is not None and process is not None:
            holder = self._holders[own.namespace.tenant.name]
            packed = b"".join(keys)
            lease = rules.acquire(
                holder, own.namespace, [own.part], packed, None, self._clock(), scattered=True
            )
        if own is None or process is None or lease is None:
            return wire.Pulled(bytes(status), b"".join(checksums), 0.0)
        found = {block.key: block for block in lease.parts[own.part][1]}
        at = [index for index, key in enumerate(keys) if key in found]
        blocks = [found[keys[index]] for index in at]
        try:
            pulled = await process.lower(
                wire.LowerBlocks(
                    segment=table.namespace.tenant.segment,
                    stride=table.stride,
                    nbytes=table.spec.nbytes,
                    rows=wire.pack_rows([rows[index] for index in at]),
                    device_rows=array("I", [block.row for block in blocks]).tobytes(),
                    checksums=b"".join([block.checksum for block in blocks]),
                    deadline_s=seconds,
                )
            )
        except KvpoolError:
            self.counters["read_errors"] += 1
            raise
        finally:
            rules.release(holder, lease.token)
        for index, block, one in zip(at, blocks, pulled.status, strict=True):
            status[index] = one
            if one == PRESENT:
                checksums[index] = block.checksum
            elif one == MISMATCH:
                rules.drop_corrupt(own.namespace, own.part, block.key)
        came = pulled.status.count(PRESENT)
        self.counters["read_blocks"] += came
        self.counters["read_bytes"] += came * table.spec.nbytes
        self.counters["mismatches"] += pulled.status.count(MISMATCH)
        return wire.Pulled(bytes(status), b"".join(checksums), pulled.seconds, pulled.error)

    # ---- for the directory -------------------------------------------------------------------------

    def follow_changes(self, changed: Callable[[], object]) -> None:
        """See `Node.follow_changes`."""
        self._notify, self._following = changed, True
        self.rules.follow_changes(changed)

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]:
        """See `Node.take_changes`; the namespaces are this tier's own."""
        return self.rules.take_changes()

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Node.masks`."""
        return self.rules.masks(digest, keys)

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `Node.walk`."""
        return self.rules.walk(cursor, count)

    # ---- the operator's view -----------------------------------------------------------------------

    def remove(self, namespace: NamespaceState, packed: bytes) -> int:
        """Forget blocks, all their parts; how many there were."""
        space = self.rules.by_directory(namespace.directory_digest)
        return 0 if space is None else self.rules.remove(space, packed)

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are in use."""
        return sum(tenant.allocator.bytes_used for tenant in self.rules.tenants.values())

    def record(self) -> TierRecord:
        """The tier as others are told of it."""
        return TierRecord("device", sum(self._sizes.values()), self.used_bytes)

    def stats(self) -> dict[str, Any]:
        """Plain values, by the names that disks have for theirs."""
        return {
            "path": self.config.device,
            "state": str(self.state),
            "error": self.error,
            "size_bytes": self.config.size,
            "segment_bytes": sum(self._sizes.values()),
            "used_bytes": self.used_bytes,
            "blocks": self.rules.block_count(),
            "queued_blocks": self._queued,
            "gone": self.rules.gone(),
            **self.counters,
        }
