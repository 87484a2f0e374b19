"""Background transfers give way, and not for ever."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.transfer.priority import Priority


class Told(threading.Condition):
    """Says when somebody is about to wait: it holds the lock from then until it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.entered.set()
        return super().wait_for(predicate, timeout)


class Patient(Priority):
    """Background transfers wait before a piece for as long as the test may take."""

    PIECE_WAIT_S = 60.0


@pytest.fixture
def told() -> Told:
    return Told()


def test_nobody_waits_for_nothing(told: Told) -> None:
    ways = Priority(told)
    with ways.urgent():
        pass
    ways.give_way(60)
    assert not told.entered.is_set()


def test_a_background_transfer_waits_for_the_last_urgent_one(told: Told) -> None:
    ways = Patient(told)
    happened: list[str] = []

    def background() -> None:
        ways.give_way(60)
        happened.append("background")

    thread = threading.Thread(target=background)
    with ways.urgent():
        with ways.urgent():
            thread.start()
            assert told.entered.wait(60)
        happened.append("one has ended")
    thread.join(60)
    assert happened == ["one has ended", "background"]


@pytest.mark.parametrize(("kind", "left_s"), [(Priority, 60.0), (Patient, 0.001)])
def test_it_gets_on_all_the_same(kind: type[Priority], left_s: float, told: Told) -> None:
    ways = kind(told)
    with ways.urgent():
        ways.give_way(left_s)
    assert told.entered.is_set()


def test_an_urgent_transfer_that_fails_stands_in_nobodys_way(told: Told) -> None:
    ways = Priority(told)
    with pytest.raises(ZeroDivisionError), ways.urgent():
        raise ZeroDivisionError
    ways.give_way(60)
    assert not told.entered.is_set()
