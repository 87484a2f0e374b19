"""The shape of a simulated cluster: its engines, nodes and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.errors import ConfigError
from kvpool.scheduler.policies import DEFAULT_POLICY
from kvpool.scheduler.scheduler import Settings
from kvpool.simulator.speeds import Speeds
from kvpool.simulator.traces import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated. prefill, decode, mixed: how many engines of each role, each on its own node.

    Without decode or mixed engines, requests end with their first token. flexible: those for prefill and those for
    decode may change sides, after the load. fifo: requests wait in the order of arrival, and are computed whole.
    queued: they wait in the scheduler, as kvpool's do, whichever policy chooses their engine. pool_tokens: memory
    of all nodes that compute prompts, or may, together; ssd_tokens the same of their disks. shared: whether nodes
    can pull from each other. network_bytes_s: instead of the profile's. lag_s: from an event to the scheduler's
    index. slow: bytes a second from one node to another, by their names, where that is less; labels: of nodes. measured: whether daemons
    measure their pulls and the scheduler is told. order_s: from the scheduler to an engine and back, each way, and more for each token that is sent. noise:
    the standard deviation of the logarithm of a factor on estimated prefill times.
    """

    speeds: Speeds
    prefill: int = 16
    decode: int = 0
    mixed: int = 0
    flexible: bool = False
    policy: str = DEFAULT_POLICY
    fifo: bool = False
    queued: bool = False
    settings: Settings = field(default_factory=Settings)
    pool_tokens: int = 50_000_000
    ssd_tokens: int = 0
    eviction: str = "aged"
    shared: bool = True
    network_bytes_s: float = 0.0
    slow: Mapping[tuple[str, str], float] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    measured: bool = False
    step_tokens: int = 2048
    block_tokens: int = BLOCK_TOKENS
    lag_s: float = 0.05
    order_s: float = 0.001
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prefill + self.mixed < 1:
            raise ConfigError("a cluster needs an engine that computes prompts")
        if min(self.prefill, self.decode, self.mixed, self.pool_tokens, self.ssd_tokens) < 0:
            raise ConfigError("counts and capacities cannot be negative")
        if min(self.lag_s, self.order_s, self.noise, self.network_bytes_s) < 0:
            raise ConfigError("lag, the time of an order, noise and bandwidth cannot be negative")
        if self.step_tokens < 1:
            raise ConfigError("steps need at least one token")

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.speeds.model.kv_bytes

    @property
    def bytes_s(self) -> float:
        """The bandwidth of a node's link."""
        return self.network_bytes_s or self.speeds.hardware.network_bytes_s
