"""Leases on blocks in memory, for those who wait for others of the same prompt.

Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.daemon.core.blocks import Holder, PartTable
from kvpool.daemon.core.node import Node
from kvpool.errors import LimitExceeded


@dataclass(eq=False)
class PullLeases:
    """See the module."""

    _node: Node
    _clock: Callable[[], float]

    def holder(self, tenant: str) -> Holder:
        """The holder of transfers' reservations and leases. It lives as long as the daemon."""
        return self._node.holders.own(tenant, "pulls")

    def hold(self, blocks: Mapping[PartTable, Sequence[bytes]], kept: list[str]) -> bool:
        """Lease these blocks of a namespace, as far as they are here, until `let_go`; False: there are too many leases.

        kept: the token of the lease is added to it.
        """
        if not blocks:
            return True
        holder = self.holder(next(iter(blocks)).namespace.tenant.name)
        try:
            lease = self._node.leases.acquire_each(holder, blocks, self._clock())
        except LimitExceeded:
            return False  # with very many pulls at a time: without a lease
        if lease is not None:
            kept.append(lease.token)
        return True

    def let_go(self, tenant: str, kept: Sequence[str]) -> None:
        """Release the leases of `hold`."""
        holder = self.holder(tenant)
        for token in kept:
            self._node.leases.release(holder, token)
