"""Which tenants have recently used more than their share of the engines. No I/O, no clock.

A tenant is charged with the seconds of prefill that are ordered for it while others wait; capacity that nobody
else wants costs nothing. Charges decay over a window. Among waiting tenants, those above the mean by `slack_s`,
each relative to its weight, go behind the others; as these are served the mean rises, so a tenant stays behind
only until they have caught up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvpool.errors import ConfigError

WINDOWS_MAX = 200.0
"""Charges are stored in units that shrink by e each window, and are renormalised after this many."""
TENANTS_MAX = 1024
"""Above this count, tenants without a relevant charge are forgotten."""
NOTHING_S = 1e-3


@dataclass(frozen=True, slots=True)
class TenantRule:
    """weights: of tenants, 1 for all others. window_s: after which a charge counts e times less."""

    weights: Mapping[str, float] = field(default_factory=dict)
    window_s: float = 30.0
    slack_s: float = 2.0

    def __post_init__(self) -> None:
        if not (
            self.window_s > 0 and self.slack_s >= 0 and all(w > 0 for w in self.weights.values())
        ):
            raise ConfigError("tenants need weights and a window above 0, and slack_s from 0")

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


class Charges:
    """Not thread-safe."""

    def __init__(self, rule: TenantRule) -> None:
        self.rule = rule
        self._used: dict[str, float] = {}
        self._unit = 1.0  # the weight of a second charged now
        self._began: float | None = None

    def add(self, tenant: str, seconds: float, now: float) -> None:
        if self._began is None:
            self._began = now
        windows = (now - self._began) / self.rule.window_s
        if windows > WINDOWS_MAX:
            shrink = math.exp(-windows)
            self._used = {name: used * shrink for name, used in self._used.items()}
            self._began, windows = now, 0.0
        self._unit = math.exp(windows)
        self._used[tenant] = self._used.get(tenant, 0.0) + seconds * self._unit
        if len(self._used) > TENANTS_MAX:
            least = NOTHING_S * self._unit
            self._used = {name: used for name, used in self._used.items() if used > least}

    def used_s(self, tenant: str) -> float:
        """Seconds that count, as of the last charge."""
        return self._used.get(tenant, 0.0) / self._unit

    def behind(self, waiting: Collection[str]) -> set[str]:
        """Waiting tenants that are over their share. O(tenants)."""
        if len(waiting) < 2:
            return set()
        weight = self.rule.weight
        mean = sum(map(self.used_s, waiting)) / sum(map(weight, waiting))
        slack_s = self.rule.slack_s
        return {name for name in waiting if self.used_s(name) > weight(name) * mean + slack_s}

    def share(self, tenant: str, waiting: Collection[str]) -> float:
        """Its share among these and itself."""
        weight = self.rule.weight
        return weight(tenant) / sum(map(weight, {*waiting, tenant}))
