"""Blocks: lists of them, one of them, prefixes, pins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvpool.admin.cluster_view import NODE_S, Answers, Cluster, View
from kvpool.admin.handlers.routers import Routers
from kvpool.admin.paging import pack_cursor, unpack_cursor
from kvpool.admin.problems import Refused, not_found
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import having, holders, tenant_of
from kvpool.admin.types import (
    BlockDetail,
    BlockInfo,
    BlockList,
    BlockPage,
    Located,
    LookupInfo,
    LookupRequest,
    OfBlock,
    OfTenant,
    PinInfo,
    PinnedOn,
    PinRequest,
    PrefixOn,
    WhyHere,
    WhyInfo,
    WhyOn,
    WhyRequest,
)
from kvpool.errors import KvpoolError
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import operator as operator_wire

TIERS = ("dram", "ssd", "device")
ASKS_MAX = 20  # of a daemon for one page: about two milliseconds of its time each
PAGE_S = 1.5
LOCATE_S = 1.0

Place = tuple[str, str, str]
"""Node, tier, and the node's own cursor there."""


class _Listed(msgspec.Struct, frozen=True):
    blocks: list[dict[str, Any]]
    cursor: str | None


class _Shown(msgspec.Struct, frozen=True):
    key: str
    namespace: str
    here: list[dict[str, Any]]


class Blocks:
    """Handlers."""

    def __init__(self, cluster: Cluster, routers: Routers) -> None:
        self._cluster = cluster
        self._routers = routers

    # ---- lists -------------------------------------------------------------------------------------

    @route("GET", "/v1/namespaces/{digest}/blocks", "viewer")
    async def list_blocks(self, call: Call, wanted: BlockPage) -> BlockList:
        """Blocks of a namespace: node by node, tier by tier."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, _, answers, unreachable = await holders(
            self._cluster, tenant, wanted.digest, wanted.node, now=not wanted.cursor
        )
        tiers = [wanted.tier] if wanted.tier else list(TIERS)
        walk = _Walk(nodes, tiers, wanted.cursor)
        items: list[BlockInfo] = []
        failed = dict(unreachable)
        clock = self._cluster.clock
        asks, until = 0, clock() + PAGE_S
        while walk.place and len(items) < wanted.limit and asks < ASKS_MAX and clock() < until:
            asks += 1
            await self._take(walk, tenant, wanted, items, failed, answers)
        after = pack_cursor(*walk.place) if walk.place else None
        return BlockList(items, after, failed)

    async def _take(
        self,
        walk: _Walk,
        tenant: str,
        wanted: BlockPage,
        items: list[BlockInfo],
        failed: dict[str, str],
        answers: Answers[NodeStats],
    ) -> None:
        """What comes next, up to a page."""
        assert walk.place is not None
        node, tier, inner = walk.place
        if tier == "device" and not answers.by_node[node].tiers.device:
            walk.next_tier()
            return
        ask = operator_wire.ListBlocks(
            tier, inner, wanted.limit - len(items), bytes.fromhex(wanted.digest)
        )
        try:
            found = await self._cluster.daemon.json(
                ask, _Listed, node=node, tenant=tenant, within_s=NODE_S
            )
        except KvpoolError as error:
            failed[node] = str(error)
            walk.next_node()
            return
        items += [_info(node, tier, block) for block in found.blocks]
        if found.cursor is None:
            walk.next_tier()
        else:
            walk.place = (node, tier, found.cursor)

    # ---- one block ---------------------------------------------------------------------------------

    @route("GET", "/v1/blocks/{key}", "viewer")
    async def get_block(self, call: Call, wanted: OfBlock) -> BlockDetail:
        """Where a block is, and its state on each node."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, view, answers, _ = await holders(self._cluster, tenant, wanted.namespace, now=True)
        key, digest = bytes.fromhex(wanted.key), bytes.fromhex(wanted.namespace)
        shown = await self._cluster.json_each(
            nodes, operator_wire.ShowBlocks(digest, key), list[_Shown], tenant=tenant
        )
        unreachable = {**answers.unreachable, **shown.unreachable}
        here = [
            _info(node, each["tier"], each)
            for node, blocks in sorted(shown.by_node.items())
            for block in blocks
            for each in block.here
        ]
        located = await self._locate(view, sorted(shown.by_node), tenant, digest, key, unreachable)
        if not here and not located and not unreachable:
            raise not_found(f"no node has a block {wanted.key}")
        return BlockDetail(wanted.key, located, here, unreachable)

    async def _locate(
        self,
        view: View,
        nodes: Sequence[str],
        tenant: str,
        digest: bytes,
        key: bytes,
        unreachable: dict[str, str],
    ) -> list[Located]:
        """From the directory, as seen by this node, or one that has the namespace open."""
        if not nodes:
            return []
        node = view.node if view.node in nodes else nodes[0]
        try:
            return await self._cluster.daemon.json(
                operator_wire.Locate(key, digest),
                list[Located],
                node=node,
                tenant=tenant,
                wait_s=LOCATE_S,
            )
        except KvpoolError as error:
            unreachable["directory"] = str(error)
            return []

    # ---- prefixes ----------------------------------------------------------------------------------

    @route("POST", "/v1/lookup", "viewer", routers=True)
    async def lookup(self, call: Call, wanted: OfTenant, body: LookupRequest) -> LookupInfo:
        """How much of a prompt each node holds."""
        tenant = tenant_of(call.who, wanted.tenant)
        by_prompt = [bool(body.prompt), bool(body.messages), bool(body.tokens)].count(True)
        if body.keys and body.namespace and not by_prompt:
            return await self._by_keys(tenant, body)
        if by_prompt == 1 and body.model and not (body.keys or body.namespace):
            return await self._routers.lookup(call, body)
        raise Refused(
            400, "invalid", "name namespace and keys, or model and one of prompt, messages, tokens"
        )

    async def _by_keys(self, tenant: str, body: LookupRequest) -> LookupInfo:
        nodes, view, answers, _ = await holders(self._cluster, tenant, body.namespace, now=True)
        nodes = nodes or having(answers, tenant)
        if not nodes:
            raise not_found(f"there is no tenant {tenant!r}")
        node = view.node if view.node in nodes else nodes[0]
        keys = b"".join(map(bytes.fromhex, body.keys))
        found = await self._cluster.daemon.json(
            client_wire.Prefixes(bytes.fromhex(body.namespace), keys, LOCATE_S),
            dict[str, tuple[int, int]],
            node=node,
            tenant=tenant,
            wait_s=LOCATE_S,
        )
        items = [PrefixOn(name, memory, every) for name, (memory, every) in found.items()]
        return LookupInfo(
            sorted(items, key=lambda each: (-each.blocks, -each.memory_blocks, each.node)),
            len(body.keys),
        )

    @route("POST", "/v1/why", "viewer")
    async def why(self, call: Call, wanted: OfTenant, body: WhyRequest) -> WhyInfo:
        """Why each node lacks the first block of a prompt that it lacks."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, _, _, unreachable = await holders(self._cluster, tenant, body.namespace, now=True)
        keys = b"".join(map(bytes.fromhex, body.keys))
        found = await self._cluster.json_each(
            nodes,
            client_wire.WhyMissing(bytes.fromhex(body.namespace), keys),
            WhyHere,
            tenant=tenant,
        )
        items = [
            WhyOn(node=node, **msgspec.structs.asdict(each))
            for node, each in sorted(found.by_node.items())
        ]
        return WhyInfo(items, {**unreachable, **found.unreachable})

    # ---- pins --------------------------------------------------------------------------------------

    @route("POST", "/v1/pins", "operator")
    async def pin(self, call: Call, wanted: OfTenant, body: PinRequest) -> PinInfo:
        """Set or remove pins of blocks."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, _, _, unreachable = await holders(
            self._cluster, tenant, body.namespace, body.node, now=True
        )
        keys = b"".join(dict.fromkeys(map(bytes.fromhex, body.keys)))
        message = operator_wire.PinBlocks(keys, body.kind, bytes.fromhex(body.namespace))
        found = await self._cluster.number_each(
            nodes, message, tenant=tenant, by=call.by, wait_s=NODE_S
        )
        self._cluster.changed()
        items = [PinnedOn(node, blocks) for node, blocks in sorted(found.by_node.items())]
        return PinInfo(items, {**unreachable, **found.unreachable})


