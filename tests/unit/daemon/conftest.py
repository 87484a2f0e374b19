"""A node with one tenant and one engine, and short words for what it does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvpool.daemon.core.blocks import OWN, Block, Holder, Lease, NamespaceState, Origin
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.departures import Departures
from kvpool.daemon.features.sessions import Sessions
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec, split_keys
from kvpool.wire.frame import NO_ROW

SLAB = 4096
BASE = b"n" * 16
QUARTER = PartSpec(1024)  # of a slab


class Pool:
    """Blocks are called by numbers. One slab holds four of the first namespace."""

    packed = False  # see `Node`

    def __init__(
        self,
        slabs: int = 4,
        *,
        parts: tuple[PartSpec, ...] = (QUARTER,),
        policy: str = "lru",
        **limits: Any,
    ) -> None:
        self.node = Node(
            make_policy=policy_maker(policy),
            packed=self.packed,
            limits=Limits(**{"grant_share": 1.0, **limits}),
        )
        self.departures = Departures(4096)
        self.node.events.subscribe("departures", self.departures.handlers)
        self.sessions = Sessions(self.node)
        self.tenant = self.node.add_tenant("red", 0, slabs * SLAB, SLAB)
        self.holder = self.node.holders.add("red", "engine")
        self.namespace = self.open(BASE, parts)
        self.tickets = 0

    @staticmethod
    def keys(numbers: Iterable[int]) -> bytes:
        return b"".join(n.to_bytes(16, "big") for n in numbers)

    def open(
        self,
        base: bytes,
        parts: tuple[PartSpec, ...],
        may_free: Callable[[NamespaceState], bool] | None = lambda _: True,
    ) -> NamespaceState:
        return self.node.namespaces.open(self.tenant, base, b"{}", parts, may_free=may_free)

    def reset(self, fence: int = 0) -> NamespaceState:
        """The namespace goes on in its next epoch; what it was before."""
        old = self.namespace
        self.namespace = self.node.namespaces.set_epoch(old, old.epoch + 1, fence)
        return old

    def reserve(
        self,
        numbers: Iterable[int],
        *,
        namespace: NamespaceState | None = None,
        part: int = 0,
        holder: Holder | None = None,
        parent: bytes = b"",
    ) -> tuple[int, list[int]]:
        self.tickets += 1
        packed = self.keys(numbers)
        _, rows = self.node.puts.reserve(
            holder or self.holder,
            namespace or self.namespace,
            part,
            self.tickets,
            split_keys(packed),
            parent,
        )
        return self.tickets, [row for row in array("I", rows) if row != NO_ROW]

    def put(self, numbers: Iterable[int], *, origin: Origin = OWN, **where: Any) -> int:
        ticket, rows = self.reserve(numbers, **where)
        holder = where.get("holder") or self.holder
        if not rows:
            return 0
        return self.node.puts.commit(holder, ticket, bytes(16) * len(rows), None, origin)

    def here(self, numbers: Iterable[int], namespace: NamespaceState | None = None) -> list[int]:
        numbers = list(numbers)
        flags = self.node.leases.contains(
            namespace or self.namespace, 0, split_keys(self.keys(numbers))
        )
        return [n for n, flag in zip(numbers, flags, strict=True) if flag]

    def blocks(self, numbers: Iterable[int]) -> list[Block]:
        self.node.settle()
        keys = [n.to_bytes(16, "big") for n in numbers]
        return [self.namespace.tables[0].blocks[key] for key in keys]

    def lease(self, numbers: Iterable[int], namespace: NamespaceState | None = None) -> Lease:
        lease = self.node.leases.acquire(
            self.holder,
            namespace or self.namespace,
            (0,),
            split_keys(self.keys(numbers)),
            10.0,
            0.0,
            scattered=True,
        )
        assert lease is not None
        return lease

    def release(self, lease: Lease) -> None:
        self.node.leases.release(self.holder, lease.token)

    def read(self, numbers: Iterable[int]) -> None:
        self.release(self.lease(numbers))

    def pin(self, numbers: Iterable[int], kind: str) -> set[bytes]:
        return self.node.pins.pin(self.namespace, split_keys(self.keys(numbers)), kind)

    def demote(self, numbers: Iterable[int]) -> int:
        return self.node.candidates.demote(self.namespace, split_keys(self.keys(numbers)))

    @property
    def bytes_used(self) -> int:
        return self.tenant.allocator.bytes_used


@pytest.fixture
def make_pool() -> type[Pool]:
    return Pool
