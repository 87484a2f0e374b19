"""An event loop whose time is a number: it never waits, and the same program takes the same steps.

Callbacks run in the order in which they were scheduled, timers in the order of their times; when nothing
is ready, the clock jumps to the next timer. No threads, no sockets, nothing of the machine.

What is called belongs to a *domain*, a simulated process, by the context that it was scheduled in. The
callbacks of a domain that is paused are kept until it goes on, as with SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1000.0  # as far from zero as any machine's monotonic clock

_domain: contextvars.ContextVar[Domain | None] = contextvars.ContextVar("domain", default=None)


class Domain:
    """What is stopped together, and dies together. Its tasks are known in the order of their making."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paused = False
        self.held: list[_Call] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(_domain.set, self)

    def __repr__(self) -> str:
        return f"<Domain {self.name}>"


class _Call(asyncio.TimerHandle):
    """What is to be called, when, and in which domain. asyncio's own does more, and is made often here."""

    __slots__ = ("domain",)

    def __init__(
        self,
        loop: VirtualLoop,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        if context is None:
            context = contextvars.copy_context()
        self._loop = loop
        self._when = when
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._source_traceback = None
        self._repr = None
        self.domain = context.get(_domain)

    def cancel(self) -> None:
        """It is dropped when its time comes."""
        self._cancelled = True


class Stuck(Exception):
    """The loop took more steps than any scenario needs, or nothing at all is left to happen."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module. Only what asyncio's own tasks, locks and time-outs need of a loop is there."""

    def __init__(self, *, steps_max: int) -> None:
        self.steps = 0
        self.broken: list[dict[str, Any]] = []  # what was told to `call_exception_handler`
        self._steps_max = steps_max
        self._now = START_S
        self._ready: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []
        self._timer_count = 0
        self._tasks: list[asyncio.Task[Any]] = []  # of no domain
        self._running = False

    # ---- what asyncio asks for -----------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        domain = _domain.get() if context is None else context.get(_domain)
        (self._tasks if domain is None else domain.tasks).append(task)
        return task

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        call = _Call(self, self._now, callback, args, context)
        self._ready.append(call)
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        call = _Call(self, when, callback, args, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, call))
        return call

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.broken.append(context)

    # ---- running -------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], domain: Domain) -> T | None:
        """Run until the work is done; None when a callback raised before it was.

        Raises what the work raised, and `Stuck`.
        """
        asyncio._set_running_loop(self)
        self._running = True
        try:
            main = self.create_task(work, context=domain.context)
            while not main.done() and not self.broken:
                self._step()
            return main.result() if main.done() else None
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        """Call what is ready now; else go to the time of the next timer."""
        timers, ready = self._timers, self._ready
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Stuck("everybody waits for somebody else")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            call = ready.popleft()
            if call.cancelled():
                continue
            domain = call.domain
            if domain is not None and domain.paused:
                domain.held.append(call)
                continue
            self.steps += 1
            call._run()
            if self.broken:
                return
        if self.steps > self._steps_max:
            raise Stuck(f"more than {self._steps_max} steps")

    def pause(self, domain: Domain) -> None:
        domain.paused = True

    def resume(self, domain: Domain) -> None:
        """What had been due goes on in its old order."""
        domain.paused = False
        self._ready.extend(domain.held)
        domain.held.clear()

    def cancel_all(self, domain: Domain | None) -> None:
        """Cancel the tasks of a domain, or those of none, oldest first."""
        for task in list(self._tasks if domain is None else domain.tasks):
            task.cancel()

    def finish(self, domains: list[Domain]) -> None:
        """Cancel everything and let it end, so that no coroutine is left half-way."""
        asyncio._set_running_loop(self)
        self._running = True
        try:
            tasks = list(self._tasks)
            for domain in domains:
                if domain.paused:
                    self.resume(domain)
                tasks += domain.tasks
            for _ in range(100):
                left = [task for task in tasks if not task.done()]
                if not left:
                    return
                for task in left:
                    task.cancel()
                for _ in range(5):
                    if self._ready:
                        self._step()
            raise Stuck(f"tasks that cannot be cancelled: {left}")
        finally:
            self._running = False
            asyncio._set_running_loop(None)


def run_alone(work: Coroutine[Any, Any, None], *, steps_max: int) -> None:
    """In a time of its own; whatever fails beside the work is an AssertionError."""
    loop = VirtualLoop(steps_max=steps_max)  # type: ignore[abstract]
    domain = Domain("test")
    try:
        loop.run(work, domain)
    finally:
        loop.finish([domain])
    assert not loop.broken, loop.broken[0]
