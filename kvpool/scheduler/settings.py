"""What of the scheduler can be set."""

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
    """queue: the order of what waits here. segment_s: seconds of prefill that one order is for.

    ahead_s: an engine gets its next order so long before it is free, and earlier by the time that its
    blocks take to load, `prefetch_s` at most. orders_max: that one engine has, of
    those that wait here. look_ahead: requests that are asked about at one poll, at most, of those that
    the same engines can serve. queue_max:
    requests that may wait. ttft_slo_s, tpot_slo_s: what is not expected to be met is refused.

    retries_max: how often a request whose order failed is tried again. decodes: whether it is decided
    here where answers are decoded; otherwise a request ends with its first token. decode, tenants, spread,
    roles: the rules of these.
    """

    queue: QueueRule = SIZE_AWARE
    segment_s: float = 0.25
    ahead_s: float = 0.005
    prefetch_s: float = 0.5
    orders_max: int = 4
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
