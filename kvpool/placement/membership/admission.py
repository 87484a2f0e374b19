"""Rules that every membership shares: who may be part of a cluster, and what is said to those who may not."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from kvpool.errors import ConfigError, NamespaceMismatch
from kvpool.placement.records import (
    FORMAT_VERSION,
    ClusterConfig,
    NamespaceEntry,
    NodeRecord,
    SettingsChange,
)


def secret_proof(secret: bytes, cluster: str) -> str:
    """What shows that two nodes have the same secret, and tells nobody which."""
    return hmac.new(secret, f"kvpool cluster {cluster}".encode(), hashlib.sha256).hexdigest()


def check_config(config: ClusterConfig, ours: ClusterConfig, protocol: int) -> None:
    """Raises `ConfigError` if a node like us may not be part of this cluster."""
    if config.cluster != ours.cluster:
        raise ConfigError(
            f"the records of cluster {ours.cluster!r} are those of {config.cluster!r}: "
            "choose the right --cluster, or another etcd"
        )
    if config.format > FORMAT_VERSION:
        raise ConfigError(
            f"cluster {config.cluster!r} keeps its records in format {config.format}, this version of "
            f"kvpool knows formats up to {FORMAT_VERSION}: upgrade this node"
        )
    if protocol < config.protocol_min:
        raise ConfigError(
            f"cluster {config.cluster!r} asks for protocol {config.protocol_min} or newer, this node "
            f"speaks {protocol}: upgrade this node"
        )
    if not hmac.compare_digest(config.secret_proof.encode(), ours.secret_proof.encode()):
        raise ConfigError(
            f"this node's secret is not that of cluster {config.cluster!r}: give it the secret of the "
            "other nodes, or choose another --cluster"
        )


def name_taken(old: NodeRecord) -> ConfigError:
    """The error for a name that a living daemon has."""
    return ConfigError(
        f"another daemon is node {old.node!r}: incarnation {old.incarnation} at "
        f"{', '.join(old.urls) or 'no address'}. Choose another --node"
    )


def incarnation_taken(record: NodeRecord, other: str) -> ConfigError:
    """The error for an incarnation that another node has."""
    return ConfigError(
        f"incarnation {record.incarnation} of node {record.node!r} is in use by node {other!r}: two "
        "daemons were started from one saved state; start this one anew"
    )


def same_address(old: NodeRecord, new: NodeRecord) -> bool:
    """Whether one of the addresses is the same: its present holder knows that the other one is dead."""
    return not set(old.urls).isdisjoint(new.urls)


def check_parts(stored: NamespaceEntry, wanted: NamespaceEntry) -> None:
    """Raises `NamespaceMismatch` for a namespace that is known with other parts."""
    if stored.parts != wanted.parts:
        raise NamespaceMismatch(
            f"namespace {wanted.digest} of tenant {wanted.tenant!r} is known to the cluster with other "
            "parts: its fields lack what makes the two differ; add it to them"
        )


def bumped(entry: NamespaceEntry, expected: int, *, fence: bool) -> NamespaceEntry:
    """In the epoch after `expected`; as it is when it has left that already."""
    if entry.epoch != expected:
        return entry
    epoch = expected + 1
    if not fence:
        return msgspec.structs.replace(entry, epoch=epoch)
    return msgspec.structs.replace(entry, epoch=epoch, fence=epoch, generation=entry.generation + 1)


def configured(entry: NamespaceEntry, change: SettingsChange) -> NamespaceEntry:
    """With the settings after a change."""
    return msgspec.structs.replace(entry, settings=change.apply(entry.settings))
