"""Which sources have which blocks: this node's lower tiers, the directory or the peers, object storage. Event
loop only.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.core.tier import SharedTier
from kvpool.daemon.fetch.peer_questions import PeerQuestions
from kvpool.daemon.fetch.plan import Located, entries_of, may_be_had, merge
from kvpool.daemon.fetch.ports import OBJECT, ClusterView, LocalSource, PeerTransport
from kvpool.errors import Unavailable
from kvpool.hit_rule import usable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.directory_memory import NegativeMemory, Remembered
from kvpool.placement.peer_selection import Candidate
from kvpool.placement.peers import Peers
from kvpool.placement.prefix_lookup import somewhere
from kvpool.telemetry.cluster_stats import FetchStats
from kvpool.telemetry.spans import LOOKUP, child, current, working_for

LOOKUP_SHARE = 0.25  # of the available time: the longest wait for an answer
LOOKUP_KEYS = 2048  # in one request; a prefix that ends within them is not looked up further
NEGATIVE_S, NEGATIVE_MAX = 2.0, 1 << 16
REMEMBERED_MAX = 1 << 18
LOST_MAX = 1024


@dataclass(eq=False)
class Locator:
    """Finds the replicas of blocks, and remembers answers and wrong ones among them.

    local: the tiers below memory on this node, by the name of each as a source.
    """

    _transport: PeerTransport
    _cluster: ClusterView
    _local: Mapping[bytes, LocalSource]
    _objects: SharedTier
    _peers: Peers
    _clock: Callable[[], float]
    _stats: FetchStats

    def __post_init__(self) -> None:
        self._questions = PeerQuestions(self._transport, self._cluster, self._peers, self._clock)
        self._negative = NegativeMemory(NEGATIVE_MAX, NEGATIVE_S)
        self._remembered = Remembered(REMEMBERED_MAX)
        # Incarnations by directory digest and key.
        self._lost: OrderedDict[bytes, bytes] = OrderedDict()

    @property
    def elsewhere(self) -> bool:
        """Whether there is any source but this node."""
        return bool(self._cluster.living) or self._objects.serving

    @property
    def has_sources(self) -> bool:
        """Whether there is anything to fetch from."""
        return any(tier.serving for tier in self._local.values()) or self.elsewhere

    def set_gauges(self) -> None:
        """How much is remembered now."""
        self._stats.negative, self._stats.remembered = len(self._negative), len(self._remembered)

    def lives(self, source: bytes) -> bool:
        """Whether a source can be asked."""
        if source == OBJECT:
            return self._objects.serving
        tier = self._local.get(source)
        return source in self._cluster.living if tier is None else tier.serving

    # ---- where blocks are ----------------------------------------------------------------------------

    async def prefix(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        deadline: float,
    ) -> Located:
        """The replicas on other nodes and object storage of a prefix of which `here` blocks are on this node."""
        nodes = self.on_nodes(namespace, tables, keys, here, deadline)
        if not self._objects.serving:
            return await nodes
        located: Located = {}
        stored = self.in_objects(namespace, tables, keys, deadline, prefix=True)
        for found in await asyncio.gather(nodes, stored):
            merge(located, found)
        return located

    async def each(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        deadline: float,
    ) -> Located:
        """Where each of these keys is, prefix or not; blocks on this node are not looked up elsewhere."""
        located = self.on_this_node(tables, keys)
        missing = [key for key in keys if key not in located and not _in_memory(tables, key)]
        if self._cluster.living:
            try:
                async with asyncio.timeout((deadline - self._clock()) * LOOKUP_SHARE):
                    for at in range(0, len(missing), LOOKUP_KEYS):
                        chunk = missing[at : at + LOOKUP_KEYS]
                        if self._cluster.directory is None:
                            wait_s = (deadline - self._clock()) * LOOKUP_SHARE
                            located.update(
                                await self._questions.each(namespace, tables, chunk, wait_s)
                            )
                            continue
                        found = await self.replicas(namespace, chunk)
                        located.update(zip(chunk, found, strict=True))
            except (Unavailable, TimeoutError):
                self._stats.lookups_failed += 1
        merge(located, await self.in_objects(namespace, tables, missing, deadline, prefix=False))
        return located

    async def everywhere(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wait_s: float,
    ) -> Located:
        """The known sources of these keys: lower tiers, the directory, object storage. Ends by `wait_s`."""
        deadline = self._clock() + wait_s / LOOKUP_SHARE
        located = self.on_this_node(tables, keys)
        lookups = [self.in_objects(namespace, tables, keys, deadline, prefix=False)]
        if self._cluster.directory is not None:
            lookups.append(self.on_nodes(namespace, tables, keys, 0, deadline))
        for found in await asyncio.gather(*lookups):
            merge(located, found)
        return located

    def on_this_node(self, tables: Sequence[PartTable], keys: Sequence[bytes]) -> Located:
        """The keys below memory on this node: on disks, or in spare device memory."""
        located: Located = {}
        for source, tier in self._local.items():
            masks: dict[bytes, int] = {}
            for table in tables:
                bit = 1 << table.part
                for held in tier.held(table):
                    for key in filter(held.__contains__, keys):
                        masks[key] = masks.get(key, 0) | bit
            merge(located, entries_of(masks, source, TIERS["dram"]))
        return located

    async def in_objects(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        deadline: float,
        *,
        prefix: bool,
    ) -> Located:
        """Which of these keys are in object storage."""
        if not keys or not self._objects.serving:
            return {}
        lacking = [table for table in tables if any(key not in table.blocks for key in keys)]
        try:
            async with asyncio.timeout((deadline - self._clock()) * LOOKUP_SHARE):
                masks = await self._objects.where(namespace, lacking, keys, prefix=prefix)
        except (Unavailable, TimeoutError):
            self._stats.lookups_failed += 1
            return {}
        return entries_of(masks, OBJECT, TIERS["object"])

    async def replicas(
        self, namespace: NamespaceState, keys: Sequence[bytes], *, engines: bool = False
    ) -> list[list[Entry]]:
        """The living replicas of each key on other nodes. Raises `Unavailable` without a directory.

        engines: also blocks in engines' own caches (tier gpu), which cannot be pulled.
        """
        directory = self._cluster.directory
        if directory is None:
            raise Unavailable("this node has no directory: configure one with --directory")
        entries = await directory.locate(namespace.directory_digest, len(namespace.tables), keys)
        self._remembered.learn(namespace.directory_digest, keys, entries)
        return self._living_only(namespace, keys, entries, engines=engines)

    async def on_nodes(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        deadline: float,
    ) -> Located:
        """Living replicas of the keys that matter: those after `here`, and the windows before it."""
        if not self._cluster.living:
            return {}
        span = child(LOOKUP)
        if span is None:
            return await self._ask_nodes(namespace, tables, keys, here, deadline)
        span.set(
            source="peers" if self._cluster.directory is None else "directory",
            blocks_asked=len(keys) - here,
        )
        try:
            with working_for(span):
                located = await self._ask_nodes(namespace, tables, keys, here, deadline)
            span.set(blocks=sum(map(bool, located.values())))
            return located
        finally:
            span.end()

    async def _ask_nodes(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        deadline: float,
    ) -> Located:
        wait_s = (deadline - self._clock()) * LOOKUP_SHARE
        windows = [table.spec.window_blocks * table.spec.stride for table in tables]
        first = max(0, here - max(windows, default=0))
        if self._cluster.directory is None:
            # A peer may have the rest of a prefix without its beginning.
            first -= first % math.lcm(*(table.spec.stride for table in tables))
            return await self._questions.prefix(namespace, tables, keys[first:], wait_s)
        located: Located = {}
        try:
            async with asyncio.timeout(wait_s):
                for at in range(first, len(keys), LOOKUP_KEYS):
                    chunk = keys[at : at + LOOKUP_KEYS]
                    self._stats.lookups += 1
                    found = await self.replicas(namespace, chunk)
                    located.update(zip(chunk, found, strict=True))
                    if not found[-1] and not _in_memory(tables, chunk[-1]):
                        break
        except (Unavailable, TimeoutError):
            self._stats.lookups_failed += 1
            if (span := current()) is not None:
                span.set(remembered=1)
            rest = [key for key in keys[first:] if key not in located]
            remembered = self._remembered.recall(namespace.directory_digest, rest)
            self._stats.lookups_remembered += any(remembered)
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
        """Adjacent keys with the same entries share a list."""
        living = self._cluster.living
        kept: list[list[Entry]] = []
        last: Sequence[Entry] | None = None
        strangers: dict[Entry, list[bytes]] = {}
        for key, found in zip(keys, entries, strict=True):
            if found == last:  # adjacent keys of a chain mostly have the same entries
                kept.append(kept[-1])
            else:
                kept.append(
                    [
                        entry
                        for entry in found
                        if entry.incarnation in living and (engines or may_be_had(entry))
                    ]
                )
            last = found
            if len(kept[-1]) != len(found):
                for entry in found:
                    if entry.incarnation not in living:
                        strangers.setdefault(entry, []).append(key)
        for entry, some in strangers.items():
            self._cluster.met(namespace, some, entry)
        if strangers:
            self._note_lost(namespace, keys, entries, kept)
        return kept

    def _note_lost(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        entries: Sequence[Sequence[Entry]],
        kept: Sequence[Sequence[Entry]],
    ) -> None:
        """Remember the first block whose replicas all are on nodes that are gone: a miss is explained by its first one."""
        for key, found, left in zip(keys, entries, kept, strict=True):
            if found and not left:
                name = namespace.directory_digest + key
                self._lost.pop(name, None)
                self._lost[name] = found[0].incarnation
                if len(self._lost) > LOST_MAX:
                    self._lost.popitem(last=False)
                return

    def lost_with(self, namespace: NamespaceState, key: bytes) -> bytes | None:
        """The incarnation, not living any more, that the directory last named for this block; None: it named none."""
        name = namespace.directory_digest + key
        lost = self._lost.get(name)
        if lost is None:
            known = self._remembered.recall(namespace.directory_digest, [key])[0]
            lost = known[0].incarnation if known else None
            if any(entry.incarnation in self._cluster.living for entry in known):
                return None
        return None if lost in self._cluster.living else lost

    # ---- what follows from it ------------------------------------------------------------------------

    def usable(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        located: Mapping[bytes, Sequence[Entry]],
    ) -> int:
        """The longest prefix that could be used here once everything located has arrived."""
        held = somewhere(
            [table.part for table in tables],
            [table.blocks for table in tables],
            keys,
            [located.get(key, ()) for key in keys],
            self.lives,
        )
        return usable([table.spec for table in tables], held, keys)

    # ---- what was wrong ------------------------------------------------------------------------------

    def was_missing(self, table: PartTable, key: bytes, source: bytes, now: float) -> None:
        """A source lacks a block that it should have: it is not asked for it again for `NEGATIVE_S`."""
        self._remembered.forget(table.namespace.directory_digest, [key], source)
        self._negative.add(table.namespace.digest, table.part, key, source, now)

    def not_missing_from(
        self, table: PartTable, key: bytes, candidates: Sequence[Candidate], now: float
    ) -> Sequence[Candidate]:
        """The candidates that were not recently found to lack a block."""
        if not self._negative:
            return candidates
        digest, part, has = table.namespace.digest, table.part, self._negative.has
        return [one for one in candidates if not has(digest, part, key, one.incarnation, now)]

    def having(
        self, table: PartTable, keys: Sequence[bytes], candidates: Sequence[Candidate], now: float
    ) -> Iterable[Sequence[Candidate]]:
        """`not_missing_from` of each key."""
        if not self._negative:
            return repeat(candidates, len(keys))
        return [self.not_missing_from(table, key, candidates, now) for key in keys]


def _in_memory(tables: Sequence[PartTable], key: bytes) -> bool:
    return any(key in table.blocks for table in tables)
