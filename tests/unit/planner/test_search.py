"""The search, against trying everything on clusters whose behaviour is a formula."""

import math
from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.errors import InvalidRequest
from kvpool.planner.search import TOLERANCE, Limits, search, smallest
from kvpool.planner.trials import Plan, Targets, Trial

TARGETS = Targets(2.0, 0.05)
EVERYTHING = 64e9


def limits(engines: int = 12, dram: float = 1e12, ssd: float = 1e12) -> Limits:
    return Limits(engines, dram, ssd, 50e9, EVERYTHING)


def cluster(prompts: float, answers: float, reuse: float = 0.5) -> Callable[[Plan], Trial]:
    """Engines slow down as they fill. reuse: the share of the work on prompts that a whole pool saves."""

    def run(plan: Plan) -> Trial:
        each = EVERYTHING / plan.computing
        kept = min(1.0, (plan.dram_bytes + 0.9 * plan.ssd_bytes) / each)
        work = prompts * (1 - reuse * kept * min(1.0, plan.network_bytes_s / 10e9))
        if plan.mixed:
            busy = (work + answers) / plan.mixed
            ttft_s, tpot_s = late(0.8, busy), late(0.03, busy)
        else:
            ttft_s = late(0.8, work / plan.prefill)
            tpot_s = late(0.03, answers / plan.decode) if plan.decode else 0.0
        met = ttft_s <= TARGETS.ttft_s and tpot_s <= TARGETS.tpot_s
        return Trial(plan, ttft_s, ttft_s, tpot_s, 0.5 * kept, 0.5, met)

    return run


def late(alone_s: float, busy: float) -> float:
    return alone_s / (1 - busy) if busy < 1 else math.inf


@given(st.integers(0, 60), st.integers(-3, 80), st.integers(0, 50))
def test_the_smallest_is_found_in_few_steps(least: int, start: int, most: int) -> None:
    asked = []

    def enough(number: int) -> bool:
        assert 1 <= number <= most
        asked.append(number)
        return number >= least

    expected = next((number for number in range(1, most + 1) if number >= least), None)
    assert smallest(enough, start, most) == expected
    assert len(asked) == len(set(asked))
    off = abs(least - max(1, min(start, most))) + 1
    assert len(asked) <= 2 * math.log2(off) + 4


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 4.0), st.floats(0.1, 4.0), st.floats(0.0, 0.9), st.integers(1, 20))
def test_no_plan_with_fewer_engines_meets_the_targets(
    prompts: float, answers: float, reuse: float, start: int
) -> None:
    run, most = cluster(prompts, answers, reuse), limits()
    counts = [(0, 0, m) for m in range(1, 13)]
    counts += [(p, d, 0) for p in range(1, 12) for d in range(1, 13 - p)]
    enough = [sum(each) for each in counts if run(most.plan(*each)).met]
    if not enough:
        with pytest.raises(InvalidRequest):
            search(run, most, TARGETS, start)
        return
    found = search(run, most, TARGETS, start)
    assert found.best.met
    assert found.best.plan.engines == min(enough)
    for trial in (found.aggregated, found.disaggregated):
        assert trial is None or trial.met


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 0.9), st.floats(4e9, 100e9), st.booleans())
def test_a_pool_is_as_small_as_it_may_be_and_disks_take_what_memory_cannot(
    reuse: float, dram: float, disks: bool
) -> None:
    run, most = cluster(2.0, 1.0, reuse), limits(dram=dram, ssd=1e12 if disks else 0.0)
    found = search(run, most, TARGETS)
    best = found.best.plan
    counts = best.prefill, best.decode, best.mixed
    wanted = run(most.plan(*counts))
    assert best.dram_bytes <= dram
    kept = run(replace(best, network_bytes_s=most.network_bytes_s))
    if kept.met and kept.ttft_mean_s <= TOLERANCE * wanted.ttft_mean_s:
        tried = {trial.plan.dram_bytes for trial in found.memory} if not best.ssd_bytes else set()
        for less in (size for size in tried if size < best.dram_bytes):
            worse = run(Plan(*counts, less, 0.0, most.network_bytes_s))
            assert not worse.met or worse.ttft_mean_s > TOLERANCE * wanted.ttft_mean_s
    else:
        # All that there may be was not enough.
        assert best.dram_bytes == min(dram, wanted.plan.dram_bytes)
        assert disks <= (best.ssd_bytes > 0)
    if best.ssd_bytes:
        assert disks
        assert best.dram_bytes == dram


def test_where_nothing_is_reused_there_is_no_pool_and_no_network() -> None:
    found = search(cluster(2.0, 1.0, reuse=0.0), limits(), TARGETS)
    assert found.best.plan.dram_bytes == found.best.plan.ssd_bytes == 0.0
    assert found.best.plan.network_bytes_s == found.bandwidths[0].plan.network_bytes_s == 1e9


def test_a_bandwidth_below_which_it_is_bad_is_kept() -> None:
    found = search(cluster(2.0, 1.0, reuse=0.9), limits(), TARGETS)
    # The formula needs 10 GB/s for all of it, and 6 are 4 tenths short.
    assert found.best.plan.network_bytes_s == 12e9
