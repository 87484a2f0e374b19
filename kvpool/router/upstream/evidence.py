"""Decides what a failed call to an engine is evidence of: the engine, or the request. No I/O; decided here only.

    no connection, or no such rank    the engine: it has read nothing of the request
    the connection broke off          the engine, if another one answers the same request. If the client has a part of
                                      the answer no other engine can be asked: the engine
    a whole HTTP answer               the request, whatever the answer says: another engine is asked once, and the
                                      client gets the last answer

A breaker counts the failures of different requests (`breaker.py`), so that one request, however often it is repeated,
opens none. Time is no evidence: a slow engine is one whose probes succeed.
"""

from __future__ import annotations

from kvpool.router.upstream.upstream import CUT, UNREACHABLE, WRONG_RANK, EngineFailed

OF_THE_ROUTER = frozenset((401, 403, 407))
"""Answers to the router's own credentials: no client's fault, and of no use to one."""
FROM_ANOTHER = OF_THE_ROUTER | {408, 425, 429}
"""Statuses from 400 to 499 that another engine may not answer."""


class Evidence:
    """Evidence from the calls of one request."""

    def __init__(self) -> None:
        self._doubted: set[str] = set()

    def failed(self, error: EngineFailed, *, begun: bool) -> set[str]:
        """Engines to blame now. begun: whether the client has a part of this call's answer."""
        if error.reason in {UNREACHABLE, WRONG_RANK} or (begun and error.reason == CUT):
            return {error.engine}
        if error.reason == CUT:
            self._doubted.add(error.engine)
        return set()

    def answered(self, engine: str) -> set[str]:
        """Engines to blame, now that this one has done what they have not."""
        blamed, self._doubted = self._doubted - {engine}, set()
        return blamed


def another_may_differ(status: int) -> bool:
    """Whether another engine may answer otherwise than with this status."""
    return not 400 <= status < 500 or status in FROM_ANOTHER


def for_client(status: int) -> bool:
    """Whether a client gets an answer of this status as it is."""
    return status >= 400 and status not in OF_THE_ROUTER
