"""Runs a traced request's handler under a span.

Handlers are wrapped only if traces are exported, and a request without a context costs one check then.
Code further in finds the span by `kvpool.telemetry.spans.current`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import CoroutineType
from typing import Any, Protocol

from kvpool.daemon.core.blocks import Holder
from kvpool.errors import KvpoolError
from kvpool.telemetry.spans import ACQUIRE, CALLED_OFF, FOLLOW, PULL, Span, Spans, working_for
from kvpool.types import KEY_BYTES
from kvpool.wire import client as client_wire
from kvpool.wire import frame

Handler = Callable[[Holder, Any], Any]
TRACED: dict[type, str] = {
    client_wire.Acquire: ACQUIRE,
    client_wire.Pull: PULL,
    client_wire.Follow: FOLLOW,
}


class _Traced(Protocol):
    """A request that may have a context."""

    @property
    def trace(self) -> str: ...
    @property
    def keys(self) -> bytes: ...


def traced(spans: Spans, name: str, handler: Handler) -> Handler:
    """The same, with a span for each request that is traced."""

    def handle(holder: Holder, message: _Traced) -> Any:
        if not message.trace:
            return handler(holder, message)
        span = spans.begin(message.trace, name)
        if span is None:
            return handler(holder, message)
        span.set(tenant=holder.tenant.name, blocks_asked=len(message.keys) // KEY_BYTES)
        return _run(span, handler, holder, message)

    return handle


async def _run(span: Span, handler: Handler, holder: Holder, message: _Traced) -> Any:
    """In a task of its own, even if there is nothing to wait for."""
    with working_for(span):
        try:
            answer = handler(holder, message)
            if isinstance(answer, CoroutineType):
                answer = await answer
        except KvpoolError as error:
            span.end(str(error))
            raise
        except asyncio.CancelledError:
            span.end(CALLED_OFF)
            raise
    span.end(blocks=_blocks(answer))
    return answer


def _blocks(answer: client_wire.Leased | frame.Done) -> int:
    return answer.blocks if isinstance(answer, client_wire.Leased) else answer.value
