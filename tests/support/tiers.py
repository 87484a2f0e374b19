"""Tiers of nodes that have none."""

from __future__ import annotations

from typing import NoReturn

from kvpool.config import DaemonConfig
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_tier import SsdTier


def without_disks(node: Node) -> SsdTier:
    """The SSD tier of a node that has no SSD."""

    def never(*_: object) -> NoReturn:
        raise AssertionError("there is no disk")

    return SsdTier(DaemonConfig(socket="/s"), node, lambda: 0.0, never, never)
