"""The records of a cluster: nodes, namespaces, settings, configuration. Frozen, JSON on the wire.

Times are stored as durations, never as time stamps, so clocks may differ by any amount.
Unknown fields of a record are ignored and absent ones have defaults.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvpool.config import OBJECT_WRITE_MODES, WRITE_MODES
from kvpool.decoding import decode_json
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.telemetry.cluster_stats import DrainProgress
from kvpool.types import EngineRecord

FORMAT_VERSION = 1  # of all keys in etcd and Redis
RECORD_BYTES_MAX = 256 << 10
INCARNATION_BYTES = 8
EPOCH_MAX = (1 << 63) - 1
TTL_S_MAX = 10 * 365 * 86_400.0
SSD_CODECS = ("blosc2",)
NIXL = "nixl://"


class NodeState(StrEnum):
    """joining: known, not read from. draining: read from, gets no new blocks. gone: neither."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


class TierRecord(msgspec.Struct, frozen=True):
    """One tier of a node: its capacity and usage, all tenants together.

    secondary_bytes: in addition, secondary replicas. They are evicted first.
    """

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    secondary_bytes: int = 0


class TransportRecord(msgspec.Struct, frozen=True):
    """How peers reach a node: a URL whose scheme names the transport, and the transport's parameters.

    numa: the NUMA node of the network card; -1: not known. rail: name of a set of cards that reach each other
    without crossing to another switch, given by an operator. net: the network of the card, ADDRESS/BITS.
    """

    url: str
    metadata: str = ""
    numa: int = -1
    rail: str = ""
    net: str = ""


class LinkRecord(msgspec.Struct, frozen=True):
    """What a node has measured of pulls from another; or, if `node` is empty, from all at this distance.

    distance: a `placement.distance.Distance`. latency_s: to the first byte; bytes_s: after it. age_s: since that was
    measured, rounded up. measured_bytes: of large pulls, older ones counting less, rounded down.
    """

    distance: str
    latency_s: float
    bytes_s: float
    age_s: float
    measured_bytes: int
    node: str = ""


class NodeRecord(msgspec.Struct, frozen=True):
    """A node as seen by all others. Bound to a lease: it disappears with its node.

    incarnation: 16 hex digits, random for each life; a new one after the lease was lost.
    protocol, protocol_oldest: the newest and the oldest supported wire protocol. version: of the package.
    labels: its location, `zone` and `rack`, and others.
    host: common to all nodes on one machine; empty: not known. numa: the NUMA node of its memory;
    -1: not known, or several. engines: announced there. links: as measured by it; `Peers.links` says which.
    """

    node: str
    incarnation: str
    state: NodeState = NodeState.JOINING
    transports: tuple[TransportRecord, ...] = ()
    tiers: tuple[TierRecord, ...] = ()
    labels: dict[str, str] = {}
    version: str = ""
    protocol: int = 0
    drain: DrainProgress | None = None
    host: str = ""
    numa: int = -1
    engines: tuple[EngineRecord, ...] = ()
    protocol_oldest: int = 0
    links: tuple[LinkRecord, ...] = ()

    @property
    def incarnation_bytes(self) -> bytes:
        """As in directory entries."""
        return bytes.fromhex(self.incarnation)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(transport.url for transport in self.transports)

    @property
    def url(self) -> str:
        """The URL for requests and, by default, pulls; empty: none."""
        return next((url for url in self.urls if not url.startswith(NIXL)), "")


class NamespaceSettings(msgspec.Struct, frozen=True):
    """How a namespace's blocks are kept. These settings change only whether blocks are found, never their bytes.

    replicas: how many are wanted of each block, on as many nodes.
    write: when blocks are written to SSD, one of `WRITE_MODES`; empty: each node's default.
    ttl_s: a block that was not used for this long on a node is dropped there; 0: never.
    ssd_codec: compression of blocks on SSD, one of `SSD_CODECS`; empty: none.
    dram_quota, ssd_quota: quota of each node's memory and disks: bytes, or a share of
        the tenant's part; 0: no quota.
    write_object: when blocks are written to object storage, one of `OBJECT_WRITE_MODES`; empty: "back". Stored and
        shown as `write_remote`.
    """

    replicas: int = 1
    write: str = ""
    ttl_s: float = 0.0
    ssd_codec: str = ""
    dram_quota: int | float = 0
    ssd_quota: int | float = 0
    write_object: str = msgspec.field(default="", name="write_remote")

    def known_here(self, replicas_max: int) -> NamespaceSettings:
        """The settings as a node applies them: replicas within its limits, and the rest.

        Values that only a newer version knows are ignored: an epoch must not be missed
        because a record beside it cannot be followed.
        """
        return NamespaceSettings(
            replicas=max(1, min(self.replicas, replicas_max)),
            write=self.write if self.write in WRITE_MODES else "",
            ttl_s=max(0.0, self.ttl_s),
            ssd_codec=self.ssd_codec if self.ssd_codec in SSD_CODECS else "",
            dram_quota=self.dram_quota if _is_quota(self.dram_quota) else 0,
            ssd_quota=self.ssd_quota if _is_quota(self.ssd_quota) else 0,
            write_object=self.write_object if self.write_object in OBJECT_WRITE_MODES else "",
        )

    def filled(self, wanted: NamespaceSettings) -> NamespaceSettings:
        """With the requested values for unset settings, and the larger number of replicas."""
        return NamespaceSettings(
            replicas=max(self.replicas, wanted.replicas),
            write=self.write or wanted.write,
            ttl_s=self.ttl_s or wanted.ttl_s,
            ssd_codec=self.ssd_codec or wanted.ssd_codec,
            dram_quota=self.dram_quota or wanted.dram_quota,
            ssd_quota=self.ssd_quota or wanted.ssd_quota,
            write_object=self.write_object or wanted.write_object,
        )


