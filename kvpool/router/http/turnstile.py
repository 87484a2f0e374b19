"""Few tasks at each turn of the event loop, so that a burst of requests delays others by a turn and not by all of it.

Without it the loop does the same step of two thousand requests in one turn: seconds in which a probe's answer, or an
engine's connection, seems to be late, which is then taken for the engine's failure.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """most: passes at each turn. In the order of arrival. One event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._passed = 0
        self._turns = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns at once while there are few."""
        if self._passed < self._most and not self._waiting:
            self._passed += 1
            self._turn_soon()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._turn_soon()
        await turn

    def _turn_soon(self) -> None:
        if not self._turns:
            self._turns = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turns = False
        self._passed = 0
        while self._waiting and self._passed < self._most:
            turn = self._waiting.popleft()
            if not turn.done():  # its client has left
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            self._turn_soon()
