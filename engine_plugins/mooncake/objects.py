"""Objects of any size under string keys, over the pool's blocks (`labels.py`)."""

from __future__ import annotations

from kvpool.client import Client
from kvpool.engine_plugins.mooncake.blocks import Blocks
from kvpool.engine_plugins.mooncake.heads import Chunks, Heads, Limits
from kvpool.engine_plugins.mooncake.reader import ObjectReader
from kvpool.engine_plugins.mooncake.spaces import Spaces
from kvpool.engine_plugins.mooncake.writer import ObjectWriter
from kvpool.errors import Unavailable


class Objects:
    """The objects of one tenant of the facade. Thread-safe.

    verify: compare all that is read with the checksums of what was put; what differs is missing, and is dropped.
    """

    def __init__(
        self,
        client: Client,
        tenant_id: str,
        limits: Limits | None = None,
        *,
        verify: bool = False,
    ) -> None:
        self._client = client
        self.limits = limits or Limits()
        self.spaces = Spaces(client, tenant_id, verify=verify)
        self._blocks = Blocks(client)
        self.heads = Heads(self.spaces, self._blocks, self.limits)
        chunks = Chunks(client, self.spaces, self._blocks, self.limits)
        parts = self.spaces, self._blocks, self.heads, chunks, self.limits
        self.reader = ObjectReader(*parts)
        self.writer = ObjectWriter(*parts)

    def clear(self) -> int:
        """Remove all objects of the tenant, from all nodes; how many this node had. Raises `KvpoolError`."""
        self.spaces.look()
        if self._blocks.away:
            raise Unavailable("the daemon does not answer")
        tenants = self._client.stats().tenants
        held = {
            digest: sum(stats.blocks)
            for tenant in tenants.values()
            for digest, stats in tenant.namespaces.items()
        }
        gone = 0
        for space in self.spaces.all:
            gone += held.get(space.ns.digest.hex(), 0) - self.spaces.marks_in(space)
        for ns in self.spaces.holding_bytes(held):
            self._client.namespaces.clear(ns)
        self.spaces.put_marks()
        return max(gone, 0)