DEFAULT_SETTINGS = NamespaceSettings()


def _is_quota(quota: float) -> bool:
    """Whether it is bytes, a share, or 0 for none."""
    return quota >= 0 if isinstance(quota, int) else 0 < quota <= 1


def quota_bytes(quota: float, size: int, part: float = 1.0) -> int:
    """A quota in bytes, at least 1; 0: there is none. size: what a share is of.

    part: the share of a quota in bytes, if a tier has several places.
    """
    if not quota:
        return 0
    return max(1, int(quota * part if isinstance(quota, int) else quota * size))


class SettingsChange(msgspec.Struct, frozen=True):
    """New values of a namespace's settings: see `NamespaceSettings`. None: unchanged."""

    replicas: int | None = None
    write: str | None = None
    ttl_s: float | None = None
    ssd_codec: str | None = None
    dram_quota: int | float | None = None
    ssd_quota: int | float | None = None
    write_object: str | None = msgspec.field(default=None, name="write_remote")

    @property
    def empty(self) -> bool:
        return self == SettingsChange()

    def apply(self, settings: NamespaceSettings) -> NamespaceSettings:
        """The settings after the change."""
        changed = {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }
        return msgspec.structs.replace(settings, **changed)

    def checked(self) -> SettingsChange:
        """The same change. Raises `InvalidRequest` for invalid values; a node's limits are checked elsewhere."""
        if self.replicas is not None and self.replicas < 1:
            raise InvalidRequest(f"{self.replicas} replicas: must be at least 1")
        if self.write and self.write not in WRITE_MODES:
            raise InvalidRequest(
                f"write {self.write!r}: must be one of {', '.join(WRITE_MODES)}; or empty for each node's default"
            )
        if self.ttl_s is not None and not 0 <= self.ttl_s <= TTL_S_MAX:  # false for NaN, too
            raise InvalidRequest(
                f"ttl_s {self.ttl_s:g}: must be from 0 (never expire) to {TTL_S_MAX:.0f} seconds"
            )
        if self.ssd_codec and self.ssd_codec not in SSD_CODECS:
            raise InvalidRequest(
                f"ssd_codec {self.ssd_codec!r}: must be one of {', '.join(SSD_CODECS)}; or empty for none"
            )
        if self.write_object and self.write_object not in OBJECT_WRITE_MODES:
            raise InvalidRequest(
                f"write_remote {self.write_object!r}: must be one of {', '.join(OBJECT_WRITE_MODES)}; or empty for back"
            )
        for name in ("dram_quota", "ssd_quota"):
            quota = getattr(self, name)
            if quota is not None and not _is_quota(quota):
                raise InvalidRequest(
                    f"{name} {quota:g}: must be whole bytes, or a share above 0 and up to 1; or 0 for none"
                )
        return self


class NamespaceEntry(msgspec.Struct, frozen=True):
    """The cluster's agreed record of one namespace.

    digest: hex, of the fields alone (`NamespaceRecord.digest`), without the epoch.
    fields: the canonical JSON, as text. parts: [nbytes, kind, window, stride] each.
    epoch: bumped by every reset. fence: clients that opened the namespace at an epoch below it must
        open it again, because their weights may be old; others continue in the new epoch. generation: number of
        fences: one for each change of weights.
    settings: of the first node that registered it, and of later changes. used: when it was last known to be used, in
        hours of the `NamespaceClock`.
    """

    tenant: str
    digest: str
    fields: str
    parts: tuple[tuple[int, str, int, int], ...]
    epoch: int = 0
    fence: int = 0
    generation: int = 0
    settings: NamespaceSettings = DEFAULT_SETTINGS
    used: int = 0


