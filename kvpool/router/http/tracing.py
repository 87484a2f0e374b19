"""Request ids and W3C trace context. No I/O; randomness is an argument."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpool.telemetry.spans import SAMPLED, RandomBytes, Span, identifier, parse

REQUEST_ID_MAX = 128
TRACE_STATE_MAX = 512
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]+")
NOT_SAMPLED = "00"
SHARE_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Trace:
    """A request's place in a trace. parent: the caller's span; empty: the trace begins here."""

    trace: str
    parent: str
    flags: str
    state: str

    def chosen(self, share: float) -> bool:
        """Whether to record it: as the caller has decided, or for a share of those that begin here.

        The trace's own random digits decide, so that all components decide alike.
        """
        if self.parent:
            return self.sampled
        return int(self.trace[-SHARE_DIGITS:], 16) < share * (1 << 4 * SHARE_DIGITS)

    @property
    def sampled(self) -> bool:
        return bool(int(self.flags, 16) & SAMPLED)

    def headers(self, random: RandomBytes, span: Span | None = None) -> dict[str, str]:
        """For one call to an engine. span: the call's own; None: not recorded, and the caller's is its parent."""
        if span is not None:
            headers = {"traceparent": span.traceparent}
        else:
            above = self.parent or identifier(8, random)
            headers = {"traceparent": f"00-{self.trace}-{above}-{self.flags}"}
        if self.state:
            headers["tracestate"] = self.state
        return headers


def trace_of(traceparent: str, tracestate: str, random: RandomBytes) -> Trace:
    """The context of a request. An invalid one starts a new trace, as in the standard."""
    found = parse(traceparent.strip())
    if found is None:
        return Trace(identifier(16, random), "", NOT_SAMPLED, "")
    state = tracestate if len(tracestate) <= TRACE_STATE_MAX and tracestate.isprintable() else ""
    return Trace(found.trace, found.span, found.flags, state)


def request_id(given: str, random: RandomBytes) -> str:
    """The client's own id if it is valid in headers and logs, or a new one."""
    if len(given) <= REQUEST_ID_MAX and _REQUEST_ID.fullmatch(given):
        return given
    return random(16).hex()
