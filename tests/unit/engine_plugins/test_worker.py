"""The worker half: copies, and what it says of those that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.engine_plugins.vllm.layout.pages import GroupPages, HostPages, PartPages
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
from kvpool.engine_plugins.vllm.worker.attachment import Attachment
from kvpool.engine_plugins.vllm.worker.half import LoadResults, WorkerHalf
from kvpool.types import NamespaceRecord, PartKind, PartSpec
from tests.support.waiting import PATIENCE_S, until

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
        block_errors: bool = False,
        seed: int = 0,
        timer: Any = None,
        attachment: Attachment | None = None,
        verify: bool = False,
        ready: Any = None,
        reuse_wait_s: float = PATIENCE_S,
    ) -> None:
        random = np.random.default_rng(seed)
        self.weights = "first"
        self.pinned = True
        self.full = [random.integers(0, 256, (BLOCKS, size), np.uint8) for size in (16, 8)]
        self.window = [random.integers(0, 256, (BLOCKS, 8), np.uint8)]
        self.made: list[HostPages] = []

        def make_pages() -> list[GroupPages]:
            made = [HostPages(layers) for layers in (self.full, self.window)]
            self.made += made
            return [GroupPages([PartPages(2 * rank + n, pages)]) for n, pages in enumerate(made)]

        self.half = WorkerHalf(
            pool,
            RankReport(rank, "cpu", "L", "", [], {}),
            make_pages,
            block_errors=block_errors,
            record_ready=lambda: ready,
            reuse_wait_s=reuse_wait_s,
            timer=timer,
            attachment=attachment,
            verify=verify,
            weights=lambda: self.weights,
            pinned=lambda: self.pinned,
        )
        self.step(StepPlan(opening=Opening(1, RECORD, 0)))

    def step(self, plan: StepPlan) -> LoadResults:
        """A step after which all copies have ended."""
        self.half.start_loads(plan)
        self.half.start_saves(plan)
        self.half.settle()
        return self.half.take_loads()

    def load_through(self, between: Callable[..., None]) -> None:
        """Call `between` in the place of copies into blocks of the window's group, with what makes them."""
        for pages in self.made[1::2]:
            pages.from_slots = partial(between, pages.from_slots)  # type: ignore[method-assign]

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


def test_a_save_is_timed_from_when_its_blocks_are_computed(pool: Any) -> None:
    computed: list[float] = []
    event = SimpleNamespace(synchronize=lambda: computed.append(time.monotonic()))
    writer = Rank(pool, ready=event)
    begun = time.monotonic()
    done = writer.save()
    assert done is not None
    assert begun <= computed[0]
    assert 0 < done.save_seconds[1] <= time.monotonic() - computed[0]


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


def test_a_step_waits_for_saves_of_blocks_that_it_overwrites(pool: Any) -> None:
    computed = threading.Event()
    ready = SimpleNamespace(synchronize=lambda: computed.wait(PATIENCE_S))
    writer = Rank(pool, ready=ready)
    save = GroupSave(0, KEYS, [2, 3, 4, 5], None)
    writer.half.start_saves(StepPlan(saves=[SaveJob(1, "s", 1, [save])]))
    writer.half.end_saves([2])  # not for others
    assert writer.half.take_done() is None
    threading.Thread(target=computed.set).start()
    writer.half.end_saves([1])
    assert writer.half.take_done() == StepDone(saves={1: 1})
    assert len(pool.writes) == 4


def test_a_save_that_is_too_late_for_its_blocks_is_given_up(pool: Any) -> None:
    """With those behind it, for each of which a step would wait as long."""
    computed = threading.Event()
    ready = SimpleNamespace(synchronize=lambda: computed.wait(PATIENCE_S))
    writer = Rank(pool, ready=ready, reuse_wait_s=0.001)
    for number in (1, 2):
        save = GroupSave(0, KEYS, [2, 3, 4, 5], None)
        writer.half.start_saves(StepPlan(saves=[SaveJob(number, "s", 1, [save])]))
    writer.half.end_saves([1])
    computed.set()
    writer.step(StepPlan())
    assert writer.half.take_done() == StepDone(saves={1: 1, 2: 1}, failed_saves={1, 2})
    assert pool.writes == []
    assert writer.save(job=3) == StepDone(saves={3: 1})


def test_saves_tell_the_parent(pool: Any, stored: list[Rank]) -> None:
    assert pool.parents[0, KEYS[:16]] is None
    assert pool.parents[1, KEYS[48:]] == KEYS[32:48]


@pytest.mark.parametrize("block_errors", [False, True])
def test_a_late_lease_is_a_failed_load(pool: Any, stored: list[Rank], block_errors: bool) -> None:
    lease = leased(pool)
    reader = Rank(pool, block_errors=block_errors)

    def slow(copy: Callable[..., None], *arguments: Any) -> None:
        copy(*arguments)
        lease.deadline = pool.clock() - 1

    reader.load_through(slow)
    results = reader.step(load(lease.token))
    assert results.finished == {"r"}
    if block_errors:
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


