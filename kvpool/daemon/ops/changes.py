"""Operators' changes of a node and its cluster: drains, epochs, settings, evictions, pins. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.masks import unpack_masks, width_of
from kvpool.daemon.core.requests import parse_change
from kvpool.daemon.ops.commands import Asker, asking_others, namespace_of, namespaces_of, unpacked
from kvpool.daemon.ops.event_log import EventLog
from kvpool.daemon.ops.listing import give_up, some_blocks
from kvpool.daemon.ops.pins import pin_in_all_tiers
from kvpool.daemon.ops.runtime_settings import changed, describe
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.decoding import decode_json
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.telemetry import logs
from kvpool.types import KEY_BYTES, split_keys
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire

EVICT_TOGETHER = 500  # in one go: about a millisecond


@dataclass(eq=False, slots=True)
class Changes:
    """Answers commands that change something. config: the current one, including operators' changes."""

    config: DaemonConfig
    cluster: ClusterMember
    tiers: Tiers
    replication: Replication
    journal: EventLog
    clock: Callable[[], float]

    async def _drain(self, who: Asker, m: operator_wire.Drain) -> int:
        known = {self.config.node, *self.cluster.view.nodes, *self.cluster.view.drains}
        if m.node not in known:
            raise InvalidRequest(
                f"there is no node {m.node!r} in this cluster; `kvpool nodes` lists the nodes"
            )
        if not self.config.join:
            raise InvalidRequest(
                "this node is alone: no other node can take its blocks. Stop it instead"
            )
        with asking_others():
            await self.cluster.membership.set_drain(m.node, m.wanted)
        self.journal.audit(who.by, "drain" if m.wanted else "undrain", of=m.node)
        return 0

    async def _clear(self, who: Asker, m: operator_wire.Clear) -> int:
        with asking_others():
            epoch = await self.cluster.namespaces.clear(who.tenant, m.digest, fence=m.fence)
        about = {"tenant": who.tenant.name, "namespace": m.digest.hex(), "fence": m.fence}
        self.journal.audit(who.by, "clear", **about, epoch=epoch)
        return epoch

    async def _configure(self, who: Asker, m: operator_wire.Configure) -> int:
        change = parse_change(m)
        with asking_others():
            await self.cluster.namespaces.configure(who.tenant, m.digest, change)
        set_to = {
            name: value for name, value in msgspec.to_builtins(change).items() if value is not None
        }
        self.journal.audit(
            who.by, "configure", tenant=who.tenant.name, namespace=m.digest.hex(), to=set_to
        )
        return 0

    async def _evict(self, who: Asker, m: operator_wire.Evict) -> int:
        if m.tier not in {"", "dram", "ssd", "device"}:
            raise InvalidRequest(
                f"blocks can be evicted from tier dram, ssd or device, not {m.tier!r}"
            )
        rules = [node for tier, node in self.tiers if m.tier in {"", tier}]
        gone = 0
        named: Sequence[bytes] = split_keys(m.keys)
        if m.masks:
            if not m.digest:
                raise InvalidRequest("masks of parts need a namespace: name it")
            named = self._taken_over(namespace_of(who.tenant, m.digest), m)
            if not named:
                return 0
        wanted = {namespace.directory_digest for namespace in namespaces_of(who.tenant, m.digest)}
        for node in rules:
            for _, blocks in some_blocks(node, who.tenant.name, wanted, named, EVICT_TOGETHER):
                gone += give_up(node, blocks)
                await asyncio.sleep(0)
        what = {"namespace": m.digest.hex(), "keys": len(m.keys) // KEY_BYTES, "tier": m.tier}
        self.journal.audit(who.by, "evict", tenant=who.tenant.name, **what, gone=gone)
        return gone

    def _taken_over(self, namespace: NamespaceState, m: operator_wire.Evict) -> list[bytes]:
        """Blocks without any part here, in any tier, beyond those that another node reports."""
        keys = split_keys(m.keys)
        theirs = unpack_masks(m.masks, width_of(m.keys, m.masks))
        more = set()
        for _, node in self.tiers:
            _, ours = node.inventory.masks(namespace.directory_digest, keys)
            more |= {k for k, our, their in zip(keys, ours, theirs, strict=False) if our & ~their}
        return [key for key in keys if key not in more]

    async def _pin_blocks(self, who: Asker, m: operator_wire.PinBlocks) -> int:
        unpacked(m.keys, frame.KEYS_MAX)
        count = await pin_in_all_tiers(
            self.tiers.node, self.tiers.ssd, namespaces_of(who.tenant, m.digest), m.keys, m.kind
        )
        named = {"namespace": m.digest.hex(), "keys": len(m.keys) // KEY_BYTES, "kind": m.kind}
        self.journal.audit(who.by, "pin", tenant=who.tenant.name, **named, blocks=count)
        return count

    async def _settings(self, _who: Asker, _m: operator_wire.Settings) -> Any:
        return describe(self.config)

    async def _change_settings(self, who: Asker, m: operator_wire.ChangeSettings) -> int:
        try:
            changes = decode_json(m.changes, dict[str, Any], "a JSON object with settings")
        except ProtocolError as error:
            raise InvalidRequest(str(error)) from None
        self._follow(changed(self.config, changes))
        logs.set_level(self.config.log_level)
        self.journal.audit(who.by, "settings", to=changes)
        return len(changes)

    def _follow(self, config: DaemonConfig) -> None:
        """Apply a configuration in which some settings have changed."""
        before, self.config = self.config, config
        self.cluster.follow(config)
        if config.replication_bandwidth != before.replication_bandwidth:
            self.replication.set_bandwidth(config.replication_bandwidth)
        if config.ssd_bytes_per_day != before.ssd_bytes_per_day:
            self.tiers.ssd.budget.change(config.ssd_bytes_per_day, self.clock())
