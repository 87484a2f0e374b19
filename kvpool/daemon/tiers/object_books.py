"""State shared by reads, writes and scans of object storage: the serving process, and the catalog.

The catalog is a hint. An object that is gone, or holds something else, is a miss, and its entry is dropped.
An entry carries a seal made with the cluster's secret, so that nobody who can write to Redis can pass off one
block as another.

Event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.tier_state import ObjectTierState
from kvpool.daemon.workers.object_proxy import ObjectStorage
from kvpool.errors import Unavailable
from kvpool.placement.catalog.base import Catalog
from kvpool.placement.directory.base import BATCH_MAX
from kvpool.placement.membership.base import Membership
from kvpool.retry import Backoff
from kvpool.storage.object.packs import LOCATION, is_encrypted
from kvpool.tasks import Tasks
from kvpool.telemetry.tier_stats import ObjectStats
from kvpool.wire import storage as storage_wire

log = logging.getLogger("kvpool.daemon")

RETRY_S = (1.0, 30.0)  # between attempts to use object storage that failed
ENTRY_S = 7 * 86_400.0  # an entry of the catalog lives, unless it is listed again
SEAL_BYTES = 16
LOCATION_BYTES = LOCATION.itemsize


class PackRecord(msgspec.Struct, array_like=True, frozen=True):
    """A pack's record of its blocks' namespace. ttl_s: from its settings then."""

    tenant: str
    base: bytes
    epoch: int
    ttl_s: float


@dataclass(eq=False)
class ObjectBooks:
    """See the module. catalog: owned from now on. secrets: the cluster's, those accepted now. encryption: the secrets of
    the encryption at rest.
    """

    config: DaemonConfig
    node: Node
    membership: Membership
    catalog: Catalog
    clock: Callable[[], float]
    secrets: Callable[[], tuple[bytes, ...]] = tuple
    encryption: Callable[[], list[bytes]] = list

    def __post_init__(self) -> None:
        url = self.config.object_store
        self._log = logging.LoggerAdapter(log, {"object_store": url})
        self.state = ObjectTierState.OPENING
        self.error = ""
        self.storage: ObjectStorage | None = None
        self.tasks = Tasks()
        self.stocked = False  # this node's earlier packs are known, and their size counts
        self.retry = Backoff(*RETRY_S)
        self.counted = ObjectStats(path=url, size_bytes=self.config.object_bytes_max)

    def ended(self, error: str) -> None:
        """The process is dead, or cannot be started."""
        self.storage = None
        self.forget_usage()
        self.state, self.error = ObjectTierState.FAILED, error

    def forget_usage(self) -> None:
        """What the process counts is not known."""
        self.tell_usage(storage_wire.ObjectUsage())

    def tell_usage(self, usage: storage_wire.ObjectUsage) -> None:
        """What the process counts."""
        for name in usage.__struct_fields__:
            setattr(self.counted, name, getattr(usage, name))

    @property
    def serving(self) -> bool:
        """See `Tier`."""
        return self.storage is not None

    def may_write(self) -> bool:
        return self.state is ObjectTierState.SERVING and self.stocked

    async def find(
        self, digest: bytes, part: int, keys: Sequence[bytes], *, any_kind: bool = False
    ) -> list[bytes | None]:
        """The locations of blocks. Ignored are entries without this cluster's seal, and unless `any_kind` those of
        blocks that are encrypted where this node writes plain ones, or the other way round: it could not read them.
        Raises `Unavailable`.
        """
        encrypts = bool(self.encryption())
        found: list[bytes | None] = []
        for at in range(0, len(keys), BATCH_MAX):
            some = keys[at : at + BATCH_MAX]
            entries = await self.catalog.find(digest, part, some)
            seal_keys = self._seal_keys()
            for key, entry in zip(some, entries, strict=True):
                location = None if entry is None else entry[:LOCATION_BYTES]
                ours = (
                    location is not None
                    and (any_kind or is_encrypted(location) == encrypts)
                    and any(seal(one, digest, part, key, location) == entry for one in seal_keys)
                )
                found.append(location if ours else None)
            await asyncio.sleep(0)  # verifying this many seals takes milliseconds
        return found

    async def enlist(
        self, digest: bytes, part: int, keys: Sequence[bytes], packed: bytes, ttl_s: float
    ) -> None:
        """Record in the catalog where blocks are. packed: their locations. Raises `Unavailable`."""
        seal_key = self._seal_keys()[0]
        entries = [
            seal(seal_key, digest, part, key, packed[at : at + LOCATION_BYTES])
            for key, at in zip(keys, range(0, len(packed), LOCATION_BYTES), strict=True)
        ]
        for at in range(0, len(keys), BATCH_MAX):
            chosen = slice(at, at + BATCH_MAX)
            await self.catalog.add(digest, part, keys[chosen], entries[chosen], ttl_s)

    def _seal_keys(self) -> list[bytes]:
        """Of the accepted secrets: new entries get the first one's seal."""
        return [
            hashlib.sha256(b"kvpool catalog\0" + secret).digest()
            for secret in self.secrets() or (b"",)
        ]

    async def unlist(
        self, digest: bytes, part: int, keys: Sequence[bytes], packs: Sequence[bytes]
    ) -> None:
        """These blocks are no longer in these objects. Best effort: a stale entry is a miss later."""
        try:
            await self.drop(digest, part, keys, packs)
        except Unavailable:
            self.counted.lookups_failed += 1

    async def drop(
        self, digest: bytes, part: int, keys: Sequence[bytes], packs: Sequence[bytes]
    ) -> None:
        for at in range(0, len(keys), BATCH_MAX):
            chosen = slice(at, at + BATCH_MAX)
            await self.catalog.drop(digest, part, keys[chosen], packs[chosen])

    def answered(self) -> None:
        if self.state is ObjectTierState.FAILING:
            self._log.warning("object storage at %s works again", self.config.object_store)
        self.state, self.error = ObjectTierState.SERVING, ""
        self.retry.succeeded()

    def failed(self, error: str) -> None:
        """A request failed: nothing is written for a while."""
        if self.state is ObjectTierState.FAILED:
            return
        if self.state is ObjectTierState.FAILING and not self.retry.due(self.clock()):
            return  # it was known already, and is retried in time
        if self.state is not ObjectTierState.FAILING:
            self._log.warning("object storage at %s fails: %s", self.config.object_store, error)
            self.error = error  # of the first one: later ones may only be back-off
        self.state = ObjectTierState.FAILING
        self.retry.failed(self.clock())


def seal(seal_key: bytes, digest: bytes, part: int, key: bytes, location: bytes) -> bytes:
    """An entry of the catalog: the location, and a proof that it is this block's."""
    said = digest + part.to_bytes(2, "little") + key + location
    return location + hashlib.blake2b(said, digest_size=SEAL_BYTES, key=seal_key).digest()
