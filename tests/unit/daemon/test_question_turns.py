"""Questions to peers wait for their turn by kind, and a worker has a thread for each that was sent."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.daemon.workers.question_turns import QuestionTurns
from kvpool.daemon.workers.supervisor import OUTSTANDING_MAX
from kvpool.daemon.workers.transfer_worker import THREADS_MAX
from kvpool.daemon.workers.turns import COPIES, PULLS, QUESTIONS, WAITS, TurnLimits
from kvpool.errors import LimitExceeded
from kvpool.wire.frame import Done
from kvpool.wire.peer import Ask, Await, Operate
from kvpool.wire.worker import AskPeer

QUICK = Ask("default", bytes(16), [], bytes(16))
WAITING = Await("other", "default", bytes(16), bytes(16), b"\0", 1.0)
OPERATORS = Operate("other", b"", 1.0, "default", "somebody")


def question(asks: Ask | Await | Operate, seconds: float = 1.0) -> AskPeer:
    return AskPeer("tcp://a", asks, seconds)


def test_each_kind_has_turns_of_its_own() -> None:
    async def main() -> None:
        limits = TurnLimits(1, 1)
        turns = QuestionTurns(questions=limits, waits=limits)
        answered = asyncio.Event()
        begun: list[object] = []

        async def send(order: AskPeer) -> Done:
            begun.append(order.question)
            await answered.wait()
            return Done(1)

        first = [
            asyncio.create_task(turns.ask(question(asks), send))
            for asks in (QUICK, WAITING, OPERATORS)
        ]
        await asyncio.sleep(0)
        assert begun == [QUICK, WAITING, OPERATORS]
        # What does not wait there is quick, whatever it asks.
        for asks in (QUICK, Await("other", "default", bytes(16), bytes(16), b"\0", 0.0)):
            with pytest.raises(LimitExceeded, match="in progress"):
                await turns.ask(question(asks, 0.0), send)
        answered.set()
        assert [done.value for done in await asyncio.gather(*first) if isinstance(done, Done)] == [
            1,
            1,
            1,
        ]

    asyncio.run(main())


def test_what_a_question_waited_for_its_turn_is_taken_from_its_time() -> None:
    async def main() -> None:
        limits = TurnLimits(1, 1)
        turns = QuestionTurns(questions=limits, waits=limits)
        left: list[float] = []
        answered = asyncio.Event()

        async def send(order: AskPeer) -> Done:
            left.append(order.deadline_s)
            await answered.wait()
            return Done()

        first = asyncio.create_task(turns.ask(question(QUICK, 60.0), send))
        await asyncio.sleep(0)
        second = asyncio.create_task(turns.ask(question(QUICK, 60.0), send))
        await asyncio.sleep(0.01)
        answered.set()
        await asyncio.gather(first, second)
        assert left[1] < left[0] <= 60.0

    asyncio.run(main())


def test_there_are_threads_for_all_that_may_be_ordered() -> None:
    """One worker: limits are times their number. Waiting questions of operators are as many as of engines."""
    together = sum(limits.together for limits in (PULLS, COPIES, QUESTIONS, WAITS, WAITS))
    assert together <= min(THREADS_MAX, OUTSTANDING_MAX)
