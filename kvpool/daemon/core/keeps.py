"""Blocks that are kept for a time: soft pins in memory that end by themselves. No I/O, no clock.

Only blocks that nobody had pinned are kept, and a pin that is set or removed meanwhile replaces it. Disks do not know of
it: a restart ends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvpool.daemon.core.blocks import PIN_NONE, NamespaceState, Tenant
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.pins import NOTHING_TAKEN, Fit, Pins, Taken

ENDED_TOGETHER = 256  # blocks, which take the event loop about a millisecond
SLACK = 4096
_End = tuple[float, int, NamespaceState, Sequence[bytes]]


@dataclass(eq=False, repr=False, slots=True)
class Keeps:
    """What is kept, and until when. Not thread-safe."""

    _tenants: Mapping[str, Tenant]
    _limits: Limits
    _ledger: Ledger
    _pins: Pins
    _ends: list[_End] = field(default_factory=list, init=False)
    """A heap."""
    _last: int = field(default=0, init=False)
    _listed: int = field(default=0, init=False)
    """Blocks in the heap, some of them twice or kept no longer."""

    def fit(
        self, namespace: NamespaceState, keys: Sequence[bytes], taken: Taken = NOTHING_TAKEN
    ) -> Fit:
        """How many of these blocks, from the first on, may be kept. taken: by others before them."""
        self._ledger.settle()
        tenant, limits, each = namespace.tenant, self._limits, block_bytes(namespace)
        known = [one for one in tenant.namespaces.values() if one.kept]
        # Those that have gone meanwhile count until their time is over.
        held = sum(len(one.kept) * block_bytes(one) for one in known)
        left = (limits.kept_blocks_max - sum(len(one.kept) for one in known)) * each
        left = min(left, int(tenant.allocator.size * limits.keep_share) - held) - taken.elsewhere
        if namespace.quota:
            own = int(namespace.quota * limits.keep_share)
            left = min(left, own - len(namespace.kept) * each)
        left = max(0, left - taken.here)
        pins = self._pins.fit(namespace, keys, "soft", taken)
        nbytes = 0
        for at, key in enumerate(keys[: pins.blocks]):
            more = each if self._is_free(namespace, key) else 0  # maybe put again since it was kept
            if nbytes + more > left:
                return Fit(at, nbytes, left)
            nbytes += more
        return Fit(pins.blocks, nbytes, pins.room)

    @staticmethod
    def _is_free(namespace: NamespaceState, key: bytes) -> bool:
        """Whether a block is here, and no part of it pinned."""
        found = [
            block for table in namespace.tables if (block := table.blocks.get(key)) is not None
        ]
        return bool(found) and all(block.pin == PIN_NONE for block in found)

    def keep(self, namespace: NamespaceState, keys: Sequence[bytes], until: float) -> None:
        """Keep these blocks until then, and not shorter than before. Those that are pinned or not here are ignored.

        Raises `LimitExceeded` beyond the quota of soft pins.
        """
        self._ledger.settle()
        kept = namespace.kept
        new = [key for key in dict.fromkeys(keys) if self._is_free(namespace, key)]
        self._pins.pin(namespace, new, "soft")
        later = [*new, *(key for key in keys if kept.get(key, until) < until)]
        kept.update(dict.fromkeys(later, until))
        self._push(namespace, new, until)
        # Some are of blocks that were pinned and unpinned meanwhile.
        if self._listed > 2 * self._count() + SLACK:
            self._list_anew()

    def _push(self, namespace: NamespaceState, keys: Sequence[bytes], until: float) -> None:
        for at in range(0, len(keys), ENDED_TOGETHER):
            self._last += 1
            some = keys[at : at + ENDED_TOGETHER]
            self._listed += len(some)
            heappush(self._ends, (until, self._last, namespace, some))

    def _count(self) -> int:
        return sum(
            len(one.kept) for tenant in self._tenants.values() for one in tenant.namespaces.values()
        )

    def _list_anew(self) -> None:
        self._ends.clear()
        self._listed = 0
        for tenant in self._tenants.values():
            for namespace in tenant.namespaces.values():
                keys = sorted(namespace.kept, key=namespace.kept.__getitem__)
                for at in range(0, len(keys), ENDED_TOGETHER):
                    some = keys[at : at + ENDED_TOGETHER]
                    self._push(namespace, some, namespace.kept[some[0]])

    def forget(self, namespace: NamespaceState, keys: Iterable[bytes]) -> dict[bytes, float]:
        """Somebody sets or removes pins of these blocks: they are not for a time any more. Returns until when they were."""
        kept = namespace.kept
        return {key: kept.pop(key) for key in keys if key in kept} if kept else {}

    def put_back(self, namespace: NamespaceState, forgotten: Mapping[bytes, float]) -> None:
        """Undo `forget`, where the pins are as they were too."""
        if forgotten and not namespace.retired:
            namespace.kept.update(forgotten)
            self._push(namespace, list(forgotten), min(forgotten.values()))

    def end_some(self, now: float) -> bool:
        """End some of what was to be kept until now; returns whether there may be more."""
        if not self._ends or self._ends[0][0] > now:
            return False
        _, _, namespace, keys = heappop(self._ends)
        self._listed -= len(keys)
        kept = namespace.kept
        over = [key for key in keys if kept.get(key, math.inf) <= now]
        for key in over:
            del kept[key]
        if over and not namespace.retired:
            self._pins.pin(namespace, over, "none")
        later = [key for key in keys if key in kept]
        if later and not namespace.retired:
            self._push(namespace, later, min(kept[key] for key in later))
        return True

    @property
    def next_end(self) -> float | None:
        """When to call `end_some` next."""
        return self._ends[0][0] if self._ends else None


def block_bytes(namespace: NamespaceState) -> int:
    """The slots of a block of which all parts are here."""
    return sum(table.stride for table in namespace.tables)
