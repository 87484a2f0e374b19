"""One simulated run of a plan, and whether it met the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvpool.errors import ConfigError
from kvpool.scheduler.values import Request
from kvpool.simulator.report import mean, quantile
from kvpool.simulator.shape import Shape
from kvpool.simulator.simulated_cluster import Outcome, Simulation

STABLE = 0.95
"""Engines that are busier than this share of the time are too few, whatever a short run says."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds to the first token and a token after it, which this share of requests is to keep to."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9

    def __post_init__(self) -> None:
        if min(self.ttft_s, self.tpot_s) <= 0 or not 0 < self.share < 1:
            raise ConfigError(
                "targets must be seconds above 0, for a share of requests between 0 and 1"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster. Bytes are of each node that computes prompts, network_bytes_s of every node."""

    prefill: int
    decode: int
    mixed: int
    dram_bytes: float
    ssd_bytes: float
    network_bytes_s: float

    @property
    def engines(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def computing(self) -> int:
        """Engines that compute prompts; their nodes hold the pool."""
        return self.prefill + self.mixed


@dataclass(frozen=True, slots=True)
class Trial:
    """What a plan did. ttft_s, tpot_s: at the targets' share of requests. hit: of blocks asked for.

    busy: of engines that compute prompts, the seconds of work for each second in which requests came.
    met: the targets.
    """

    plan: Plan
    ttft_s: float
    ttft_mean_s: float
    tpot_s: float
    hit: float
    busy: float
    met: bool

    def slack(self, targets: Targets) -> float:
        """How far it is below both targets; below 0 where it misses one."""
        return 1 - max(self.ttft_s / targets.ttft_s, self.tpot_s / targets.tpot_s)


@dataclass(eq=False, repr=False, slots=True)
class Trials:
    """Runs plans on one workload, each once: the same plan, the same trial."""

    _requests: Sequence[Request]
    _base: Shape
    """What is simulated, but for what a plan says."""
    _targets: Targets
    _told: Callable[[Plan], None]
    """Called with each plan before it is run."""
    _done: dict[Plan, Trial] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._done)

    def run(self, plan: Plan) -> Trial:
        if plan not in self._done:
            self._told(plan)
            self._done[plan] = self._run(plan)
        return self._done[plan]

    def _run(self, plan: Plan) -> Trial:
        kv_bytes = self._base.speeds.model.kv_bytes
        block = self._base.block_tokens
        blocks = [size / kv_bytes // block for size in (plan.dram_bytes, plan.ssd_bytes)]
        dram, ssd = (int(count) * block * plan.computing for count in blocks)
        shape = replace(
            self._base,
            prefill=plan.prefill,
            decode=plan.decode,
            mixed=plan.mixed,
            pool_tokens=dram,
            ssd_tokens=ssd,
            network_bytes_s=plan.network_bytes_s,
        )
        simulation = Simulation(shape, self._requests)
        outcomes = simulation.run()
        span_s = self._requests[-1].arrived_s - self._requests[0].arrived_s
        computing = [s for name, s in simulation.busy_s.items() if not name.startswith("decode")]
        return self._judge(plan, outcomes, mean(computing) / span_s if span_s else 0.0)

    def _judge(self, plan: Plan, outcomes: Sequence[Outcome], busy: float) -> Trial:
        # What is refused never comes: it counts as late.
        ttft_s = [math.inf if o.ttft_s is None else o.ttft_s for o in outcomes]
        tpot_s = [tpot for o in outcomes if (tpot := o.tpot_s) is not None]
        asked = sum(len(o.request.keys) for o in outcomes)
        share = self._targets.share
        late_s = quantile(sorted(ttft_s), share)
        slow_s = quantile(sorted(tpot_s), share) if tpot_s else 0.0
        met = late_s <= self._targets.ttft_s and slow_s <= self._targets.tpot_s
        return Trial(
            plan,
            late_s,
            mean(ttft_s),
            slow_s,
            sum(o.hit_blocks for o in outcomes) / asked,
            busy,
            # Engines that also decode are always busy; of these only the targets tell.
            met and (plan.mixed > 0 or busy <= STABLE),
        )
