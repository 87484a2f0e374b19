"""What is chosen before blocks are brought: how much of a prefix, whether to load or recompute it, and for how long
to wait. Event loop only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from kvpool.daemon.core.blocks import PartTable
from kvpool.daemon.fetch.delivery import SECONDARY
from kvpool.daemon.fetch.load_or_recompute import Choice, Sources, choose
from kvpool.daemon.fetch.locate import Locator
from kvpool.daemon.fetch.plan import SLICE_BYTES, Candidates, FetchRequest, Located, lacking
from kvpool.daemon.fetch.ports import LocalSource
from kvpool.daemon.fetch.transfers import Transfers
from kvpool.hit_rule import needed
from kvpool.placement.directory.base import Entry
from kvpool.placement.peer_selection import Candidate
from kvpool.placement.peers import HEDGE_TIMES, TRIAL_S, Peers
from kvpool.telemetry.cluster_stats import FetchStats
from kvpool.types import PartKind, Recompute

TRIAL_BYTES = 1 << 20  # loaded to measure a source's speed, or one block if that is more


@dataclass(eq=False)
class Choices:
    """See the module. local: the tiers below memory on this node, by the name of each as a source."""

    _locator: Locator
    _transfers: Transfers
    _local: Mapping[bytes, LocalSource]
    _peers: Peers
    _clock: Callable[[], float]
    _stats: FetchStats

    def choose(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        located: Located,
        recompute: Recompute | None,
    ) -> Choice:
        """How much of a prefix to bring here: all that is available, unless computing is sooner."""
        if recompute is None:
            return Choice(self._locator.usable(tables, keys, located), {})
        now = self._clock()
        living = Candidates(self._locator.lives)

        def candidates(
            table: PartTable, key: bytes, entries: Sequence[Entry]
        ) -> Sequence[Candidate]:
            found = living(entries, table.part)
            return self._locator.not_missing_from(table, key, found, now)

        def delivering(table: PartTable, key: bytes) -> list[bytes]:
            transfers = self._transfers.of(table).get(key, ())
            return [transfer.source for transfer in transfers if not transfer.background]

        return choose(
            tables,
            keys,
            here,
            located,
            lambda some: self._locator.usable(tables, some, located),
            Sources(candidates, delivering, self._peers, SLICE_BYTES),
            recompute,
            now,
        )

    def decline(self, declined: Mapping[bytes, Sequence[tuple[PartTable, bytes]]]) -> None:
        """Count the declined blocks, and start a trial of sources that are due one. Not awaited."""
        now = self._clock()
        for source, parts in declined.items():
            self._stats.declined += len(parts)
            self._peers.declined(source, len(parts))
            if not self._peers.begin_trial(source, now):
                continue
            table = parts[0][0]
            most = max(1, TRIAL_BYTES // table.spec.nbytes)
            keys = [key for other, key in parts[:most] if other is table]
            self._stats.trials += 1
            self._transfers.begin({table: keys}, source, now + TRIAL_S, SECONDARY, background=False)

    def doubtful(self, located: Located) -> bool:
        """Whether some of these are on a place of this node that has answered nothing since it was slow or failed."""
        doubted = [
            source
            for source in self._local
            if (peer := self._peers.get(source)) is not None and peer.on_probation
        ]
        return bool(doubted) and any(
            entry.incarnation in doubted for entries in located.values() for entry in entries
        )

    def fitting(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        located: Located,
        besides: Callable[[PartTable], Container[bytes]] | None,
    ) -> int:
        """How much of a prefix fits into memory at a time: more would not be held until it is whole."""
        namespace = tables[0].namespace
        allocator = namespace.tenant.allocator
        strides = {table.stride for table in tables}
        # Each other size has a slab that is not full.
        most = 1 - (len(strides) - 1) * allocator.slab_bytes / allocator.size
        if namespace.quota:
            most = min(most, namespace.quota / allocator.size)

        def share(blocks: int) -> float:
            taken = 0.0
            for table in tables:
                of_table = needed(table.spec, keys[:blocks])
                if besides is not None:
                    of_table = lacking(besides(table), of_table)
                taken += len(of_table) / allocator.capacity(table.stride)
            return taken

        if share(len(keys)) <= most:
            return len(keys)
        fit = bisect_right(range(1, len(keys) + 1), most, key=share)
        return self._locator.usable(tables, keys[:fit], located)

    def shorter_needs_more(
        self, tables: Sequence[PartTable], keys: Sequence[bytes], here: int, located: Located
    ) -> bool:
        """Whether the next shorter prefix that is available needs blocks that this one does not, and that are not here."""
        windows = [table for table in tables if table.spec.kind is PartKind.WINDOW]
        if not windows:
            return False
        shorter = self._locator.usable(tables, keys[:-1], located)
        return shorter > here and any(
            key not in table.blocks
            for table in windows
            for key in set(needed(table.spec, keys[:shorter])).difference(needed(table.spec, keys))
        )

    def expected_s(self, wanted: Sequence[FetchRequest]) -> float:
        """The duration after which something is wrong: see `Peers.hedge_after_s`."""
        nbytes: Counter[bytes] = Counter()
        for request in wanted:
            for candidate in request.candidates[:1]:
                nbytes[candidate.incarnation] += len(request.keys) * request.table.spec.nbytes
        found = [self._peers.hedge_after_s(one, much) for one, much in nbytes.items()]
        return HEDGE_TIMES * max(found, default=0.0)
