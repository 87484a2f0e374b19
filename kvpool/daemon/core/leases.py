"""Gets: which blocks of a prefix are here, and leases on them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvpool.daemon.core.blocks import Block, Holder, Lease, NamespaceState, PartTable, Tenant
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.slots import Slots
from kvpool.errors import InvalidRequest, LimitExceeded
from kvpool.hit_rule import first_needed, needed, usable
from kvpool.telemetry.memory_stats import Counters

_SWEEP_FROM = 64  # deadlines of leases, some of them already released


@dataclass(eq=False, repr=False, slots=True)
class Leases:
    """The leases of all holders. Not thread-safe."""

    _limits: Limits
    _ledger: Ledger
    _slots: Slots
    _counters: Counters
    _incarnation: str
    """Prefix of the tokens."""
    _by_token: dict[str, Lease] = field(default_factory=dict, init=False)
    _made: int = field(default=0, init=False)
    _deadlines: list[tuple[float, str]] = field(default_factory=list, init=False)

    @property
    def count(self) -> int:
        """Number of living leases."""
        return len(self._by_token)

    def match(self, namespace: NamespaceState, parts: Sequence[int], keys: Sequence[bytes]) -> int:
        """How many blocks of the prefix an engine could use, by the hit rules of `parts` (empty: all)."""
        self._ledger.settle()
        n = self._usable(namespace.tables_of(parts), keys)
        counters = self._counters
        counters.match_calls += 1
        counters.match_keys += len(keys)
        counters.match_hits += n
        return n

    def contains(self, namespace: NamespaceState, part: int, keys: Sequence[bytes]) -> bytes:
        """One byte a key, 1 where the part of the block is here."""
        self._ledger.settle()
        return bytes(namespace.table(part).blocks.present(keys))

    def contains_in(
        self,
        namespaces: Sequence[NamespaceState],
        part: int,
        keys: Sequence[bytes],
        *,
        first: bool = False,
    ) -> list[bytes]:
        """As `contains`, of the same keys in each of several namespaces. first: a block that is in one is not looked for
        in those after it, where it is 0.
        """
        self._ledger.settle()
        rows: list[bytes] = []
        left: Sequence[bytes] = keys
        for namespace in namespaces:
            row = bytes(namespace.table(part).blocks.present(left))
            if len(left) < len(keys):  # some were found before
                here = set(compress(left, row))
                row = bytes([key in here for key in keys])
            rows.append(row)
            if first and 1 in row:
                found = set(compress(keys, row))
                left = [key for key in left if key not in found]
        return rows

    def acquire(
        self,
        holder: Holder,
        namespace: NamespaceState,
        parts: Sequence[int],
        keys: Sequence[bytes],
        lease_s: float | None,
        now: float,
        *,
        scattered: bool = False,
    ) -> Lease | None:
        """Lease the longest usable prefix, or with `scattered` each key that is here (one part only).

        lease_s: capped at the node's limit; None is for the node's own workers only. With `scattered`
        the lease's `blocks` counts the keys; absent ones have no slots: see `scattered_rows`.
        """
        self._ledger.settle()
        tables = namespace.tables_of(parts)
        holder.check_alive()
        self.check_count(holder)
        seconds = None if lease_s is None else self.seconds(lease_s)
        held: dict[int, tuple[int, list[Block]]] = {}
        if scattered:
            if len(tables) != 1:
                raise InvalidRequest("a scattered acquire must name exactly one part")
            lease = self._lease_each(holder, {tables[0]: keys}, seconds, now)
            self._counters.acquire_misses += lease is None
            return lease
        n = self._usable(tables, keys)
        for table in tables:
            spec = table.spec
            first = first_needed(spec, n) - spec.stride + 1
            held[table.part] = (first, table.blocks.all_of(needed(spec, keys[:n])))
        if n == 0:
            self._counters.acquire_misses += 1
            return None
        return self._lease(holder, namespace.tenant, held, n, seconds, now)

    def acquire_each(
        self, holder: Holder, wanted: Mapping[PartTable, Sequence[bytes]], now: float
    ) -> Lease | None:
        """For the node's own workers: lease each of these blocks of one namespace that is here, until released.

        None if there is none, which counts as no read that found nothing. `parts` as with `scattered`.
        """
        self._ledger.settle()
        holder.check_alive()
        self.check_count(holder)
        return self._lease_each(holder, wanted, None, now)

    def _lease_each(
        self,
        holder: Holder,
        wanted: Mapping[PartTable, Sequence[bytes]],
        seconds: float | None,
        now: float,
    ) -> Lease | None:
        held: dict[int, tuple[int, list[Block]]] = {}
        for table, keys in wanted.items():
            found = [block for block in table.blocks.found(keys) if block is not None]
            held[table.part] = (0, found)
        n = sum(len(found) for _, found in held.values())
        if n == 0:
            return None
        return self._lease(holder, holder.tenant, held, n, seconds, now)

    def lease(
        self,
        holder: Holder,
        held: Mapping[int, tuple[int, list[Block]]],
        n: int,
        lease_s: float | None,
        now: float,
    ) -> Lease:
        """Lease the blocks that are here of a usable prefix of n blocks, some of which are elsewhere.

        held: part → first block index, and its blocks that are here, after `settle`. The rest as for `acquire`.
        """
        holder.check_alive()
        self.check_count(holder)
        seconds = None if lease_s is None else self.seconds(lease_s)
        return self._lease(holder, holder.tenant, dict(held), n, seconds, now)

    def _lease(
        self,
        holder: Holder,
        tenant: Tenant,
        held: dict[int, tuple[int, list[Block]]],
        n: int,
        seconds: float | None,
        now: float,
    ) -> Lease:
        counters = self._counters
        ledger = self._ledger
        ledger.tick += 1
        for _, slots in held.values():
            if slots:
                ledger.leased(slots)
                counters.leased_blocks += len(slots)
                counters.leased_bytes += len(slots) * slots[0].table.spec.nbytes
        counters.acquired += 1
        self._made += 1
        token = f"{self._incarnation}.{self._made}"
        deadline = None
        if seconds is not None:
            deadline = now + seconds
            heapq.heappush(self._deadlines, (deadline, token))
        lease = Lease(token, tenant, holder.instance, deadline, n, held)
        self._by_token[token] = lease
        self._hold(lease, holder)
        return lease

    def hold(self, holder: Holder, blocks: Sequence[Block]) -> Lease:
        """Keep blocks of one table in their slots until `release`, without counting as a use."""
        self._ledger.settle()
        holder.check_alive()
        table = blocks[0].table
        held = [block for block in blocks if block.is_here()]
        lease = self.new(holder, len(held))
        lease.read_on(table, held)
        return lease

    def new(self, holder: Holder, blocks: int) -> Lease:
        """A lease that is not a use of any block, until its holder releases it."""
        self._made += 1
        token = f"{self._incarnation}.{self._made}"
        lease = Lease(token, holder.tenant, holder.instance, None, blocks, {}, is_use=False)
        self._by_token[token] = lease
        self._hold(lease, holder)
        return lease

    def seconds(self, asked: float) -> float:
        """The granted duration for a requested one."""
        if not asked > 0:
            raise InvalidRequest(f"the requested lease of {asked} seconds is not valid")
        return min(asked, self._limits.lease_s_max)

    def join(self, holder: Holder, token: str, now: float) -> Lease | None:
        """Join a living lease of the holder's own instance; None if there is none."""
        lease = self._by_token.get(token)
        if (
            lease is None
            or lease.tenant is not holder.tenant
            or lease.instance != holder.instance
            or id(holder) not in holder.tenant.holders
            or (lease.deadline is not None and lease.deadline <= now)
        ):
            return None
        if token not in holder.leases:
            self.check_count(holder)
        self._hold(lease, holder)
        return lease

    def check_count(self, holder: Holder) -> None:
        """Raises `LimitExceeded` if it has as many leases as allowed."""
        if len(holder.leases) >= self._limits.leases_per_holder:
            raise LimitExceeded(
                f"this client holds {len(holder.leases)} leases, the limit: release some"
            )

    def release(self, holder: Holder, token: str) -> None:
        """Undo one acquire or join. The slots are free when the last holder has released."""
        lease = holder.leases.get(token)
        if lease is None:
            return
        lease.holds[id(holder)] -= 1
        if lease.holds[id(holder)] == 0:
            self.leave(holder, lease)

    def _hold(self, lease: Lease, holder: Holder) -> None:
        lease.holders[id(holder)] = holder
        lease.holds[id(holder)] = lease.holds.get(id(holder), 0) + 1
        holder.leases[lease.token] = lease

    def leave(self, holder: Holder, lease: Lease) -> None:
        """Remove a holder, however often it has joined."""
        del holder.leases[lease.token]
        del lease.holders[id(holder)]
        del lease.holds[id(holder)]  # the id may be reused
        if not lease.holders:
            self._end(lease)

    def expire(self, now: float) -> float | None:
        """End the leases whose deadline has passed; returns the next deadline, if any."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, token = heapq.heappop(deadlines)
            lease = self._by_token.get(token)
            if lease is not None:
                for holder in lease.holders.values():
                    del holder.leases[token]
                lease.holders.clear()
                self._end(lease)
                self._counters.leases_expired += 1
        # Released leases stay in the heap until their deadline; when they are most of it, it is rebuilt.
        if len(deadlines) > _SWEEP_FROM and len(deadlines) > 4 * len(self._by_token):
            alive = [entry for entry in deadlines if entry[1] in self._by_token]
            heapq.heapify(alive)
            self._deadlines = deadlines = alive
        return deadlines[0][0] if deadlines else None

    def _end(self, lease: Lease) -> None:
        self._ledger.settle()
        del self._by_token[lease.token]
        self._slots.releases += 1
        if lease.beside is not None:
            lease.beside.end()
        for _, blocks in lease.parts.values():
            back: list[Block] = []
            unused: list[Block] = []
            parked = blocks[0].table.slots.parked if blocks else {}
            for block in blocks:
                block.leases -= 1
                if block.leases == 0:
                    if block.gone:
                        block.table.going -= 1
                        self._slots.free(block)
                    elif parked and (parked_at := parked.pop(block, -1)) >= 0:
                        was_used = lease.is_use or block.used > parked_at
                        (back if was_used else unused).append(block)
            if back:
                self._slots.put_in(back)
            if unused:
                self._slots.put_in(unused, first=True)

    @staticmethod
    def _usable(tables: Sequence[PartTable], keys: Sequence[bytes]) -> int:
        """The longest prefix, in blocks, for which every part satisfies its hit rule."""
        if len(tables) == 1:
            return usable((tables[0].spec,), (tables[0].blocks,), keys)
        return usable([table.spec for table in tables], [table.blocks for table in tables], keys)
