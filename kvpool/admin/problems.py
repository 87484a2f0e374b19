"""Errors as HTTP problems: the one place that gives kvpool's errors their status."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from kvpool.admin.types import Problem
from kvpool.errors import (
    ClusterUnavailable,
    ConfigError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NamespaceMismatch,
    NotAuthenticated,
    PoolFull,
    ProtocolError,
    StaleEpoch,
    Unavailable,
)

# The first that fits; each stands before its bases.
_STATUS: tuple[tuple[type[KvpoolError], int], ...] = (
    (NamespaceMismatch, 409),
    (StaleEpoch, 409),
    (InvalidRequest, 400),
    (PoolFull, 507),
    (LimitExceeded, 429),
    (ClusterUnavailable, 503),
    (Unavailable, 503),
    (NotAuthenticated, 502),  # it is the gateway that the daemon does not let in
    (ProtocolError, 502),
    (ConfigError, 500),
)


class Refused(Exception):
    """A request that is answered with a problem. headers: beside it."""

    def __init__(
        self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


def not_found(what: str) -> Refused:
    """For missing objects, and for other tenants': indistinguishable."""
    return Refused(404, "not_found", what)


def refused(error: KvpoolError) -> Refused:
    """As which problem an error of kvpool is shown."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    headers = {"Retry-After": "1"} if status in {429, 503} else None
    return Refused(status, error.code, str(error), headers)


def problem(error: Refused, request: str) -> Problem:
    """request: its id."""
    return Problem(
        type=f"urn:kvpool:problem:{error.code}",
        title=HTTPStatus(error.status).phrase,
        status=error.status,
        detail=str(error),
        code=error.code,
        instance=f"urn:kvpool:request:{request}",
    )
