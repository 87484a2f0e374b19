"""What tiers are good for at the moment."""

from enum import StrEnum


class TierState(StrEnum):
    """Of a disk, or of device memory."""

    OPENING = "opening"  # its process starts, or its index is being read
    SERVING = "serving"
    READ_ONLY = "read-only"  # writes fail; tried again now and then
    FAILED = "failed"  # its process does not run


class ObjectTierState(StrEnum):
    """Of object storage."""

    OPENING = "opening"  # it has not answered yet
    SERVING = "serving"
    FAILING = "failing"  # the last requests failed; it is tried again now and then
    FAILED = "failed"  # its process does not run
