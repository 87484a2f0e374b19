"""Why blocks of a prompt were missed, in the accounts of requests that have ended. Event loop only.

The daemon of the engine's node remembers why reads ended where they did (`kvpool.daemon.features.miss_reasons`), of some
thousand reads. So it is asked when a request ends, and not when somebody wants to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvpool.router.hashing import Prompt
from kvpool.router.records.explain import Account

TOGETHER = 2
"""Questions under way; requests that end meanwhile get no answer."""

Why = Callable[[Prompt, str], Awaitable[dict[str, Any] | None]]


class MissNotes:
    """See the module. why: of a prompt and the name of an engine, as `Prompts.why`."""

    def __init__(self, why: Why, clock: Callable[[], float]) -> None:
        self._why = why
        self._clock = clock
        self._asking: set[asyncio.Task[None]] = set()

    def ended(
        self, account: Account, prompt: Prompt, engine: str, cached_tokens: int | None
    ) -> None:
        """Have it noted why this engine did not find more of the prompt, if it has said how much it found. Nobody waits
        for it.
        """
        if prompt.spec is None or cached_tokens is None:
            return
        size = prompt.spec.block_tokens
        if cached_tokens >= (len(prompt.tokens) - 1) // size * size:  # the last token is computed
            return
        if len(self._asking) >= TOGETHER:
            account.facts["missing"] = {
                "engine": engine,
                "error": "too many lookups were under way",
            }
            return
        task = asyncio.get_running_loop().create_task(self._ask(account, prompt, engine))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, account: Account, prompt: Prompt, engine: str) -> None:
        told = await self._why(prompt, engine)
        if told is None:
            return
        if "error" in told:
            account.facts["missing"] = {"engine": engine, **told}
            return
        last = told["last"]
        # A read before the request came was another one's.
        if last is not None and last["ago_s"] <= self._clock() - account.arrived_s:
            account.facts["missing"] = {"engine": engine, **last}

    async def close(self) -> None:
        """Cancel what is under way."""
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
