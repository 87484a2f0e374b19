"""Lists of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.admin.cluster_view import NODE_S, Cluster
from kvpool.admin.paging import pack_cursor, unpack_cursor
from kvpool.admin.problems import Refused
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import having, holders, tenant_of
from kvpool.admin.types import BlockPage, Listed
from kvpool.errors import KvpoolError
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Block

TIERS = ("dram", "ssd", "device")
ASKS_MAX = 20  # of a daemon for one page: about two milliseconds of its time each
PAGE_S = 1.5

Place = tuple[str, str, str]
"""Node, tier, and the node's own cursor there."""


class Blocks:
    """Handlers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @route("GET", "/v1/namespaces/{digest}/blocks", "viewer")
    async def list_blocks(self, call: Call, wanted: BlockPage) -> Listed[Block]:
        """Blocks of a namespace: node by node, tier by tier. A page may be short, or empty, and have a next one."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, _, answers, unreachable = await holders(
            self._cluster, tenant, wanted.digest, wanted.node, now=not wanted.cursor
        )
        tiers = [wanted.tier] if wanted.tier else list(TIERS)
        nodes = [each for each in nodes if each in having(answers, tenant, wanted.digest)]
        walk = _Walk(nodes, tiers, wanted.cursor)
        items: list[Block] = []
        failed = dict(unreachable)
        clock = self._cluster.clock
        asks, until = 0, clock() + PAGE_S
        while walk.place and len(items) < wanted.limit and asks < ASKS_MAX and clock() < until:
            asks += 1
            node, tier, inner = walk.place
            if tier == "device" and not answers.nodes[node].tiers.device:
                walk.next_tier()
                continue
            left = wanted.limit - len(items)
            ask = operator_wire.ListBlocks(tier, inner, left, bytes.fromhex(wanted.digest))
            try:
                found = await self._cluster.daemon.get(
                    ask, node=node, tenant=tenant, within_s=NODE_S
                )
            except KvpoolError as error:
                failed[node] = str(error)
                walk.next_node()
                continue
            items += found.blocks
            if found.cursor is None:
                walk.next_tier()
            else:
                walk.place = (node, tier, found.cursor)
        return Listed(items, pack_cursor(*walk.place) if walk.place else None, failed)


class _Walk:
    """A position in a list: a node, a tier of it, a place there. Earlier positions are not visited again."""

    def __init__(self, nodes: Sequence[str], tiers: Sequence[str], cursor: str) -> None:
        self._places: list[Place] = [(node, tier, "") for node in sorted(nodes) for tier in tiers]
        self.place = next(iter(self._places), None)
        if not cursor:
            return
        node, tier, inner = self.place = unpack_cursor(cursor, Place)
        if tier not in tiers or len(inner) > 64:
            raise Refused(400, "invalid", "cursor: this cursor does not belong to this list")
        if node not in nodes:
            self.next_node()  # it has left meanwhile: on with those after it

    def next_tier(self) -> None:
        assert self.place is not None
        index = self._places.index((*self.place[:2], "")) + 1
        self.place = next(iter(self._places[index:]), None)

    def next_node(self) -> None:
        assert self.place is not None
        here = self.place[0]
        self.place = next((each for each in self._places if each[0] > here), None)
