"""What answers at an engine's URL: which models it serves, asked periodically, once for all of its ranks.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.errors import ProtocolError
from kvpool.router.upstream.engine_calls import read

MODELS_S = 10.0
"""How often an engine is asked for its models: adapters come and go."""
MODELS_RETRY_S, DOUBTED_S = 0.5, 2.0
"""The same for one that does not answer, or that may have ended."""
ASK_S = 2.0
ANSWER_BYTES_MAX = 1 << 20

Cards = Sequence[Mapping[str, Any]]


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


_decode_models = JsonDecoder[_Models](_Models, "a list of models")


@dataclass(eq=False, repr=False, slots=True)
class EngineServer:
    """See the module. Asks from `begin` to `close`.

    headers: of each question. told: called when its answer has changed. cards: the last answer. missed: consecutive
    failures to answer. met: set once it was asked. doubted: whether it may have ended, and is asked more often.
    """

    url: str
    _session: aiohttp.ClientSession
    _headers: Callable[[], Mapping[str, str]]
    _told: Callable[[], None]
    cards: Cards = field(default=(), init=False)
    missed: int = field(default=0, init=False)
    met: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    doubted: bool = field(default=False, init=False)
    _now: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def doubt(self) -> None:
        """Find out now whether it answers: failures are counted from here."""
        self.doubted = True
        self.missed = 0
        self._now.set()

    def end(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """The same, and wait for it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._now.clear()
            answered = await self._ask()
            self.missed = 0 if answered else self.missed + 1
            self.met.set()
            pause_s = DOUBTED_S if self.doubted else MODELS_S
            if self.missed or not self.cards:
                pause_s = MODELS_RETRY_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._now.wait()
            except TimeoutError:
                pass

    async def _ask(self) -> bool:
        try:
            async with self._session.get(
                f"{self.url}/v1/models",
                headers=self._headers(),
                timeout=aiohttp.ClientTimeout(total=ASK_S),
                allow_redirects=False,
            ) as answer:
                body = await read(answer, ANSWER_BYTES_MAX)
                if answer.status != 200:
                    return False
                cards = _decode_models(body).data
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        except ProtocolError:
            return False
        if cards != self.cards:
            self.cards = cards
            self._told()
        return True
