"""Request ids and W3C trace context. No I/O; randomness is an argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

REQUEST_ID_MAX = 128
TRACE_STATE_MAX = 512
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]+")
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)

RandomBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Trace:
    """A request's place in a trace. parent: the span that called us; empty: we begin the trace."""

    trace: str
    parent: str
    flags: str
    state: str

    def headers(self, random: RandomBytes) -> dict[str, str]:
        """For one call to an engine. No span is recorded here: the caller's is the engine's parent."""
        span = self.parent or _identifier(8, random)
        headers = {"traceparent": f"00-{self.trace}-{span}-{self.flags}"}
        if self.state:
            headers["tracestate"] = self.state
        return headers


def trace_of(traceparent: str, tracestate: str, random: RandomBytes) -> Trace:
    """The context that came with a request. One that is not valid begins anew, as the standard has it."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    good = (
        match is not None
        and match["version"] != "ff"
        and not (match["version"] == "00" and match["more"])
        and match["trace"].strip("0")
        and match["span"].strip("0")
    )
    if match is None or not good:
        return Trace(_identifier(16, random), "", "00", "")
    state = tracestate if len(tracestate) <= TRACE_STATE_MAX and tracestate.isprintable() else ""
    return Trace(match["trace"], match["span"], match["flags"], state)


def request_id(given: str, random: RandomBytes) -> str:
    """The client's own id if it is fit for headers and logs, or a new one."""
    if len(given) <= REQUEST_ID_MAX and _REQUEST_ID.fullmatch(given):
        return given
    return random(16).hex()


def _identifier(size: int, random: RandomBytes) -> str:
    """Of all zeros is no identifier."""
    found = random(size)
    while not any(found):
        found = random(size)
    return found.hex()
