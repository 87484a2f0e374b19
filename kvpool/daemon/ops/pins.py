"""Pins, in all tiers of a node or in none."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.types import split_keys


async def pin_in_all_tiers(
    node: Node, ssd: SsdTier, namespaces: Sequence[NamespaceState], keys: bytes, kind: str
) -> int:
    """Pin blocks in memory and on disks, or release their pins; returns how many of them are here.

    Raises `KvpoolError` if a tier refuses; then nothing has changed in any.
    """
    for namespace in namespaces:
        node.pins.check(namespace, split_keys(keys), kind)
        ssd.check_pin(namespace, keys, kind)
    count = 0
    for namespace in namespaces:
        found = node.pins.pin(namespace, split_keys(keys), kind)
        count += len(found | await ssd.pin(namespace, keys, kind))
    return count
