"""The rules of one node: what may happen to a block. No I/O, no clock, no randomness.

Each part of a `Node` handles one kind of event. A method is one event: it checks, changes the state, and returns
what its caller must send or do. Times are seconds of a monotonic clock, given by the caller. One thread only.

A slot is in one of five states, with these transitions:

    free ──reserve──▶ reserved ──commit──▶ committed ──acquire──▶ leased
                         │                   │    ▲                 │
                         │ abort, death      │    └── last lease ───┤
                         ▼                   │        ends          │ removed while leased
                        free ◀───evicted─────┘                      ▼
                         ▲                                       evicting
                         └──────────── last lease ends ─────────────┘

Slots may also be *granted*: reserved without keys, so that a small put costs its writer one exchange with
the daemon instead of two. A granted slot is otherwise like a reserved one.

A block is found (match, contains, acquire) from commit until it is evicted or removed, and never in
any other state. Three rules carry the promises:

1. A reserved slot may be written by its reserver at any time. So it is freed only when the reserver
   aborts, commits, or is dead as a process: never by a deadline, never because a socket closed.
2. A leased slot may be read by its holders, until they release, until its deadline (readers check the clock
   after their copy), or until they are dead as processes.
3. Space for a put is reclaimed in the put: the eviction policy of the slot class gives one victim after
   the other, each in O(1). Leased blocks that come up as victims are set aside and return to the
   policy with their last lease, so each lease costs at most one such step: as the most recently used, or, if
   they were only held in place meanwhile, as the next victims.
"""

from __future__ import annotations

from kvpool.daemon.core.block_index import BlockIndex
from kvpool.daemon.core.blocks import BlockObjects, Tenant
from kvpool.daemon.core.candidates import Candidates
from kvpool.daemon.core.change_feed import ChangeFeed
from kvpool.daemon.core.commit_waiters import CommitWaiters
from kvpool.daemon.core.ended_epochs import EndedEpochs
from kvpool.daemon.core.events import Events, TierInfo
from kvpool.daemon.core.eviction import Eviction
from kvpool.daemon.core.grants import Grants
from kvpool.daemon.core.holders import Holders
from kvpool.daemon.core.idle_age import IdleAge
from kvpool.daemon.core.inventory import Inventory
from kvpool.daemon.core.keeps import Keeps
from kvpool.daemon.core.leases import Leases
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.namespaces import Namespaces
from kvpool.daemon.core.packed_blocks import PackedBlocks, PackedTable
from kvpool.daemon.core.pins import Pins
from kvpool.daemon.core.puts import Puts
from kvpool.daemon.core.quotas import Quotas
from kvpool.daemon.core.reclaimer import Reclaimer
from kvpool.daemon.core.removal import Removal
from kvpool.daemon.core.slots import Slots
from kvpool.errors import InvalidRequest
from kvpool.storage.eviction import MakePolicy
from kvpool.storage.slab import SlabAllocator
from kvpool.telemetry.memory_stats import Counters


class Node:
    """All blocks of one daemon in one tier. Not thread-safe: the control process's event loop calls it.

    idle_age: of ticks; sampled by the caller, which has a clock.
    """

    def __init__(
        self,
        *,
        make_policy: MakePolicy,
        limits: Limits | None = None,
        incarnation: str = "0",
        packed: bool = False,
        events: Events | None = None,
        tier: str = "dram",
    ) -> None:
        """make_policy: for a class with so many slots. packed: blocks are kept in arrays, for a tier of tens of
        millions of them: see `packed_blocks`. events: of all tiers of the daemon; None: nobody subscribes.
        """
        self.limits = limits = limits or Limits()
        self.incarnation = incarnation
        self.counters = counters = Counters()
        self.idle_age = IdleAge()
        self.events = events or Events()
        info = TierInfo(tier, self.idle_age)
        self.commit_waiters = CommitWaiters(limits.waiters_max, limits.waiters_per_peer_max)
        self.tenants: dict[str, Tenant] = {}
        tenants = self.tenants
        self._changes = changes = ChangeFeed(info, self.events, self.commit_waiters)
        self.ledger = ledger = Ledger(changes)
        new_records = PackedBlocks if packed else lambda _: BlockObjects()
        slots = Slots(make_policy, new_records, ledger, changes)
        self.ended_epochs = EndedEpochs(slots, changes, counters)
        self.eviction = Eviction(tenants, ledger, changes, counters)
        self.quotas = Quotas(ledger, slots, self.ended_epochs, self.eviction, counters)
        self.candidates = Candidates(tenants, ledger, self.quotas)
        reclaimer = Reclaimer(
            *(limits, ledger, slots, self.ended_epochs),
            *(self.eviction, self.quotas, info, counters),
        )
        self.namespaces = Namespaces(
            *(tenants, limits, ledger, self.ended_epochs),
            *(self.quotas, changes),
            PackedTable if packed else BlockIndex,
        )
        self.puts = Puts(tenants, limits, ledger, slots, reclaimer, counters)
        self.grants = Grants(limits, ledger, slots, self.quotas, reclaimer, self.puts)
        self.leases = Leases(limits, ledger, slots, counters, incarnation)
        self.holders = Holders(tenants, self.puts, self.grants, self.leases, counters)
        self.removal = Removal(ledger, slots, counters)
        self.pins = Pins(limits, ledger, slots)
        self.keeps = Keeps(tenants, limits, ledger, self.pins)
        self.inventory = Inventory(
            *(tenants, self.namespaces, self.candidates),
            *(ledger, slots, changes),
        )

    def add_tenant(
        self,
        name: str,
        segment: int,
        size: int,
        slab_bytes: int | None = None,
        allocator: SlabAllocator | None = None,
    ) -> Tenant:
        """Give a tenant its segment. The caller owns the bytes.

        allocator: of the segment, if its owner needs more than the rules report.
        """
        if name in self.tenants:
            raise InvalidRequest(f"tenant {name!r} already has a segment")
        tenant = Tenant(name, segment, allocator or SlabAllocator(size, slab_bytes=slab_bytes))
        self.tenants[name] = tenant
        return tenant

    def end(self) -> None:
        """What these rules are of is gone, and with it all blocks."""
        self.settle()
        for tenant in self.tenants.values():
            for namespace in tenant.namespaces.values():
                for table in namespace.tables:
                    self._changes.ended(table)

    def settle(self) -> bool:
        """Book all recorded puts and reads; returns whether there were any: see `Ledger`."""
        return self.ledger.settle()
