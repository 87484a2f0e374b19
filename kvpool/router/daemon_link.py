"""The local daemon, called in threads beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvpool.client import Client
from kvpool.errors import KvpoolError

THREADS = 4

Answer = TypeVar("Answer")


class DaemonLink:
    """Calls in threads, so many at a time. For one event loop. client: not closed here.

    error: why a call failed; the caller clears `error` when it succeeds again.
    """

    def __init__(self, client: Client, threads: int = THREADS) -> None:
        self.error = ""
        self._client = client
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvpool-look")

    async def ask(self, question: Callable[[Client], Answer]) -> Answer:
        """Raises `KvpoolError`, and keeps its message."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, question, self._client)
        except KvpoolError as error:
            self.error = str(error)
            raise

    def close(self) -> None:
        """Cancel calls that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
