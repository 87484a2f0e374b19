"""How a limit of a node is divided among its tenants. Rules only: no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvpool.errors import LimitExceeded


class Shares:
    """Half of a limit is divided evenly among the tenants, and kept for each of them; the other half is for whoever
    comes first. Where that half is less than one each, each has one, if the limit has
    as many. So none can take all, and a tenant that is alone on a node has it all.
    """

    def __init__(self, tenants: Collection[str]) -> None:
        self._count = max(1, len(tenants))

    def room(self, used: Mapping[str, int], tenant: str, limit: int, more: int = 1) -> bool:
        """Whether a tenant may have so many more. used: by tenant; those without any may be missing."""
        own = limit // (2 * self._count) if self._count > 1 else limit
        if not own and limit >= self._count:
            own = 1
        common = limit - own * self._count
        beyond = sum(max(0, each - own) for name, each in used.items() if name != tenant)
        return beyond + max(0, used.get(tenant, 0) + more - own) <= common

    def check(self, used: Mapping[str, int], tenant: str, limit: int, what: str, name: str) -> None:
        """Raises `LimitExceeded` unless a tenant may have one more. what: such as "clients"; name: of the setting."""
        if self.room(used, tenant, limit):
            return
        total = sum(used.values())
        if total >= limit:
            raise LimitExceeded(f"{total} {what} on this node, the limit ({name})")
        raise LimitExceeded(
            f"tenant {tenant} has {used.get(tenant, 0)} of the {limit} {what} on this node ({name}); the rest is kept "
            "for other tenants"
        )
