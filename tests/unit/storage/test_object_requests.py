"""How failures of a store are met: retries, deadlines, suspension, and that nothing piles up."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvpool.errors import ConfigError, Unavailable
from kvpool.storage.object.client import Fault, StoreFault
from kvpool.storage.object.requests import ObjectLimits, Requests
from tests.support.waiting import PATIENCE_S

FAST = ObjectLimits(bytes_max=1, backoff_s=0.0, failures_max=1000, retries=3)


class Now:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def requests(limits: ObjectLimits = FAST, clock: Callable[[], float] | None = None) -> Iterator:
    made = Requests(limits, clock or Now(), random.Random(1))
    try:
        yield made
    finally:
        made.close()


class Store:
    """Answers as it was told, then with "fine"."""

    def __init__(self, *answers: Fault | str) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self) -> str:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else "fine"
        if isinstance(answer, Fault):
            raise StoreFault(answer)
        return answer


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.UNREACHABLE, Fault.LATE])
def test_what_may_pass_is_tried_again(fault: Fault) -> None:
    with requests() as made:
        store = Store(fault, fault, fault)
        assert made.one(store, PATIENCE_S) == "fine"
        assert store.asked == 4
        assert made.faults[fault] == 3
        store = Store(*[fault] * 4)
        with pytest.raises(StoreFault) as caught:
            made.one(store, PATIENCE_S)
        assert caught.value.fault is fault
        assert store.asked == 4


@pytest.mark.parametrize("fault", [Fault.MISSING, Fault.RANGE, Fault.DENIED, Fault.REFUSED])
def test_what_will_not_pass_is_not(fault: Fault) -> None:
    with requests() as made:
        store = Store(fault)
        with pytest.raises(StoreFault) as caught:
            made.one(store, PATIENCE_S)
        assert caught.value.fault is fault
        assert store.asked == 1


def test_no_retry_begins_behind_the_deadline() -> None:
    # The wait is up to an hour, what is left is a minute; the seed's first wait is longer than that.
    limits = ObjectLimits(bytes_max=1, backoff_s=3600.0, backoff_s_max=3600.0)
    with requests(limits) as made:
        store = Store(Fault.BUSY)
        with pytest.raises(StoreFault):
            made.one(store, PATIENCE_S)
        assert store.asked == 1


def test_waits_double_up_to_their_most(monkeypatch: pytest.MonkeyPatch) -> None:
    class Most(random.Random):
        def random(self) -> float:
            return 1.0

    waits = []
    real = asyncio.sleep

    async def sleep(delay: float) -> None:
        waits.append(delay)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    limits = ObjectLimits(
        bytes_max=1, backoff_s=0.5, backoff_s_max=3.0, retries=5, failures_max=1000
    )
    made = Requests(limits, Now(), Most())
    try:
        assert made.one(Store(*[Fault.BUSY] * 5), PATIENCE_S) == "fine"
    finally:
        made.close()
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_silent_store_is_given_up_and_its_request_ended() -> None:
    ended = threading.Event()

    async def silent() -> None:
        try:
            await forever()
        finally:
            ended.set()

    limits = ObjectLimits(bytes_max=1, attempt_s=0.01, retries=0)
    with requests(limits) as made:
        with pytest.raises(StoreFault) as caught:
            made.one(silent, PATIENCE_S)
        assert caught.value.fault is Fault.LATE
        assert ended.wait(PATIENCE_S)


def test_what_nobody_waits_for_any_more_is_ended() -> None:
    ended = threading.Event()

    async def silent() -> None:
        try:
            await forever()
        finally:
            ended.set()

    with requests(ObjectLimits(bytes_max=1, attempt_s=PATIENCE_S)) as made:
        results = made.run([(1, silent, 0), (2, Store(), 0)], PATIENCE_S, 2)
        assert next(results) == (2, "fine")
        results.close()
        assert ended.wait(PATIENCE_S)


def test_many_bytes_may_take_longer() -> None:
    limits = ObjectLimits(bytes_max=1, attempt_s=0.01, bytes_s_min=1.0, retries=0)

    async def takes_long() -> str:
        await asyncio.sleep(0.02)
        return "fine"

    with requests(limits) as made:
        with pytest.raises(StoreFault):
            made.one(takes_long, PATIENCE_S)
        assert list(made.run([("tag", takes_long, 50)], PATIENCE_S, 1)) == [("tag", "fine")]


def test_a_deadline_ends_what_runs_and_what_waits_for_its_turn() -> None:
    import time

    limits = ObjectLimits(bytes_max=1, requests_max=2, attempt_s=PATIENCE_S, retries=0)
    threads = set(threading.enumerate())
    running: set[int] = set()
    most = 0

    def job(number: int) -> Callable:
        async def silent() -> None:
            nonlocal most
            running.add(number)
            most = max(most, len(running))
            try:
                await forever()
            finally:
                running.discard(number)

        return silent

    with requests(limits, time.monotonic) as made:
        for _ in range(20):
            jobs = [(number, job(number), 0) for number in range(5)]
            assert all(
                isinstance(result, StoreFault)
                for _, result in made.run(jobs, time.monotonic() + 0.01, 5)
            )
        assert len(set(threading.enumerate()) - threads) == 1
        # All have ended: nothing is left of 100 silent requests once the permits are had again.
        assert made.one(Store(), time.monotonic() + PATIENCE_S) == "fine"
        assert most <= 2


def test_no_job_is_drawn_before_it_can_start_or_behind_the_deadline() -> None:
    clock = Now()
    drawn: list[int] = []

    def jobs() -> Iterator:
        for number in range(6):
            drawn.append(number)
            yield number, Store(), 0

    with requests(FAST, clock) as made:
        results = made.run(jobs(), 10.0, 2)
        next(results)
        assert len(drawn) == 2
        next(results)
        assert len(drawn) == 3
        clock.now = 10.0
        # Those under way may have ended or not; nothing new is drawn.
        list(results)
        assert len(drawn) == 3


def test_requests_give_their_permits_back() -> None:
    limits = ObjectLimits(bytes_max=1, requests_max=1, retries=0, failures_max=1000)
    with requests(limits) as made:
        for fault in Fault:
            if fault is not Fault.DENIED:
                with pytest.raises(StoreFault):
                    made.one(Store(fault), PATIENCE_S)
        assert made.one(Store(), PATIENCE_S) == "fine"


def test_a_store_that_keeps_failing_is_left_alone_and_tried_again() -> None:
    clock = Now()
    limits = ObjectLimits(bytes_max=1, retries=0, failures_max=3, suspend_s=8.0)
    with requests(limits, clock) as made:
        for _ in range(3):
            with pytest.raises(StoreFault):
                made.one(Store(Fault.BUSY), clock.now + PATIENCE_S)
        assert 4.0 <= made.suspended_s <= 8.0
        store = Store()
        with pytest.raises(StoreFault) as caught:
            made.one(store, clock.now + PATIENCE_S)
        assert caught.value.fault is Fault.SUSPENDED and store.asked == 0
        assert made.last_fault == Fault.BUSY.text
        clock.now += 8.0
        assert made.one(store, clock.now + PATIENCE_S) == "fine"
        assert made.suspended_s == 0.0
        assert made.suspensions == 1


def test_refused_credentials_suspend_at_once() -> None:
    with requests() as made:
        with pytest.raises(StoreFault):
            made.one(Store(Fault.DENIED), PATIENCE_S)
        assert made.suspended_s > 0


@pytest.mark.parametrize("fault", [Fault.MISSING, Fault.RANGE, Fault.REFUSED])
def test_an_answer_is_no_failure(fault: Fault) -> None:
    limits = ObjectLimits(bytes_max=1, retries=0, failures_max=2)
    with requests(limits) as made:
        for answer in (Fault.BUSY, fault, Fault.BUSY, fault, Fault.BUSY):
            with pytest.raises(StoreFault):
                made.one(Store(answer), PATIENCE_S)
        assert made.suspensions == 0


def test_a_request_that_was_sent_is_not_said_to_be_suspended() -> None:
    limits = ObjectLimits(bytes_max=1, backoff_s=0.0, retries=3, failures_max=2)
    with requests(limits) as made:
        store = Store(*[Fault.UNREACHABLE] * 9)
        with pytest.raises(StoreFault) as caught:
            made.one(store, PATIENCE_S)
        assert caught.value.fault is Fault.UNREACHABLE
        assert store.asked == 2


def test_a_hasty_caller_does_not_suspend_the_store() -> None:
    limits = ObjectLimits(bytes_max=1, retries=0, failures_max=1)
    with requests(limits) as made:
        with pytest.raises(StoreFault):
            made.one(forever, 0.05)
        assert made.suspensions == 0
        with pytest.raises(StoreFault):
            made.one(forever, 0.3)
        assert made.suspensions == 1


def test_closing_ends_what_runs() -> None:
    made = Requests(FAST, Now(), random.Random(1))
    began = threading.Event()
    results: list[object] = []

    async def silent() -> None:
        began.set()
        await forever()

    def ask() -> None:
        try:
            made.one(silent, PATIENCE_S)
        except Unavailable as error:
            results.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert began.wait(PATIENCE_S)
    made.close()
    asking.join(PATIENCE_S)
    assert not asking.is_alive() and len(results) == 1
    with pytest.raises(Unavailable, match="closed"):
        made.one(Store(), PATIENCE_S)


def test_a_trial_that_a_hasty_caller_gave_up_lets_another_try() -> None:
    clock = Now()
    limits = ObjectLimits(bytes_max=1, retries=0, failures_max=1, suspend_s=4.0)
    with requests(limits, clock) as made:
        with pytest.raises(StoreFault):
            made.one(Store(Fault.BUSY), PATIENCE_S)
        clock.now = 4.0
        with pytest.raises(StoreFault) as caught:
            made.one(forever, clock.now + 0.05)
        assert caught.value.fault is Fault.LATE
        assert made.one(Store(), clock.now + PATIENCE_S) == "fine"


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_max": 0},
        {"attempt_s": 0.0},
        {"retries": -1},
        {"dead_share_max": 1.5},
        {"pack_bytes": 2 << 30},
        {"reads": 0},
    ],
)
def test_limits_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ObjectLimits(**{"bytes_max": 1, **wrong})
