"""When a question to a peer may be sent: those to one peer wait for one another, as pulls do (`turns.py`).

Each kind has turns of its own: quick ones, those that wait at the peer for news, and operators'. No I/O; event loop
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from kvpool.daemon.workers.turns import QUESTIONS, WAITS, TurnLimits, Turns
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

Answered = frame.Done | frame.Bytes


class QuestionTurns:
    """See the module. workers: transfer workers, which share all questions."""

    def __init__(
        self, workers: int = 1, *, questions: TurnLimits = QUESTIONS, waits: TurnLimits = WAITS
    ) -> None:
        self._questions = Turns(questions.times(workers))
        self._waits = Turns(waits.times(workers))
        self._operators = Turns(waits.times(workers))  # they do not delay engines' requests

    async def ask(
        self,
        order: worker_wire.AskPeer,
        send: Callable[[worker_wire.AskPeer], Awaitable[Answered]],
    ) -> Answered:
        """Send a question when its turn comes, with the rest of its time; returns what `send` does.

        Raises `LimitExceeded` if its turn does not come in time, which says nothing about the peer.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + order.deadline_s
        async with self._of(order).turn(order.url, order.deadline_s):
            return await send(msgspec.structs.replace(order, deadline_s=deadline - clock()))

    def _of(self, order: worker_wire.AskPeer) -> Turns:
        match order.question:
            case peer_wire.Operate(wait_s=wait_s) if wait_s > 0:
                return self._operators
            case peer_wire.Await(wait_s=wait_s) if wait_s > 0:
                return self._waits
        return self._questions
