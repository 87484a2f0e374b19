"""Where to place replicas, which node makes them, and how fast. No I/O, no clock; event loop only.

Replicas are made for three reasons (`replicas=n`, repair after a loss, draining), and victims are
forwarded for a fourth (a node is full and others are not). The sender chooses by the node records,
which are seconds old; the receiver decides by its current state (`accept_forward`).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

import xxhash

from kvpool.placement.records import NodeRecord, NodeState

MEMORY_TIER = "dram"
MUCH_OLDER = 2.0
"""How many times as old this node's coldest block must be to make room for another node's victim."""


def choose_targets(
    view_nodes: Sequence[NodeRecord],
    own: NodeRecord,
    holders: Collection[bytes],
    n: int,
    nbytes: int,
    rng: random.Random,
) -> list[NodeRecord]:
    """Up to n nodes for one further replica each of `nbytes`, the best one first.

    own: of this node, never chosen. holders: incarnations that have the blocks already; dead ones
    do not matter. Only serving nodes whose memory is large enough are chosen; a full memory
    is no obstacle, because a pool in use always is, and makes room.

    Failure domains decide first: a zone without a replica, then a rack without one, then any other
    node. A missing label is not a separate domain. Among equals two are drawn and the one with
    more free bytes is taken, so that many senders do not all choose the emptiest.
    """
    zones: set[str] = set()
    racks: set[str] = set()
    free: dict[str, int] = {}
    left: list[NodeRecord] = []
    for node in view_nodes:
        incarnation = node.incarnation_bytes
        if incarnation in holders:
            zones.add(_zone(node))
            racks.add(_rack(node))
        elif incarnation != own.incarnation_bytes and node.state is NodeState.SERVING:
            capacity, free[node.node] = _memory(node)
            if capacity >= nbytes:
                left.append(node)
    if own.incarnation_bytes in holders:  # this node's record may not have come back yet
        zones.add(_zone(own))
        racks.add(_rack(own))
    chosen: list[NodeRecord] = []
    while left and len(chosen) < n:
        best = _farthest(left, zones, racks)
        drawn = rng.sample(best, 2) if len(best) > 1 else best
        node = max(drawn, key=lambda node: free[node.node])
        chosen.append(node)
        left.remove(node)
        zones.add(_zone(node))
        racks.add(_rack(node))
    return chosen


def _farthest(nodes: Iterable[NodeRecord], zones: set[str], racks: set[str]) -> list[NodeRecord]:
    """The nodes that share least with the used zones and racks."""
    by_rank: dict[int, list[NodeRecord]] = {}
    for node in nodes:
        rank = 0 if _apart(_zone(node), zones) else 1 if _apart(_rack(node), racks) else 2
        by_rank.setdefault(rank, []).append(node)
    return by_rank[min(by_rank)]


def _apart(domain: str, taken: set[str]) -> bool:
    """Whether this is certainly another domain than all used ones."""
    return not taken or (domain != "" and domain not in taken and "" not in taken)


def _zone(node: NodeRecord) -> str:
    return node.labels.get("zone", "")


def _rack(node: NodeRecord) -> str:
    """Racks are names within a zone."""
    rack = node.labels.get("rack")
    return f"{_zone(node)}/{rack}" if rack else ""


def _memory(node: NodeRecord) -> tuple[int, int]:
    """Capacity and free bytes of a node's memory, as its record says."""
    capacity = used = 0
    for tier in node.tiers:
        if tier.name == MEMORY_TIER:
            capacity += tier.capacity_bytes
            used += tier.used_bytes
    return capacity, max(0, capacity - used)


def responsible(holders: Iterable[bytes], key: bytes) -> bytes:
    """The living holder of a block that repairs it: all nodes agree, and blocks are spread over them evenly.

    holders: incarnations, at least one. When one is lost, only the blocks it was responsible for move.
    """
    return max(holders, key=lambda holder: (xxhash.xxh3_64_intdigest(key + holder), holder))


def is_needed(others: int, wanted: int) -> bool:
    """Whether a replica here is one of those wanted, so that it must not be evicted ahead of others.

    others: how many other nodes have the block. Which of theirs are primary nobody knows; so where there are
    more replicas than wanted, each node may take its own for spare.
    """
    return others < wanted


def accept_forward(
    free_bytes: int,
    nbytes: int,
    offered_age_s: float,
    own_coldest_age_s: float,
    hops: int,
    hops_max: int,
) -> bool:
    """Whether to accept a block that another node evicts.

    Ages are times since the last use. hops: how often the block has been forwarded since its last use, this
    time included. Accepted when there is room, or when this node's coldest block is much older: a little
    older is not enough, or two full nodes would pass their blocks back and forth.
    """
    if hops > hops_max:
        return False
    return free_bytes >= nbytes or own_coldest_age_s > MUCH_OLDER * offered_age_s