@pytest.mark.parametrize("verify", [False, True])
def test_a_load_of_damaged_blocks_fails_where_they_are_verified(
    pool: Any, stored: list[Rank], verify: bool
) -> None:
    lease = leased(pool)
    reader = Rank(pool, verify=verify)
    assert reader.step(load(lease.token)).failed_requests == set()
    lease.slots[1].damaged = [0]
    assert reader.step(load(lease.token)).failed_requests == ({"r"} if verify else set())
    assert lease.reports == ([(1, [0])] if verify else [])
    lease.slots[0].checksums = None
    assert reader.step(load(lease.token)).failed_requests == ({"r"} if verify else set())
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
    worker = Rank(pool, block_errors=True)
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
    for pages in worker.made:
        pages.nbytes = 23
    worker.half.start_loads(load(lease.token))
    worker.half.settle()
    with pytest.raises(AssertionError):
        worker.half.take_loads()


def test_closing_ends_the_threads(pool: Any, stored: list[Rank]) -> None:
    for rank in stored:
        rank.half.close()
        with pytest.raises(RuntimeError):
            rank.half.start_loads(load("any"))


# --- the daemon's device memory


class Hold(Attachment):
    """Attached to what the test says; what it lets go of is closed by the rank."""

    def __init__(self, device: Any, threads: Any) -> None:
        super().__init__(lambda: self.given, threads)
        self.given = self.memory = device


@pytest.fixture
def device(pool: Any, stored: list[Rank], pool_types: Any) -> Any:
    """Device memory that holds blocks 1 and 3 of all parts of both ranks, which are in memory no more."""
    pool.device = pool_types.FakeDevice(7)
    ns = pool.open(RECORD)
    for part in range(4):
        pool.lift(ns, part, KEYS[48:] if part % 2 else KEYS[16:32] + KEYS[48:])
    return pool.device


def near(pool: Any) -> Any:
    lease = pool.acquire(pool.open(RECORD), KEYS, life=7)
    assert lease is not None
    assert lease.life == 7
    return lease


@pytest.mark.parametrize("sync", [False, True])
def test_a_load_gathers_from_memory_and_from_the_device(
    pool: Any, stored: list[Rank], device: Any, threads: Any, sync: bool
) -> None:
    lease = near(pool)
    for rank, writer in enumerate(stored):
        reader = Rank(pool, rank, seed=50, attachment=Hold(device, threads))
        results = reader.step(load(lease.token, sync=sync))
        assert results == LoadResults(set() if sync else {"r"}, set(), set())
        assert reader.half.take_done() == StepDone(loads={9: 1})
        for mine, theirs in zip(reader.full, writer.full, strict=True):
            assert np.array_equal(mine[6:10], theirs[2:6])
        assert np.array_equal(reader.window[0][1], writer.window[0][5])
        tally = reader.half.counters.take()
        assert (tally["loaded_blocks"], tally["loaded_bytes"]) == (5, 4 * 24 + 8)
        assert (tally["device_blocks"], tally["device_bytes"]) == (3, 2 * 24 + 8)
    assert pool.holds == {lease.token: 1}


def test_a_load_of_a_part_of_what_is_leased_takes_the_right_rows(
    pool: Any, stored: list[Rank], device: Any, threads: Any
) -> None:
    """As after the engine has computed a block since the lookup."""
    lease = near(pool)
    reader = Rank(pool, 0, seed=50, attachment=Hold(device, threads))
    groups = [GroupLoad(1, 1, [6, 7, 8]), GroupLoad(1, 3, [1])]
    reader.step(StepPlan(loads=[LoadJob(9, "r", lease.token, False, groups)]))
    assert reader.half.take_done() == StepDone(loads={9: 1})
    assert np.array_equal(reader.full[0][6:9], stored[0].full[0][3:6])


@pytest.mark.parametrize("block_errors", [False, True])
def test_device_memory_that_dies_under_a_load_fails_all_of_it(
    pool: Any, stored: list[Rank], device: Any, threads: Any, block_errors: bool
) -> None:
    lease = near(pool)
    reader = Rank(pool, block_errors=block_errors, attachment=Hold(device, threads))

    def die(copy: Callable[..., None], *arguments: Any) -> None:
        device.alive = False
        copy(*arguments)

    reader.load_through(die)
    results = reader.step(load(lease.token))
    if block_errors:
        assert results.failed_blocks == {1, 6, 7, 8, 9}
    else:
        assert results.failed_requests == {"r"}
    done = reader.half.take_done()
    assert done is not None
    assert done.failed_loads == {9}
    assert pool.holds == {lease.token: 1}
    tally = reader.half.counters.take()
    assert tally["failed_loads"] == 1
    assert "loads" not in tally


