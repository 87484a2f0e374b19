"""The engines that this node's clients have announced: their addresses and properties.

Routers ask any node for the engines of all nodes. An announcement holds until its client's process
ends, as leases do. No I/O; event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import msgspec

from kvpool.daemon.core.blocks import Holder, NamespaceState
from kvpool.daemon.core.requests import check_engine
from kvpool.daemon.shares import Shares
from kvpool.errors import NotAuthenticated
from kvpool.placement.records import NodeRecord
from kvpool.types import EngineRecord


class EngineRegistry:
    """See the module. most: maximum number of engines. tenants: whose clients may announce any."""

    def __init__(self, most: int, tenants: Collection[str]) -> None:
        self._most = most
        self._tenants = frozenset(tenants)
        self._shares = Shares(tenants)
        self._engines: dict[int, EngineRecord] = {}  # by id() of their holder

    def announce(
        self, holder: Holder, namespace: NamespaceState, engine: EngineRecord | None
    ) -> None:
        """Set a client's announcement; None: withdraw it.

        Raises `NotAuthenticated` for a tenant whose clients may not, `InvalidRequest` for invalid values,
        `LimitExceeded` for one too many.
        """
        if engine is None:
            self.forget(holder)
            return
        if holder.tenant.name not in self._tenants:
            raise NotAuthenticated(
                f"clients of tenant {holder.tenant.name} may not announce engines: set announce = true in "
                f"[tenants.{holder.tenant.name}] if routers should send them prompts"
            )
        check_engine(engine)
        if id(holder) not in self._engines:
            used = Counter(each.tenant for each in self._engines.values())
            self._shares.check(
                used, holder.tenant.name, self._most, "engines are announced", "engines_max"
            )
        self._engines[id(holder)] = replace(
            engine, tenant=holder.tenant.name, namespace=namespace.base.hex()
        )

    def has(self, holder: Holder) -> bool:
        """Whether this client has announced an engine."""
        return id(holder) in self._engines

    def forget(self, holder: Holder) -> None:
        """The client or its engine has ended."""
        self._engines.pop(id(holder), None)

    def records(self) -> tuple[EngineRecord, ...]:
        return tuple(self._engines.values())


def describe(nodes: Iterable[NodeRecord], here: NodeRecord, tenant: str) -> list[dict[str, Any]]:
    """Plain values: one tenant's engines, with properties of their nodes; see `client_wire.Engines`.

    here: this node's current record. Links of a node are about 2 KB, and routers ask every second: they are told once.
    """
    others = [record for record in nodes if record.node != here.node]
    return [
        {
            **msgspec.to_builtins(engine),
            "node": record.node,
            "incarnation": record.incarnation,
            "labels": record.labels,
            "host": record.host,
            **({"links": msgspec.to_builtins(record.links)} if number == 0 else {}),
            "here": record is here or (bool(here.host) and record.host == here.host),
        }
        for record in (here, *others)
        for number, engine in enumerate(each for each in record.engines if each.tenant == tenant)
    ]
