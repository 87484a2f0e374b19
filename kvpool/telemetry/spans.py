"""Spans of traces, recorded as plain values and kept until they are taken. No I/O; time and randomness are
arguments.

A request's trace context (W3C `traceparent`) travels with it, from the router to the engine, from there to the
daemon, and on to the daemons that it pulls from. Without a valid, sampled context nothing is
recorded. Work for a request finds its span by `current`: tasks that are created under a span
inherit it. Work that continues after its request has been answered is in no trace.

The exporter takes spans (`kvpool.telemetry.otlp`); without one, none are recorded (`Spans.on`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

SPANS_MAX = 4096
"""Finished spans that are kept; beyond it the oldest are dropped."""
TAKE_MAX = 512
ATTRIBUTES_MAX = 32
TEXT_CHARACTERS_MAX = 256
TRACEPARENT_CHARACTERS_MAX = 256
USUAL_CHARACTERS = 55
SAMPLED = 1
EVEN = "02468ace"
"""Last digits of flags without sampling."""

SERVER, CLIENT, INTERNAL = "server", "client", "internal"

REQUEST = "kvpool.request"
PREPARE = "kvpool.prepare"
QUEUE = "kvpool.queue"
PREFILL = "kvpool.prefill"
DECODE = "kvpool.decode"
GENERATE = "kvpool.generate"
ACQUIRE = "kvpool.acquire"
PULL = "kvpool.pull"
FOLLOW = "kvpool.follow"
LOOKUP = "kvpool.lookup"
TRANSFER = "kvpool.transfer"
READ = "kvpool.read"
LEND = "kvpool.lend"

CALLED_OFF = "called off"
"""Status of a span whose work was cancelled: `Span.end`."""

NAMES = {
    REQUEST: SERVER,
    PREPARE: INTERNAL,
    QUEUE: INTERNAL,
    PREFILL: CLIENT,
    DECODE: CLIENT,
    GENERATE: CLIENT,
    ACQUIRE: SERVER,
    PULL: SERVER,
    FOLLOW: SERVER,
    LOOKUP: CLIENT,
    TRANSFER: CLIENT,
    READ: INTERNAL,
    LEND: SERVER,
}
"""All span names, and their kinds; docs/tracing.md describes them."""

Value = str | int | float
RandomBytes = Callable[[int], bytes]

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


class Context(NamedTuple):
    """The fields of a `traceparent`, in hex digits as there. span: the caller's."""

    trace: str
    span: str
    flags: str

    @property
    def sampled(self) -> bool:
        return bool(int(self.flags, 16) & SAMPLED)


def parse(traceparent: str) -> Context | None:
    """None if it is invalid."""
    if len(traceparent) > TRACEPARENT_CHARACTERS_MAX:
        return None
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if not match["trace"].strip("0") or not match["span"].strip("0"):
        return None
    return Context(match["trace"], match["span"], match["flags"])


def identifier(size: int, random: RandomBytes) -> str:
    """Random bytes of this size, in hex. All zeros are not a valid identifier."""
    found = random(size)
    while not any(found):
        found = random(size)
    return found.hex()


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A finished span, as exported. Times are nanoseconds since 1970. error: empty on success."""

    trace: str
    span: str
    parent: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    error: str = ""


class Batch(msgspec.Struct, frozen=True):
    """Some finished spans, oldest first. left: how many more there are. dropped: overflowed spans, in total."""

    spans: list[Finished]
    left: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class Span:
    """A piece of work under way, until `end`. Belongs to its creator; one thread."""

    trace: str
    span: str
    parent: str
    name: str
    start_ns: int
    attributes: dict[str, Value]
    _spans: Spans = field(repr=False)
    _up: Span | None = field(default=None, repr=False)
    ended: bool = False

    @property
    def traceparent(self) -> str:
        """The context for work on this span elsewhere."""
        return f"00-{self.trace}-{self.span}-01"

    def set(self, **attributes: Value) -> None:
        if not self.ended:
            self.attributes.update(attributes)

    def count(self, name: str, more: int) -> None:
        """Add to an attribute."""
        if not self.ended:
            self.attributes[name] = int(self.attributes.get(name, 0)) + more

    def count_above(self, name: str, more: int) -> None:
        """Add to an attribute of the parent span."""
        if self._up is not None:
            self._up.count(name, more)

    def child(self, name: str) -> Span | None:
        """A child of this one; None once this has ended."""
        return None if self.ended else self._spans.start(self.trace, self.span, name, self)

    def end(self, error: str = "", **attributes: Value) -> None:
        """Only the first time counts."""
        if self.ended:
            return
        self.attributes.update(attributes)
        self.ended = True
        self._up = None
        self._spans.finish(self, error)


class Spans:
    """Starts spans, and keeps finished ones. One thread.

    on: whether they are exported. wall_ns: nanoseconds since 1970.
    """

    def __init__(
        self,
        wall_ns: Callable[[], int],
        random: RandomBytes,
        *,
        on: bool = True,
        most: int = SPANS_MAX,
    ) -> None:
        self.on = on
        self.dropped = 0
        self._wall_ns = wall_ns
        self._random = random
        self._most = most
        self._finished: deque[Finished] = deque()

    def __len__(self) -> int:
        return len(self._finished)

    def begin(self, traceparent: str, name: str) -> Span | None:
        """Work for a caller; None if its context is invalid, or not sampled."""
        if not self.on or (len(traceparent) == USUAL_CHARACTERS and traceparent[-1] in EVEN):
            return None  # most are rejected here, without parsing
        context = parse(traceparent)
        if context is None or not context.sampled:
            return None
        return self.start(context.trace, context.span, name)

    def start(self, trace: str, parent: str, name: str, up: Span | None = None) -> Span:
        """parent: empty for the first one of its trace."""
        span = identifier(8, self._random)
        return Span(trace, span, parent, name, self._wall_ns(), {}, self, up)

    def finish(self, span: Span, error: str) -> None:
        """For `Span.end`."""
        if len(self._finished) >= self._most:
            self._finished.popleft()
            self.dropped += 1
        self._finished.append(
            Finished(
                span.trace,
                span.span,
                span.parent,
                span.name,
                span.start_ns,
                # The clock may have been set back meanwhile.
                max(span.start_ns, self._wall_ns()),
                {
                    name: value[:TEXT_CHARACTERS_MAX] if isinstance(value, str) else value
                    for name, value in islice(span.attributes.items(), ATTRIBUTES_MAX)
                },
                error[:TEXT_CHARACTERS_MAX],
            )
        )

    def take(self, count: int) -> Batch:
        """The oldest ones, `TAKE_MAX` at most; they are removed."""
        finished = self._finished
        taken = [finished.popleft() for _ in range(min(max(0, count), TAKE_MAX, len(finished)))]
        return Batch(taken, len(finished), self.dropped)


_current: ContextVar[Span | None] = ContextVar("kvpool_span", default=None)


def current() -> Span | None:
    """The span that the running task works for."""
    return _current.get()


def child(name: str) -> Span | None:
    """A child of the running task's span; None if that is not traced."""
    above = _current.get()
    return None if above is None else above.child(name)


@contextmanager
def working_for(span: Span) -> Iterator[None]:
    """Make `span` the current one."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)