def test_dead_device_memory_is_not_touched(
    pool: Any, stored: list[Rank], device: Any, threads: Any
) -> None:
    lease = near(pool)
    reader = Rank(pool, block_errors=True, attachment=Hold(device, threads))
    device.alive = False
    lease.slots[0].device_table = None
    assert reader.step(load(lease.token)).failed_blocks == {1, 6, 7, 8, 9}


@pytest.mark.parametrize("attached", [None, 8])
def test_a_lease_on_memory_that_the_rank_has_not_is_a_failed_load(
    pool: Any, stored: list[Rank], device: Any, threads: Any, pool_types: Any, attached: int | None
) -> None:
    lease = near(pool)
    hold = None if attached is None else Hold(pool_types.FakeDevice(attached), threads)
    reader = Rank(pool, block_errors=True, attachment=hold)
    assert reader.step(load(lease.token)).failed_blocks == {1, 6, 7, 8, 9}
    assert pool.holds == {lease.token: 1}


def test_a_rank_tells_of_each_life_once(
    pool: Any, device: Any, threads: Any, pool_types: Any
) -> None:
    hold = Hold(device, threads)
    rank = Rank(pool, attachment=hold)
    assert rank.half.report.life == 7
    assert rank.half.take_done() is None
    device.alive, hold.given = False, pool_types.FakeDevice(8)
    done = rank.half.take_done()
    assert done is not None
    assert [report.life for report in done.reports] == [0]
    assert rank.half.take_done() is None
    threads.run()
    done = rank.half.take_done()
    assert done is not None
    assert [report.life for report in done.reports] == [8]
    assert done.reports == [rank.half.report]
    assert rank.half.take_done() is None


def test_device_memory_is_closed_behind_the_loads_that_read_it(
    pool: Any, stored: list[Rank], device: Any, threads: Any
) -> None:
    lease = near(pool)
    reader = Rank(pool, attachment=Hold(device, threads))
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def slow(copy: Callable[..., None], *arguments: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        seen.append(device.closed)
        copy(*arguments)

    reader.load_through(slow)
    reader.half.start_loads(load(lease.token))
    assert begun.wait(PATIENCE_S)
    device.alive = False
    reader.half.take_done()
    reader.half.start_saves(StepPlan(saves=[SaveJob(1, "s", 1, [GroupSave(0, KEYS, [2], None)])]))
    until(reader.half.take_done, "the thread of saves has done what was before this one")
    go_on.set()
    reader.half.settle()
    assert device.closed
    reader.half.close()
    assert seen == [False]


def test_dead_device_memory_is_closed(pool: Any, device: Any, threads: Any) -> None:
    rank = Rank(pool, attachment=Hold(device, threads))
    device.alive = False
    rank.half.take_done()
    rank.half.settle()
    assert device.closed
    rank.half.close()


def test_closing_lets_go_of_device_memory(pool: Any, device: Any, threads: Any) -> None:
    rank = Rank(pool, attachment=Hold(device, threads))
    rank.half.close()
    assert device.closed


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


def test_a_rank_looks_at_its_weights_once_a_reset(pool: Any) -> None:
    rank = Rank(pool)
    rank.half.take_done()
    rank.weights = "second"
    rank.half.begin_step(StepPlan())
    assert rank.half.take_done() is None
    for _ in range(2):  # steps that overlap ask twice
        rank.half.begin_step(StepPlan(reset=3))
        rank.weights = "third"
    done = rank.half.take_done()
    assert done is not None
    (report,) = done.reports
    assert (report.weights, report.reset) == ("second", 3)
    assert rank.half.take_done() is None


def test_it_settles_when_its_copies_have_ended(pool: Any) -> None:
    """As before the engine's memory is unmapped."""
    held, settled = threading.Event(), threading.Event()
    rank = Rank(pool, ready=SimpleNamespace(synchronize=lambda: held.wait(PATIENCE_S)))
    save = GroupSave(0, KEYS, [2, 3, 4, 5], None)
    rank.half.start_saves(StepPlan(saves=[SaveJob(1, "s", 1, [save])]))

    def settle() -> None:
        rank.half.settle()
        assert pool.writes
        settled.set()

    waiter = threading.Thread(target=settle)
    waiter.start()
    assert not settled.is_set()
    held.set()
    waiter.join(PATIENCE_S)
    assert settled.is_set()


def test_a_rank_reports_when_its_device_may_not_read_the_pools_memory(pool: Any) -> None:
    rank = Rank(pool)
    rank.half.take_done()
    for pinned in (False, True):
        rank.pinned = pinned
        done = rank.half.take_done()
        assert done is not None
        assert [report.pinned for report in done.reports] == [pinned]
        assert rank.half.take_done() is None
