"""The worker half: copies, and what it says of those that failed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.engine_plugins.vllm.layout import HostPages
from kvpool.engine_plugins.vllm.plan import (
    GroupLoad,
    GroupSave,
    LoadJob,
    Opening,
    RankReport,
    SaveJob,
    StepDone,
    StepPlan,
)
from kvpool.engine_plugins.vllm.worker import LoadResults, WorkerHalf
from kvpool.types import NamespaceRecord, PartKind, PartSpec

RECORD = NamespaceRecord({"m": 1}, (PartSpec(24), PartSpec(8, PartKind.WINDOW, 1)) * 2)
KEYS = b"".join(bytes([i]) * 16 for i in range(4))
BLOCKS = 10


class Rank:
    """A worker half over its own paged KV."""

    def __init__(
        self,
        pool: Any,
        rank: int = 0,
        *,
        single_group: bool = False,
        seed: int = 0,
        timer: Any = None,
    ) -> None:
        random = np.random.default_rng(seed)
        self.full = [random.integers(0, 256, (BLOCKS, size), np.uint8) for size in (16, 8)]
        self.window = [random.integers(0, 256, (BLOCKS, 8), np.uint8)]
        self.half = WorkerHalf(
            pool,
            RankReport(rank, "cpu", "L", "", [], {}),
            lambda: [HostPages(self.full), HostPages(self.window)],
            single_group=single_group,
            record_ready=lambda: None,
            timer=timer,
        )
        self.step(StepPlan(opening=Opening(1, RECORD, 0)))

    def step(self, plan: StepPlan) -> LoadResults:
        """A step after which all copies have ended."""
        self.half.start_loads(plan)
        self.half.start_saves(plan)
        for future in [*self.half._loads, *self.half._saves]:
            future.result(10)
        return self.half.take_loads()

    def save(
        self, job: int = 1, blocks: tuple[int, ...] = (2, 3, 4, 5), generation: int = 1
    ) -> StepDone | None:
        saves = [
            GroupSave(0, KEYS, list(blocks), None),
            GroupSave(1, KEYS[48:], list(blocks[3:]), KEYS[32:48]),
        ]
        self.step(StepPlan(saves=[SaveJob(job, "s", generation, saves)]))
        return self.half.take_done()


def load(token: str, *, sync: bool = False, job: int = 9, window: int = 3) -> StepPlan:
    groups = [GroupLoad(1, 0, [6, 7, 8, 9]), GroupLoad(1, window, [1])]
    return StepPlan(loads=[LoadJob(job, "r", token, sync, groups)])


def leased(pool: Any) -> Any:
    lease = pool.acquire(pool.open(RECORD), KEYS)
    assert lease is not None
    return lease


@pytest.fixture
def stored(pool: Any) -> list[Rank]:
    """Two ranks that have saved four blocks each."""
    ranks = [Rank(pool, rank, seed=rank) for rank in range(2)]
    for rank in ranks:
        done = rank.save()
        assert done == StepDone(saves={1: 1})
    return ranks


@pytest.mark.parametrize("sync", [False, True])
def test_each_rank_gets_back_its_own_bytes(pool: Any, stored: list[Rank], sync: bool) -> None:
    lease = leased(pool)
    for rank, writer in enumerate(stored):
        reader = Rank(pool, rank, seed=50)
        results = reader.step(load(lease.token, sync=sync))
        assert results == LoadResults(set() if sync else {"r"}, set(), set())
        assert reader.half.take_done() == StepDone(loads={9: 1})
        for mine, theirs in zip(reader.full, writer.full, strict=True):
            assert np.array_equal(mine[6:10], theirs[2:6])
        assert np.array_equal(reader.window[0][1], writer.window[0][5])
        tally = reader.half.counters.take()
        assert tally["loaded_blocks"] == 5
        assert tally["loaded_bytes"] == 4 * 24 + 8
    assert pool.holds == {lease.token: 1}


def test_what_is_there_is_not_written_again(pool: Any, stored: list[Rank]) -> None:
    writes = len(pool.writes)
    again = Rank(pool, 0, seed=7)
    assert again.save(job=2) == StepDone(saves={2: 1})
    assert len(pool.writes) == writes == len(set(pool.writes))
    assert again.half.counters.take() == {}


def test_a_save_belongs_to_the_opening_it_was_planned_in(pool: Any) -> None:
    other = NamespaceRecord({"m": 2}, RECORD.parts)
    writer = Rank(pool)
    assert writer.save() == StepDone(saves={1: 1})
    writer.step(StepPlan(opening=Opening(2, other, 0)))
    assert writer.save(job=2) == StepDone(saves={2: 1}, failed_saves={2})
    assert writer.save(job=3, generation=2) == StepDone(saves={3: 1})
    assert {digest for digest, _, _ in pool.rows} == {RECORD.digest(), other.digest()}
    assert len(pool.writes) == 2 * 5
    assert pool.opened == [RECORD, other]


def test_a_save_into_an_ended_epoch_is_said_to_be_one(pool: Any) -> None:
    writer = Rank(pool)
    pool.outdated = True
    assert writer.save() == StepDone(saves={1: 1}, failed_saves={1}, outdated={1})
    assert writer.half.counters.take() == {"failed_saves": 1}
    pool.outdated = False
    writer.step(StepPlan(opening=Opening(2, RECORD, 0)))
    assert writer.save(job=2, generation=2) == StepDone(saves={2: 1})


def test_saves_tell_the_parent(pool: Any, stored: list[Rank]) -> None:
    assert pool.parents[0, KEYS[:16]] is None
    assert pool.parents[1, KEYS[48:]] == KEYS[32:48]


@pytest.mark.parametrize("single_group", [False, True])
def test_a_late_lease_is_a_failed_load(pool: Any, stored: list[Rank], single_group: bool) -> None:
    lease = leased(pool)
    reader = Rank(pool, single_group=single_group)
    pages = reader.half._load_pages[1]
    copy = pages.from_slots

    def slow(*arguments: Any) -> None:
        copy(*arguments)
        lease.deadline = pool.clock() - 1

    pages.from_slots = slow  # type: ignore[method-assign]
    results = reader.step(load(lease.token))
    assert results.finished == {"r"}
    if single_group:
        assert results.failed_blocks == {1, 6, 7, 8, 9}
        assert results.failed_requests == set()
    else:
        assert results.failed_blocks == set()
        assert results.failed_requests == {"r"}
    assert reader.half.take_done() == StepDone(loads={9: 1}, failed_loads={9})
    assert reader.half.counters.take()["failed_loads"] == 1


@pytest.mark.parametrize("why", ["away", "gone", "short"])
def test_a_load_without_its_lease_fails(pool: Any, stored: list[Rank], why: str) -> None:
    lease = leased(pool)
    pool.away = why == "away"
    plan = load(
        "no such lease" if why == "gone" else lease.token, window=1 if why == "short" else 3
    )
    reader = Rank(pool)
    assert reader.step(plan).failed_requests == {"r"}
    assert pool.holds == {lease.token: 1}


@pytest.mark.parametrize("why", ["away", "full"])
def test_a_pool_that_takes_nothing_costs_only_the_save(pool: Any, why: str) -> None:
    setattr(pool, why, True)
    writer = Rank(pool)
    assert writer.save() == StepDone(saves={1: 1}, failed_saves={1})
    assert writer.half.counters.take() == {"failed_saves": 1}
    setattr(pool, why, False)
    assert writer.save(job=2) == StepDone(saves={2: 1})


def test_nothing_is_saved_between_a_failed_load_and_the_schedulers_answer(pool: Any) -> None:
    worker = Rank(pool, single_group=True)
    plan = load("no such lease", sync=True)
    plan.saves = [SaveJob(1, "r", 1, [GroupSave(0, KEYS, [2, 3, 4, 5], None)])]
    results = worker.step(plan)
    assert results.failed_blocks == {1, 6, 7, 8, 9}
    assert worker.half.take_done() == StepDone({9: 1}, {1: 1}, {9}, {1})
    # Steps that were planned before the scheduler could know of it.
    assert worker.save(job=2) == StepDone(saves={2: 1}, failed_saves={2})
    worker.step(StepPlan(acknowledged=[9]))
    assert worker.save(job=3) == StepDone(saves={3: 1})
    assert len(pool.writes) == 5


def test_a_rank_reports_itself_when_asked(pool: Any) -> None:
    worker = Rank(pool)
    worker.step(StepPlan(want_report=True))
    done = worker.half.take_done()
    assert done is not None
    assert done.reports == [worker.half.report]
    assert worker.half.take_done() is None


def test_a_broken_invariant_is_not_hidden(pool: Any, stored: list[Rank]) -> None:
    lease = leased(pool)
    worker = Rank(pool)
    worker.half._load_pages[0].nbytes = 23
    worker.half.start_loads(load(lease.token))
    for future in worker.half._loads:
        assert future.exception(10) is not None
    with pytest.raises(AssertionError):
        worker.half.take_loads()


def test_closing_ends_the_threads(pool: Any, stored: list[Rank]) -> None:
    for rank in stored:
        rank.half.close()
        with pytest.raises(RuntimeError):
            rank.half._load_thread.submit(print)


# --- forward passes


class Stopwatch:
    """A device whose clock the test moves. What was marked after `reached` has not happened yet."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = float("inf")

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin if end <= self.reached else None


