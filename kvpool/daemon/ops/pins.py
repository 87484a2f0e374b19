"""Pins, in all tiers of a node or in none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.pins import PinsBefore, levels
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import KvpoolError
from kvpool.types import KEY_BYTES, split_keys

log = logging.getLogger(__name__)

PINNED_TOGETHER = 128
"""So many blocks take the event loop a millisecond or two."""


async def pin_in_all_tiers(
    node: Node, ssd: SsdTier, namespaces: Sequence[NamespaceState], keys: bytes, kind: str
) -> int:
    """Pin blocks in memory and on disks, or release their pins; returns how many of them are here.

    A few at a time, and others are served in between. Raises `KvpoolError` if a tier refuses; then all pins are as
    they were, except on a disk that has failed.
    """
    request = _Request(node, ssd)
    step = PINNED_TOGETHER * KEY_BYTES
    count = 0
    try:
        for namespace in namespaces:
            here: set[bytes] = set()
            for at in range(0, len(keys), step):
                if at:
                    await asyncio.sleep(0)
                here |= await request.pin(namespace, keys[at : at + step], kind)
            count += len(here)
    except KvpoolError:
        await request.undo()
        raise
    return count


class _Request:
    """What one request has pinned, and how that was pinned before."""

    def __init__(self, node: Node, ssd: SsdTier) -> None:
        self._node = node
        self._ssd = ssd
        self._in_memory: list[PinsBefore] = []
        self._kept: list[tuple[NamespaceState, dict[bytes, float]]] = []
        self._on_disks: list[tuple[SsdDevice, Node, PinsBefore]] = []

    async def pin(self, namespace: NamespaceState, keys: bytes, kind: str) -> set[bytes]:
        """Returns which are here. A quota that refuses some of them changes nothing of these."""
        changed = self._node.pins.check(namespace, split_keys(keys), kind)
        before = [
            (device, device.rules, device.check_pin(namespace, keys, kind))
            for device in self._ssd.devices
        ]
        self._in_memory.append(levels(changed))
        self._on_disks += before
        found = self._node.pins.pin(namespace, split_keys(keys), kind)
        self._kept.append((namespace, self._node.keeps.forget(namespace, split_keys(keys))))
        return found | await self._ssd.pin(namespace, keys, kind)

    async def undo(self) -> None:
        """The last change first."""
        for before in reversed(self._in_memory):
            self._node.pins.put_back(before)
            await asyncio.sleep(0)
        for namespace, kept in self._kept:
            self._node.keeps.put_back(namespace, kept)
        for device, node, before in reversed(self._on_disks):
            try:
                await device.put_back(node, before)
            except KvpoolError as error:
                log.warning(
                    "some pins on the disk at %s are not as they were: %s",
                    device.path,
                    error,
                    extra={"disk": device.path},
                )
