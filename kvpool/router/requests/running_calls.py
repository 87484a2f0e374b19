"""The calls of one request to engines, from their start until their ends are known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from kvpool.errors import KvpoolError
from kvpool.router.requests.calls import Call, end_span, span_of
from kvpool.telemetry.spans import Span


@dataclass(frozen=True, slots=True)
class Ended:
    """A call has ended on its own, successfully or not."""

    call: Call


Work = Callable[..., Coroutine[Any, Any, None]]


class RunningCalls:
    """The calls, in the order of their starts. span: of the request, or None if it is not traced."""

    def __init__(self, span: Span | None) -> None:
        self._span = span
        self._calls: list[Call] = []

    def __iter__(self) -> Iterator[Call]:
        """Iterate over a copy: a call may be started or cancelled on the way."""
        return iter(self._calls.copy())

    def start(self, call: Call, tell: Callable[[Ended], None], work: Work, *args: Any) -> None:
        """Do the work of a call in a task. tell: gets the event when the call has ended."""
        if self._span is not None:
            call.span = span_of(call, self._span)
        call.task = asyncio.create_task(_outcome(work, call, *args))
        self._calls.append(call)
        if (span := call.span) is not None:
            # Before the event, which may end the request.
            call.task.add_done_callback(lambda task: end_span(span, call, task))
        call.task.add_done_callback(lambda _: tell(Ended(call)))

    def take(self, call: Call) -> KvpoolError | None:
        """Remove an ended call, and return its error; None for a cancelled one."""
        self._calls.remove(call)
        assert call.task is not None, "it was started"
        # A call and its task must not refer to each other: such cycles are not collected.
        task, call.task = call.task, None
        if call.timer is not None:
            call.timer.cancel()
        return None if call.cancelled else task.result()

    def cancel(self, call: Call) -> None:
        """Cancel a call. Its connection is closed when its task ends, which `cancel_all` waits for."""
        call.cancelled = True
        if call.timer is not None:
            call.timer.cancel()
        assert call.task is not None, "it was started"
        call.task.cancel()

    async def cancel_all(self) -> None:
        """Cancel all calls, and wait until their tasks have ended."""
        calls = list(self)
        for call in calls:
            self.cancel(call)
        await asyncio.gather(
            *(call.task for call in calls if call.task is not None), return_exceptions=True
        )
        for call in calls:
            call.task = None


async def _outcome(work: Work, *args: Any) -> KvpoolError | None:
    """Return the error, without its traceback: the frames refer to the task whose result it is.

    The result of a cancelled task is not read.
    """
    try:
        await work(*args)
    except KvpoolError as error:
        error.__context__ = None
        return error.with_traceback(None)
    except asyncio.CancelledError:
        return None
    return None
