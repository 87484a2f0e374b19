"""Holders of reservations and leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.daemon.core.blocks import Holder, Tenant
from kvpool.daemon.core.grants import Grants
from kvpool.daemon.core.leases import Leases
from kvpool.daemon.core.puts import Puts
from kvpool.errors import InvalidRequest
from kvpool.telemetry.memory_stats import Counters


@dataclass(eq=False, repr=False, slots=True)
class Holders:
    """Creates holders, and takes back what they held. Not thread-safe."""

    _tenants: Mapping[str, Tenant]
    _puts: Puts
    _grants: Grants
    _leases: Leases
    _counters: Counters
    _own: dict[tuple[str, str], Holder] = field(default_factory=dict, init=False)

    def add(self, tenant: str, instance: str, name: str = "") -> Holder:
        """Create a holder. Call `holder_died` when its process is dead."""
        if tenant not in self._tenants:
            raise InvalidRequest(f"there is no tenant {tenant!r} on this node")
        holder = Holder(self._tenants[tenant], instance, name)
        holder.tenant.holders[id(holder)] = holder
        return holder

    def own(self, tenant: str, name: str) -> Holder:
        """A part of this daemon that reserves and leases, identified by `name`; created on first use."""
        holder = self._own.get((tenant, name))
        if holder is None:
            holder = self._own[tenant, name] = self.add(tenant, "", name)
        return holder

    def died(self, holder: Holder) -> None:
        """It is closed or its process is dead: nothing reads or writes through it any more."""
        if holder.tenant.holders.pop(id(holder), None) is None:
            return
        self._counters.dead_holders += not holder.idle
        for ticket in list(holder.reservations):
            self._puts.abort(holder, ticket)
        for lease in list(holder.leases.values()):
            self._leases.leave(holder, lease)
        self._grants.give_all_back(holder)
