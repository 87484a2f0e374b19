"""What operators ask about a node, its cluster and its blocks. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpool.daemon.cluster.engine_registry import describe as describe_engines
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import Block, NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.miss_reasons import MissReasons
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import NOT_NODES, OBJECT
from kvpool.daemon.ops.commands import Asker, asking_others, namespace_of, namespaces_of, unpacked
from kvpool.daemon.ops.event_log import EventLog
from kvpool.daemon.ops.listing import describe_block, list_blocks, show_blocks
from kvpool.daemon.ops.prefixes import prefixes
from kvpool.daemon.ops.receipts import AccountPeriods
from kvpool.daemon.ops.stats_gatherer import StatsGatherer
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.errors import InvalidRequest, Unavailable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.telemetry.spans import Spans
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Block as Shown
from kvpool.wire.answers import Events, Located, Replica

EVENTS_MAX = 1000  # in one answer
WAIT_S_MAX = 60.0
LOCATE_KEYS_MAX = 4096
SHOW_KEYS_MAX = 1024
LIST_BLOCKS_MAX = 1000


@dataclass(frozen=True, eq=False, slots=True)
class Reports:
    """Answers commands that look at a node as a whole."""

    cluster: ClusterMember
    stats: StatsGatherer
    journal: EventLog
    miss_reasons: MissReasons
    receipts: AccountPeriods
    spans: Spans

    async def _describe_cluster(self, _who: Asker, _m: operator_wire.Cluster) -> Any:
        return self.cluster.describe()

    async def _inspect(self, _who: Asker, _m: operator_wire.Inspect) -> Any:
        return self.stats.all()

    async def _tenant_stats(self, who: Asker, _m: client_wire.Stats) -> Any:
        return self.stats.tenant(who.tenant)

    async def _describe_engines(self, who: Asker, _m: client_wire.Engines) -> Any:
        nodes, here = self.cluster.view.nodes.values(), self.cluster.record()
        return describe_engines(nodes, here, who.tenant.name)

    async def _prefixes(self, who: Asker, m: client_wire.Prefixes) -> Any:
        keys = unpacked(m.keys, frame.KEYS_MAX)
        return await prefixes(self.cluster, who.tenant, m.digest, keys, m.wait_s)

    async def _why_missing(self, who: Asker, m: client_wire.WhyMissing) -> Any:
        """Explain what this node lacks, whatever node the message names."""
        keys = unpacked(m.keys, frame.KEYS_MAX)
        if not keys:
            raise InvalidRequest("no keys: name those of a prompt, in their order")
        return self.miss_reasons.explain(namespace_of(who.tenant, m.digest), [], keys)

    async def _hit_curves(self, who: Asker, _m: operator_wire.HitCurves) -> Any:
        return self.miss_reasons.memory(who.tenant)

    async def _list_accounts(self, _who: Asker, m: operator_wire.ListAccounts) -> Any:
        return await self.receipts.accounts(m)

    async def _list_receipts(self, _who: Asker, m: operator_wire.ListReceipts) -> Any:
        return self.receipts.receipts(m, self.cluster.config.node)

    async def _events(self, _who: Asker, m: operator_wire.Events) -> Any:
        journal = self.journal
        await journal.wait(m.after, min(m.wait_s, WAIT_S_MAX))
        events = journal.after(m.after, min(max(1, m.count), EVENTS_MAX))
        return Events(events, journal.first, journal.last)

    async def _take_spans(self, _who: Asker, m: operator_wire.TakeSpans) -> Any:
        return self.spans.take(m.count)


@dataclass(frozen=True, eq=False, slots=True)
class BlockReports:
    """Answers commands that look at blocks."""

    name: str
    cluster: ClusterMember
    tiers: Tiers
    fetcher: BlockFetcher
    engines: Engines
    clock: Callable[[], float]

    async def _locate(self, who: Asker, m: operator_wire.Locate) -> Any:
        keys = unpacked(m.keys, LOCATE_KEYS_MAX)
        found = []
        with asking_others():
            for namespace in namespaces_of(who.tenant, m.digest):
                found += await self._replicas(namespace, keys)
        return found

    async def _list_blocks(self, who: Asker, m: operator_wire.ListBlocks) -> Any:
        namespaces = namespaces_of(who.tenant, m.digest)
        rules = self._tier(m.tier)
        count = min(max(1, m.count), LIST_BLOCKS_MAX)
        shown: dict[Block, Shown] = {}
        show = partial(self._show, shown, tier=m.tier)
        answer = list_blocks(rules, namespaces, m.cursor, count, self.clock(), show)
        await self._show_parents(shown)
        return answer

    async def _show_blocks(self, who: Asker, m: operator_wire.ShowBlocks) -> Any:
        keys = unpacked(m.keys, SHOW_KEYS_MAX)
        namespaces = namespaces_of(who.tenant, m.digest)
        shown: dict[Block, Shown] = {}
        show = partial(self._show, shown)
        answer = show_blocks(self.tiers.by_tier(), namespaces, keys, self.clock(), show)
        await self._show_parents(shown)
        return answer

    def _show(self, shown: dict[Block, Shown], block: Block, age_s: float, tier: str) -> Shown:
        return shown.setdefault(block, describe_block(self.name, tier, block, age_s))

    async def _show_parents(self, shown: Mapping[Block, Shown]) -> None:
        """Where the rules of a tier do not know a block's parent, its disk does; it stays empty if the disk is away."""
        unknown = [block for block in shown if not block.parent_known]
        try:
            parents = await self.tiers.ssd.parents(unknown)
        except Unavailable:
            return
        for block, parent in zip(unknown, parents, strict=True):
            shown[block].parent = parent.hex()

    def _tier(self, tier: str) -> list[Node]:
        found = self.tiers.by_tier()
        if tier not in found:
            raise InvalidRequest(f"tier {tier!r:.40}: this node has only {', '.join(found)}")
        return found[tier]

    async def _replicas(self, namespace: NamespaceState, keys: Sequence[bytes]) -> list[Located]:
        """Where blocks of one namespace are: here from this node's state, elsewhere from the directory."""
        digest = namespace.directory_digest
        _, masks = self.tiers.node.inventory.masks(digest, keys)
        _, on_disk = self.tiers.ssd.masks(digest, keys)
        on_disk = on_disk or [0] * len(keys)
        _, on_device = (
            (0, []) if self.tiers.device is None else self.tiers.device.masks(digest, keys)
        )
        on_device = on_device or [0] * len(keys)
        _, in_engines = self.engines.masks(digest, keys)
        in_engines = in_engines or [0] * len(keys)
        stored = await self.tiers.objects.where(namespace, namespace.tables, keys)
        on_nodes: Sequence[Sequence[Entry]] = [[] for _ in keys]
        if self.cluster.directory is not None:
            on_nodes = await self.fetcher.locator.replicas(namespace, keys, engines=True)
        tier_names = {number: name for name, number in TIERS.items()}
        found = []
        for key, gpu, device, dram, ssd, entries in zip(
            keys, in_engines, on_device, masks, on_disk, on_nodes, strict=True
        ):
            replicas = [
                Replica(self.name, self.cluster.incarnation, tier, mask.bit_count())
                for tier, mask in (("gpu", gpu), ("dram", dram), ("device", device), ("ssd", ssd))
                if mask
            ]
            replicas += [
                Replica(
                    self.cluster.living[entry.incarnation].record.node,
                    entry.incarnation.hex(),
                    tier_names.get(entry.tier, str(entry.tier)),
                    entry.mask.bit_count(),
                )
                for entry in entries
            ]
            if objects := stored.get(key, 0):
                replicas.append(Replica(NOT_NODES[OBJECT], "", "object", objects.bit_count()))
            if replicas:
                name = namespace.base.hex()
                found.append(Located(key.hex(), name, len(namespace.tables), replicas))
        return found
