"""Sessions that are expected back, what they give up meanwhile, and what tiers below are to think of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.sessions import SLICE, Session
from kvpool.daemon.ops.prefetcher import LEAD_MAX_S, MARGIN_S, QUEUE_MAX, Prefetcher
from kvpool.daemon.ops.session_turns import SessionTurns
from kvpool.types import Outcome, PauseKind, split_keys
from kvpool.wire.client import SessionTurn
from tests.sim.simulation.loop import run_alone
from tests.support.tiers import without_disks
from tests.unit.daemon.conftest import Pool

NOTHING: Any = None
run = partial(run_alone, steps_max=100_000)


def keys(some: Sequence[int]) -> Sequence[bytes]:
    return split_keys(Pool.keys(some))


def turn(pool: Pool, name: str, some: Sequence[int], now: float, **more: Any) -> Session | None:
    return pool.node.sessions.turn(
        pool.tenant, pool.namespace, name, "", Pool.keys(some), now, **more
    )


# ---- when they return ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 30)), max_size=20))
def test_sessions_are_expected_in_the_order_of_their_returns(
    turns: list[tuple[int, int | None]],
) -> None:
    pool = Pool()
    returns: dict[str, int | None] = {}
    for number, pause in turns:
        name = f"s{number}"
        turn(pool, name, [number], 0.0, pause_s=pause)
        returns[name] = pause
    for since, until in ((0, 30), (5, 20), (10, 10)):
        found = [(each.back_at, each.name) for each in pool.node.sessions.expected(since, until)]
        wanted = sorted((at, n) for n, at in returns.items() if at is not None)
        assert found == [(at, n) for at, n in wanted if since <= at <= until]


def test_a_session_that_has_given_up_all_is_still_expected() -> None:
    pool = Pool(slabs=8)
    pool.put(range(32))
    session = turn(pool, "long", range(16), 0.0, pause_s=1000.0)
    assert session is not None
    sessions = pool.node.sessions
    for now in range(1, 6):  # each time there are evictions
        pool.put(range(100 * now, 100 * now + 16))
        sessions.keep_ahead(float(now))
    assert [each.name for each in sessions.expected(0.0, 2000.0)] == ["long"]
    (chain,) = session.chains.values()
    assert chain.left == 0 and SLICE >= 16
    sessions.recall(session)
    assert chain.left == 16


def test_each_return_is_prepared_once() -> None:
    pool = Pool()
    session = turn(pool, "tool", [1], 0.0, pause=PauseKind.TOOL)
    assert session is not None and session.prefetch_at is None
    session.prefetch_at = math.inf
    turn(pool, "tool", [1, 2], 3.0, pause=PauseKind.TOOL)
    assert session.prefetch_at is None
    assert session.back_at == 8.0


# ---- what is brought -----------------------------------------------------------------------------------


class Orders(Prefetcher):
    """Notes what is ordered, and carries none of it out."""

    def __init__(self, pool: Pool, clock: Any) -> None:
        super().__init__(pool.node, NOTHING, clock)
        self.noted: list[tuple[str, int, float]] = []

    def order(
        self, namespace: NamespaceState, keys: bytes, nbytes: int, session: str = ""
    ) -> Outcome:
        self.noted.append((session, len(split_keys(keys)), self._clock()))
        return Outcome.ACCEPTED


def test_a_session_is_prepared_ahead_of_its_return_by_the_time_that_loading_takes() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pool = Pool()
        orders = Orders(pool, loop.time)
        orders._bytes_s = 1024.0  # a block a second
        keeper = SessionTurns(
            *("a", pool.node, without_disks(pool.node), orders),
            *(NOTHING, NOTHING, loop.time),
        )
        begun = loop.time()
        task = loop.create_task(keeper.run())

        def tell(
            name: str, some: Sequence[int], pause_s: float | None, *, ended: bool = False
        ) -> None:
            told = SessionTurn(0, name, Pool.keys(some), pause_s=pause_s, ended=ended)
            keeper.turn(pool.tenant, pool.namespace, told)

        tell("soon", range(4), 20.0)
        tell("long", range(100), 50.0)
        tell("again", [7], 5.0)
        tell("over", [8], 5.0, ended=True)
        tell("never", [9], None)
        await asyncio.sleep(4.0)
        tell("again", [7, 8], 40.0)
        await asyncio.sleep(60.0)
        task.cancel()
        found = {(name, count): at - begun for name, count, at in orders.noted}
        assert len(found) == len(orders.noted), "each once"
        wanted = {
            ("soon", 4): 20 - 4 - MARGIN_S,
            ("long", 100): 50 - LEAD_MAX_S,  # though it would take 100 seconds
            ("again", 1): 5 - 1 - MARGIN_S,
            ("again", 2): 44 - 2 - MARGIN_S,
        }
        assert found.keys() == wanted.keys()
        assert all(0 <= found[each] - at <= 0.3 for each, at in wanted.items())

    run(main())


def test_orders_wait_their_turn_and_too_many_are_refused() -> None:
    pool = Pool()
    prefetcher = Prefetcher(pool.node, NOTHING, lambda: 0.0)
    order = partial(prefetcher.order, pool.namespace)
    assert prefetcher.foreseen(pool.namespace, Pool.keys([0])) is Outcome.ACCEPTED
    assert order(Pool.keys([0]), 10) is Outcome.ACCEPTED
    assert order(Pool.keys([5, 0]), 10) is Outcome.DEFERRED, "it is ordered already"
    assert prefetcher.waiting_bytes("red") == 10
    for number in range(1, QUEUE_MAX):
        assert order(Pool.keys([number]), 10) is Outcome.DEFERRED
    assert order(Pool.keys([QUEUE_MAX]), 10) is Outcome.REFUSED
    assert prefetcher.foreseen(pool.namespace, Pool.keys([QUEUE_MAX])) is Outcome.REFUSED
    assert prefetcher.waiting_bytes("red") == 10 * QUEUE_MAX


# ---- what others think of it -----------------------------------------------------------------------------


def test_blocks_that_are_left_are_no_ordinary_ones_until_they_are_read() -> None:
    pool = Pool()
    pool.put(range(8))
    candidates = pool.node.candidates
    candidates.expend(pool.namespace, keys(range(4)), left=True)
    candidates.expend(pool.namespace, keys(range(4, 6)))
    assert candidates.ordinary(pool.namespace, keys(range(10))) == list(keys(range(6, 10)))
    assert [block.left == block.used for block in pool.blocks(range(8))] == [True] * 4 + [False] * 4
    pool.read([1])
    assert candidates.ordinary(pool.namespace, keys(range(4))) == list(keys([1]))
    (block,) = pool.blocks([1])
    assert block.left != block.used
    candidates.recall(pool.namespace, keys(range(8)))
    assert candidates.ordinary(pool.namespace, keys(range(10))) == list(keys(range(10)))
    assert candidates.expendable(pool.tenant) == 0


def test_only_what_is_left_is_told_to_tiers_below() -> None:
    """What a session gives up for a pause it loads from there."""
    pool = Pool(slabs=8)
    told: list[bytes] = []
    pool.node.sessions.follow(lambda _, some: told.extend(some))
    pool.put(range(32))
    turn(pool, "long", range(16), 0.0, pause_s=1000.0)
    pool.put(range(100, 104))
    pool.node.sessions.keep_ahead(1.0)
    assert pool.node.candidates.expendable(pool.tenant) > 0
    assert told == []
    turn(pool, "other", range(20, 30), 2.0)
    turn(pool, "other", range(20, 25), 3.0)
    while pool.node.sessions.work(4):
        pass
    assert sorted(told) == sorted(keys(range(25, 30)))


def test_of_a_long_chain_that_is_left_the_end_goes_first() -> None:
    pool = Pool(slabs=8)
    pool.put(range(32))
    below: list[list[bytes]] = []
    pool.node.sessions.follow(lambda _, some: below.append(list(some)))
    turn(pool, "over", range(20), 0.0, ended=True)
    pool.node.sessions.settle(10.0)
    while pool.node.sessions.work(6):
        pass
    assert pool.node.counters.expended == 20
    pool.put(range(100, 107))
    assert pool.here(range(32)) == [*range(13), *range(20, 32)]
    assert [key for some in below for key in some] == list(keys(range(20)))[::-1]
