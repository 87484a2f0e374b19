"""Sessions over a real node: which blocks go first, and when a turn's own saves are over."""

from typing import Any

import pytest

from kvpool.daemon.features.sessions import SETTLE_S, Sessions

AHEAD = 10.0


class Told:
    """A session's turns, over a pool of so many blocks."""

    def __init__(self, make_pool: Any, slabs: int) -> None:
        self.pool = make_pool(slabs)
        self.now = 100.0

    def turn(self, name: str, numbers: Any, agent: str = "", **said: Any) -> None:
        pool = self.pool
        keys = pool.keys(numbers)
        pool.sessions.turn(pool.tenant, pool.namespace, name, agent, keys, self.now, **said)

    def wait(self, seconds: float = AHEAD) -> None:
        self.now += seconds
        self.pool.sessions.settle(self.now)
        while self.pool.sessions.work(256):
            pass

    @property
    def expended(self) -> int:
        return self.pool.node.counters.expended


@pytest.fixture
def told(make_pool: Any) -> Told:
    return Told(make_pool, slabs=2)  # 8 blocks


def test_what_a_turn_left_goes_first_though_it_was_saved_after_the_turn_was_told(
    told: Told,
) -> None:
    told.turn("edited", range(4))
    told.pool.put(range(4))
    told.pool.put(range(10, 12))  # of another session, older than the next turn's
    told.wait()
    told.turn("edited", [0, 20])
    told.pool.put([20])
    told.wait()
    assert told.expended == 3
    told.pool.put(range(30, 34))
    assert told.pool.here([*range(4), 10, 11, 20]) == [0, 10, 11, 20]


def test_what_somebody_else_read_since_stays(told: Told) -> None:
    told.turn("edited", range(4))
    told.pool.put(range(4))
    told.wait()
    told.pool.read([2])
    told.turn("edited", [0, 20])
    told.wait()
    assert told.expended == 2


def test_a_session_that_ends_with_its_answer_leaves_what_is_saved_after_it(told: Told) -> None:
    told.turn("last", range(4), ended=True)
    told.wait(SETTLE_S / 2)
    assert told.expended == 0
    told.pool.put(range(4))
    told.wait(SETTLE_S)
    assert told.expended == 4


def test_a_session_that_ends_later_leaves_all_at_once(told: Told) -> None:
    told.turn("chat", range(4))
    told.pool.put(range(4))
    told.wait()
    assert told.pool.sessions.end(told.pool.tenant, "chat")
    told.wait(0.0)
    assert told.expended == 4


def test_chains_that_wait_for_their_saves_have_a_limit(told: Told) -> None:
    class NoneWait(Sessions):
        ENDING_BYTES_MAX = 0

    told.pool.sessions = NoneWait(told.pool.node)
    told.pool.put(range(4))
    told.turn("last", range(4), ended=True)
    told.wait(0.0)
    assert told.expended == 4
    told.wait()
    assert told.expended == 4
