"""One rank's attachment to the daemon's spare device memory, across restarts of the process that owns it.

Mapping takes a round trip and the driver's time, so a thread does it beside the engine's steps. Without
a mapping the rank reads through host memory, as if the daemon had no device memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import TYPE_CHECKING

from kvpool.engine_plugins.vllm.plan import QUIET_S
from kvpool.errors import KvpoolError
from kvpool.retry import Backoff

if TYPE_CHECKING:
    from kvpool.client.device_memory import DeviceMemory

log = logging.getLogger("kvpool.vllm")

REFUSED_S = 600.0
"""The pause after device memory could not be mapped: mostly it is another device's, permanently."""


class Attachment:
    """For the engine's thread of one rank.

    attach: maps the memory; None if there is none now. Raises `KvpoolError` if there is some that this
        rank cannot map. Runs in `thread`, one at a time.
    """

    def __init__(
        self,
        attach: Callable[[], DeviceMemory | None],
        thread: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory: DeviceMemory | None = None
        self._attach = attach
        self._thread = thread
        self._clock = clock
        self._trying: Future[DeviceMemory | None] | None = None
        self._quiet = Backoff(*QUIET_S)
        self._refused_until = 0.0

    @property
    def life(self) -> int:
        """Of the memory; 0: there is none."""
        return 0 if self.memory is None else self.memory.life

    def look(self) -> DeviceMemory | None:
        """Use a finished mapping, and try again when it is time to. Called at every step.

        Memory whose owner has died is returned, to be closed when nobody reads there any more.
        """
        ended = None
        if self.memory is not None and not self.memory.alive:
            ended, self.memory = self.memory, None
        if self._trying is not None and self._trying.done():
            self.memory, self._trying = self._outcome(self._trying), None
        now = self._clock()
        paused = not self._quiet.due(now) or now < self._refused_until
        if self.memory is None and self._trying is None and not paused:
            self._trying = self._thread.submit(self._attach)
        return ended

    def begin(self) -> None:
        """Try for the first time, and wait for the result."""
        self.look()
        assert self._trying is not None
        wait([self._trying])
        self.look()

    def _outcome(self, tried: Future[DeviceMemory | None]) -> DeviceMemory | None:
        now = self._clock()
        try:
            memory = tried.result()
        except KvpoolError as error:
            self._refused_until = now + REFUSED_S
            log.warning(
                "device memory of the daemon is not mapped; its blocks are loaded through host memory: %s",
                error,
            )
            return None
        # Memory that ends as soon as it is mapped counts as none: it must not be tried at every step.
        self._quiet.note(now, failed=memory is None or not memory.alive)
        return memory

    def close(self) -> None:
        """Unmap it. Nobody reads there any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._trying is not None and not self._trying.cancelled():
            self.memory = self._outcome(self._trying)
        if self.memory is not None:
            self.memory.close()
            self.memory = None
