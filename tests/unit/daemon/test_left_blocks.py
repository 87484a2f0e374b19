"""Blocks that are ordered ahead, and blocks that sessions leave: here, and in the tiers below."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvpool.daemon.features.sessions import Session, Sessions
from kvpool.daemon.fetch.plan import FetchRequest, Located
from kvpool.daemon.ops.prefetcher import JUDGE_S, QUEUE_MAX, USED_WITHIN_S, Prefetcher
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.types import Outcome, split_keys
from tests.sim.simulation.loop import run_alone
from tests.unit.daemon.conftest import Pool

NOTHING: Any = None
run = partial(run_alone, steps_max=100_000)


def keys(some: Sequence[int]) -> Sequence[bytes]:
    return split_keys(Pool.keys(some))


def turn(pool: Pool, name: str, some: Sequence[int], now: float, **more: Any) -> Session | None:
    return pool.sessions.turn(pool.tenant, pool.namespace, name, "", Pool.keys(some), now, **more)


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


class Brings:
    """A fetcher that finds all blocks elsewhere, and puts what is asked for into the pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.lookups = self

    async def locate_prefix(self, _: Any, asked: Sequence[bytes], __: float) -> tuple[int, Located]:
        return len(asked), {key: [Entry(b"elsewhere", TIERS["dram"], 1)] for key in asked}

    async def bring_ahead(self, requests: Sequence[FetchRequest], _: float) -> bool:
        for request in requests:
            self.pool.put([int.from_bytes(key, "big") for key in request.keys])
        return True


def test_what_was_brought_ahead_is_counted_as_used_or_wasted_after_a_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pool = Pool(slabs=16)
        fetcher: Any = Brings(pool)
        prefetcher = Prefetcher(pool.node, fetcher, loop.time)
        task = loop.create_task(prefetcher.run())
        assert prefetcher.order(pool.namespace, Pool.keys(range(30)), 30) is Outcome.ACCEPTED
        await asyncio.sleep(1.0)
        pool.read(range(20))
        counters = pool.node.counters
        assert (counters.prefetched, counters.prefetches_used) == (30, 0)
        await asyncio.sleep(USED_WITHIN_S + 2 * JUDGE_S)
        assert (counters.prefetches_used, counters.prefetches_wasted) == (20, 10)
        task.cancel()

    run(main())


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


def test_of_a_long_chain_that_is_left_the_end_goes_first() -> None:
    pool = Pool(slabs=8)
    pool.put(range(32))
    below: list[list[bytes]] = []
    pool.sessions = Sessions(pool.node, lambda _, some: below.append(list(some)))
    turn(pool, "over", range(20), 0.0, ended=True)
    pool.sessions.settle(10.0)
    while pool.sessions.work(6):
        pass
    assert pool.node.counters.expended == 20
    pool.put(range(100, 107))
    assert pool.here(range(32)) == [*range(13), *range(20, 32)]
    assert [key for some in below for key in some] == list(keys(range(20)))[::-1]
