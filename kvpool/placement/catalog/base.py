"""The catalog port: where in object storage blocks are. A hint; the object is the truth.

Contract, for every backend (`tests.contract.suites.catalog` tests it):

- An entry says: this part of this block of this namespace (its digest in its epoch) is at this location.
  `add` sets it, `drop` removes it if it still points into the named object; both are idempotent.
- An entry expires after its time to live, unless it was set again. All may be lost at any time.
- `completed` records that a scan of all objects has gone into the catalog. That record ends with its own
  time to live, and with the loss of any part of the catalog: then another scan is needed.

One event loop. Every wait has a deadline, and ends with `Unavailable`; a failed change may have been
made in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvpool.errors import InvalidRequest
from kvpool.placement.directory.checks import check_keys
from kvpool.types import PARTS_MAX

LOCATION_BYTES = 66
"""A location and a seal, opaque here, except for the 16 bytes that name the object."""
PACK = slice(2, 18)

TTL_S_MAX = 30 * 86_400.0


class Catalog(Protocol):
    """See the module. At most `directory.BATCH_MAX` keys in one call, and each once.

    All methods raise `InvalidRequest` for invalid arguments. shared: whether all nodes of the cluster see it.
    """

    shared: bool

    async def find(self, digest: bytes, part: int, keys: Sequence[bytes]) -> list[bytes | None]:
        """The location of each block, in the order of the keys."""

    async def add(
        self,
        digest: bytes,
        part: int,
        keys: Sequence[bytes],
        locations: Sequence[bytes],
        ttl_s: float,
    ) -> None:
        """Set where these blocks are, for this time."""

    async def drop(
        self, digest: bytes, part: int, keys: Sequence[bytes], packs: Sequence[bytes]
    ) -> None:
        """These blocks are no longer in these objects, one object a key."""

    async def complete(self) -> bool:
        """Whether all objects have been entered, as `completed` recorded, and nothing was lost since."""

    async def completed(self, ttl_s: float) -> None:
        """All objects have been entered; to be repeated after this time."""

    async def close(self) -> None:
        """Idempotent."""


def check_part(digest: bytes, part: int, keys: Sequence[bytes]) -> None:
    """Raises `InvalidRequest` unless these are blocks of a part of a namespace, and not too many."""
    check_keys(digest, 1, keys)
    if not 0 <= part < PARTS_MAX:
        raise InvalidRequest(f"part {part}: parts must be 0 to {PARTS_MAX - 1}")


def check_columns(keys: Sequence[bytes], values: Sequence[bytes], nbytes: int) -> None:
    """Raises `InvalidRequest` unless there is a value of this many bytes for each key."""
    if len(values) != len(keys):
        raise InvalidRequest(f"{len(values)} values for {len(keys)} keys")
    if set(map(len, values)) - {nbytes}:
        raise InvalidRequest(f"each of these values must have {nbytes} bytes")


def check_ttl(ttl_s: float) -> None:
    """Raises `InvalidRequest` for an invalid time to live."""
    if not 0 < ttl_s <= TTL_S_MAX:
        raise InvalidRequest(
            f"a time to live of {ttl_s} seconds: must be above 0 and at most {TTL_S_MAX:.0f}"
        )