class _Walk:
    """A position in a list: a node, a tier of it, a place there. Earlier positions are not visited again."""

    def __init__(self, nodes: Sequence[str], tiers: Sequence[str], cursor: str) -> None:
        self._nodes = sorted(nodes)
        self._tiers = tiers
        self.place: Place | None = None
        if not cursor:
            self._begin(0)
            return
        node, tier, inner = unpack_cursor(cursor, Place)
        if tier not in tiers or len(inner) > 64:
            raise Refused(400, "invalid", "cursor: this cursor does not belong to this list")
        if node in self._nodes:
            self.place = (node, tier, inner)
        else:
            # It has left meanwhile: on with those after it.
            self._begin(sum(each < node for each in self._nodes))

    def _begin(self, number: int) -> None:
        left = number < len(self._nodes)
        self.place = (self._nodes[number], self._tiers[0], "") if left else None

    def next_tier(self) -> None:
        assert self.place is not None
        node, tier, _ = self.place
        following = self._tiers.index(tier) + 1
        if following < len(self._tiers):
            self.place = (node, self._tiers[following], "")
        else:
            self.next_node()

    def next_node(self) -> None:
        assert self.place is not None
        self._begin(self._nodes.index(self.place[0]) + 1)


def _info(node: str, tier: str, block: dict[str, Any]) -> BlockInfo:
    return msgspec.convert({**block, "node": node, "tier": tier}, BlockInfo)
