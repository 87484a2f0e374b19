"""Return codes of `mooncake.store`, as far as this facade gives them.

A put gives `OK`, a read the bytes that it copied, and anything negative is one of these. They are numbers that
programs compare with, so they are never changed.
"""

from __future__ import annotations

from typing import Final

from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LeaseLost,
    LimitExceeded,
    PoolFull,
    UnknownReservation,
)

OK: Final = 0
INTERNAL_ERROR: Final = -1
NO_SPACE: Final = -200
INVALID: Final = -600
NOT_FOUND: Final = -704
EXISTS: Final = -705
LEASE_LOST: Final = -707
UNAVAILABLE: Final = -900
UNSUPPORTED: Final = -1012


def code_of(error: KvpoolError) -> int:
    """The code for an error of the pool: what is none of the caller's doing counts as an unreachable store."""
    if isinstance(error, (PoolFull, LimitExceeded)):
        return NO_SPACE
    if isinstance(error, LeaseLost):
        return LEASE_LOST
    if isinstance(error, InvalidRequest) and not isinstance(error, UnknownReservation):
        return INTERNAL_ERROR
    return UNAVAILABLE  # reservations are unknown to a daemon that has started anew
