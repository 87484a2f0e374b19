"""The states of tiers."""

from enum import StrEnum


class TierState(StrEnum):
    """For a disk, or device memory."""

    OPENING = "opening"  # its process starts, or its index is being read
    SERVING = "serving"
    READ_ONLY = "read-only"  # writes fail; retried periodically
    FAILED = "failed"  # its process does not run


class ObjectTierState(StrEnum):
    """For object storage."""

    OPENING = "opening"  # it has not answered yet
    SERVING = "serving"
    FAILING = "failing"  # the last requests failed; retried periodically
    FAILED = "failed"  # its process does not run
