"""One data-parallel rank of a stub engine: its work, at its own time, and the KV events of its own cache."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from tests.support.stub_engine.core import FOLLOW_POLL_S, Core, Job, event_maps
from tests.support.stub_engine.events import EventPublisher


class Rank:
    """`async with Rank(core, publisher)`: it works meanwhile, and closes the publisher. Event loop only."""

    def __init__(self, core: Core, publisher: EventPublisher | None) -> None:
        self.core = core
        self._publisher = publisher
        self._gap: dict[str, bool] | None = None
        self._hold_at: int | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._publisher is not None:
            self._publisher.close()

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return len(self.core.running) + len(self.core.waiting)

    def add(self, job: Job) -> None:
        self.core.add(job)
        self._wake.set()

    def clear(self) -> None:
        """Forget the cache."""
        self.core.clear()
        self._publish_own()

    def hold(self, computed: int | None) -> None:
        """Begin no step while a running job has so many tokens computed, of its prompt and its answer; None: go on."""
        self._hold_at = computed
        self._wake.set()

    def lose(self, *, forgotten: bool) -> None:
        """Nobody hears the next events; forgotten: no replay has them either."""
        self._gap = {"lost": True, "forgotten": forgotten}

    def publish(self, events: list[dict[str, object]]) -> None:
        """Events as if something had happened. Only where it publishes any."""
        assert self._publisher is not None, "it was told where"
        self._publisher.publish(events)

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            step = None if self._held else self.core.begin(clock())
            self._publish_own()
            if step is None:
                self._wake.clear()
                looks = self.core.waiting or self._hold_at is not None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_POLL_S if looks else None):
                        await self._wake.wait()
                due = clock()
                continue
            due = max(due + step.seconds, clock())
            await asyncio.sleep(due - clock())
            self.core.end(step)
            self._publish_own()

    @property
    def _held(self) -> bool:
        at = self._hold_at
        return at is not None and any(job.computed >= at for job in self.core.running)

    def _publish_own(self) -> None:
        events = self.core.take_events()
        if events and self._publisher is not None:
            gap, self._gap = self._gap, None
            self._publisher.publish(event_maps(events, self.core.block_tokens), **(gap or {}))
