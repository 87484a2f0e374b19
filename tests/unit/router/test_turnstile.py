"""Bursts in turns."""

import asyncio
from itertools import pairwise

from kvpool.router.http.turnstile import Turnstile


def passes(count: int, most: int, leave: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """At which turn of the loop who passes, of so many that come at once; some of them leave meanwhile."""

    async def main() -> list[tuple[int, int]]:
        turnstile = Turnstile(most)
        turn = 0
        found: list[tuple[int, int]] = []

        async def one(number: int) -> None:
            await turnstile.enter()
            found.append((turn, number))

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        while not all(task.done() for task in tasks):
            if turn == 1:
                for number in leave:
                    tasks[number].cancel()
            await asyncio.sleep(0)
            turn += 1
            assert turn < 10 * count + 10, "it goes on"
        return found

    return asyncio.run(main())


def test_few_pass_at_once() -> None:
    found = passes(5, most=5)
    assert len({turn for turn, _ in found}) == 1


def test_a_burst_passes_in_order_and_a_few_at_each_turn() -> None:
    found = passes(100, most=7)
    assert [number for _, number in found] == list(range(100))
    turns = [turn for turn, _ in found]
    assert max(turns.count(turn) for turn in turns) == 7
    assert all(later - turn <= 2 for turn, later in pairwise(turns)), "no turn is lost"
    assert turns[-1] <= 100 // 7 + 2


def test_who_leaves_takes_nobodys_turn() -> None:
    leave = frozenset(range(20, 90))
    found = passes(100, most=7, leave=leave)
    assert [number for _, number in found] == [n for n in range(100) if n not in leave]
    turns = [turn for turn, _ in found]
    assert turns[-1] <= 30 // 7 + 4
