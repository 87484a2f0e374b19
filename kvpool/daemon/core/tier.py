"""The ports of `kvpool.storage.base`, for blocks of this daemon's memory."""

from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable
from kvpool.storage import base

Tier = base.Tier[NamespaceState, PartTable, Block]
LocalTier = base.LocalTier[NamespaceState, PartTable, Block]
SharedTier = base.SharedTier[NamespaceState, PartTable, Block]
