"""How much of the event loop's time a tenant may use while others need it. Rules only: the clock is an argument."""

from __future__ import annotations

from collections.abc import Collection

WINDOW_S = 0.05


class LoopShares:
    """Within each window a tenant may use half of the time and its part of the other half, which is divided evenly
    among the tenants; the rest of the window it waits. While no other tenant asks for anything it has all of it.

    tenants: at least two. now: monotonic seconds.
    """

    def __init__(self, tenants: Collection[str]) -> None:
        self._share_s = WINDOW_S * (0.5 + 0.5 / len(tenants))
        self._began = 0.0
        self._used: dict[str, float] = {}
        self._before: Collection[str] = ()  # who used any in the window before

    def used(self, tenant: str, now: float, seconds: float) -> None:
        """Some time was used until now."""
        self._turn(now)
        self._used[tenant] = self._used.get(tenant, 0.0) + seconds

    def wait_s(self, tenant: str, now: float) -> float:
        """How long the tenant's requests have to wait; 0: not at all."""
        self._turn(now)
        if self._used.get(tenant, 0.0) < self._share_s:
            return 0.0
        others = self._used.keys() | self._before
        if not others - {tenant}:
            return 0.0
        return max(0.0, self._began + WINDOW_S - now)

    def _turn(self, now: float) -> None:
        if now - self._began >= WINDOW_S:
            just = now - self._began < 2 * WINDOW_S
            self._before = self._used.keys() if just else ()
            self._used, self._began = {}, now
