"""The scheduler's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.queue import SIZE_AWARE, QueueRule
from kvpool.scheduler.roles import RoleRule
from kvpool.scheduler.spreading import SpreadRule
from kvpool.scheduler.tenants import TenantRule


@dataclass(frozen=True, slots=True)
class Settings:
    """queue: the order of waiting requests. segment_s: seconds of prefill per order.

    An engine gets orders as long as all that it has to compute fits one step (of each of its stages and ranks): what
    waits there waits no longer than here, and is computed with the rest. Beyond that it gets its next order shortly
    before it is free: ahead_s, plus the time to load its blocks, `prefetch_s` at most. orders_max: open orders of one
    engine, at most: as many requests as engines schedule at a time. look_ahead: requests examined per poll and group of engines, at most. queue_max:
    the most waiting requests. ttft_slo_s, tpot_slo_s: requests that would miss these are refused.

    retries_max: how often a request whose order failed is retried. decodes: whether the scheduler
    also chooses decode engines; otherwise a request ends with its first token. decode, tenants, spread,
    roles: their rules.
    """

    queue: QueueRule = SIZE_AWARE
    segment_s: float = 0.25
    ahead_s: float = 0.005
    prefetch_s: float = 0.5
    orders_max: int = 256
    look_ahead: int = 16
    queue_max: int = 100_000
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    retries_max: int = 2
    decodes: bool = True
    decode: DecodeRule = field(default_factory=DecodeRule)
    tenants: TenantRule = field(default_factory=TenantRule)
    spread: SpreadRule = field(default_factory=SpreadRule)
    roles: RoleRule = field(default_factory=RoleRule)
