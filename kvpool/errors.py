"""Every error that kvpool raises on purpose.

    KvpoolError
    ├── ConfigError              a setting is wrong; the message names it and what would be right
    ├── InvalidRequest           the caller asked for something that can never work
    │   ├── NamespaceMismatch    the sizes of a namespace differ from what is stored under it
    │   ├── StaleEpoch           the namespace was reset since it was opened: open it again
    │   ├── UnknownNamespace     a number that is none of an open namespace: open it again
    │   └── UnknownReservation   commit or abort of slots that are not reserved, or reserved by another client
    ├── ProtocolError            bytes on a connection violate the protocol or its version
    ├── NotAuthenticated         the peer did not authenticate
    ├── PoolFull                 leases, reservations or hard pins hold all space
    ├── LimitExceeded            a quota or a bound on queues, bytes or connections is reached
    ├── LeaseLost                a lease ended before its reader finished: discard what was read
    ├── SegmentError             the memory or file of a segment is not available
    ├── AlreadyRunning           another daemon holds the socket or the data directory
    ├── InternalError            a bug met a request that changes nothing; the process that it was sent to goes on
    ├── Unavailable              the daemon or a peer cannot be reached, or did not answer in time
    │   └── Declined             a peer answered that it cannot serve the request now
    └── ClusterUnavailable       this node answers, but etcd, Redis or another node that it needs does not

A miss is not an error, nor is a block that is present already. A broken invariant is an `AssertionError` and
ends the process, unless it is met in answering a request that changes nothing (`InternalError`).

`code` is sent on the wire; `from_code` is its inverse.
"""

from __future__ import annotations

__all__ = [
    "AlreadyRunning",
    "ClusterUnavailable",
    "ConfigError",
    "Declined",
    "InternalError",
    "InvalidRequest",
    "KvpoolError",
    "LeaseLost",
    "LimitExceeded",
    "NamespaceMismatch",
    "NotAuthenticated",
    "PoolFull",
    "ProtocolError",
    "SegmentError",
    "StaleEpoch",
    "Unavailable",
    "UnknownNamespace",
    "UnknownReservation",
    "from_code",
]


class KvpoolError(Exception):
    """Base of the tree. The message says what happened, to what, and what to do about it."""

    code = "error"


class ConfigError(KvpoolError):
    """A setting is wrong. Correct what the message names and start again."""

    code = "config"


class InvalidRequest(KvpoolError):
    """The request is invalid: a key of the wrong size, a part that does not exist."""

    code = "invalid"


class NamespaceMismatch(InvalidRequest):
    """Two users of one namespace disagree about the sizes of its parts.

    The namespace record lacks a field that distinguishes them. Add it, so that they become two namespaces.
    """

    code = "namespace_mismatch"


class StaleEpoch(InvalidRequest):
    """The namespace was reset since this client opened it. Open it again with the new weights."""

    code = "stale_epoch"


class UnknownNamespace(InvalidRequest):
    """A number that is none of an open namespace: it was never given, or its namespace was freed since. Open it."""

    code = "unknown_namespace"


class UnknownReservation(InvalidRequest):
    """A commit or abort names slots that this process did not reserve, or that were settled before."""

    code = "unknown_reservation"


class ProtocolError(KvpoolError):
    """A connection violates the protocol or speaks another version. It is closed."""

    code = "protocol"


class NotAuthenticated(KvpoolError):
    """The peer did not authenticate. Check the tenant's token or the cluster secret."""

    code = "not_authenticated"


class PoolFull(KvpoolError):
    """No space can be reclaimed now: leases, reservations or hard pins hold it. Retry after they end."""

    code = "pool_full"


class LimitExceeded(KvpoolError):
    """A quota or bound is reached. The message names it."""

    code = "limit"


class LeaseLost(KvpoolError):
    """The lease ended before its reader finished. Discard what was read and recompute."""

    code = "lease_lost"


class SegmentError(KvpoolError):
    """A segment's memory is not available. The message names the cause and the remedy."""

    code = "segment"


class AlreadyRunning(KvpoolError):
    """Another daemon serves this socket or data directory. Stop it, or choose another path."""

    code = "already_running"


class InternalError(KvpoolError):
    """A bug kept a daemon from answering a request that changes nothing. The daemon's log has the traceback: report it."""

    code = "internal"


class Unavailable(KvpoolError):
    """The daemon or a peer cannot be reached or did not answer in time. Recompute; retry later."""

    code = "unavailable"


class Declined(Unavailable):
    """A peer answered that it cannot serve the request now. Another path to it gets the same answer."""

    code = "declined"


class ClusterUnavailable(KvpoolError):
    """etcd, Redis or another node did not answer. This node continues alone. Retry later."""

    code = "cluster_unavailable"


def _tree(root: type[KvpoolError]) -> dict[str, type[KvpoolError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(KvpoolError)


def from_code(code: str, message: str) -> KvpoolError:
    """The error that a peer reported. A code from a newer peer becomes a plain `KvpoolError`."""
    return _BY_CODE.get(code, KvpoolError)(message)
