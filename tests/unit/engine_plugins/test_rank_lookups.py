"""Lookups of engines over several nodes: usable is what all ranks have, and nothing is held for longer than asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.following import Following
from kvpool.engine_plugins.vllm.layout.pages import GroupPages, HostPages, PartPages
from kvpool.engine_plugins.vllm.plan import (
    GroupLoad,
    GroupRule,
    GroupSave,
    LoadJob,
    LookupJob,
    Opening,
    RankReport,
    SaveJob,
    StepPlan,
    several_nodes,
)
from kvpool.engine_plugins.vllm.scheduler.rank_lookups import ROUNDS_MAX, RankLookups
from kvpool.engine_plugins.vllm.scheduler.request_state import Engine, Shared
from kvpool.engine_plugins.vllm.worker.half import WorkerHalf
from kvpool.errors import ProtocolError
from kvpool.types import KEY_BYTES, NamespaceRecord, PartKind, PartSpec
from tests.support.waiting import PATIENCE_S

LEASE_S, WAIT_S, ANSWER_S = 8.0, 1.0, 0.5
KEYS = b"".join(bytes([i]) * KEY_BYTES for i in range(4))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(ranks: int = 2, *, windows: bool = False) -> tuple[RankLookups, Clock]:
    clock = Clock()
    rule = GroupRule(0, 1, PartKind.WINDOW if windows else PartKind.FULL)
    config = PluginConfig(lease_s=LEASE_S, pull_wait_s=WAIT_S, request_timeout_s=ANSWER_S)
    client: Any = None  # ranks ask
    shared = Shared(client, config, Engine([rule], 1, 1, ranks, sync_loads=False), clock)
    return RankLookups(shared), clock


def test_usable_is_what_all_ranks_have() -> None:
    lookups, clock = made(3)
    question = lookups.ask(0, KEYS, None, None, "trace")
    jobs, released = lookups.take()
    assert jobs == [LookupJob(1, KEYS, LEASE_S, WAIT_S, None, None, "trace")]
    assert released == []
    assert not lookups.has_work
    lookups.note({1: [4, 2]})
    assert not lookups.ended(question)
    clock.now += 0.1
    lookups.note({1: [3], 9: [1]})
    assert lookups.ended(question)
    lease = lookups.lease(question)
    assert lease is not None
    assert (lease.job, lease.blocks, lease.deadline) == (1, 2, 100.0 + LEASE_S)
    lookups.release(lease)
    assert lookups.take() == ([], [1])


@pytest.mark.parametrize("answers", [[], [4], [4, 0]])
def test_one_rank_without_is_a_miss_for_all(answers: list[int]) -> None:
    lookups, clock = made()
    question = lookups.ask(0, KEYS, None, None, "")
    lookups.take()
    lookups.note({1: answers})
    clock.now += WAIT_S + ANSWER_S
    assert lookups.ended(question)
    assert lookups.lease(question) is None
    assert lookups.take() == ([], [1]), "ranks that have leased give back"
    lookups.note({1: [4]})  # too late: it was given back


def test_prefixes_with_windows_are_asked_for_until_they_are_one() -> None:
    lookups, _ = made(windows=True)
    question = lookups.ask(0, KEYS, None, None, "")
    lookups.take()
    for job, answers in enumerate(([4, 3], [2, 3], [2, 2]), 1):
        assert not lookups.ended(question)
        lookups.note({job: answers})
    assert lookups.ended(question)
    lease = lookups.lease(question)
    assert lease is not None
    assert (lease.job, lease.blocks) == (3, 2)
    jobs, released = lookups.take()
    assert [(job.job, len(job.keys) // KEY_BYTES, job.wait_s) for job in jobs] == [
        (2, 3, 0.0),
        (3, 2, 0.0),
    ]
    assert released == [1, 2]


def test_ranks_that_never_agree_are_a_miss() -> None:
    lookups, _ = made(windows=True)
    question = lookups.ask(0, KEYS * 4, None, None, "")
    for job in range(1, ROUNDS_MAX + 1):
        assert not lookups.ended(question)
        lookups.note({job: [12 - job, 13 - job]})
    assert lookups.ended(question)
    assert lookups.lease(question) is None
    assert lookups.take()[1] == list(range(1, ROUNDS_MAX + 1))


def test_a_lease_of_before_a_long_wait_is_taken_anew() -> None:
    lookups, clock = made()
    following = Following(follow_s=30.0)
    question = lookups.ask(0, KEYS, None, following, "")
    assert lookups.take()[0][0].following is following
    clock.now += 20
    lookups.note({1: [4, 4]})
    assert not lookups.ended(question)
    (job,), released = lookups.take()
    assert (job.following, job.wait_s, released) == (None, 0.0, [1])
    lookups.note({2: [4, 4]})
    assert lookups.ended(question)
    lease = lookups.lease(question)
    assert lease is not None
    assert lease.deadline == clock.now + LEASE_S


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), max_size=6), st.booleans())
def test_every_lookup_is_given_back_once(rounds: list[list[int]], windows: bool) -> None:
    lookups, clock = made(windows=windows)
    question = lookups.ask(0, KEYS, None, None, "")
    asked, released = [], []

    def take() -> None:
        jobs, back = lookups.take()
        asked.extend(job.job for job in jobs)
        released.extend(back)

    take()
    for answers in rounds:
        lookups.note({question.job: answers})
        if lookups.ended(question):
            break
        take()
    clock.now += 60
    assert lookups.ended(question)
    lease = lookups.lease(question)
    if lease is not None:
        assert lease.blocks <= len(KEYS) // KEY_BYTES
        lookups.release(lease)
    take()
    assert sorted(released) == asked


def test_places_tell_nodes_apart() -> None:
    reports = [RankReport(rank, "cpu", "", "", [], {}, place=f"node-{rank}") for rank in (0, 1)]
    assert several_nodes(reports)
    assert not several_nodes(reports[:1])


# --- the ranks' half

RECORD = NamespaceRecord({"m": 1}, (PartSpec(16), PartSpec(16)))


class Rank:
    """A worker half at a daemon of its own, with one part."""

    def __init__(self, pool: Any, part: int) -> None:
        self.pool, self.part = pool, part
        self.layer = np.random.default_rng(part).integers(0, 256, (10, 16), np.uint8)
        self.half = WorkerHalf(
            pool,
            RankReport(part, "cpu", "L", "", [], {}),
            lambda: [GroupPages([PartPages(part, HostPages([self.layer]))])],
            block_errors=False,
            record_ready=lambda: None,
        )
        self.step(StepPlan(opening=Opening(1, RECORD, 0)))

    def step(self, plan: StepPlan) -> Any:
        self.half.start_loads(plan)
        self.half.start_saves(plan)
        for lookup in list(self.half._lookups):
            lookup.result(PATIENCE_S)
        self.half.settle()
        return self.half.take_loads()


@pytest.fixture
def ranks(pool_types: Any) -> list[Rank]:
    ranks = [Rank(pool_types.FakePool(), part) for part in range(2)]
    for rank in ranks:
        save = GroupSave(0, KEYS, [2, 3, 4, 5], None)
        rank.step(StepPlan(saves=[SaveJob(1, "s", 1, [save])]))
        done = rank.half.take_done()
        assert done is not None
        assert done.saves == {1: 1}
    return ranks


def lookup(job: int = 7, keys: bytes = KEYS) -> StepPlan:
    return StepPlan(lookups=[LookupJob(job, keys, LEASE_S, 0.0, None, None, "")])


def test_each_rank_leases_and_loads_at_its_own_daemon(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.step(lookup())
        done = rank.half.take_done()
        assert done is not None
        assert done.lookups == {7: [4]}
        assert len(rank.pool.leases) == 1
        was = rank.layer[2:6].copy()
        job = LoadJob(8, "r", "", False, [GroupLoad(1, 0, [6, 7, 8, 9])], lookup=7)
        assert rank.step(StepPlan(loads=[job])).failed_requests == set()
        assert np.array_equal(rank.layer[6:10], was)
        rank.step(StepPlan(released=[7]))
        assert rank.pool.leases == {}


@pytest.mark.parametrize("how", ["away", "given back"])
def test_a_daemon_that_is_gone_between_lookup_and_load_is_a_failed_load(
    ranks: list[Rank], how: str
) -> None:
    rank = ranks[1]
    rank.step(lookup())
    rank.half.take_done()
    rank.pool.away = how == "away"
    if how == "given back":
        rank.step(StepPlan(released=[7]))
    job = LoadJob(8, "r", "", False, [GroupLoad(1, 0, [6, 7, 8, 9])], lookup=7)
    assert rank.step(StepPlan(loads=[job])).failed_requests == {"r"}
    done = rank.half.take_done()
    assert done is not None
    assert done.failed_loads == {8}


def test_what_is_given_back_before_it_came_is_not_kept(ranks: list[Rank]) -> None:
    rank = ranks[0]
    rank.step(lookup())
    rank.half.start_loads(StepPlan(released=[7]))
    rank.half.take_done()
    assert rank.pool.leases == {}


def test_a_daemon_of_another_version_is_a_counted_miss(ranks: list[Rank]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ProtocolError("the daemon speaks another protocol")

    rank = ranks[1]
    rank.pool.acquire = refuse
    rank.step(lookup())
    done = rank.half.take_done()
    assert done is not None
    assert done.lookups == {7: [0]}
    assert rank.half.counters.take()["failed_lookups"] == 1


def test_a_rank_that_has_nothing_says_so(ranks: list[Rank]) -> None:
    rank = ranks[0]
    rank.step(lookup(keys=b"x" * KEY_BYTES))
    done = rank.half.take_done()
    assert done is not None
    assert done.lookups == {7: [0]}
