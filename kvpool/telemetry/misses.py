"""Why blocks were not there when they were asked for, in words that code, metrics and people share."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a block was missed. Those up to `DRAINED` are ways to leave a tier, too."""

    FULL = "full"
    QUOTA = "quota"
    TTL = "ttl"
    OPERATOR = "operator"
    REMOVED = "removed"
    CORRUPT = "corrupt"
    EPOCH = "epoch"
    SUPERSEDED = "superseded"
    DISK_LOST = "disk_lost"
    DRAINED = "drained"
    NEVER_STORED = "never_stored"
    FORGOTTEN = "forgotten"
    OTHER_NAMESPACE = "other_namespace"
    NODE_LOST = "node_lost"
    DECLINED = "declined"
    LATE = "late"
    DROPPED_ELSEWHERE = "dropped_elsewhere"
    NOT_ASKED = "not_asked"


WORDS = {
    Reason.FULL: "evicted, as its tier was full",
    Reason.QUOTA: "evicted, as its namespace had used up its quota",
    Reason.TTL: "expired: unused for longer than its namespace's ttl_s",
    Reason.OPERATOR: "evicted by an operator",
    Reason.REMOVED: "removed by a client",
    Reason.CORRUPT: "dropped, as its checksum did not match",
    Reason.EPOCH: "of an ended epoch: its namespace was reset or cleared",
    Reason.SUPERSEDED: "evicted before others, as its session has gone on without it",
    Reason.DISK_LOST: "on a disk that was lost",
    Reason.DRAINED: "on a node that was drained",
    Reason.NEVER_STORED: "never stored",
    Reason.FORGOTTEN: "never stored, or longer ago than departures are remembered",
    Reason.OTHER_NAMESPACE: "stored in another namespace only",
    Reason.NODE_LOST: "on a node that is gone",
    Reason.DECLINED: "there, but slower to load than to compute",
    Reason.LATE: "there, but it did not arrive in time",
    Reason.DROPPED_ELSEWHERE: "announced by another node, which has dropped it since",
    Reason.NOT_ASKED: "there, but the reader did not wait for it",
}
"""What a person reads."""
