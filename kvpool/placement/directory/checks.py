"""Checks common to all directories: rejects invalid calls before anything is done.

Pure functions, a few tens of microseconds for a full batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpool.errors import InvalidRequest
from kvpool.placement.directory.base import BATCH_MAX, TIERS
from kvpool.placement.records import INCARNATION_BYTES
from kvpool.types import KEY_BYTES, PARTS_MAX, check_digest

DEAD_MAX = 16 << 10
"""Incarnations in one call of `sweep`: all that a node knows to be dead, so that one pass is for all of them."""

ENTRIES_MAX = 64
"""Entries of one block; beyond it the oldest is dropped. No block needs as many replicas."""

TIER_BYTES = frozenset(TIERS.values())


def check_keys(digest: bytes, parts: int, keys: Sequence[bytes]) -> None:
    """Raises `InvalidRequest` unless these are block keys of a namespace, and not too many."""
    check_digest(digest)
    if not 0 < parts <= PARTS_MAX:
        raise InvalidRequest(f"{parts} parts: a namespace must have 1 to {PARTS_MAX}")
    if len(keys) > BATCH_MAX:
        raise InvalidRequest(f"{len(keys)} keys in one call: at most {BATCH_MAX}")
    wrong = set(map(len, keys)) - {KEY_BYTES}
    if wrong:
        raise InvalidRequest(f"a block key must have {KEY_BYTES} bytes, not {wrong.pop()}")


def check_publication(
    digest: bytes,
    parts: int,
    incarnation: bytes,
    tier: int,
    keys: Sequence[bytes],
    masks: Sequence[int],
) -> None:
    """Raises `InvalidRequest` for invalid arguments of `Directory.publish`."""
    check_keys(digest, parts, keys)
    check_incarnations((incarnation,))
    if tier not in TIER_BYTES:
        raise InvalidRequest(f"tier {tier} is not one of {sorted(TIER_BYTES)}")
    if len(masks) != len(keys):
        raise InvalidRequest(f"{len(masks)} masks for {len(keys)} keys")
    if keys and not (min(masks) >= 0 and max(masks) >> parts == 0):
        raise InvalidRequest(f"a mask names a part beyond the namespace's {parts} parts")


def check_incarnations(incarnations: Collection[bytes]) -> None:
    """Raises `InvalidRequest` unless these are incarnations, and not too many."""
    if len(incarnations) > DEAD_MAX:
        raise InvalidRequest(f"{len(incarnations)} incarnations in one call: at most {DEAD_MAX}")
    wrong = set(map(len, incarnations)) - {INCARNATION_BYTES}
    if wrong:
        raise InvalidRequest(
            f"an incarnation must have {INCARNATION_BYTES} bytes, not {wrong.pop()}"
        )


def last_of_each(
    keys: Sequence[bytes], masks: Sequence[int]
) -> tuple[Sequence[bytes], Sequence[int]]:
    """Each key once, with the last of its masks: so a batch may be split and reordered."""
    last = dict(zip(keys, masks, strict=True))
    if len(last) == len(keys):
        return keys, masks
    return list(last), list(last.values())
