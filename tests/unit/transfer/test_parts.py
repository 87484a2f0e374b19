"""Deadlines, cancellation, budgets, threads and addresses, each by itself."""

import math
import threading

import pytest

from kvpool.errors import ConfigError, LimitExceeded, Unavailable
from kvpool.net import host_and_port as parse
from kvpool.transfer.addresses import is_loopback, resolve, url_of
from kvpool.transfer.base import DEADLINE_S_MAX, Deadline, Stop
from kvpool.transfer.responder import Budget, Budgets
from kvpool.transfer.thread_pool import ThreadPool
from tests.support.waiting import PATIENCE_S


def test_a_deadline_is_bounded_and_ends() -> None:
    assert 0 < Deadline(1e9).left() <= DEADLINE_S_MAX
    for seconds in (0.0, -5.0, math.nan, -math.inf):
        with pytest.raises(Unavailable, match="within its 0 s"):
            Deadline(seconds).left()
    soon, late = Deadline(1), Deadline(100)
    assert late.sooner(1).left() <= 1
    assert soon.sooner(50) is soon


def test_stop_runs_what_is_registered_once() -> None:
    stop, calls = Stop(), list[str]()

    def kept() -> None:
        calls.append("kept")

    def left() -> None:
        calls.append("left")

    stop.register(kept)
    stop.register(left)
    stop.unregister(left)
    stop.set()
    stop.set()
    assert calls == ["kept"]
    with pytest.raises(Unavailable, match="cancelled"):
        stop.register(left)
    stop.unregister(kept)


def test_the_budget_lets_an_oversized_loan_in_alone() -> None:
    budget = Budget(100)
    budget.take(500, Deadline(PATIENCE_S))
    with pytest.raises(LimitExceeded, match="100 bytes on loan"):
        budget.take(1, Deadline(0.01))
    budget.give(500)
    budget.take(60, Deadline(PATIENCE_S))
    budget.take(40, Deadline(PATIENCE_S))
    with pytest.raises(LimitExceeded):
        budget.take(1, Deadline(0))


def test_what_nobody_waits_for_has_a_budget_of_its_own() -> None:
    budgets = Budgets.of(100)
    budgets.urgent.take(75, Deadline(PATIENCE_S))
    budgets.background.take(25, Deadline(PATIENCE_S))
    for budget in budgets:
        with pytest.raises(LimitExceeded):
            budget.take(1, Deadline(0))


def test_the_budget_wakes_who_waits() -> None:
    budget = Budget(10)
    budget.take(10, Deadline(PATIENCE_S))
    waiter = threading.Thread(target=lambda: budget.take(10, Deadline(60)))
    waiter.start()
    budget.give(10)
    waiter.join(60)
    assert not waiter.is_alive()


def test_a_crew_has_a_limit_and_loses_no_job() -> None:
    crew = ThreadPool("test", 2)
    gate, done = threading.Event(), threading.Semaphore(0)
    idents = set()

    def job() -> None:
        assert gate.wait(60)
        idents.add(threading.get_ident())
        done.release()

    assert crew.try_now(job)
    assert crew.try_now(job)
    assert not crew.try_now(job)
    for _ in range(20):
        crew.submit(job)
    gate.set()
    for _ in range(22):
        assert done.acquire(timeout=60)
    assert len(idents) <= 2
    crew.close()


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("tcp://127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("tcp://[::1]:1", ("::1", 1)),
        ("tcp://node-7.example:65535", ("node-7.example", 65535)),
    ],
)
def test_urls_there_and_back(url: str, place: tuple[str, int]) -> None:
    assert parse(url) == place
    assert url_of(*place) == url


@pytest.mark.parametrize(
    "url",
    [
        "tcp://h",
        "tcp://:1",
        "tcp://h:x",
        "tcp://h:70000",
        "tcp://h:1/p",
        "tcp://h:1?q",
        "tcp://u@h:1",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        parse(url)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_is_loopback(host: str, local: bool) -> None:
    assert [is_loopback(info) for info in resolve(host, 1, Deadline(PATIENCE_S))] == [local]


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "a\0b", ".a"])
def test_a_name_that_cannot_be_one_is_not_resolved(host: str) -> None:
    with pytest.raises(Unavailable, match="cannot be resolved"):
        resolve(host, 1, Deadline(PATIENCE_S))


def test_a_look_up_can_be_cancelled() -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(Unavailable):
        resolve("some-name.invalid", 1, Deadline(PATIENCE_S), stop)
