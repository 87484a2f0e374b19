"""Blocks that are not in memory here, for this node's clients: where to look, whom to ask, when to ask another.

This node's own disks are one more source, as `LOCAL`; object storage is another, as `STORE`. The path of a
remote acquire:

1. The disks here hold some of what is missing. Of the rest the directory says who holds what (or,
   without one, the peers are asked), and the catalog what lies in object storage.
2. The hit rule over all living replicas gives the prefix that can be had; of that, what is missing here.
3. Where the engine says how fast it computes, what it computes sooner than it comes is left out.
4. Each missing part is given to the peer that should deliver it soonest; several work in parallel.
5. A part that is on its way for somebody else is waited for, not fetched twice.
6. A peer that takes longer than it should is given a rival: the next replica's peer. The first to
   deliver wins, the other one is called off.
7. What a peer does not have is remembered for a while, and asked of the next one.

All this ends by the caller's deadline, with what has arrived by then. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, filterfalse, groupby, repeat
from typing import Any, NamedTuple, Protocol

from kvpool import wire
from kvpool.daemon.ahead import REST_S, Ahead, Batch
from kvpool.daemon.blocks import Holder, NamespaceState, PartTable
from kvpool.daemon.node import Node
from kvpool.daemon.pulling import pull_order
from kvpool.daemon.space import OWN, Origin
from kvpool.daemon.tasks import crash_if_failed
from kvpool.daemon.tracing import CALLED_OFF
from kvpool.daemon.traffic import Delivered, Loads
from kvpool.daemon.worth import Choice, Sources, choose
from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NamespaceMismatch,
    PoolFull,
    Unavailable,
)
from kvpool.placement.directory import TIERS, Directory, Entry
from kvpool.placement.prefix import AnyOf, needed, somewhere, usable
from kvpool.placement.records import NodeRecord
from kvpool.placement.sources import (
    HEDGE_TIMES,
    TRIAL_S,
    Candidate,
    NegativeMemory,
    Peers,
    Remembered,
    faster,
    plan,
)
from kvpool.spans import LOOKUP, READ, TRANSFER, Span, child, current, working_for
from kvpool.types import KEY_BYTES, Recompute, split_keys

log = logging.getLogger("kvpool.daemon")

LOOKUP_SHARE = 0.25  # of the time there is: longest wait for who has what
LOOKUP_KEYS = (
    2048  # asked of the directory at a time; a prefix that ends within them is not asked on
)
ASKED_MAX = 16  # peers that are asked where there is no directory
SLICE_BYTES = 8 << 20  # given to one peer at a time, so that others can share the work
ORDER_BYTES = 64 << 20  # in one transfer
ROUNDS_MAX = 8  # shorter and shorter prefixes, when the directory was wrong
RIVALS_MAX = 2  # transfers of one part of a block at a time
FLIGHT_S = 1.0  # a transfer goes on for at least so long, whoever still waits: others will want it
FLIGHTS_MAX = 256
TRIAL_BYTES = 1 << 20  # loaded to learn how fast a source is, or one block where that is more
NEGATIVE_S, NEGATIVE_MAX = 2.0, 1 << 16
REMEMBERED_MAX = 1 << 18
PRESENT, MISMATCH = 1, 2  # `Pulled.status`

SECONDARY = Origin(secondary=True)
LOCAL = b"kvp-disk"  # stands for this node's disks where others are known by their incarnations
DEVICE = b"kvp-device"  # the same for its spare device memory; longer than an incarnation, as none can be
STORE = b"kvp-store"  # the same for object storage; longer than an incarnation, as none can be
NOT_NODES = {LOCAL: "ssd of this node", DEVICE: "device of this node", STORE: "object storage"}
TIER_OF = {LOCAL: "ssd", DEVICE: "device", STORE: "remote"}
PEER = "peer"  # the tier of all that other nodes have
GONE = "gone"  # who delivered it is no member any more


class Living(NamedTuple):
    """A node that lives, and where to reach it."""

    record: NodeRecord
    url: str


class Carrier(Protocol):
    """What moves bytes and questions: the movers."""

    async def pull(self, order: wire.PullBlocks) -> wire.Pulled: ...

    async def ask(self, order: wire.AskPeer) -> wire.Done | wire.Bytes: ...


class Lower(Protocol):
    """The tiers below memory on this node."""

    @property
    def any(self) -> bool:
        """Whether there are any."""

    def held(self, table: PartTable) -> Sequence[Container[bytes]]:
        """Sets of keys that together are what is there of a table in memory."""

    async def read(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> wire.Pulled:
        """Read blocks into reserved rows; as `Carrier.pull`."""


class Beyond(Protocol):
    """Object storage, shared by all nodes."""

    @property
    def any(self) -> bool:
        """Whether there is any."""

    async def where(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        *,
        prefix: bool = False,
    ) -> Mapping[bytes, int]:
        """Which parts of these keys are there, as masks. prefix: not asked on where it ends.

        Raises `Unavailable`.
        """

    async def read(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> wire.Pulled:
        """Read blocks into reserved rows; as `Carrier.pull`."""


class Neighbours(Protocol):
    """What a node knows of its cluster."""

    @property
    def living(self) -> Mapping[bytes, Living]:
        """The others, by incarnation, that may be pulled from."""

    @property
    def directory(self) -> Directory | None: ...

    def met(self, namespace: NamespaceState, keys: Sequence[bytes], entry: Entry) -> None:
        """The directory has this entry, of an incarnation that is none of the others that live, for these keys."""


@dataclass(eq=False, slots=True)
class Flight:
    """One transfer: blocks of one part, from one peer."""

    table: PartTable
    incarnation: bytes
    keys: Sequence[bytes]
    hedge_at: float  # a rival may begin then
    background: bool = False  # nobody waits for it
    late: bool = False
    batch: Batch | None = None  # whose slots it has taken over, with the bytes that are in them
    expected_s: float = 0.0
    task: asyncio.Task[None] = field(init=False)


@dataclass(eq=False, slots=True)
class Want:
    """Blocks of one part that are not here, in the order of their chain, and who may have all of them.

    tried: who was asked for them already.
    """

    table: PartTable
    keys: list[bytes]
    candidates: Sequence[Candidate]
    tried: frozenset[bytes] = frozenset()


class _Slots(NamedTuple):
    """Slots of one reservation that are to be filled with these blocks.

    indices: of the keys in that reservation. have: bytes that are in each slot already. whole: the reservation
    has no others.
    """

    holder: Holder
    ticket: int
    keys: Sequence[bytes]
    indices: Sequence[int]
    rows: list[int]
    have: int = 0
    whole: bool = False


class Remote:
    """Pulls from other nodes. What comes stays here as a copy that others keep too: it goes first."""

    def __init__(
        self,
        node: Node,
        carrier: Carrier,
        neighbours: Neighbours,
        lower: Lower,
        beyond: Beyond,
        peers: Peers,
        clock: Callable[[], float],
        device: Lower | None = None,
    ) -> None:
        self.node = node
        self._local: dict[bytes, Lower] = {LOCAL: lower}
        if device is not None:
            self._local[DEVICE] = device
        self._beyond = beyond
        self.peers = peers
        self._carrier = carrier
        self._neighbours = neighbours
        self._clock = clock
        self._negative = NegativeMemory(NEGATIVE_MAX, NEGATIVE_S)
        self._remembered = Remembered(REMEMBERED_MAX)
        self._flights: dict[PartTable, dict[bytes, tuple[Flight, ...]]] = {}
        self._flying: dict[Flight, None] = {}
        self._tickets = 0
        self.ahead = Ahead(node, carrier, neighbours, peers, clock)
        self.delivered = Delivered()
        self.counters = {
            "lookups": 0,
            "lookups_failed": 0,
            "lookups_remembered": 0,
            "joined": 0,  # parts that were on their way for somebody else
            "rivals": 0,  # parts that a second peer was asked for as well
            "called_off": 0,  # transfers that a rival was faster than
            "declined": 0,  # parts that are computed sooner than they come
            "trials": 0,  # transfers all the same, to learn how fast their source is
            "absent": 0,
            "mismatches": 0,
            "failed_transfers": 0,
        }

    @property
    def active(self) -> bool:
        """Whether there is anything to pull from."""
        below = any(lower.any for lower in self._local.values()) or self._beyond.any
        return below or bool(self._neighbours.living)

    def stats(self) -> dict[str, Any]:
        peers = self.peers.stats(self._clock())
        for peer in peers:
            incarnation = bytes.fromhex(peer["incarnation"])
            other = self._neighbours.living.get(incarnation)
            peer["node"] = "" if other is None else other.record.node
            peer["url"] = "" if other is None else other.url
            if incarnation in NOT_NODES:
                peer["node"], peer["incarnation"] = NOT_NODES[incarnation], ""
        return {
            **self.counters,
            "transfers": len(self._flying),
            "negative": len(self._negative),
            "remembered": len(self._remembered),
            "peers": peers,
            "delivered": self.delivered.stats(),
        }

    def close(self) -> None:
        """Call all transfers off. They end by themselves, soon."""
        for flight in list(self._flying):
            flight.task.cancel()
        self.ahead.close()

    # ---- for clients ---------------------------------------------------------------------------------

    async def pull(
        self,
        namespace: NamespaceState,
        parts: Sequence[int],
        packed: bytes,
        wait_s: float,
        recompute: Recompute | None = None,
        *,
        direct: bool = False,
    ) -> int:
        """Bring what is missing of the prefix here; the usable blocks afterwards. Ends by `wait_s`.

        recompute: the price of computing the blocks instead; what takes longer to load is left out. direct:
        who asks reads spare device memory by itself, so that what lies there is here.
        """
        if not wait_s > 0:
            raise InvalidRequest(f"a wait of {wait_s} seconds")
        deadline = self._clock() + wait_s
        here = self.match(namespace, parts, packed, direct=direct)
        if here * KEY_BYTES == len(packed) or not self.active:
            return here
        tables = [namespace.tables[part] for part in parts] if parts else namespace.tables
        keys = split_keys(packed)
        located = self._on_disks(tables, keys)
        asked = not (self._neighbours.living or self._beyond.any)
        # A shorter prefix may need blocks that a longer one does not (windows), so when one turns out not
        # to be had, what the next one lacks is fetched too. Others are asked when disks do not have it all,
        # or did not deliver.
        for _ in range(ROUNDS_MAX):
            there, declined = Choice(here, {})
            if located:
                there = self._usable(tables, keys, located)
            if asked or there == len(keys):
                there, declined = self._choose(tables, keys, here, located, recompute)
            if there < len(keys) and not asked:
                asked = True
                nodes = self._locate(namespace, tables, keys, there, deadline)
                if self._beyond.any:
                    store = self._in_store(namespace, tables, keys, deadline, prefix=True)
                    for elsewhere in await asyncio.gather(nodes, store):
                        _add(located, elsewhere)
                else:
                    _add(located, await nodes)
                there, declined = self._choose(tables, keys, here, located, recompute)
            if recompute is not None:
                keys = keys[:there]  # decided once: what is declined now is not considered again
                self._decline(declined)
            if there <= here or self._clock() >= deadline:
                break
            wants = self._missing(tables, keys[:there], located, direct=direct)
            lacking = await self._complete(namespace, tables, keys[:there], wants, deadline)
            here = self.match(namespace, parts, packed, direct=direct)
            if not lacking:
                break
            _strike_out(located, lacking)
        return self.match(namespace, parts, packed, direct=direct)

    def match(
        self, namespace: NamespaceState, parts: Sequence[int], packed: bytes, *, direct: bool
    ) -> int:
        """The usable blocks of a prefix in memory, or with `direct` there and in spare device memory."""
        if not direct:
            return self.node.match(namespace, parts, packed)
        self.node.settle()
        tables = self.node.tables_of(namespace, parts)
        held = [AnyOf((table.blocks, *self._local[DEVICE].held(table))) for table in tables]
        return usable([table.spec for table in tables], held, split_keys(packed))

    async def pull_each(
        self, namespace: NamespaceState, parts: Sequence[int], packed: bytes, wait_s: float
    ) -> None:
        """Bring those of the blocks here that are to be had, prefix or not. Ends by `wait_s`."""
        if not wait_s > 0:
            raise InvalidRequest(f"a wait of {wait_s} seconds")
        deadline = self._clock() + wait_s
        self.node.settle()
        tables = self.node.tables_of(namespace, parts)
        keys = split_keys(packed)
        located = self._on_disks(tables, keys)
        missing = [key for key in keys if key not in located and not _held(tables, key)]
        if self._neighbours.living:
            try:
                async with asyncio.timeout((deadline - self._clock()) * LOOKUP_SHARE):
                    for at in range(0, len(missing), LOOKUP_KEYS):
                        chunk = missing[at : at + LOOKUP_KEYS]
                        located.update(zip(chunk, await self.locate(namespace, chunk), strict=True))
            except (Unavailable, TimeoutError):
                self.counters["lookups_failed"] += 1
        stored = await self._in_store(namespace, tables, missing, deadline, prefix=False)
        _add(located, stored)
        candidates = _Candidates()
        wants: list[Want] = []
        for table in tables:
            wants += _wants(table, filter(located.__contains__, keys), located, candidates)
        await self._fetch(wants, deadline)

    def _choose(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        located: Mapping[bytes, Sequence[Entry]],
        recompute: Recompute | None,
    ) -> Choice:
        """How much of a prefix is to be brought here: all that there is, unless computing is sooner."""
        if recompute is None:
            return Choice(self._usable(tables, keys, located), {})
        now = self._clock()
        living = _Candidates(self._lives)

        def candidates(table: PartTable, key: bytes, entries: Sequence[Entry]) -> list[Candidate]:
            found = living(entries, table.part)
            if not self._negative:
                return found
            return [one for one in found if not self._lacks(table, key, one.incarnation, now)]

        def awaited(table: PartTable, key: bytes) -> list[bytes]:
            flights = self._flights.get(table, {}).get(key, ())
            return [flight.incarnation for flight in flights if not flight.background]

        return choose(
            tables,
            keys,
            here,
            located,
            lambda some: self._usable(tables, some, located),
            Sources(candidates, awaited, self.peers, SLICE_BYTES),
            recompute,
            now,
        )

    def _decline(self, declined: Mapping[bytes, Sequence[tuple[PartTable, bytes]]]) -> None:
        """Count what is not loaded, and try a little of it all the same if it is time to. Nobody waits for that."""
        now = self._clock()
        for incarnation, parts in declined.items():
            self.counters["declined"] += len(parts)
            self.peers.declined(incarnation, len(parts))
            if not self.peers.begin_trial(incarnation, now):
                continue
            table = parts[0][0]
            most = max(1, TRIAL_BYTES // table.spec.nbytes)
            keys = [key for other, key in parts[:most] if other is table]
            self.counters["trials"] += self._begin(
                table, incarnation, keys, now, now + TRIAL_S, SECONDARY, background=False
            )

    async def _complete(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wants: Sequence[Want],
        deadline: float,
    ) -> Sequence[Want]:
        """Bring what is missing of a prefix that should be there in full; what could not be had."""
        kept: list[str] = []
        try:
            # Else what is here of it, and what comes first, would make room for what comes after.
            for table in tables:
                self._keep(table, needed(table.spec, keys), kept)
            return await self._fetch(wants, deadline, kept=kept)
        finally:
            self.let_go(namespace.tenant.name, kept)

    def _keep(self, table: PartTable, keys: Sequence[bytes], kept: list[str]) -> bool:
        """Lease what is here of these blocks, for as long as the rest of their prefix is being fetched.

        False: there are too many leases.
        """
        namespace = table.namespace
        holder = self._holder(namespace.tenant.name)
        try:
            lease = self.node.acquire(
                holder,
                namespace,
                [table.part],
                b"".join(keys),
                None,
                self._clock(),
                scattered=True,
            )
        except LimitExceeded:
            return False  # very many pulls at a time: then without
        if lease is not None:
            kept.append(lease.token)
        return True

    def reach(self, namespace: NamespaceState, parts: Sequence[int], packed: bytes) -> int:
        """The usable blocks of a prefix that are here, in memory or on disks."""
        self.node.settle()
        tables = [namespace.tables[part] for part in parts] if parts else namespace.tables
        keys = split_keys(packed)
        return self._usable(tables, keys, self._on_disks(tables, keys))

    def lies_below(self, table: PartTable, keys: Sequence[bytes]) -> bool:
        """Whether any of these is in a tier below memory here and not in memory."""
        held = [keys_of for lower in self._local.values() for keys_of in lower.held(table)]
        if not held:
            return False
        self.node.settle()
        return any(key not in table.blocks and any(key in each for each in held) for key in keys)

    async def fetch_up(self, table: PartTable, keys: Sequence[bytes], wait_s: float) -> None:
        """Bring blocks of a table from this node's tiers below memory into it. Ends by `wait_s`."""
        located = self._on_disks([table], keys)
        wants = _wants(table, filter(located.__contains__, keys), located, _Candidates())
        if wants:
            await self._fetch(wants, self._clock() + wait_s)

    async def take(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        incarnation: bytes,
        origin: Origin,
        wait_s: float,
    ) -> None:
        """Bring these blocks here from one node, to be kept as `origin` says. Ends by `wait_s`."""
        deadline = self._clock() + wait_s
        only = [Candidate(incarnation, TIERS["dram"])]
        wants = [Want(table, list(_lacking(table.blocks, keys)), only) for table in tables]
        await self._fetch(wants, deadline, origin, background=True)

    # ---- for follows ---------------------------------------------------------------------------------

    async def look(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wait_s: float,
    ) -> dict[bytes, Sequence[Entry]]:
        """Who has what of these keys: tiers below memory, the directory's nodes, object storage. Ends by `wait_s`."""
        deadline = self._clock() + wait_s / LOOKUP_SHARE
        self.node.settle()
        located = self._on_disks(tables, keys)
        looks = [self._in_store(namespace, tables, keys, deadline, prefix=False)]
        if self._neighbours.directory is not None:
            looks.append(self._locate(namespace, tables, keys, 0, deadline))
        for elsewhere in await asyncio.gather(*looks):
            _add(located, elsewhere)
        return located

    def wants(self, some: Mapping[PartTable, Mapping[bytes, Sequence[Entry]]]) -> list[Want]:
        """Blocks that are to be brought, and by whom, for each part."""
        candidates = _Candidates()
        return [
            want
            for table, located in some.items()
            for want in _wants(table, located, located, candidates)
        ]

    async def bring(self, wants: Sequence[Want], deadline: float) -> Sequence[Want]:
        """Have transfers bring these; what did not come by the deadline."""
        return await self._fetch(wants, deadline)

    def expected_s(self, wants: Sequence[Want]) -> float:
        """How long that may take before something is wrong: see `Peers.hedge_after_s`."""
        nbytes: Counter[bytes] = Counter()
        for want in wants:
            for candidate in want.candidates[:1]:
                nbytes[candidate.incarnation] += len(want.keys) * want.table.spec.nbytes
        found = [self.peers.hedge_after_s(one, much) for one, much in nbytes.items()]
        return HEDGE_TIMES * max(found, default=0.0)

    def hold(self, table: PartTable, keys: Sequence[bytes], kept: list[str]) -> bool:
        """Have what is here of these blocks stay until `let_go`; whether it could be had.

        kept: takes the tokens for that.
        """
        return self._keep(table, keys, kept)

    def let_go(self, tenant: str, kept: Sequence[str]) -> None:
        """These blocks may go again."""
        holder = self._holder(tenant)
        for token in kept:
            self.node.release(holder, token)

    # ---- who has what --------------------------------------------------------------------------------

    def _on_disks(
        self, tables: Sequence[PartTable], keys: Sequence[bytes]
    ) -> dict[bytes, Sequence[Entry]]:
        """What of these keys lies below memory on this node: on disks, or in spare device memory."""
        located: dict[bytes, Sequence[Entry]] = {}
        for incarnation, lower in self._local.items():
            masks: dict[bytes, int] = {}
            for table in tables:
                bit = 1 << table.part
                for held in lower.held(table):
                    for key in filter(held.__contains__, keys):
                        masks[key] = masks.get(key, 0) | bit
            _add(located, _entries(masks, incarnation, TIERS["dram"]))
        return located

    def _lives(self, incarnation: bytes) -> bool:
        """Whether this source can be asked."""
        if incarnation == STORE:
            return self._beyond.any
        lower = self._local.get(incarnation)
        return incarnation in self._neighbours.living if lower is None else lower.any

    async def _in_store(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        deadline: float,
        *,
        prefix: bool,
    ) -> dict[bytes, Sequence[Entry]]:
        """What of these keys lies in object storage."""
        if not keys or not self._beyond.any:
            return {}
        lacking = [table for table in tables if any(key not in table.blocks for key in keys)]
        try:
            async with asyncio.timeout((deadline - self._clock()) * LOOKUP_SHARE):
                masks = await self._beyond.where(namespace, lacking, keys, prefix=prefix)
        except (Unavailable, TimeoutError):
            self.counters["lookups_failed"] += 1
            return {}
        return _entries(masks, STORE, TIERS["remote"])

    async def locate(
        self, namespace: NamespaceState, keys: Sequence[bytes], *, engines: bool = False
    ) -> list[list[Entry]]:
        """The living replicas of each key on other nodes. Raises `Unavailable` without a directory.

        engines: also what engines keep for themselves (tier gpu), which is no copy that could be relied on.
        """
        directory = self._neighbours.directory
        if directory is None:
            raise Unavailable("this node has no directory: give it one with --directory")
        entries = await directory.locate(namespace.directory_digest, len(namespace.tables), keys)
        self._remembered.learn(namespace.directory_digest, keys, entries)
        return self._living_only(namespace, keys, entries, engines=engines)

    async def _locate(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        deadline: float,
    ) -> dict[bytes, Sequence[Entry]]:
        """Living replicas of the keys that matter: what comes after `here`, and the windows before it."""
        if not self._neighbours.living:
            return {}
        span = child(LOOKUP)
        if span is None:
            return await self._locate_now(namespace, tables, keys, here, deadline)
        span.set(
            source="peers" if self._neighbours.directory is None else "directory",
            blocks_asked=len(keys) - here,
        )
        try:
            with working_for(span):
                located = await self._locate_now(namespace, tables, keys, here, deadline)
            span.set(blocks=sum(map(bool, located.values())))
            return located
        finally:
            span.end()

    async def _locate_now(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        deadline: float,
    ) -> dict[bytes, Sequence[Entry]]:
        wait_s = (deadline - self._clock()) * LOOKUP_SHARE
        if self._neighbours.directory is None:
            return await self._ask_all(namespace, tables, keys, wait_s)
        windows = [table.spec.window_blocks * table.spec.stride for table in tables]
        first = max(0, here - max(windows, default=0))
        located: dict[bytes, Sequence[Entry]] = {}
        try:
            async with asyncio.timeout(wait_s):
                for at in range(first, len(keys), LOOKUP_KEYS):
                    chunk = keys[at : at + LOOKUP_KEYS]
                    self.counters["lookups"] += 1
                    found = await self.locate(namespace, chunk)
                    located.update(zip(chunk, found, strict=True))
                    if not found[-1] and not _held(tables, chunk[-1]):
                        break
        except (Unavailable, TimeoutError):
            self.counters["lookups_failed"] += 1
            if (span := current()) is not None:
                span.set(remembered=1)
            rest = [key for key in keys[first:] if key not in located]
            remembered = self._remembered.recall(namespace.directory_digest, rest)
            self.counters["lookups_remembered"] += any(remembered)
            living = self._living_only(namespace, rest, remembered, engines=False)
            located.update(zip(rest, living, strict=True))
        return located

    def _living_only(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        entries: Sequence[Sequence[Entry]],
        *,
        engines: bool,
    ) -> list[list[Entry]]:
        """Neighbours of which the same is known get the same list."""
        living = self._neighbours.living
        kept: list[list[Entry]] = []
        last: Sequence[Entry] | None = None
        strangers: dict[Entry, list[bytes]] = {}
        for key, found in zip(keys, entries, strict=True):
            if found == last:  # of neighbours in a chain mostly the same is known
                kept.append(kept[-1])
            else:
                kept.append(
                    [
                        entry
                        for entry in found
                        if entry.incarnation in living and (engines or _may_be_had(entry))
                    ]
                )
            last = found
            if len(kept[-1]) != len(found):
                for entry in found:
                    if entry.incarnation not in living:
                        strangers.setdefault(entry, []).append(key)
        for entry, some in strangers.items():
            self._neighbours.met(namespace, some, entry)
        return kept

    async def _ask_all(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wait_s: float,
    ) -> dict[bytes, Sequence[Entry]]:
        """Without a directory: each peer says how much of the prefix it could give."""
        now = self._clock()
        question = wire.Ask(
            namespace.tenant.name,
            namespace.digest,
            [table.part for table in tables],
            b"".join(keys),
        )
        asked = [
            (incarnation, node.url)
            for incarnation, node in self._neighbours.living.items()
            if (peer := self.peers.get(incarnation)) is None or not peer.suspended(now)
        ][:ASKED_MAX]
        answers = await asyncio.gather(
            *(self._ask(incarnation, url, question, wait_s) for incarnation, url in asked)
        )
        mask = sum(1 << table.part for table in tables)
        located: dict[bytes, Sequence[Entry]] = {}
        reach = sorted(zip(answers, [incarnation for incarnation, _ in asked], strict=True))
        first = 0
        for at, (end, _) in enumerate(reach):
            if end > first:  # all keys up to this one have the same entries, as one object
                having = [Entry(incarnation, TIERS["dram"], mask) for _, incarnation in reach[at:]]
                located.update(dict.fromkeys(keys[first:end], having))
                first = end
        return located

    async def _ask(self, incarnation: bytes, url: str, question: wire.Ask, wait_s: float) -> int:
        started = self._clock()
        self.peers.started(incarnation, 0, started)
        try:
            answer = await self._carrier.ask(wire.AskPeer(url, question, wait_s))
        except (NamespaceMismatch, asyncio.CancelledError):
            self.peers.stopped(incarnation, 0)
            raise
        except KvpoolError as error:
            self.peers.failed(incarnation, self._clock(), error=error, asked=0)
            return 0
        now = self._clock()
        self.peers.finished(incarnation, 0, now - started, now)
        return answer.value if isinstance(answer, wire.Done) else 0

    def _usable(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        located: Mapping[bytes, Sequence[Entry]],
    ) -> int:
        """The longest prefix that could be usable here once everything there is has come."""
        held = somewhere(
            [table.part for table in tables],
            [table.blocks for table in tables],
            keys,
            [located.get(key, ()) for key in keys],
            self._lives,
        )
        return usable([table.spec for table in tables], held, keys)

    def _missing(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        located: Mapping[bytes, Sequence[Entry]],
        *,
        direct: bool,
    ) -> list[Want]:
        """What is not here of a prefix, in the order of the chain, part by part. direct: see `pull`."""
        candidates = _Candidates()
        wants: list[Want] = []
        for table in tables:
            keys_needed = needed(table.spec, keys)
            if direct:
                keys_needed = _lacking(AnyOf(self._local[DEVICE].held(table)), keys_needed)
            wants += _wants(table, keys_needed, located, candidates)
        return wants

    def _lacks(self, table: PartTable, key: bytes, incarnation: bytes, now: float) -> bool:
        """Whether a source was found lately not to have it, whatever the directory says."""
        return self._negative.has(table.namespace.digest, table.part, key, incarnation, now)

    # ---- transfers -----------------------------------------------------------------------------------

    async def _fetch(
        self,
        wants: Sequence[Want],
        deadline: float,
        origin: Origin = SECONDARY,
        kept: list[str] | None = None,
        background: bool = False,
    ) -> Sequence[Want]:
        """Have transfers bring what is wanted; until it is here, nobody is left to ask, or it is late.

        kept: takes the tokens of leases on what has come. background: no engine waits for it. Returns
        what did not come.
        """
        for want in wants:
            flying = self._flights.get(want.table)
            if flying:
                self.counters["joined"] += sum(map(flying.__contains__, want.keys))
        while True:
            self.node.settle()
            arrived: dict[PartTable, list[bytes]] = {}
            left: list[Want] = []
            for want in wants:
                here = want.table.blocks
                if not here.keys().isdisjoint(want.keys):
                    came = arrived.setdefault(want.table, [])
                    came += filter(here.__contains__, want.keys)
                    want.keys = _lacking(here, want.keys)
                if want.keys and not want.table.namespace.retired:
                    left.append(want)
            wants = left
            now = self._clock()
            if not wants or now >= deadline:
                return wants
            if kept is not None:
                for table, keys in arrived.items():
                    self._keep(table, keys, kept)
            wants = self._launch(wants, now, deadline, origin, background)
            flights = dict.fromkeys(
                flight
                for want in wants
                if (flying := self._flights.get(want.table))
                for ahead in dict.fromkeys(map(flying.get, want.keys))
                if ahead is not None
                for flight in ahead
            )
            if not flights:
                return wants
            wake = min([deadline, *(f.hedge_at for f in flights if f.hedge_at > now)])
            await asyncio.wait(
                [flight.task for flight in flights],
                timeout=max(0.0, wake - now),
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._call_off(flights)

    def _call_off(self, flights: Iterable[Flight]) -> None:
        """End transfers all of whose blocks have come on another way."""
        self.node.settle()
        for flight in flights:
            if flight.task.done() or flight.task.cancelling():
                continue
            if all(map(flight.table.blocks.__contains__, flight.keys)):
                flight.task.cancel()
                self.counters["called_off"] += 1

    def _launch(
        self,
        wants: Sequence[Want],
        now: float,
        deadline: float,
        origin: Origin,
        background: bool,
    ) -> list[Want]:
        """Begin a transfer for whatever has none, or only such as take too long.

        Returns the same wants, cut by who was asked for them.
        """
        waiting: list[Want] = []
        ready: dict[PartTable, list[tuple[Want, Sequence[Candidate]]]] = {}
        for want in wants:
            for some, ahead in self._by_flights(want):
                askable = self._askable(some, ahead, now, background)
                if askable:
                    ready.setdefault(want.table, []).append((some, askable))
                else:
                    waiting.append(some)
        for table, found in ready.items():
            waiting += self._ask_for(table, found, now, deadline, origin, background)
        return waiting

    def _by_flights(self, want: Want) -> list[tuple[Want, tuple[Flight, ...]]]:
        """A want in runs of blocks that are on the same flights, with these."""
        flying = self._flights.get(want.table)
        if not flying or flying.keys().isdisjoint(want.keys):
            return [(want, ())]
        found = []
        for ahead, keys in groupby(want.keys, lambda key: flying.get(key, ())):
            found.append((replace(want, keys=list(keys)), ahead))
        return found

    def _askable(
        self, want: Want, flights: Sequence[Flight], now: float, background: bool
    ) -> Sequence[Candidate]:
        """Who may be asked for these blocks now, beside the flights that they are on."""
        # What gives way to everything else is nothing to wait for.
        ahead = [flight for flight in flights if background or not flight.background]
        if len(flights) >= RIVALS_MAX or any(flight.hedge_at > now for flight in ahead):
            return ()
        for flight in ahead:
            if not flight.late:
                flight.late = True
                self.peers.slow(flight.incarnation, now)
        flying = {flight.incarnation for flight in ahead}
        return [
            candidate
            for candidate in want.candidates
            if candidate.incarnation not in want.tried
            and candidate.incarnation not in flying
            and self._lives(candidate.incarnation)
        ]

    def _ask_for(
        self,
        table: PartTable,
        found: Sequence[tuple[Want, Sequence[Candidate]]],
        now: float,
        deadline: float,
        origin: Origin,
        background: bool,
    ) -> list[Want]:
        """Begin transfers of blocks of one table that these candidates may be asked for."""
        keys: list[bytes] = []
        candidates: list[Sequence[Candidate]] = []
        of: list[Want] = []
        for want, askable in found:
            keys += want.keys
            candidates += self._having(table, want.keys, askable, now)
            of += repeat(want, len(want.keys))
        assignments = plan(candidates, table.spec.nbytes, self.peers, now, slice_bytes=SLICE_BYTES)
        most = max(1, ORDER_BYTES // table.spec.nbytes)
        asked: list[bytes | None] = [None] * len(keys)
        for incarnation, indices in assignments:
            for index in indices:
                asked[index] = incarnation
            for at in range(0, len(indices), most):
                order = [keys[index] for index in indices[at : at + most]]
                self._begin(table, incarnation, order, now, deadline, origin, background)
        if len(assignments) == 1 and len(assignments[0].indices) == len(keys):
            return [replace(want, tried=want.tried | {incarnation}) for want, _ in found]
        # Each want is cut where another one was asked, so that who was tried is right for all of its blocks.
        cut: list[Want] = []
        for (want, incarnation), group in groupby(
            zip(keys, of, asked, strict=True), lambda one: one[1:]
        ):
            tried = want.tried if incarnation is None else want.tried | {incarnation}
            cut.append(Want(table, [key for key, _, _ in group], want.candidates, tried))
        return cut

    def _having(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        candidates: Sequence[Candidate],
        now: float,
    ) -> Iterable[Sequence[Candidate]]:
        """For each key, those of the candidates that were not found to lack it."""
        if not self._negative:
            return repeat(candidates, len(keys))
        return [
            [one for one in candidates if not self._lacks(table, key, one.incarnation, now)]
            for key in keys
        ]

    def _begin(
        self,
        table: PartTable,
        incarnation: bytes,
        keys: Sequence[bytes],
        now: float,
        deadline: float,
        origin: Origin,
        background: bool,
    ) -> bool:
        """Whether the transfer began: there may be too many.

        What has come ahead of its commit is a transfer of its own, for each batch: in the slots that are there.
        """
        keys = list(dict.fromkeys(keys))  # an engine, or a peer, may have named one twice
        # A transfer that gives way to everything else would keep them from who waits for them.
        alone = background or incarnation in NOT_NODES
        taken = {} if alone else self.ahead.take(table, keys)
        if not taken:
            return self._begin_one(
                table, incarnation, keys, now, deadline, origin, background, batch=None
            )
        others = set(keys).difference(*taken.values())
        began = False
        for batch, some in [*taken.items(), (None, [key for key in keys if key in others])]:
            if not some:
                continue
            flies = self._begin_one(
                table, incarnation, some, now, deadline, origin, background, batch=batch
            )
            if batch is not None and not flies:
                self.ahead.landed(batch, wrong=0)
            began |= flies
        return began

    def _begin_one(
        self,
        table: PartTable,
        incarnation: bytes,
        keys: Sequence[bytes],
        now: float,
        deadline: float,
        origin: Origin,
        background: bool,
        *,
        batch: Batch | None,
    ) -> bool:
        if len(self._flying) >= FLIGHTS_MAX:
            return False
        have = 0 if batch is None else batch.have
        nbytes = len(keys) * (table.spec.nbytes - have)
        rest_s = 0.0 if batch is None or batch.pull is None else REST_S
        flight = Flight(
            table,
            incarnation,
            keys,
            now + rest_s + self.peers.hedge_after_s(incarnation, nbytes),
            background,
            batch=batch,
        )
        local = incarnation in NOT_NODES
        url = "" if local else self._neighbours.living[incarnation].url
        seconds = max(deadline - now, FLIGHT_S)
        self._flying[flight] = None
        flying = self._flights.setdefault(table, {})
        if flying.keys().isdisjoint(keys):
            flying.update(dict.fromkeys(keys, (flight,)))
        else:
            for key in keys:
                rivals = flying.get(key, ())
                self.counters["rivals"] += bool(rivals)
                flying[key] = (*rivals, flight)
        # A task of its own: the transfer outlives whoever asked first, for others who wait for it.
        flight.task = asyncio.get_running_loop().create_task(
            self._fly(flight, url, seconds, OWN if local else origin)
        )
        flight.task.add_done_callback(lambda task: self._landed(flight, task))
        return True

    def _landed(self, flight: Flight, task: asyncio.Task[None]) -> None:
        self._flying.pop(flight, None)
        flying = self._flights[flight.table]
        for key in flight.keys:
            flights = flying.pop(key)
            if len(flights) > 1:
                flying[key] = tuple(other for other in flights if other is not flight)
        if not flying:
            del self._flights[flight.table]
        crash_if_failed(task)

    async def _fly(self, flight: Flight, url: str, seconds: float, origin: Origin) -> None:
        """Reserve, transfer, commit what has come."""
        node, table, batch = self.node, flight.table, flight.batch
        if batch is not None:
            await self._fly_on(flight, batch, url, seconds, origin)
            return
        namespace = table.namespace
        holder = self._holder(namespace.tenant.name)
        self._tickets += 1
        ticket = self._tickets
        try:
            node.reserve(holder, namespace, table.part, ticket, b"".join(flight.keys))
        except (PoolFull, LimitExceeded, InvalidRequest):
            return  # no room, or the epoch has just ended
        reservation = holder.reservations.get(ticket)
        if reservation is None:
            return  # somebody else brought them in the meantime
        slots = _Slots(
            holder,
            ticket,
            reservation.keys,
            reservation.indices,
            reservation.rows,
            whole=True,
        )
        try:
            pulled = await self._fill(flight, slots, url, seconds, origin)
        finally:
            node.abort(holder, ticket)
            node.settle()
        if pulled is not None:
            self._note(flight, slots, pulled)

    async def _fly_on(
        self, flight: Flight, batch: Batch, url: str, seconds: float, origin: Origin
    ) -> None:
        """The same in slots that the beginning of these blocks has come into, ahead of their commit.

        Where that was the beginning of something else, the owner may have them right: they are pulled again, whole.
        """
        reservation = batch.reservation
        deadline = self._clock() + seconds
        wrong = 0
        try:
            await self.ahead.rest(batch, flight.incarnation)
            positions = [batch.position[key] for key in flight.keys]
            indices = [reservation.indices[at] for at in positions]
            rows = [reservation.rows[at] for at in positions]
            slots = _Slots(batch.holder, batch.ticket, flight.keys, indices, rows, batch.have)
            self._begins(flight, slots, self._clock())
            pulled = await self._fill(flight, slots, url, seconds, origin)
            if pulled is None:
                return
            self._note(flight, slots, pulled)
            if not slots.have:
                return
            wrong = pulled.status.count(MISMATCH)
            now = self._clock()
            if not wrong or now >= deadline:
                return
            again = _those(slots, [status == MISMATCH for status in pulled.status])
            self._begins(flight, again, now)
            pulled = await self._fill(flight, again, url, deadline - now, origin)
            if pulled is not None:
                self._note(flight, again, pulled)
        finally:
            self.ahead.landed(batch, wrong=wrong)
            self.node.settle()

    def _begins(self, flight: Flight, slots: _Slots, now: float) -> None:
        """How long this may take, before it counts as slow, begins now."""
        nbytes = len(slots.keys) * (flight.table.spec.nbytes - slots.have)
        flight.hedge_at = now + self.peers.hedge_after_s(flight.incarnation, nbytes)

    async def _fill(
        self, flight: Flight, slots: _Slots, url: str, seconds: float, origin: Origin
    ) -> wire.Pulled | None:
        """Transfer, and commit what has come; None where that has failed."""
        node = self.node
        nbytes = len(slots.keys) * (flight.table.spec.nbytes - slots.have)
        now = self._clock()
        flight.expected_s = self._estimate_s(flight.incarnation, nbytes, now)
        self.peers.started(flight.incarnation, nbytes, now)
        span = child(TRANSFER if url else READ)
        try:
            # This returns, raises or is cancelled only when nothing writes to the rows any more, so
            # that what did not arrive can be given back.
            if span is None:
                pulled = await self._bring(flight, url, slots, seconds)
            else:
                with working_for(span):
                    pulled = await self._bring_traced(flight, url, slots, seconds, span)
            if slots.whole and pulled.status.count(PRESENT) == len(slots.keys):
                node.commit(slots.holder, slots.ticket, pulled.checksums, None, origin)
            elif PRESENT in pulled.status:
                here = [status == PRESENT for status in pulled.status]
                checksums = b"".join(compress(split_keys(pulled.checksums), here))
                indices = list(compress(slots.indices, here))
                node.commit(slots.holder, slots.ticket, checksums, indices, origin)
        except KvpoolError as error:
            if span is not None:
                span.end(str(error))
            self._failed(flight, nbytes, str(error))
            self._count(flight, Loads(failed=len(slots.keys)))
            return None
        except asyncio.CancelledError:
            if span is not None:
                span.end(CALLED_OFF)
            self.peers.stopped(flight.incarnation, nbytes)
            self._count(flight, Loads(called_off=len(slots.keys)))
            raise
        return pulled

    async def _bring_traced(
        self, flight: Flight, url: str, slots: _Slots, seconds: float, span: Span
    ) -> wire.Pulled:
        """As `_bring`, and say what came of it."""
        tier = TIER_OF.get(flight.incarnation, PEER)
        span.set(tier=tier, part=flight.table.part, blocks_asked=len(slots.keys))
        if url:
            other = self._neighbours.living.get(flight.incarnation)
            span.set(node=GONE if other is None else other.record.node)
        pulled = await self._bring(flight, url, slots, seconds, span.traceparent if url else "")
        came, mismatches = pulled.status.count(PRESENT), pulled.status.count(MISMATCH)
        span.count_above(f"parts_from_{tier}", came)
        span.end(
            pulled.error,
            blocks=came,
            bytes=came * (flight.table.spec.nbytes - slots.have),
            mismatches=mismatches,
            absent=pulled.status.count(0),
        )
        return pulled

    def _estimate_s(self, incarnation: bytes, nbytes: int, now: float) -> float:
        """How long so much from a source should take, behind what is in flight."""
        peer = self.peers.get(incarnation) or self.peers.stranger(incarnation)
        latency_s, per_byte = peer.expected(now)
        return latency_s + (peer.inflight_bytes + nbytes) * per_byte

    def _count(self, flight: Flight, loads: Loads) -> None:
        """Count what has become of a transfer, by who was to deliver it and for whom."""
        tier = TIER_OF.get(flight.incarnation, PEER)
        flight.table.namespace.tenant.traffic.loaded(tier, loads)
        if tier == PEER:
            other = self._neighbours.living.get(flight.incarnation)
            self.delivered.delivered(GONE if other is None else other.record.node, loads)

    async def _bring(
        self, flight: Flight, url: str, slots: _Slots, seconds: float, trace: str = ""
    ) -> wire.Pulled:
        """Have reserved rows filled, by a peer, or where there is no URL, from disks or object storage."""
        table = flight.table
        if not url:
            source = self._local.get(flight.incarnation, self._beyond)
            return await source.read(table, slots.keys, slots.rows, seconds)
        return await self._carrier.pull(
            pull_order(
                table,
                url,
                slots.keys,
                slots.rows,
                seconds,
                background=flight.background,
                start=slots.have,
                trace=trace,
            )
        )

    def _note(self, flight: Flight, slots: _Slots, pulled: wire.Pulled) -> None:
        """Learn from a transfer that has ended by itself."""
        table, incarnation, now = flight.table, flight.incarnation, self._clock()
        keys, each = slots.keys, table.spec.nbytes - slots.have
        came, mismatches = pulled.status.count(PRESENT), pulled.status.count(MISMATCH)
        if slots.have:
            mismatches = (
                0  # its owner may have it right: what came before the commit was something else
            )
        if came < len(keys):
            lacks = {0, MISMATCH} if mismatches else {0}
            for key, status in zip(keys, pulled.status, strict=True):
                if status in lacks:
                    self._remembered.forget(table.namespace.directory_digest, [key], incarnation)
                    self._negative.add(table.namespace.digest, table.part, key, incarnation, now)
        counters = self.node.counters
        counters.pulled_blocks += came
        counters.pulled_bytes += came * each
        counters.checksum_mismatches += mismatches
        self.counters["mismatches"] += mismatches
        self.counters["absent"] += pulled.status.count(0)
        nbytes = len(keys) * each
        absent = pulled.status.count(0)
        failed = len(keys) - came - absent - mismatches
        self._count(flight, Loads(came, absent, mismatches, failed, nbytes=came * each))
        tier = TIER_OF.get(incarnation, PEER)
        if came and not flight.background:
            self.delivered.took(tier, pulled.seconds)
            if came == len(keys) and not slots.have:
                self.delivered.foreseen(tier, flight.expected_s, pulled.seconds)
        if pulled.error:
            # Of what the error broke off, as much as one block may have been half here.
            arrived = (came + 1) * each
            self._failed(flight, nbytes, pulled.error, arrived, pulled.seconds)
        elif flight.background or slots.have:
            # How long it gave way, or hashed what was here already, says nothing of the peer.
            self.peers.stopped(incarnation, nbytes)
        else:
            self.peers.finished(incarnation, came * each, pulled.seconds, now, asked=nbytes)

    def _failed(
        self, flight: Flight, nbytes: int, error: str, at_most: int = 0, seconds: float = 0.0
    ) -> None:
        self.counters["failed_transfers"] += 1
        if flight.background:
            self.peers.stopped(flight.incarnation, nbytes)
            return
        self.peers.failed(
            flight.incarnation,
            self._clock(),
            error=error,
            asked=nbytes,
            at_most=at_most,
            seconds=seconds,
        )

    def _holder(self, tenant: str) -> Holder:
        """Who reserves for transfers. It lives as long as this process."""
        return self.node.own_holder(tenant, "pulls")


def _those(slots: _Slots, wanted: Sequence[bool]) -> _Slots:
    """Some of them, as if nothing had come yet."""
    return slots._replace(
        keys=list(compress(slots.keys, wanted)),
        indices=list(compress(slots.indices, wanted)),
        rows=list(compress(slots.rows, wanted)),
        have=0,
    )


def _may_be_had(entry: Entry) -> bool:
    """What an engine keeps for itself (tier gpu) is nobody's to give."""
    return entry.tier != TIERS["gpu"]


class _Candidates:
    """Whom to ask for a part: each source once, in the fastest tier that it has it in.

    Neighbours in a chain mostly lie together: what was worked out for one of them serves the next, and is
    the same list.
    """

    def __init__(self, lives: Callable[[bytes], bool] = lambda _: True) -> None:
        self._lives = lives
        self._last: tuple[int, Sequence[Entry]] = (-1, ())
        self._found: list[Candidate] = []

    def __call__(self, entries: Sequence[Entry], part: int) -> list[Candidate]:
        last_part, last = self._last
        if last_part == part and (last is entries or last == entries):
            return self._found
        tiers: dict[bytes, int] = {}
        for entry in filter(_may_be_had, entries):
            if entry.mask >> part & 1 and self._lives(entry.incarnation):
                best = tiers.get(entry.incarnation, entry.tier)
                tiers[entry.incarnation] = faster(entry.tier, best)
        self._last = part, entries
        self._found = [Candidate(incarnation, tier) for incarnation, tier in tiers.items()]
        return self._found


def _wants(
    table: PartTable,
    keys: Iterable[bytes],
    located: Mapping[bytes, Sequence[Entry]],
    candidates: _Candidates,
) -> list[Want]:
    """Those of these keys that a table lacks: runs of neighbours that the same sources may have."""
    wants: list[Want] = []
    known: Sequence[Entry] | None = None
    for key in _lacking(table.blocks, keys):
        entries = located.get(key, ())
        if entries is not known:
            known = entries
            found = candidates(entries, table.part)
            if not wants or found is not wants[-1].candidates:
                wants.append(Want(table, [], found))
        wants[-1].keys.append(key)
    return wants


def _entries(
    masks: Mapping[bytes, int], incarnation: bytes, tier: int
) -> dict[bytes, Sequence[Entry]]:
    """What a source has, as a directory would say it. Keys with the same mask share their entries."""
    by_mask = {mask: [Entry(incarnation, tier, mask)] for mask in set(masks.values())}
    return {key: by_mask[mask] for key, mask in masks.items()}


def _lacking(held: Container[bytes], keys: Iterable[bytes]) -> list[bytes]:
    """Those of the keys that are not there."""
    return list(filterfalse(held.__contains__, keys))


def _add(located: dict[bytes, Sequence[Entry]], more: Mapping[bytes, Sequence[Entry]]) -> None:
    """Merge what is known of further sources. Keys may share their entries, which nobody changes."""
    if not located:
        located.update(more)
        return
    for key, entries in more.items():
        known = located.get(key)
        located[key] = [*known, *entries] if known else entries


def _strike_out(located: dict[bytes, Sequence[Entry]], lacking: Sequence[Want]) -> None:
    """Nobody could deliver these: do not count on them any more."""
    for want in lacking:
        bit = 1 << want.table.part
        for key in want.keys:
            located[key] = [
                entry._replace(mask=entry.mask & ~bit) for entry in located.get(key, ())
            ]


def _held(tables: Sequence[PartTable], key: bytes) -> bool:
    return any(key in table.blocks for table in tables)
