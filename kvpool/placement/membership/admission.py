"""Rules common to all memberships: which nodes may join a cluster, and the errors for others."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

import msgspec

from kvpool.errors import ConfigError, LimitExceeded, NamespaceMismatch
from kvpool.placement.records import (
    FORMAT_VERSION,
    ClusterConfig,
    NamespaceClock,
    NamespaceEntry,
    NodeRecord,
    SettingsChange,
)

PROOFS_MAX = 4
NAMESPACES_PER_TENANT_MAX = 16_384
# An engine that missed a namespace's deletion counts on from its former generation, one for each change of its weights.
# It must not come to a number of those who registered the namespace anew.
GENERATIONS_APART = 1 << 20
NOTE_HOURS = 24  # within so many the use of a namespace is noted again


def secret_proof(secret: bytes, cluster: str) -> str:
    """A proof that two nodes have the same secret, without revealing it."""
    return hmac.new(secret, f"kvpool cluster {cluster}".encode(), hashlib.sha256).hexdigest()


def config_of(cluster: str, secrets: tuple[bytes, ...]) -> ClusterConfig:
    """Return what a node with these secrets knows, the newest first. Without any, the empty one stands for them.

    Peers authenticate each other in any case: this says at the start what every one of them would say.
    """
    first, *others = (secret_proof(secret, cluster) for secret in secrets or (b"",))
    return ClusterConfig(cluster=cluster, secret_proof=first, other_proofs=tuple(others))


def founding(ours: ClusterConfig) -> ClusterConfig:
    """The record of a new cluster: with the newest secret's proof alone."""
    return msgspec.structs.replace(ours, other_proofs=())


def renewed(config: ClusterConfig, ours: ClusterConfig) -> ClusterConfig:
    """With the proof of our newest secret, if it lacks that; the oldest one makes way.

    Never in another order than before: two nodes with the same secrets in different orders would write for ever.
    """
    if ours.secret_proof in config.proofs or not set(config.proofs).intersection(ours.proofs):
        return config
    first, *others = (*config.proofs, ours.secret_proof)[-PROOFS_MAX:]
    return msgspec.structs.replace(config, secret_proof=first, other_proofs=tuple(others))


def check_config(config: ClusterConfig, ours: ClusterConfig, protocol: int) -> None:
    """Raises `ConfigError` if this node may not join this cluster."""
    if config.cluster != ours.cluster:
        raise ConfigError(
            f"etcd holds the records of cluster {config.cluster!r}, not of {ours.cluster!r}: choose the right "
            "--cluster, or another etcd"
        )
    if config.format != FORMAT_VERSION:
        raise ConfigError(
            f"the records of cluster {config.cluster!r} have format {config.format}, this version of kvpool supports "
            f"{FORMAT_VERSION}: install the version of the other nodes"
        )
    if protocol < config.protocol_min:
        raise ConfigError(
            f"cluster {config.cluster!r} requires protocol {config.protocol_min} or newer, this node supports "
            f"{protocol}: upgrade this node"
        )
    if not set(config.proofs).intersection(ours.proofs):
        raise ConfigError(
            f"this node's secret differs from that of cluster {config.cluster!r}: use the same secret as the other "
            "nodes, or choose another --cluster. If all nodes have been given another secret at once, delete etcd's key "
            f"/kvpool/{config.cluster}/config"
        )


def name_taken(old: NodeRecord) -> ConfigError:
    """The error for a name that a living daemon has."""
    return ConfigError(
        f"another daemon is node {old.node!r}: incarnation {old.incarnation} at "
        f"{', '.join(old.urls) or 'no address'}. Choose another --node"
    )


def incarnation_taken(record: NodeRecord, other: str) -> ConfigError:
    """The error for an incarnation of another node."""
    return ConfigError(
        f"incarnation {record.incarnation} of node {record.node!r} is in use by node {other!r}: two daemons run "
        "from one snapshot; restart this one"
    )


def same_address(old: NodeRecord, new: NodeRecord) -> bool:
    """Whether they share an address: its present holder knows that the other one is dead."""
    return not set(old.urls).isdisjoint(new.urls)


def check_parts(stored: NamespaceEntry, wanted: NamespaceEntry) -> None:
    """Raises `NamespaceMismatch` for a namespace that is known with other parts."""
    if stored.parts != wanted.parts:
        raise NamespaceMismatch(
            f"namespace {wanted.digest} of tenant {wanted.tenant!r} is registered in the cluster with other parts: "
            "its fields lack what distinguishes the two; add it to the fields"
        )


def bumped(entry: NamespaceEntry, expected: int, *, fence: bool) -> NamespaceEntry:
    """In the epoch after `expected`; unchanged if it has left that already."""
    if entry.epoch != expected:
        return entry
    epoch = expected + 1
    if not fence:
        return msgspec.structs.replace(entry, epoch=epoch)
    return msgspec.structs.replace(entry, epoch=epoch, fence=epoch, generation=entry.generation + 1)


def configured(entry: NamespaceEntry, change: SettingsChange) -> NamespaceEntry:
    """With the settings after a change."""
    return msgspec.structs.replace(entry, settings=change.apply(entry.settings))


def check_room(known: Iterable[tuple[str, str]], tenant: str) -> None:
    """Raises `LimitExceeded` for one namespace more than a tenant may have in the cluster. known: (tenant, digest)."""
    there = sum(1 for whose, _ in known if whose == tenant)
    if there >= NAMESPACES_PER_TENANT_MAX:
        raise LimitExceeded(
            f"tenant {tenant!r} has {there} namespaces in the cluster, the limit. Those that nothing uses are "
            "deleted after `namespace_unused_days`"
        )


def begun(entry: NamespaceEntry, clock: NamespaceClock) -> NamespaceEntry:
    """A namespace that the cluster does not know, as it begins now.

    Its epoch may have to be a later one than its node's. Then that node was away while the namespace was deleted, and
    does not know which weights others had meanwhile: so its clients have to open it again, with the latest.
    """
    if entry.epoch >= clock.first_epoch:
        return entry
    return msgspec.structs.replace(
        entry,
        epoch=clock.first_epoch,
        fence=clock.first_epoch,
        generation=max(entry.generation, clock.first_generation),
    )


def stale(entry: NamespaceEntry, clock: NamespaceClock) -> bool:
    """Whether the last note of a namespace's use is so old that another one is due: for each at an hour of its own."""
    spread = int(entry.digest[:2], 16) % (NOTE_HOURS // 2)
    return clock.hours - entry.used >= NOTE_HOURS - spread


def noted(entry: NamespaceEntry, clock: NamespaceClock) -> NamespaceEntry:
    """A namespace that is in use now."""
    return msgspec.structs.replace(entry, used=max(entry.used, clock.hours))


def after_deletion(clock: NamespaceClock, entry: NamespaceEntry) -> NamespaceClock:
    """The clock once a namespace has been deleted."""
    return msgspec.structs.replace(
        clock,
        first_epoch=max(clock.first_epoch, entry.epoch + 1),
        first_generation=max(clock.first_generation, entry.generation + GENERATIONS_APART),
    )


def later(one: NamespaceClock, other: NamespaceClock) -> NamespaceClock:
    """Of two records of a cluster's clock what is later in either: it never goes back."""
    return NamespaceClock(
        max(one.hours, other.hours),
        max(one.first_epoch, other.first_epoch),
        max(one.first_generation, other.first_generation),
    )
