"""The search for the smallest plan that meets the targets. No I/O; every trial is asked for.

Counts are bisected, since more engines do not make it worse; sizes and bandwidths are tried in a few
steps, since these say where the knee is. The order:

1. Aggregated: the fewest engines that compute and decode, with a pool that forgets nothing.
2. Disaggregated: the fewest that compute prompts, when decoding takes nothing; then the fewest that
   decode behind them. Where no number of these is enough, one more that computes prompts, and again.
3. The smaller of the two; of equals, the one that stays further below the targets.
4. The least DRAM a node, then SSD for what does not fit in the most DRAM that a node may have, then the
   least bandwidth, with which the targets are met and the mean time to first token is at most
   `TOLERANCE` times what it is with all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvpool.errors import InvalidRequest
from kvpool.planner.trials import Plan, Targets, Trial

TOLERANCE = 1.05
STEPS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of all that could be used of a tier: what is tried."""
BANDWIDTHS = (1e9, 3e9, 6e9, 12e9, 25e9, 50e9, 100e9)
"""Bytes a second of a node: what is tried below what its hardware has."""
GROW_MAX = 4
"""How often step 2 takes one more that computes prompts."""

Run = Callable[[Plan], Trial]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may have. dram_bytes, ssd_bytes: of each node. everything_bytes: of all blocks of the
    workload, together."""

    engines: int
    dram_bytes: float
    ssd_bytes: float
    network_bytes_s: float
    everything_bytes: float

    def plan(self, prefill: int, decode: int, mixed: int) -> Plan:
        """With memory for everything, whether a node may have so much or not."""
        each = self.everything_bytes / (prefill + mixed)
        return Plan(prefill, decode, mixed, each, 0.0, self.network_bytes_s)


@dataclass(frozen=True, slots=True)
class Found:
    """aggregated, disaggregated: the smallest of either kind, None where none meets the targets.

    best: the recommended one, with the memory, disks and bandwidth that it needs. memory, disks, bandwidths: the trials of each sweep, in order.
    """

    best: Trial
    aggregated: Trial | None
    disaggregated: Trial | None
    memory: tuple[Trial, ...]
    disks: tuple[Trial, ...]
    bandwidths: tuple[Trial, ...]


def search(run: Run, limits: Limits, targets: Targets, start: int = 1) -> Found:
    """start: a guess at how many engines compute prompts. Raises `InvalidRequest` if nothing is enough."""
    count = smallest(lambda n: run(limits.plan(0, 0, n)).met, start, limits.engines)
    aggregated = run(limits.plan(0, 0, count)) if count is not None else None
    disaggregated = _disaggregated(run, limits, start)
    found = [trial for trial in (aggregated, disaggregated) if trial is not None]
    if not found:
        raise InvalidRequest(
            f"{limits.engines} engines do not meet the targets, even with an unlimited pool: allow more engines, or "
            "longer times"
        )
    chosen = min(found, key=lambda trial: (trial.plan.engines, -trial.slack(targets)))
    best, memory, disks = _pool(run, limits, chosen)
    slower = [speed for speed in BANDWIDTHS if speed < limits.network_bytes_s]
    speeds = [*slower, limits.network_bytes_s]
    plans = [replace(best.plan, network_bytes_s=speed) for speed in speeds]
    best, bandwidths = _least(run, plans, best)
    return Found(best, aggregated, disaggregated, tuple(memory), tuple(disks), tuple(bandwidths))


def smallest(enough: Callable[[int], bool], start: int, most: int) -> int | None:
    """The least number from 1 to `most` that is enough, if more is never less so; None if none is.

    start: a guess. It takes about 2 log2 of how far off that is.
    """
    low, high, step = 0, most + 1, 1  # not enough; enough, or more than there may be
    at = max(1, min(start, most))
    while high - low > 1:
        if enough(at):
            high = at
        else:
            low = at
        if low and high <= most:
            at = (low + high) // 2
        else:
            at = min(most, at + step) if low else max(1, at - step)
            step *= 2
    return high if high <= most else None


def _disaggregated(run: Run, limits: Limits, start: int) -> Trial | None:
    def soon_enough(prefill: int) -> bool:
        # Without engines that decode a request ends with its first token.
        return run(limits.plan(prefill, 0, 0)).met

    most = limits.engines - 1
    prefill = smallest(soon_enough, start, most)
    if prefill is None:
        return None
    for computing in range(prefill, min(prefill + GROW_MAX, most) + 1):

        def enough(decode: int, computing: int = computing) -> bool:
            return run(limits.plan(computing, decode, 0)).met

        decode = smallest(enough, computing, limits.engines - computing)
        if decode is not None:
            return run(limits.plan(computing, decode, 0))
    return None


def _pool(run: Run, limits: Limits, chosen: Trial) -> tuple[Trial, list[Trial], list[Trial]]:
    """The least memory, and disks for the rest where that is more than a node may have.

    If neither is enough, the best that there is, whether that meets the targets or not.
    """
    everything = chosen.plan.dram_bytes
    most = min(everything, limits.dram_bytes)
    plans = [replace(chosen.plan, dram_bytes=step * most) for step in STEPS]
    best, memory = _least(run, plans, chosen)
    if _as_good(best, chosen) or not limits.ssd_bytes:
        return best, memory, []
    most = min(everything, limits.ssd_bytes)
    plans = [replace(plans[-1], ssd_bytes=step * most) for step in STEPS]
    best, disks = _least(run, plans, chosen)
    return best, memory, disks


def _least(run: Run, plans: Sequence[Plan], wanted: Trial) -> tuple[Trial, list[Trial]]:
    """The first of these from which on all are as good as what is wanted, or else the last; and all."""
    trials = [run(plan) for plan in plans]
    best = trials[-1]
    for trial in reversed(trials):
        if not _as_good(trial, wanted):
            break
        best = trial
    return best, trials


def _as_good(trial: Trial, wanted: Trial) -> bool:
    return trial.met and trial.ttft_mean_s <= TOLERANCE * wanted.ttft_mean_s