def forward(rank: Rank, timer: Stopwatch, plan: StepPlan, seconds: float, *, before: bool) -> None:
    """A step as vLLM makes it. before: loads are started before the forward pass, else after it."""
    rank.half.begin_step(plan)
    if before:
        timer.now += 5
        rank.half.start_loads(plan)
    timer.now += seconds
    if not before:
        rank.half.start_loads(plan)
    rank.half.start_saves(plan)
    timer.now += 7


@pytest.mark.parametrize("sync", [False, True])
def test_a_forward_pass_is_measured_without_the_loads_before_it(
    pool: Any, stored: list[Rank], sync: bool
) -> None:
    timer = Stopwatch()
    rank = Rank(pool, timer=timer)
    plan = load(leased(pool).token, sync=sync)
    plan.measured = 4
    forward(rank, timer, plan, 0.25, before=sync)
    done = rank.half.take_done()
    assert done is not None
    assert done.steps == {4: (0.25, 1)}


def test_only_passes_that_are_asked_for_and_have_ended_are_told(pool: Any) -> None:
    timer = Stopwatch()
    rank = Rank(pool, timer=timer)
    forward(rank, timer, StepPlan(), 1, before=False)
    timer.reached = timer.now
    forward(rank, timer, StepPlan(measured=1), 2, before=False)
    forward(rank, timer, StepPlan(measured=2), 3, before=False)
    assert rank.half.take_done() is None
    timer.reached += 2
    assert rank.half.take_done() == StepDone(steps={1: (2.0, 1)})
    timer.reached = timer.now
    assert rank.half.take_done() == StepDone(steps={2: (3.0, 1)})
    assert rank.half.take_done() is None


def test_a_rank_without_a_timer_measures_nothing(pool: Any) -> None:
    rank = Rank(pool)
    forward(rank, Stopwatch(), StepPlan(measured=1), 1, before=False)
    assert rank.half.take_done() is None


def test_seconds_of_pipeline_stages_add_up() -> None:
    done = StepDone(steps={1: (0.5, 1), 2: (1.0, 1)})
    done.merge(StepDone(steps={1: (0.25, 1), 3: (4.0, 1)}))
    done.merge(StepDone(saves={7: 1}))
    assert done.steps == {1: (0.75, 2), 2: (1.0, 1), 3: (4.0, 1)}
    assert done
