"""Which engine computes a request: kvpool's policy, and those of other routers, behind one interface."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.errors import ConfigError
from kvpool.scheduler.policies.base import Choice, Policy
from kvpool.scheduler.policies.mooncake import MooncakeGlobal, MooncakeLocal
from kvpool.scheduler.policies.ours import EarliestToken
from kvpool.scheduler.policies.prefix import ApproximatePrefix, DynamoLinear, LMetric
from kvpool.scheduler.policies.simple import LeastLoaded, RandomChoice, RoundRobin, SessionHash

__all__ = ["DEFAULT_POLICY", "POLICIES", "Choice", "Policy", "make_policy"]

DEFAULT_POLICY = "kvpool"

POLICIES: dict[str, Callable[[], Policy]] = {
    "kvpool": EarliestToken,
    "mooncake-global": MooncakeGlobal,
    "mooncake-local": MooncakeLocal,
    "dynamo": DynamoLinear,
    "lmetric": LMetric,
    "sglang": ApproximatePrefix,
    "session-hash": SessionHash,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "random": RandomChoice,
}
"""Every policy by the name that configuration uses."""


def make_policy(name: str) -> Policy:
    """A new policy of this name. Raises `ConfigError`."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name]()
