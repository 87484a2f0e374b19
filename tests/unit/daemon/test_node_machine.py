"""The rules of one node against a plain model: dictionaries of blocks, byte ranges, and brute force.

The model does not predict *which* blocks are evicted. It sees what is gone after a `reserve`, and
judges: was each of them committed, unleased and not pinned hard, did it have to go at all, and, where
the node says that it has no space, was there really nothing left to evict?

What an ended epoch leaves behind is found by nobody, so the model looks into the node's tables to see how
much of it is still there. It checks that against the bytes in use, and that nobody else has them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import combinations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvpool.daemon.core.blocks import OWN, Block, Holder, Lease, NamespaceState, Origin, Tenant
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.errors import (
    InvalidRequest,
    LimitExceeded,
    PoolFull,
    StaleEpoch,
    UnknownReservation,
)
from kvpool.storage.eviction import POLICIES, policy_maker
from kvpool.types import PartKind, PartSpec, split_keys
from kvpool.wire.frame import NO_ROW

pytestmark = pytest.mark.timeout(600)  # some ten seconds of work, on a machine that may be busy

SLAB = 4096
KEYS = [bytes([n]) * 16 for n in range(1, 15)]
TENANTS = ("red", "blue")
INSTANCES = ("engine-1", "engine-2")
NAMESPACES: dict[bytes, tuple[PartSpec, ...]] = {
    b"quarter of slab.": (PartSpec(1000),),
    b"quarters again..": (PartSpec(1024),),
    b"whole slabs.....": (PartSpec(4096),),
    b"three slabs.....": (PartSpec(12_000),),
    b"sliding window..": (PartSpec(1000), PartSpec(700, PartKind.WINDOW, window_blocks=3)),
    b"strides 1 2.....": (PartSpec(1000), PartSpec(2000, stride=2)),
    b"strides 3 2w....": (
        PartSpec(700, stride=3),
        PartSpec(1500, PartKind.WINDOW, window_blocks=2, stride=2),
    ),
}
LIMITS = Limits(
    lease_s_max=20.0,
    leases_per_holder=4,
    reserved_share_per_holder=0.5,
    hard_pin_share=0.34,
    soft_pin_share=0.6,
    grant_bytes_per_holder=10 << 10,
    grant_share=0.5,
    steal_tries=2,
)
SHARES = {"hard": LIMITS.hard_pin_share, "soft": LIMITS.soft_pin_share}


@dataclass(eq=False)
class Copy:
    """Bytes at one place: reserved, committed, or removed and still read by somebody."""

    tenant: str
    namespace: bytes
    part: int
    key: bytes
    stride: int
    row: int
    epoch: int = 0
    checksum: bytes = b""
    pin: str = "none"
    secondary: bool = False
    wanted: int = 0  # copies in the cluster

    @property
    def begin(self) -> int:
        return self.row * self.stride

    @property
    def end(self) -> int:
        return self.begin + self.stride

    @property
    def where(self) -> tuple[str, bytes, int, bytes]:
        return (self.tenant, self.namespace, self.part, self.key)


@dataclass(eq=False)
class Loan:
    tenant: str
    instance: str
    deadline: float
    copies: list[Copy]
    holds: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class Client:
    number: int
    tenant: str
    instance: str
    real: Holder
    open: dict[int, dict[int, Copy]] = field(default_factory=dict)
    granted: list[Copy] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Epochs:
    """What has become of one namespace."""

    epoch: int = 0
    fence: int = 0
    states: dict[int, NamespaceState] = field(default_factory=dict)  # by epoch


@dataclass(eq=False)
class Walk:
    """A walk under way. stable: blocks of which nothing came or went since it began."""

    stable: dict[tuple[bytes, bytes], set[Copy]]
    cursor: int = 0
    met: set[tuple[bytes, bytes]] = field(default_factory=set)


def digest_of(tenant: str, name: bytes, epoch: int) -> bytes:
    """By what the directory knows a namespace."""
    living = name
    if epoch:
        living = hashlib.sha256(name + epoch.to_bytes(8, "big")).digest()[:16]
    return hashlib.sha256(tenant.encode() + b"\0" + living).digest()[:16]


def checksum_of(where: tuple[str, bytes, int, bytes], writer: int) -> bytes:
    tenant, namespace, part, key = where
    return b"%s%s%s%c" % (tenant[:1].encode(), namespace[:1], key[:13], 16 * part + writer)


def stride_of(nbytes: int) -> int:
    return -(-nbytes // 64) * 64 if nbytes < 4096 else -(-nbytes // 4096) * 4096


def present_prefix(parts: list[tuple[PartSpec, set[bytes]]], keys: list[bytes]) -> int:
    """The hit rules, as their definition says it: try every length, the longest first."""
    for n in range(len(keys), 0, -1):
        if all(_usable(spec, here, keys[:n]) for spec, here in parts):
            return n
    return 0


def _usable(spec: PartSpec, here: set[bytes], prefix: list[bytes]) -> bool:
    if len(prefix) % spec.stride:
        return False
    needed = [key for i, key in enumerate(prefix, 1) if i % spec.stride == 0]
    if spec.kind is PartKind.WINDOW:
        needed = needed[-spec.window_blocks :]
    return all(key in here for key in needed)


def subsets(n: int) -> list[list[int]]:
    return [list(chosen) for size in range(n + 1) for chosen in combinations(range(n), size)]


# Two prompts, and now and then keys in no order, some of them twice.
chains = st.one_of(
    st.integers(1, 8).map(lambda n: KEYS[:n]),
    st.integers(1, 6).map(lambda n: KEYS[8 : 8 + n]),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
)
tenants = st.sampled_from([*TENANTS, TENANTS[0]])
origins = st.sampled_from(
    [OWN, OWN, Origin(secondary=True), Origin(replicas=3), Origin(True, 1, 2)]
)
namespaces = st.runner().flatmap(lambda machine: st.sampled_from(machine.names))


class NodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.clients: list[Client] = []
        self.blocks: dict[tuple[str, bytes, int, bytes], Copy] = {}
        self.loans: dict[str, Loan] = {}
        self.over: list[str] = []  # tokens of leases that ended
        self.opened: dict[tuple[str, bytes], NamespaceState] = {}  # living ones
        self.epochs: dict[tuple[str, bytes], Epochs] = {}
        self.garbage: dict[Copy, None] = {}  # blocks of ended epochs
        self.seen: list[tuple[Block, Copy]] = []  # handed out by the node at some time
        self.walks: list[Walk] = []
        self.directory: dict[bytes, dict[bytes, int]] = {}  # as it was told
        self.quotas: dict[tuple[str, bytes], int] = {}
        self.totals: Counter[str] = Counter()
        self.tickets = 0
        self.made = 0

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        slabs=st.tuples(st.sampled_from([3, 5, 8, 12]), st.sampled_from([4, 6])),
        names=st.lists(st.sampled_from(sorted(NAMESPACES)), unique=True, min_size=2, max_size=3),
        puts=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=5),
        packed=st.booleans(),
    )
    def start(
        self,
        policy: str,
        slabs: tuple[int, int],
        names: list[bytes],
        puts: list[tuple[int, bool]],
        packed: bool,
    ) -> None:
        self.names = names
        self.packed = packed
        self.node = Node(make_policy=policy_maker(policy), limits=LIMITS, packed=packed)
        self.node.inventory.follow_changes()
        self.sizes = {name: n * SLAB for name, n in zip(TENANTS, slabs, strict=True)}
        self.tenants: dict[str, Tenant] = {
            name: self.node.add_tenant(name, number, self.sizes[name], SLAB)
            for number, name in enumerate(TENANTS)
        }
        for instance in (*INSTANCES, INSTANCES[0]):
            self.add_client(TENANTS[0], instance)
        self.add_client(TENANTS[1], INSTANCES[0])
        for (
            number,
            first,
        ) in puts:  # most of what is interesting happens in a pool that is not empty
            self.put_all(
                self.clients[0], names[number % len(names)], KEYS[:8] if first else KEYS[8:]
            )

    # ---- what the model knows ------------------------------------------------------------------

    def copies(self, tenant: str) -> list[Copy]:
        """Everything that takes space, once."""
        found = {copy: None for copy in self.blocks.values() if copy.tenant == tenant}
        found.update({copy: None for copy in self.garbage if copy.tenant == tenant})
        for client in self.clients:
            if client.tenant == tenant:
                found.update(dict.fromkeys(client.granted))
                for copies in client.open.values():
                    found.update(dict.fromkeys(copies.values()))
        for loan in self.loans.values():
            if loan.tenant == tenant:
                found.update(dict.fromkeys(loan.copies))
        return list(found)

    def leased(self) -> set[Copy]:
        return {copy for loan in self.loans.values() for copy in loan.copies}

    def evictable(self, tenant: str, *, soft: bool) -> set[Copy]:
        held = self.leased()
        pins = ("none", "soft") if soft else ("none",)
        return {
            copy
            for copy in self.blocks.values()
            if copy.tenant == tenant and copy not in held and copy.pin in pins
        }

    def idle_garbage(self, tenant: str) -> set[Copy]:
        held = self.leased()
        return {copy for copy in self.garbage if copy.tenant == tenant and copy not in held}

    def look_for_garbage(self) -> set[Copy]:
        """What has gone of it since the last look."""
        gone = set()
        for copy in self.garbage:
            state = self.epochs[copy.tenant, copy.namespace].states[copy.epoch]
            if copy.key not in state.tables[copy.part].garbage:
                gone.add(copy)
        for copy in gone:
            del self.garbage[copy]
        self.totals["reclaimed_blocks"] += len(gone)
        return gone

    def here(self, tenant: str, namespace: bytes, part: int) -> set[bytes]:
        return {key for key in KEYS if (tenant, namespace, part, key) in self.blocks}

    def slabs_of(self, copy: Copy) -> range:
        """The slabs of the extent that a copy is in: layout, as the allocator's page draws it."""
        span = self.span(copy.tenant, copy.stride)
        first = copy.begin // (span * SLAB) * span
        return range(first, min(first + span, self.sizes[copy.tenant] // SLAB))

    def span(self, tenant: str, stride: int) -> int:
        return self.tenants[tenant].allocator._classes[stride].span

    def runs(self, tenant: str, stride: int) -> list[range]:
        """The runs of slabs that could be an extent of this stride: with a whole slot in them."""
        span, slabs = self.span(tenant, stride), self.sizes[tenant] // SLAB
        found = []
        for first in range(0, slabs, span):
            begin, end = first * SLAB, min((first + span) * SLAB, self.sizes[tenant])
            if (-(-begin // stride) + 1) * stride <= end:
                found.append(range(first, min(first + span, slabs)))
        return found

    def free_runs(self, tenant: str, stride: int, movable: set[Copy]) -> set[range]:
        """Runs that hold nothing of this stride, and nothing at all but what may go."""
        blocked: set[int] = set()
        for copy in self.copies(tenant):
            if copy.stride == stride or copy not in movable:
                blocked.update(self.slabs_of(copy))
        return {run for run in self.runs(tenant, stride) if blocked.isdisjoint(run)}

    def could_place(self, tenant: str, stride: int, movable: set[Copy]) -> bool:
        """Whether one slot can be had by evicting some of `movable`, of whatever class."""
        mine = [copy for copy in self.copies(tenant) if copy.stride == stride]
        if any(copy in movable for copy in mine):
            return True
        taken = {copy.row for copy in mine}
        for copy in mine:
            run = self.slabs_of(copy)
            begin, end = run.start * SLAB, min(run.stop * SLAB, self.sizes[tenant])
            if any(row not in taken for row in range(-(-begin // stride), end // stride)):
                return True
        return bool(self.free_runs(tenant, stride, movable))

    def add_client(self, tenant: str, instance: str) -> Client:
        real = self.node.holders.add(tenant, instance, "test")
        self.made += 1
        client = Client(self.made, tenant, instance, real)
        self.clients.append(client)
        return client

    def client(self, data: st.DataObject) -> Client:
        return data.draw(st.sampled_from(self.clients), "client")

    def namespace(self, tenant: str, name: bytes) -> NamespaceState:
        known = self.opened.get((tenant, name))
        found = self.node.namespaces.open(self.tenants[tenant], name, b"{}", NAMESPACES[name])
        if known is None:
            self.epochs[tenant, name] = Epochs(states={0: found})
        assert known is None or found is known
        self.opened[tenant, name] = found
        assert self.node.namespaces.by_number(self.tenants[tenant], found.number) is found
        for other in TENANTS:
            if other != tenant:
                with pytest.raises(InvalidRequest):
                    self.node.namespaces.by_number(self.tenants[other], found.number)
        return found

    def aim(
        self, data: st.DataObject, tenant: str, name: bytes, keys: list[bytes]
    ) -> tuple[bytes, list[bytes]]:
        """More often than not something that is there, since most of what could be there is not."""
        here = sorted(where[1:] for where in self.blocks if where[0] == tenant)
        if here and data.draw(st.sampled_from([False, True, True]), "aimed"):
            name, _, key = data.draw(st.sampled_from(here), "at")
            start, stop = (0, 8) if KEYS.index(key) < 8 else (8, len(KEYS))
            keys = KEYS[start : data.draw(st.integers(KEYS.index(key) + 1, stop), "end")]
        return name, keys

    def observed(self) -> set[tuple[str, bytes, int, bytes]]:
        found = set()
        packed = b"".join(KEYS)
        for (tenant, name), namespace in self.opened.items():
            for part in range(len(namespace.parts)):
                flags = self.node.leases.contains(namespace, part, split_keys(packed))
                assert len(flags) == len(KEYS)
                found.update(
                    (tenant, name, part, key) for key, flag in zip(KEYS, flags, strict=True) if flag
                )
        return found

    def end_loan(self, token: str) -> None:
        del self.loans[token]
        self.over.append(token)

    def forget(self, copy: Copy) -> None:
        del self.blocks[copy.where]
        copy.pin = "none"

    # ---- put -----------------------------------------------------------------------------------

    @rule(name=namespaces, data=st.data(), keys=chains)
    def reserve(self, data: st.DataObject, name: bytes, keys: list[bytes]) -> None:
        client = self.client(data)
        tenant = client.tenant
        namespace = self.namespace(tenant, name)
        part = data.draw(st.integers(0, len(namespace.parts) - 1), "part")
        self.put(client, namespace, name, part, keys)

    @rule(name=namespaces, data=st.data(), keys=chains)
    def put_at_once(self, data: st.DataObject, name: bytes, keys: list[bytes]) -> None:
        """All parts of a chain, committed: what fills the pool."""
        self.put_all(self.client(data), name, keys, data.draw(origins, "origin"))

    def put_all(self, client: Client, name: bytes, keys: list[bytes], origin: Origin = OWN) -> None:
        namespace = self.namespace(client.tenant, name)
        for part, spec in enumerate(namespace.parts):
            ticket = self.put(client, namespace, name, part, keys[spec.stride - 1 :: spec.stride])
            if ticket is not None:
                self.settle_ticket(client, ticket, None, origin)

    def put(
        self, client: Client, namespace: NamespaceState, name: bytes, part: int, keys: list[bytes]
    ) -> int | None:
        if not keys:
            return None
        tenant, size = client.tenant, self.sizes[client.tenant]
        stride = stride_of(namespace.parts[part].nbytes)
        here = self.here(tenant, name, part)
        wanted = [i for i, key in enumerate(keys) if key not in here]
        reserved = sum(c.stride for copies in client.open.values() for c in copies.values())
        allowed = max(0, int(size * LIMITS.reserved_share_per_holder) - reserved) // stride
        if not reserved:
            allowed = max(allowed, 1)
        before = self.before(tenant, stride)
        own = self.of_prefix(tenant, name, keys)
        quota = Quota(self, tenant, name, stride * min(len(wanted), allowed))
        own_may_go = quota.over > 0 or not self.could_place(
            tenant, stride, (before[0] | self.idle_garbage(tenant)) - own
        )
        self.tickets += 1
        ticket = self.tickets
        try:
            packed, parent = b"".join(keys), KEYS[KEYS.index(keys[0]) - 1]
            answer = self.node.puts.reserve(
                client.real, namespace, part, ticket, split_keys(packed), parent
            )
        except LimitExceeded:
            assert wanted
            assert allowed == 0
            assert self.observed() == set(self.blocks)
            return None
        except PoolFull:
            assert wanted
            assert allowed > 0
            self.judge(tenant, stride, 1, 0, before, quota)
            if not quota.is_reached(stride):
                assert not self.idle_garbage(tenant), "there were ended epochs' slots"
                movable = self.evictable(tenant, soft=True)
                assert not self.could_place(tenant, stride, movable), "there was something to evict"
            return None
        assert answer[0] == stride
        rows = array("I", answer[1])
        granted = [row for row in rows if row != NO_ROW]
        got = dict(zip(wanted, granted, strict=False))
        assert len(granted) <= min(len(wanted), allowed) if wanted else not granted
        covered = len(keys) if len(granted) == len(wanted) else wanted[len(granted)]
        assert list(rows) == [got.get(i, NO_ROW) for i in range(covered)]
        if wanted:
            assert granted, "no row and no error"
            client.open[ticket] = {
                i: Copy(tenant, name, part, keys[i], stride, row, namespace.epoch)
                for i, row in got.items()
            }
        self.totals["reserved"] += len(granted)
        assert own_may_go or own == self.of_prefix(tenant, name, keys, self.observed())
        first = KEYS.index(keys[0]) - (namespace.parts[part].stride - 1)
        between = KEYS[first : KEYS.index(keys[-1]) + 1]  # of other parts, which are not as sparse
        spared = own | self.of_prefix(tenant, name, between)
        self.judge(tenant, stride, min(len(wanted), allowed), len(granted), before, quota, spared)
        quota.is_kept()
        if len(granted) < min(len(wanted), allowed) and not quota.is_reached(stride, spared):
            movable = self.evictable(tenant, soft=True) - spared
            assert not self.could_place(tenant, stride, movable), "there was something to evict"
        return ticket if wanted else None

    def of_prefix(
        self,
        tenant: str,
        name: bytes,
        keys: list[bytes],
        here: set[tuple[str, bytes, int, bytes]] | None = None,
    ) -> set[Copy]:
        """All parts of these blocks; here: only those of them that are at these places."""
        return {
            copy
            for copy in self.blocks.values()
            if (copy.tenant, copy.namespace) == (tenant, name) and copy.key in keys
            if here is None or copy.where in here
        }

    def before(self, tenant: str, stride: int) -> tuple[set[Copy], bool, set[range]]:
        plain = self.evictable(tenant, soft=False) | self.idle_garbage(tenant)
        return (
            self.evictable(tenant, soft=True),
            self.could_place(tenant, stride, set()),
            self.free_runs(tenant, stride, plain),
        )

    def judge(
        self,
        tenant: str,
        stride: int,
        asked: int,
        granted: int,
        before: tuple[set[Copy], bool, set[range]],
        quota: Quota,
        own: AbstractSet[Copy] = frozenset(),
    ) -> None:
        """What a put evicted: learnt from what is gone, and then asked whether that was right. own: of its prefix."""
        candidates, had_space, runs = before
        here = self.observed()
        assert here <= set(self.blocks), "a block from nowhere"
        gone = {copy for copy in self.blocks.values() if copy.where not in here}
        assert gone <= candidates, "evicted what is leased, pinned hard, or another tenant's"
        idle = self.idle_garbage(tenant)
        reclaimed = self.look_for_garbage()
        assert all(copy.tenant == tenant for copy in reclaimed)
        if quota.over > 0:
            spent = quota.judge(gone, stride, granted, own)
            gone -= spent
            if sum(copy.stride == stride for copy in spent) >= granted:
                assert not gone, "others' blocks, although its own made room"
        else:
            assert sum(copy.stride == stride for copy in reclaimed & idle) <= granted
            if asked <= 1 and had_space:
                assert not reclaimed
        if gone:
            assert not any(copy.tenant == tenant for copy in self.garbage), "the living first"
        if granted == 0:
            assert not gone
        if granted <= 1 and had_space:
            assert not gone, "evicted although there was space"
        if all(copy.stride == stride for copy in gone):
            assert len(gone) <= granted, "evicted more than was needed"
        soft = [copy for copy in gone if copy.pin == "soft"]
        primary = [c for c in gone if c.stride == stride and c.pin == "none" and not c.secondary]
        self.evicted(gone)
        if primary:
            left = self.evictable(tenant, soft=False) - own
            assert not any(copy.stride == stride and copy.secondary for copy in left), (
                "a primary copy before a secondary one"
            )
        if any(copy.stride != stride for copy in soft):
            left = self.evictable(tenant, soft=True) - own
            assert not any(copy.stride == stride for copy in left), (
                "another class's pin before ours"
            )
        if soft:
            left = self.evictable(tenant, soft=False) - own
            assert not any(copy.stride == stride for copy in left), "a soft pin before plain ones"
            assert not runs & self.free_runs(tenant, stride, left), "a soft pin before a slab"

    def evicted(self, gone: set[Copy]) -> None:
        self.totals["evicted"] += len(gone)
        self.totals["evicted_soft_pins"] += sum(copy.pin == "soft" for copy in gone)
        self.totals["evicted_secondary"] += sum(copy.secondary for copy in gone)
        for copy in gone:
            self.forget(copy)

    # ---- quotas --------------------------------------------------------------------------------

    def quota_held(self, tenant: str, name: bytes) -> int:
        """What counts: blocks, and what is reserved for more of them."""
        epoch = self.epochs[tenant, name].epoch
        counted = list(self.blocks.values())
        for client in self.clients:
            for copies in client.open.values():
                counted += [copy for copy in copies.values() if copy.epoch == epoch]
        return sum(c.stride for c in counted if (c.tenant, c.namespace) == (tenant, name))

    @rule(
        name=namespaces,
        tenant=tenants,
        share=st.sampled_from([0, 0.05, 0.2, 0.4, 0.7, 2.0]),
        often=st.sampled_from([0, 1]),
    )
    def set_quota(self, name: bytes, tenant: str, share: float, often: int) -> None:
        if often:
            nbytes = int(self.sizes[tenant] * share)
            self.quotas[tenant, name] = nbytes
            self.node.quotas.set(self.namespace(tenant, name), nbytes)

    @precondition(lambda self: any(self.quotas.values()))
    @rule(n=st.sampled_from([1, 3, 1000]))
    def tend_quotas(self, n: int) -> None:
        quotas = [Quota(self, *where, 0) for where, nbytes in self.quotas.items() if nbytes]
        more = self.node.quotas.tend(n)
        here = self.observed()
        gone = {copy for copy in self.blocks.values() if copy.where not in here}
        self.look_for_garbage()
        assert len(gone) <= n
        for quota in quotas:
            gone -= quota.judge(gone, 0)
        assert not gone, "of a namespace within its quota"
        for quota in quotas:
            assert more or quota.is_reached(1) or quota.held <= quota.nbytes
        assert not more or n < 1000

    @precondition(lambda self: any(client.open for client in self.clients))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([c for c in self.clients if c.open]), "client")
        ticket = data.draw(st.sampled_from(sorted(client.open)), "ticket")
        chosen: list[int] | None = None
        if data.draw(st.booleans(), "partly"):
            chosen = data.draw(
                st.lists(st.sampled_from(sorted(client.open[ticket])), unique=True), "indices"
            )
        self.settle_ticket(client, ticket, chosen, data.draw(origins, "origin"))

    def settle_ticket(
        self, client: Client, ticket: int, chosen: list[int] | None, origin: Origin
    ) -> None:
        reservation = client.open[ticket]
        indices = sorted(reservation) if chosen is None else chosen
        new = 0
        sums = []
        for i in indices:
            copy = reservation.pop(i)
            copy.checksum = checksum_of(copy.where, client.number % 16)
            sums.append(copy.checksum)
            if copy.epoch != self.epochs[copy.tenant, copy.namespace].epoch:
                self.totals["aborted"] += 1
            elif copy.where in self.blocks:
                self.totals["duplicates"] += 1
            else:
                self.blocks[copy.where] = copy
                copy.secondary, copy.wanted = origin.secondary, origin.replicas
                new += 1
                nbytes = NAMESPACES[copy.namespace][copy.part].nbytes
                self.totals["committed_bytes"] += nbytes
        if not reservation:
            del client.open[ticket]
            client.settled.add(ticket)
        self.totals["committed"] += new
        assert self.node.puts.commit(client.real, ticket, b"".join(sums), chosen, origin) == new

    @precondition(lambda self: any(client.open for client in self.clients))
    @rule(data=st.data())
    def refused_commits(self, data: st.DataObject) -> None:
        """Each changes nothing, which the invariants then see."""
        client = data.draw(st.sampled_from([c for c in self.clients if c.open]), "client")
        ticket = data.draw(st.sampled_from(sorted(client.open)), "ticket")
        indices = sorted(client.open[ticket])
        sums = bytes(16) * len(indices)
        bad: list[tuple[Holder, int, bytes, list[int] | None]] = [
            (client.real, ticket, sums[1:], None),
            (client.real, ticket, sums + bytes(16), None),
            (client.real, ticket, sums, [*indices[:-1], 99]),
            (client.real, ticket, sums + bytes(16), indices + indices[:1]),
            (client.real, ticket, sums, indices[1:]),
            *((other.real, ticket, sums, None) for other in self.clients if other is not client),
            *((client.real, old, sums, None) for old in list(client.settled)[-3:]),
        ]
        for holder, number, checksums, chosen in bad:
            with pytest.raises((InvalidRequest, UnknownReservation)):
                self.node.puts.commit(holder, number, checksums, chosen)
        name = next(iter(client.open[ticket].values())).namespace
        with pytest.raises(InvalidRequest):  # the ticket is in use
            self.node.puts.reserve(
                client.real, self.opened[client.tenant, name], 0, ticket, [KEYS[0]]
            )

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client = self.client(data)
        ticket = data.draw(st.sampled_from([*sorted(client.open), 0]), "ticket")
        self.node.puts.abort(client.real, ticket)
        dropped = client.open.pop(ticket, {})
        self.totals["aborted"] += len(dropped)
        if dropped:
            client.settled.add(ticket)

    # ---- put in one exchange -------------------------------------------------------------------

    @rule(name=namespaces, data=st.data(), count=st.integers(0, 6))
    def grant(self, data: st.DataObject, name: bytes, count: int) -> None:
        client = self.client(data)
        tenant = client.tenant
        namespace = self.namespace(tenant, name)
        part = data.draw(st.integers(0, len(namespace.parts) - 1), "part")
        stride = stride_of(namespace.parts[part].nbytes)
        everywhere = sum(c.stride for o in self.clients if o.tenant == tenant for c in o.granted)
        room = min(
            LIMITS.grant_bytes_per_holder - sum(c.stride for c in client.granted),
            int(self.sizes[tenant] * LIMITS.grant_share) - everywhere,
        )
        if nbytes := self.quotas.get((tenant, name), 0):
            mine = sum(c.stride for c in client.granted)
            room = min(room, int(nbytes * LIMITS.grant_share) - mine)
        allowed = min(count, max(0, room) // stride)
        before = self.before(tenant, stride)
        quota = Quota(self, tenant, name, stride * allowed)
        rows = self.node.grants.grant(client.real, namespace, part, count)
        assert len(rows) <= allowed
        client.granted += [Copy(tenant, name, part, b"", stride, row) for row in rows]
        self.judge(tenant, stride, allowed, len(rows), before, quota)
        if len(rows) < allowed and not quota.is_reached(stride * (len(rows) + 1)):
            movable = self.evictable(tenant, soft=True)
            assert not self.could_place(tenant, stride, movable), "there was something to evict"

    @precondition(lambda self: any(client.granted for client in self.clients))
    @rule(name=namespaces, data=st.data())
    def store(self, data: st.DataObject, name: bytes) -> None:
        client = data.draw(st.sampled_from([c for c in self.clients if c.granted]), "client")
        namespace = self.namespace(client.tenant, name)
        part = data.draw(st.integers(0, len(namespace.parts) - 1), "part")
        stride = stride_of(namespace.parts[part].nbytes)
        fitting = [copy for copy in client.granted if copy.stride == stride]
        if not fitting:
            rows = [client.granted[0].row]
            with pytest.raises(UnknownReservation):
                self.node.grants.store(client.real, namespace, part, rows, [KEYS[0]], bytes(16))
            return
        chosen = data.draw(st.lists(st.sampled_from(fitting), min_size=1, unique=True), "slots")
        keys = data.draw(
            st.lists(st.sampled_from(KEYS), min_size=len(chosen), max_size=len(chosen)), "keys"
        )
        origin = data.draw(origins, "origin")
        new_keys = {key for key in keys if (client.tenant, name, part, key) not in self.blocks}
        quota = Quota(self, client.tenant, name, stride * len(new_keys))
        rows, sums, unused = [], [], []
        new = 0
        for copy, key in zip(chosen, keys, strict=True):
            rows.append(copy.row)
            where = (client.tenant, name, part, key)
            sums.append(checksum_of(where, client.number % 16))
            if where in self.blocks:
                unused.append(copy.row)
                self.totals["duplicates"] += 1
            else:
                copy.namespace, copy.part, copy.key, copy.checksum = name, part, key, sums[-1]
                copy.epoch = namespace.epoch
                copy.secondary, copy.wanted = origin.secondary, origin.replicas
                self.blocks[where] = copy
                quota.new.add(copy)
                client.granted.remove(copy)
                new += 1
        checksums = b"".join(sums)
        call = (client.real, namespace, part)
        for bad in (
            (rows, keys, checksums[1:]),
            (rows, keys, checksums + b"!"),
            (rows, keys[1:], checksums),
            (rows[1:], keys, checksums),
            (rows + rows[:1], [*keys, KEYS[0]], checksums + bytes(16)),
            ([*rows[1:], 4000], keys, checksums),
        ):
            with pytest.raises(InvalidRequest):
                self.node.grants.store(*call, *bad)
        for other in self.clients:
            if other is not client and other.tenant == client.tenant:
                with pytest.raises(UnknownReservation):
                    self.node.grants.store(other.real, namespace, part, rows, keys, checksums)
        self.totals["committed"] += new
        self.totals["committed_bytes"] += new * namespace.parts[part].nbytes
        stored = self.node.grants.store(*call, rows, keys, checksums, origin=origin)
        assert stored == (new, unused)
        here = self.observed()
        gone = {copy for copy in self.blocks.values() if copy.where not in here}
        self.look_for_garbage()
        if quota.over > 0:
            gone -= quota.judge(gone, stride)
            assert quota.is_reached(1) or quota.held <= quota.nbytes
        assert not gone

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """One's own slots; those of others, and those that were stored, stay where they are."""
        client = self.client(data)
        anything = self.copies(client.tenant)
        if not anything:
            return
        chosen = data.draw(st.lists(st.sampled_from(client.granted or anything)), "slots")
        chosen += data.draw(st.lists(st.sampled_from(anything), max_size=2), "more")
        for copy in chosen:
            self.node.grants.give_back(client.real, copy.stride, [copy.row])
            if copy in client.granted:
                client.granted.remove(copy)

    # ---- get -----------------------------------------------------------------------------------

    @rule(name=namespaces, data=st.data(), tenant=tenants, keys=chains)
    def match(self, data: st.DataObject, name: bytes, tenant: str, keys: list[bytes]) -> None:
        name, keys = self.aim(data, tenant, name, keys)
        namespace = self.namespace(tenant, name)
        for parts in subsets(len(NAMESPACES[name])):
            used = [
                (NAMESPACES[name][part], self.here(tenant, name, part))
                for part in parts or range(len(NAMESPACES[name]))
            ]
            for chain in (keys, KEYS[:8], KEYS[8:], KEYS[:5], []):
                expected = present_prefix(used, chain)
                assert self.node.leases.match(namespace, parts, chain) == expected
                self.totals["match_calls"] += 1
                self.totals["match_keys"] += len(chain)
                self.totals["match_hits"] += expected

    @rule(name=namespaces, data=st.data(), keys=chains, seconds=st.sampled_from([0.5, 5.0, 99.0]))
    def acquire(self, data: st.DataObject, name: bytes, keys: list[bytes], seconds: float) -> None:
        client = self.client(data)
        name, keys = self.aim(data, client.tenant, name, keys)
        namespace = self.namespace(client.tenant, name)
        parts = data.draw(st.sampled_from(subsets(len(NAMESPACES[name]))), "parts")
        used = parts or list(range(len(NAMESPACES[name])))
        call = (client.real, namespace, parts, keys, seconds, self.now)
        if self.at_limit(client):
            with pytest.raises(LimitExceeded):
                self.node.leases.acquire(*call)
            return
        with pytest.raises(InvalidRequest):
            self.node.leases.acquire(*call[:4], 0.0, self.now)
        lease = self.node.leases.acquire(*call)
        here = {part: self.here(client.tenant, name, part) for part in used}
        n = present_prefix([(NAMESPACES[name][part], here[part]) for part in used], keys)
        if n == 0:
            assert lease is None
            self.totals["acquire_misses"] += 1
            return
        assert lease is not None
        assert lease.blocks == n
        assert sorted(lease.parts) == used
        copies = []
        for part in used:
            spec = NAMESPACES[name][part]
            chain = keys[:n][spec.stride - 1 :: spec.stride]
            first = 0
            if spec.kind is PartKind.WINDOW:
                first = max(0, len(chain) - spec.window_blocks)
                chain = chain[first:]
            expected = [self.blocks[client.tenant, name, part, key] for key in chain]
            assert lease.parts[part][0] == first * spec.stride
            self.same_places(lease, part, expected)
            copies += expected
        self.open_loan(client, lease, copies, seconds)

    @rule(name=namespaces, data=st.data(), keys=chains, seconds=st.sampled_from([0.5, 5.0, 99.0]))
    def acquire_scattered(
        self, data: st.DataObject, name: bytes, keys: list[bytes], seconds: float
    ) -> None:
        client = self.client(data)
        if self.at_limit(client):
            return
        name, keys = self.aim(data, client.tenant, name, keys)
        namespace = self.namespace(client.tenant, name)
        part = data.draw(st.integers(0, len(namespace.parts) - 1), "part")
        lease = self.node.leases.acquire(
            client.real, namespace, [part], keys, seconds, self.now, scattered=True
        )
        found = [
            self.blocks[client.tenant, name, part, key]
            for key in keys
            if (client.tenant, name, part, key) in self.blocks
        ]
        if not found:
            assert lease is None
            self.totals["acquire_misses"] += 1
            return
        assert lease is not None
        self.same_places(lease, part, found)
        self.open_loan(client, lease, found, seconds)

    def at_limit(self, client: Client) -> bool:
        held = sum(client.number in loan.holds for loan in self.loans.values())
        return held >= LIMITS.leases_per_holder

    def same_places(self, lease: Lease, part: int, expected: list[Copy]) -> None:
        assert [(b.table.stride, b.row, b.key, b.checksum) for b in lease.parts[part][1]] == [
            (c.stride, c.row, c.key, c.checksum) for c in expected
        ]

    def open_loan(self, client: Client, lease: Lease, copies: list[Copy], seconds: float) -> None:
        deadline = self.now + min(seconds, LIMITS.lease_s_max)
        assert lease.deadline == deadline
        assert lease.token not in self.loans
        assert lease.token not in self.over
        loan = Loan(client.tenant, client.instance, deadline, copies)
        loan.holds[client.number] = 1
        self.loans[lease.token] = loan
        self.totals["acquired"] += 1
        self.totals["leased_blocks"] += len(copies)

    @precondition(lambda self: self.loans or self.over)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        client = self.client(data)
        token = data.draw(st.sampled_from([*self.loans, *self.over[-3:], "nonsense"]), "token")
        loan = self.loans.get(token)
        holders = [c for c in self.clients if loan is not None and c.number in loan.holds]
        if holders and data.draw(st.booleans(), "again"):
            client = data.draw(st.sampled_from(holders), "holder")
        may = (
            loan is not None
            and loan.tenant == client.tenant
            and loan.instance == client.instance
            and loan.deadline > self.now
        )
        new = loan is not None and client.number not in loan.holds
        if may and new and self.at_limit(client):
            with pytest.raises(LimitExceeded):
                self.node.leases.join(client.real, token, self.now)
            return
        lease = self.node.leases.join(client.real, token, self.now)
        assert (lease is not None) == may
        if may:
            assert loan is not None
            assert lease is not None
            assert lease.token == token
            assert self.node.leases.join(client.real, token, loan.deadline) is None, (
                "it is over then"
            )
            loan.holds[client.number] += 1

    @precondition(lambda self: self.loans or self.over)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Of one's own lease, of another's, of one that is over, and once too often."""
        client = self.client(data)
        mine = [token for token, loan in self.loans.items() if client.number in loan.holds]
        others = [*self.loans, *self.over[-3:], "nonsense"]
        token = data.draw(st.sampled_from(mine or others), "token")
        if data.draw(st.booleans(), "any"):
            token = data.draw(st.sampled_from(others), "token")
        self.node.leases.release(client.real, token)
        loan = self.loans.get(token)
        if loan is not None and client.number in loan.holds:
            loan.holds[client.number] -= 1
            if not loan.holds[client.number]:
                self.leave(client, token)

    def leave(self, client: Client, token: str) -> None:
        loan = self.loans[token]
        del loan.holds[client.number]
        if not loan.holds:
            self.end_loan(token)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 3.0]), expire=st.booleans())
    def time_passes(self, seconds: float, expire: bool) -> None:
        """A little, or exactly up to a deadline. Without `expire` late leases still hold their slots."""
        self.now += seconds
        if not seconds and self.loans:
            self.now = max(self.now, min(loan.deadline for loan in self.loans.values()))
        if expire:
            due = self.node.leases.expire(self.now)
            for token, loan in list(self.loans.items()):
                if loan.deadline <= self.now:
                    self.end_loan(token)
                    self.totals["leases_expired"] += 1
            if self.loans:
                first = min(loan.deadline for loan in self.loans.values())
                assert due is not None
                assert self.now < due <= first

    @rule(data=st.data(), times=st.sampled_from([0, 0, 1, 2]))
    def holder_died(self, data: st.DataObject, times: int) -> None:
        if not times:  # or no lease would last
            return
        client = self.client(data)
        for _ in range(times):
            self.node.holders.died(client.real)
        self.clients.remove(client)
        holding = bool(client.open or client.granted)
        holding |= any(client.number in loan.holds for loan in self.loans.values())
        self.totals["dead_holders"] += holding
        self.totals["aborted"] += sum(map(len, client.open.values()))
        for token, loan in list(self.loans.items()):
            if client.number in loan.holds:
                self.leave(client, token)
        self.add_client(client.tenant, client.instance)

    # ---- remove, pin ---------------------------------------------------------------------------

    @rule(
        data=st.data(),
        name=namespaces,
        tenant=tenants,
        keys=st.lists(st.sampled_from(KEYS), max_size=3),
    )
    def remove(self, data: st.DataObject, name: bytes, tenant: str, keys: list[bytes]) -> None:
        if keys:
            name, keys = self.aim(data, tenant, name, keys)
            keys = keys[-2:]
        namespace = self.namespace(tenant, name)
        gone = set()
        for part in range(len(NAMESPACES[name])):
            for key in keys:
                copy = self.blocks.get((tenant, name, part, key))
                if copy is not None:
                    gone.add(key)
                    self.forget(copy)
                    self.totals["dropped"] += 1
        assert self.node.removal.remove(namespace, keys) == gone
        self.totals["removed"] += len(gone)

    @rule(name=namespaces, data=st.data(), tenant=tenants, key=st.sampled_from(KEYS))
    def drop_corrupt(self, data: st.DataObject, name: bytes, tenant: str, key: bytes) -> None:
        name, (*_, key) = self.aim(data, tenant, name, [key])
        namespace = self.namespace(tenant, name)
        part = data.draw(st.integers(0, len(namespace.parts) - 1), "part")
        self.node.removal.drop_corrupt(namespace, part, key)
        self.totals["checksum_mismatches"] += 1
        copy = self.blocks.get((tenant, name, part, key))
        if copy is not None:
            self.forget(copy)
            self.totals["dropped"] += 1

    @rule(
        data=st.data(),
        name=namespaces,
        tenant=tenants,
        keys=chains,
        kind=st.sampled_from(["none", "soft", "hard", "hard"]),
    )
    def pin(
        self, data: st.DataObject, name: bytes, tenant: str, keys: list[bytes], kind: str
    ) -> None:
        name, keys = self.aim(data, tenant, name, keys)
        namespace = self.namespace(tenant, name)
        chosen = {
            copy: None
            for key in keys
            for part in range(len(NAMESPACES[name]))
            if (copy := self.blocks.get((tenant, name, part, key)))
        }
        if kind != "none":
            asked = sum(c.stride for c in chosen if c.pin != kind)
            own = sum(c.stride for c in self.pins(tenant, kind) if c.namespace == name)
            quota = self.quotas.get((tenant, name), 0)
            too_much = self.pinned(tenant, kind) + asked > int(self.sizes[tenant] * SHARES[kind])
            if asked and (too_much or (quota and own + asked > int(quota * SHARES[kind]))):
                with pytest.raises(LimitExceeded):
                    self.node.pins.pin(namespace, keys, kind)
                return
        found = {copy.key for copy in chosen}
        assert self.node.pins.pin(namespace, keys, kind) == {key for key in keys if key in found}
        for copy in chosen:
            copy.pin = kind

    def pins(self, tenant: str, kind: str) -> list[Copy]:
        return [c for c in self.blocks.values() if c.tenant == tenant and c.pin == kind]

    def pinned(self, tenant: str, kind: str) -> int:
        return sum(copy.stride for copy in self.pins(tenant, kind))

    # ---- copies elsewhere ----------------------------------------------------------------------

    @rule(data=st.data(), name=namespaces, tenant=tenants, keys=chains)
    def demote(self, data: st.DataObject, name: bytes, tenant: str, keys: list[bytes]) -> None:
        name, keys = self.aim(data, tenant, name, keys)
        chosen = {
            copy: None
            for key in keys
            for part in range(len(NAMESPACES[name]))
            if (copy := self.blocks.get((tenant, name, part, key))) and not copy.secondary
        }
        namespace = self.namespace(tenant, name)
        assert self.node.candidates.demote(namespace, keys) == len(chosen)
        for copy in chosen:
            copy.secondary = True

    @rule(data=st.data(), name=namespaces, tenant=tenants, keys=chains)
    def expend(self, data: st.DataObject, name: bytes, tenant: str, keys: list[bytes]) -> None:
        """They go before others: which ones may go, and how many, is as before."""
        name, keys = self.aim(data, tenant, name, keys)
        may = {copy for copy in self.evictable(tenant, soft=False) if not copy.secondary}
        chosen = self.of_prefix(tenant, name, keys) & may
        before = self.node.candidates.expendable(self.tenants[tenant])
        new = self.node.candidates.expend(self.namespace(tenant, name), keys)
        assert new <= len(chosen)
        assert self.node.candidates.expendable(self.tenants[tenant]) == before + new

    @rule(tenant=tenants, n=st.integers(1, 20))
    def see_the_coldest(self, tenant: str, n: int) -> None:
        """Those that may go, and no others. What was seen may be gone when somebody comes back to it."""
        plain = self.evictable(tenant, soft=False)
        for secondary, ask in (
            (False, self.node.candidates.coldest),
            (True, self.node.candidates.coldest_secondary),
        ):
            may = {copy.where: copy for copy in plain if copy.secondary == secondary}
            everything = ask(self.tenants[tenant], 1000)
            found = ask(self.tenants[tenant], n)
            for blocks in (everything, found):
                wheres = [self.where(block) for block in blocks]
                assert len(set(wheres)) == len(wheres)
                assert set(wheres) <= set(may), "not to be evicted next"
                ages = [block.used for block in blocks]
                assert ages == sorted(ages)
            assert len(found) <= n
            assert len(everything) == len(may), "lost from its queue"
            self.seen += [(block, may[self.where(block)]) for block in found]

    def where(self, block: Block) -> tuple[str, bytes, int, bytes]:
        namespace = block.table.namespace
        return (namespace.tenant.name, namespace.base, block.table.part, block.key)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.seen), min_size=1, max_size=6), "blocks")
        if self.packed:
            # A view of a slot cannot be told from one of the slot's next block.
            chosen = [one for one in chosen if self.blocks.get(one[1].where) is one[1]]
        self.node.candidates.promote([block for block, _ in chosen])
        for _, copy in chosen:
            if self.blocks.get(copy.where) is copy:
                copy.secondary = False

    # ---- epochs --------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        name=namespaces,
        tenant=tenants,
        ahead=st.sampled_from([-1, 0, 1, 1, 3]),
        fenced=st.booleans(),
        often=st.sampled_from([0, 0, 1]),
    )
    def set_epoch(
        self,
        data: st.DataObject,
        name: bytes,
        tenant: str,
        ahead: int,
        fenced: bool,
        often: int,
    ) -> None:
        if not often:  # or no block would grow old
            return
        name, _ = self.aim(data, tenant, name, KEYS[:1])
        was = self.namespace(tenant, name)
        known = self.epochs[tenant, name]
        epoch = max(0, known.epoch + ahead)
        fence = epoch if fenced else data.draw(st.integers(0, epoch), "fence")
        any_state = data.draw(st.sampled_from(list(known.states.values())), "asked by")
        living = self.node.namespaces.set_epoch(any_state, epoch, fence)
        known.fence = max(known.fence, fence)
        if epoch <= known.epoch:
            assert living is was
            return
        assert living is not was
        assert (living.epoch, living.number in {s.number for s in known.states.values()}) == (
            epoch,
            False,
        )
        self.opened[tenant, name] = known.states[epoch] = living
        known.epoch = epoch
        self.totals["epochs_ended"] += 1
        ended = [c for c in self.blocks.values() if (c.tenant, c.namespace) == (tenant, name)]
        for copy in ended:
            self.forget(copy)
            self.garbage[copy] = None
        self.totals["dropped"] += len(ended)

    @precondition(lambda self: any(len(known.states) > 1 for known in self.epochs.values()))
    @rule(data=st.data())
    def clients_of_ended_epochs(self, data: st.DataObject) -> None:
        """Those before the fence find nothing and store nothing; others are where everybody is."""
        ended = [
            (where, epoch)
            for where, known in self.epochs.items()
            for epoch in known.states
            if epoch < known.epoch
        ]
        (tenant, name), epoch = data.draw(st.sampled_from(ended), "epoch")
        known = self.epochs[tenant, name]
        state = known.states[epoch]
        found = self.node.namespaces.by_number(self.tenants[tenant], state.number)
        assert self.node.namespaces.living(state) is self.opened[tenant, name]
        assert state.fenced == (epoch < known.fence)
        if not state.fenced:
            assert found is self.opened[tenant, name]
            return
        assert found is state
        assert self.node.leases.match(state, (), KEYS) == 0
        self.totals["match_calls"] += 1
        self.totals["match_keys"] += len(KEYS)
        client = next(c for c in self.clients if c.tenant == tenant)
        if not self.at_limit(client):
            for parts, scattered in (((), False), ((0,), True)):
                call = (client.real, state, parts, KEYS, 1.0, self.now)
                assert self.node.leases.acquire(*call, scattered=scattered) is None
                self.totals["acquire_misses"] += 1
        for part in range(len(NAMESPACES[name])):
            assert not any(self.node.leases.contains(state, part, KEYS))
            rows = [c.row for c in client.granted if c.stride == state.tables[part].stride][:1]
            with pytest.raises(StaleEpoch):
                self.node.puts.reserve(client.real, state, part, 10**6, KEYS)
            with pytest.raises(StaleEpoch):
                self.node.grants.grant(client.real, state, part, 1)
            with pytest.raises(StaleEpoch):
                self.node.grants.store(client.real, state, part, rows, [KEYS[0]], bytes(16))
        assert self.node.removal.remove(state, KEYS) == set()
        assert self.node.candidates.demote(state, KEYS) == 0
        assert not self.node.pins.pin(state, KEYS, "hard")

    @rule(n=st.integers(0, 6))
    def reclaim_garbage(self, n: int) -> None:
        count = len(self.garbage)
        assert bool(self.node.ended_epochs) == (count > 0)
        assert self.node.ended_epochs.reclaim(n) == min(n, count)
        assert len(self.look_for_garbage()) == min(n, count)

    # ---- what the directory is told ------------------------------------------------------------

    def held(self) -> dict[bytes, dict[bytes, int]]:
        found: dict[bytes, dict[bytes, int]] = {}
        for copy in self.blocks.values():
            digest = digest_of(copy.tenant, copy.namespace, copy.epoch)
            keys = found.setdefault(digest, {})
            keys[copy.key] = keys.get(copy.key, 0) | 1 << copy.part
        return found

    @rule()
    def announce(self) -> None:
        for namespace, keys in self.node.inventory.take_changes():
            digest = namespace.directory_digest
            assert self.node.namespaces.by_directory(digest) is namespace
            parts, masks = self.node.inventory.masks(digest, keys)
            assert parts == len(namespace.parts)
            known = self.directory.setdefault(digest, {})
            known.update(zip(keys, masks, strict=True))
        told = {
            digest: {key: mask for key, mask in keys.items() if mask}
            for digest, keys in self.directory.items()
        }
        held = self.held()
        unsaid = {(digest_of(c.tenant, c.namespace, c.epoch), c.key) for c in self.garbage}
        for digest, found in told.items():
            living = self.node.namespaces.by_directory(digest)
            assert living is not None
            if living.retired:
                assert {(digest, key) for key in found} <= unsaid, "not withdrawn"
            else:
                assert found == held.pop(digest, {})
        assert not held, "never told of"
        assert self.node.inventory.take_changes() == []

    @rule()
    def begin_walk(self) -> None:
        if len(self.walks) < 2:
            self.walks.append(Walk(self.held_copies()))

    @precondition(lambda self: self.walks)
    @rule(data=st.data(), count=st.integers(1, 12), steps=st.sampled_from([1, 1, 2, 1000]))
    def walk_on(self, data: st.DataObject, count: int, steps: int) -> None:
        walk = data.draw(st.sampled_from(self.walks), "walk")
        held = self.held()
        for _ in range(steps):
            groups, cursor = self.node.inventory.walk(walk.cursor, count)
            assert sum(len(keys) for _, keys in groups) <= count
            for digest, keys in groups:
                assert set(keys) <= held[digest].keys(), "met what is not here"
                walk.met.update((digest, key) for key in keys)
            if cursor is None:
                assert walk.stable.keys() <= walk.met, "not met"
                self.walks.remove(walk)
                return
            assert cursor > walk.cursor
            walk.cursor = cursor
        assert steps < 1000, "a walk without an end"

    def held_copies(self) -> dict[tuple[bytes, bytes], set[Copy]]:
        found: dict[tuple[bytes, bytes], set[Copy]] = {}
        for copy in self.blocks.values():
            digest = digest_of(copy.tenant, copy.namespace, copy.epoch)
            found.setdefault((digest, copy.key), set()).add(copy)
        return found

    @rule()
    def settle(self) -> None:
        self.node.settle()
        assert not self.node.settle()

    # ---- always --------------------------------------------------------------------------------

    @invariant()
    def found_is_what_was_committed_and_not_evicted(self) -> None:
        assert self.observed() == set(self.blocks)

    @invariant()
    def masks_are_what_is_here(self) -> None:
        held = self.held()
        for (tenant, name), known in self.epochs.items():
            for epoch, state in known.states.items():
                digest = digest_of(tenant, name, epoch)
                assert self.node.namespaces.by_directory(digest) is state
                here = held.get(digest, {})
                expected = [here.get(key, 0) for key in KEYS]
                assert self.node.inventory.masks(digest, KEYS) == (len(NAMESPACES[name]), expected)
            copies = [
                next(
                    (
                        copy.wanted or 1
                        for part in range(len(NAMESPACES[name]))
                        if (copy := self.blocks.get((tenant, name, part, key)))
                    ),
                    0,
                )
                for key in KEYS
            ]
            assert self.node.inventory.replicas_wanted(self.opened[tenant, name], KEYS) == copies
        assert self.node.inventory.masks(bytes(16), KEYS) == (0, [])
        assert self.node.inventory.block_count() == len(self.blocks)

    @invariant()
    def walks_need_not_meet_what_changed(self) -> None:
        if self.walks:
            now = self.held_copies()
            for walk in self.walks:
                walk.stable = {
                    block: copies
                    for block, copies in walk.stable.items()
                    if now.get(block) == copies
                }

    @invariant()
    def what_can_go_without_a_loss(self) -> None:
        for tenant in TENANTS:
            plain = self.evictable(tenant, soft=False)
            least = sum(copy.stride for copy in plain if copy.secondary)
            most = sum(copy.stride for copy in self.copies(tenant) if copy.secondary)
            assert least <= self.node.candidates.secondary_bytes(self.tenants[tenant]) <= most

    @invariant()
    def nobody_shares_bytes(self) -> None:
        """Reserved, committed, and removed but leased: all at once, so a leased slot is never reused."""
        for tenant in TENANTS:
            end = 0
            for copy in sorted(self.copies(tenant), key=lambda copy: copy.begin):
                assert copy.begin >= end
                end = copy.end
            assert end <= self.sizes[tenant]

    @invariant()
    def the_sums_are_right(self) -> None:
        self.node.settle()
        for name, count in msgspec.structs.asdict(self.node.counters).items():
            if name in self.totals:
                assert count == self.totals[name], name
        assert self.totals["committed"] == (
            len(self.blocks) + self.totals["evicted"] + self.totals["dropped"]
        )
        assert self.node.leases.count == len(self.loans)
        for tenant in TENANTS:
            line = self.node.inventory.tenant_stats(self.tenants[tenant])
            assert line.space.bytes_used == sum(c.stride for c in self.copies(tenant))
            assert line.blocks == sum(c.tenant == tenant for c in self.blocks.values())
            assert line.hard_pinned_bytes == self.pinned(tenant, "hard")
            assert line.soft_pinned_bytes == self.pinned(tenant, "soft")
            for name, namespace in line.namespaces.items():
                where = (tenant, bytes.fromhex(name))
                assert namespace.held_bytes == self.quota_held(*where)
                assert namespace.quota_bytes == self.quotas.get(where, 0)
        for client in self.clients:
            reserved = sum(c.stride for copies in client.open.values() for c in copies.values())
            assert client.real.reserved_bytes == reserved
            assert client.real.granted_bytes == sum(c.stride for c in client.granted)

    def teardown(self) -> None:
        """When all have died, every byte can be had again, whatever went before."""
        if not self.clients:
            return
        for client in list(self.clients):
            self.node.holders.died(client.real)
        self.clients.clear()
        self.loans.clear()
        self.the_sums_are_right_after_all_died()
        self.every_block_can_be_evicted()

    def the_sums_are_right_after_all_died(self) -> None:
        assert self.node.leases.count == 0
        for tenant in TENANTS:
            used = sum(c.stride for c in self.copies(tenant))
            assert self.tenants[tenant].allocator.bytes_used == used

    def every_block_can_be_evicted(self) -> None:
        everything = b"".join(KEYS)
        for namespace in self.opened.values():
            self.node.pins.pin(namespace, split_keys(everything), "none")
        for tenant in TENANTS:
            capacity = self.sizes[tenant] // SLAB
            fresh = self.node.namespaces.open(
                self.tenants[tenant], b"fill", b"{}", [PartSpec(SLAB)]
            )
            for n in range(capacity):
                writer = self.node.holders.add(tenant, "filler")
                key = n.to_bytes(16, "big")
                _, rows = self.node.puts.reserve(writer, fresh, 0, 1, split_keys(key))
                assert len(rows) == 4
            assert not any(found[0] == tenant for found in self.observed())
            assert self.tenants[tenant].allocator.bytes_used == self.sizes[tenant]


class Quota:
    """One namespace's before a put of so many bytes, and what may then become of its blocks.

    over: what has to go of it, if it is above 0.
    """

    def __init__(self, machine: NodeMachine, tenant: str, name: bytes, nbytes: int) -> None:
        self.machine = machine
        self.where = (tenant, name)
        self.nbytes = machine.quotas.get(self.where, 0)
        machine.namespace(tenant, name)
        self.new: set[Copy] = set()  # put with this: none of it can have gone
        self.before = self.held
        self.over = self.before + nbytes - self.nbytes if self.nbytes and nbytes else 0
        if self.nbytes and not nbytes:
            self.over = self.before - self.nbytes

    @property
    def held(self) -> int:
        return self.machine.quota_held(*self.where)

    def own(self, *, soft: bool) -> set[Copy]:
        """What could go of it."""
        found = self.machine.evictable(self.where[0], soft=soft)
        return {copy for copy in found - self.new if copy.namespace == self.where[1]}

    def is_kept(self) -> None:
        assert not self.nbytes or self.held <= max(self.nbytes, self.before), "grown beyond it"

    def is_reached(self, stride: int, spared: AbstractSet[Copy] = frozenset()) -> bool:
        """Whether it is why nothing more of this stride can be had: nothing more of its own can go. spared: stays."""
        may_go = self.own(soft=True) - spared
        return self.over > 0 and self.held + stride > self.nbytes and not may_go

    def judge(
        self,
        gone: set[Copy],
        stride: int,
        granted: int = 0,
        spared: AbstractSet[Copy] = frozenset(),
    ) -> set[Copy]:
        """Those that went for it, if they are the right ones. stride, granted: what a put wanted and got. spared: goes
        after all others.
        """
        if self.over <= 0:
            return set()
        spent = {copy for copy in gone if (copy.tenant, copy.namespace) == self.where}
        plain = [copy for copy in spent if copy.pin == "none"]
        primary = {copy.stride for copy in plain if not copy.secondary}
        soft = len(plain) < len(spent)
        # Else room was made among all of the tenant too, where others decide what of it goes.
        freed = sum(copy.stride == stride for copy in spent)
        alone = freed >= granted and self.over >= granted * stride
        self.machine.evicted(spent)
        left = self.own(soft=False) - spared
        if alone and spent:
            assert sum(c.stride for c in spent) - max(c.stride for c in spent) < self.over
            assert not soft or not left, "a soft pin before plain ones"
            assert not any(copy.secondary and copy.stride in primary for copy in left)
            if any(copy.stride != stride for copy in plain) and stride:
                assert not any(copy.stride == stride for copy in left), "another size first"
        return spent


NodeMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestNode = NodeMachine.TestCase