class NamespaceClock(msgspec.Struct, frozen=True):
    """What all namespaces of a cluster have in common.

    hours: counted by its members while they run, so that nobody's clock needs to be right.
    first_epoch, first_generation: in which new namespaces begin; beyond those of all that were deleted, so that one that
        comes back never meets its former blocks, nor engines with its former weights.
    """

    hours: int = 0
    first_epoch: int = 0
    first_generation: int = 0


def check_entry(entry: NamespaceEntry, where: str) -> NamespaceEntry:
    """The same entry. Raises `ProtocolError` unless its digest and its epochs can be those of a namespace."""
    try:
        is_digest = entry.digest != "" and bytes.fromhex(entry.digest).hex() == entry.digest
    except ValueError:
        is_digest = False
    if not is_digest:
        raise ProtocolError(f"{where} has the digest {entry.digest!r}, which is not in hex")
    _check_counts(entry, ("epoch", "fence", "generation", "used"), where)
    return entry


def check_clock(clock: NamespaceClock, where: str) -> NamespaceClock:
    """The same clock. Raises `ProtocolError` for values that it cannot have."""
    _check_counts(clock, clock.__struct_fields__, where)
    return clock


def _check_counts(record: msgspec.Struct, names: Sequence[str], where: str) -> None:
    for name in names:
        if not 0 <= getattr(record, name) <= EPOCH_MAX:
            raise ProtocolError(f"{where} has {name} {getattr(record, name)}: 0 to {EPOCH_MAX}")


class ClusterConfig(msgspec.Struct, frozen=True):
    """The common configuration of a cluster; written by the first node.

    protocol_min: nodes that support only an older wire protocol are refused.
    secret_proof: HMAC of the cluster's name under its secret, hex: a node with another one is refused
        when it joins, rather than by each of its peers. other_proofs: the same of secrets that came after it:
        several may be in use.
    """

    cluster: str
    format: int = FORMAT_VERSION
    protocol_min: int = 0
    secret_proof: str = ""
    other_proofs: tuple[str, ...] = ()

    @property
    def proofs(self) -> tuple[str, ...]:
        """All of them."""
        return (self.secret_proof, *self.other_proofs)


@dataclass(frozen=True, slots=True)
class View:
    """The cluster at one moment. Immutable; a change makes a new one.

    nodes: by name, all that hold a lease. namespaces: by digest (hex) and tenant, `(tenant, digest)`. clock: theirs.
    drains: names of the nodes that an operator wants drained.
    revision: grows with every change; comparable only within one process.
    """

    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    namespaces: Mapping[tuple[str, str], NamespaceEntry] = field(default_factory=dict)
    clock: NamespaceClock = field(default_factory=NamespaceClock)
    drains: frozenset[str] = frozenset()
    config: ClusterConfig | None = None
    revision: int = 0


class NodeChange(NamedTuple):
    """A node's record before and after; None: there was none, or is none any more."""

    before: NodeRecord | None
    after: NodeRecord | None


def changed_nodes(before: View, after: View) -> list[NodeChange]:
    """What has changed between two views, by identity: unchanged records are the same objects in both.

    About 80 us for 1,000 nodes; nothing if no node has changed.
    """
    old, new = before.nodes, after.nodes
    if old is new:
        return []
    changes = [
        NodeChange(known, record)
        for name, record in new.items()
        if (known := old.get(name)) is not record
    ]
    changes += [NodeChange(record, None) for name, record in old.items() if name not in new]
    return changes


def new_incarnation() -> str:
    """64 random bits, as 16 hex digits."""
    return secrets.token_hex(INCARNATION_BYTES)


def epoch_digest(digest: bytes, epoch: int) -> bytes:
    """The 16 bytes that name a namespace in one epoch, to peers and in the directory.

    Epoch 0 is the namespace's own digest, so that nodes without a membership agree with others.
    """
    if epoch == 0:
        return digest
    return hashlib.sha256(digest + epoch.to_bytes(8, "big")).digest()[:16]


R = TypeVar("R", bound=msgspec.Struct)


def encode_record(record: msgspec.Struct) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


def decode_record(data: bytes, kind: type[R], where: str) -> R:
    """Raises `ProtocolError` for an invalid record; `where` names its place."""
    if len(data) > RECORD_BYTES_MAX:
        raise ProtocolError(f"{where} has {len(data)} bytes: the limit is {RECORD_BYTES_MAX}")
    try:
        return decode_json(data, kind, f"a valid {kind.__name__}")
    except ProtocolError as error:
        raise ProtocolError(f"{where} is {error}") from None


def plain(record: msgspec.Struct) -> Any:
    """The record as plain JSON values."""
    return msgspec.to_builtins(record)
