"""Every error that kvpool raises on purpose.

    KvpoolError
    ├── ConfigError              a setting is wrong; the message names it and what would be right
    ├── InvalidRequest           the caller asked for something that can never work
    │   ├── NamespaceMismatch    the sizes of a namespace differ from what is stored under it
    │   ├── StaleEpoch           the namespace was reset since it was opened: open it again
    │   └── UnknownReservation   commit or abort of what was never reserved, was settled, or is another's
    ├── ProtocolError            bytes on a connection are not the protocol, or not this version of it
    ├── NotAuthenticated         the peer did not prove who it is
    ├── PoolFull                 leases, reservations or hard pins hold all the space that is needed
    ├── LimitExceeded            a quota or a bound on queues, bytes or connections is reached
    ├── LeaseLost                a lease ended before its reader did: what was read must not be used
    ├── SegmentError             the memory or the file of a segment cannot be had
    ├── AlreadyRunning           another daemon holds the socket or the data directory
    ├── Unavailable              the daemon or a peer cannot be reached, or did not answer in time
    │   └── Declined             a peer answered, and that it cannot at present
    └── ClusterUnavailable       this node answers, but what it needs of its cluster does not

A miss is never an error, and neither is a block that is there already. A broken invariant is not in
this tree either: it is an `AssertionError`, and ends the process.

`code` is what travels; `from_code` is its inverse.
"""

from __future__ import annotations


class KvpoolError(Exception):
    """Base of the tree. The message says what happened, to what, and what to do about it."""

    code = "error"


class ConfigError(KvpoolError):
    """A setting is wrong. Correct what the message names and start again."""

    code = "config"


class InvalidRequest(KvpoolError):
    """The request can never work as it stands: a key of the wrong size, a part that does not exist."""

    code = "invalid"


class NamespaceMismatch(InvalidRequest):
    """Two users of one namespace disagree about the sizes of its parts.

    The namespace record lacks whatever makes them differ. Add it, so that they become two namespaces.
    """

    code = "namespace_mismatch"


class StaleEpoch(InvalidRequest):
    """The namespace was reset since this client opened it. Open it again once its weights are right."""

    code = "stale_epoch"


class UnknownReservation(InvalidRequest):
    """A commit or abort names slots that this process did not reserve, or that were settled before."""

    code = "unknown_reservation"


class ProtocolError(KvpoolError):
    """A connection carries something that is not this protocol in this version. It is closed."""

    code = "protocol"


class NotAuthenticated(KvpoolError):
    """The peer did not prove who it is. Check the tenant's token or the cluster secret."""

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
    """A segment's memory cannot be had. The message names the cause and the remedy."""

    code = "segment"


class AlreadyRunning(KvpoolError):
    """Another daemon serves this socket or data directory. Stop it, or choose another path."""

    code = "already_running"


class Unavailable(KvpoolError):
    """The daemon or a peer cannot be reached or did not answer in time. Recompute; retry later."""

    code = "unavailable"


class Declined(Unavailable):
    """A peer was reached, and answered that it cannot at present. Another way to it would hear the same."""

    code = "declined"


class ClusterUnavailable(KvpoolError):
    """etcd, Redis or another node did not answer this one, which goes on by itself. Retry later."""

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
