"""Which of the engine's blocks a save holds, and what it hears of the others."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.engine_plugins.vllm.scheduler.pins import Pins

CACHED, PLAIN = [1, 2], [3, 4]


@pytest.fixture
def pins(block_pool: Any) -> Pins:
    """Of an engine whose cache has two of four blocks."""
    block_pool.cache(CACHED)
    pins = Pins(6, watches=True)
    pins.use(block_pool)
    pins.hold()
    return pins


def test_pins_have_a_limit(pins: Pins) -> None:
    pins.take(1, CACHED)
    pins.take(2, [2, *PLAIN])
    assert (pins.pinned, pins.room()) == (5, 1)
    with pytest.raises(AssertionError):
        pins.take(3, CACHED)
    pins.give_back(1)
    assert pins.room() == 3


def test_a_cached_block_is_watched_and_another_one_held(pins: Pins, block_pool: Any) -> None:
    pins.take(1, [*CACHED, *PLAIN])
    assert block_pool.held == set(PLAIN)
    block_pool.reuse([2])
    assert pins.take_reused() == {1}
    assert pins.take_reused() == set()
    pins.give_back(1)
    assert block_pool.held == set()


def test_every_save_of_a_block_is_told_of_its_reuse(pins: Pins, block_pool: Any) -> None:
    pins.take(1, [1])
    pins.take(2, CACHED)
    pins.take(3, [2])
    block_pool.reuse([1])
    assert pins.take_reused() == {1, 2}


def test_a_save_that_has_ended_is_told_nothing(pins: Pins, block_pool: Any) -> None:
    pins.take(1, [1])
    pins.take(2, CACHED)
    pins.give_back(1)
    block_pool.reuse([1])
    pins.give_back(2)
    block_pool.reuse([2])
    assert pins.take_reused() == set()


def test_nothing_is_held_while_there_is_no_request(pins: Pins, block_pool: Any) -> None:
    pins.take(1, PLAIN)
    pins.take(2, PLAIN[:1])
    pins.let_go()
    pins.let_go()
    assert block_pool.held == set()
    pins.hold()
    assert block_pool.held == set(PLAIN)
    pins.hold()
    pins.give_back(1)
    assert block_pool.held == set(PLAIN[:1])
    pins.let_go()
    pins.give_back(2)
    pins.hold()
    assert block_pool.held == set()


def test_where_the_ranks_hear_of_it_too_late_every_block_is_held(block_pool: Any) -> None:
    block_pool.cache(CACHED)
    pins = Pins(6, watches=False)
    pins.use(block_pool)
    pins.take(1, CACHED)
    assert block_pool.held == set(CACHED)
