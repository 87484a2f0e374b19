"""Requests that wait in the scheduler, in their order of service. No I/O, no clock.

Ordering by size alone gives the shortest mean wait, but may starve long prompts. So the order is by

    knee x log(1 + size / knee) + aging x arrival

where size is the seconds left to compute, or a share of that for a prompt that was started. Sizes far
above the knee differ little, so that long prompts go nearly in the order of their arrival, and no request is
overtaken by one that arrived more than knee x log(1 + size / knee) / aging seconds later. Higher priorities go
first. Tenants that have used more than their share go behind all others (`tenants`). Not thread-safe.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice

from kvpool.errors import ConfigError
from kvpool.scheduler.index import Match
from kvpool.scheduler.tenants import Charges, TenantRule
from kvpool.scheduler.values import Among, Engine, Request


@dataclass(frozen=True, slots=True)
class QueueRule:
    """knee_s, aging: see above; a knee of 0 is the order of arrival. begun: the share that counts of the size of
    a prompt that was started, from 0 to 1.
    """

    knee_s: float
    aging: float
    begun: float

    def __post_init__(self) -> None:
        if not (self.knee_s >= 0 and self.aging > 0 and 0 <= self.begun <= 1):
            raise ConfigError(f"a queue needs knee_s >= 0, aging > 0 and begun from 0 to 1: {self}")

    def key(self, size_s: float, arrived_s: float, *, begun: bool) -> float:
        return self.advantage_s(size_s * (self.begun if begun else 1.0)) + self.aging * arrived_s

    def advantage_s(self, size_s: float) -> float:
        """By how much a request without size goes before one of this size that arrived with it."""
        return self.knee_s * math.log1p(size_s / self.knee_s) if self.knee_s else 0.0


FIFO = QueueRule(knee_s=0.0, aging=1.0, begun=1.0)
SIZE_AWARE = QueueRule(knee_s=1.0, aging=0.05, begun=0.2)
"""Chosen on the first half of the conversation trace."""


@dataclass(slots=True)
class Waiting:
    """A request in the queue. done: tokens of its prompt computed by its orders so far.

    running: the engine that computes the segment before `done`, while it does: the rest keeps
    its place in the queue. match: the index's answer at `matched_at`, cached for a short time.
    decode: the engine that keeps memory for it, if it was the first that lacked any.
    """

    request: Request
    size_s: float
    done: int = 0
    running: Engine | None = None
    match: Match | None = None
    matched_at: float = 0.0
    decode: Engine | None = None


_Entry = tuple[int, float, int]


class RequestQueue:
    """Adding and removing is O(log n), and moves n pointers at most; looking is O(waiting tenants), for each
    `Among` that they wait for.
    """

    def __init__(self, rule: QueueRule, tenants: TenantRule | None = None) -> None:
        self._rule = rule
        self._charges = Charges(tenants or TenantRule())
        # Per waiting tenant and group of engines: a shortage for one model says nothing of another's.
        self._orders: dict[str, dict[Among, list[_Entry]]] = {}
        self._totals: dict[Among, tuple[int, float]] = {}  # how many wait, and their seconds
        self._items: dict[int, Waiting] = {}
        self._keys: dict[int, _Entry] = {}
        self._numbers: dict[object, int] = {}
        self._next = 0
        self.whole = 0
        """How many of them one engine must serve whole. Read-only."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Waiting]:
        """All, in no order."""
        return iter(self._items.values())

    @property
    def tenants(self) -> Collection[str]:
        """Waiting tenants."""
        return self._orders.keys()

    def count(self, tenant: str) -> int:
        """How many requests of this tenant wait."""
        return sum(map(len, self._orders.get(tenant, {}).values()))

    def share(self, tenant: str) -> float:
        """This tenant's share among the waiting tenants, as if it waited, too."""
        return self._charges.share(tenant, self._orders)

    def add(self, item: Waiting) -> bool:
        """Equal ones keep the order in which they were added. Returns whether it is surely the last of several."""
        number = self._next
        self._next += 1
        request = item.request
        key = self._rule.key(item.size_s, request.arrived_s, begun=item.done > 0)
        entry = (-request.priority, key, number)
        among = request.among
        orders = self._orders.setdefault(request.tenant, {})
        order = orders.setdefault(among, [])
        insort(order, entry)
        self._items[number] = item
        self._keys[number] = entry
        self._numbers[request.ident] = number
        self.whole += request.whole
        count, total_s = self._totals.get(among, (0, 0.0))
        self._totals[among] = count + 1, total_s + item.size_s
        return len(self._orders) == len(orders) == 1 < len(order) and order[-1] is entry

    def get(self, ident: object) -> Waiting:
        """The entry of this request; a KeyError if it does not wait."""
        return self._items[self._numbers[ident]]

    def __contains__(self, ident: object) -> bool:
        return ident in self._numbers

    def remove(self, ident: object) -> Waiting | None:
        """Remove it; None if it did not wait."""
        number = self._numbers.pop(ident, None)
        if number is None:
            return None
        entry = self._keys.pop(number)
        item = self._items.pop(number)
        tenant, among = item.request.tenant, item.request.among
        orders = self._orders[tenant]
        order = orders[among]
        self.whole -= item.request.whole
        del order[bisect_left(order, entry)]
        if not order:
            del orders[among]
        if not orders:
            del self._orders[tenant]
        count, total_s = self._totals[among]
        if count > 1:
            self._totals[among] = count - 1, total_s - item.size_s
        else:
            del self._totals[among]  # and with it all rounding errors
        return item

    def charge(self, tenant: str, seconds: float, now: float) -> None:
        """This much was ordered for it. Counts only while others wait."""
        if len(self._orders) > (tenant in self._orders):
            self._charges.add(tenant, seconds, now)

    def first(self, count: int) -> Iterator[Waiting]:
        """In order, the first `count` for each group of engines. The queue must not change
        meanwhile.
        """
        left: dict[Among, int] = {}
        for _, _, number in self._entries(count):
            item = self._items[number]
            among = item.request.among
            more = left.get(among, count)
            if more:
                left[among] = more - 1
                yield item

    def waiting_s(self, request: Request) -> float:
        """Seconds of waiting prefill for engines that can serve this request, too."""
        among = request.among
        return sum(total_s for other, (_, total_s) in self._totals.items() if among.meets(other))

    def ahead_s(self, size_s: float, request: Request) -> float:
        """The same, of the requests before one of this size. O(n)."""
        among = request.among
        entry = (-request.priority, self._rule.key(size_s, request.arrived_s, begun=False))
        mine = (*entry, self._next)
        behind = self._charges.behind({*self._orders, request.tenant})
        is_behind = request.tenant in behind
        total_s = 0.0
        for tenant, orders in self._orders.items():
            for other, order in orders.items():
                if not among.meets(other):
                    continue
                if (tenant in behind) == is_behind:
                    ahead = order[: bisect_left(order, mine)]
                else:
                    ahead = order if is_behind else []
                total_s += sum(self._items[number].size_s for _, _, number in ahead)
        return total_s

    def _entries(self, count: int) -> Iterator[_Entry]:
        """In order; for each tenant at most this many per group of engines."""
        behind = self._charges.behind(self._orders)
        front: list[Iterator[_Entry]] = []
        back: list[Iterator[_Entry]] = []
        for tenant, orders in self._orders.items():
            found = back if tenant in behind else front
            found += [islice(order, count) for order in orders.values()]
        return chain(merge(*front), merge(*back))
