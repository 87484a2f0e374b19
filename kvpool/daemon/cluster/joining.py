"""Creates membership and directory from the configuration. Nothing else knows their implementations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvpool.config import DaemonConfig
from kvpool.errors import ConfigError
from kvpool.extras import install
from kvpool.placement.catalog.base import Catalog
from kvpool.placement.catalog.embedded import EmbeddedCatalog
from kvpool.placement.directory.base import Directory
from kvpool.placement.membership.base import Membership
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.redis.settings import RedisSettings
from kvpool.security.cluster_secrets import ClusterSecrets, SecretSource, make_default
from kvpool.wire.frame import PROTOCOL_VERSION

EPOCHS_FILE = "namespaces.json"


def open_secrets(config: DaemonConfig) -> ClusterSecrets:
    """The secrets that the configuration names; else, if there are peers, those of this user and machine.

    Raises `ConfigError`.
    """
    if config.cluster_secret or config.cluster_secret_file:
        return ClusterSecrets(SecretSource(config.cluster_secret, config.cluster_secret_file))
    if config.listen or config.peers:
        return ClusterSecrets(make_default(config.cluster))
    return ClusterSecrets.of()


def open_membership(
    config: DaemonConfig, secrets: Callable[[], tuple[bytes, ...]], clock: Callable[[], float]
) -> Membership:
    """etcd if the configuration names one; else this node is alone. secrets: `ClusterSecrets.known`.

    Raises `ConfigError`.
    """
    if not config.join:
        path = Path(config.data_dir) / EPOCHS_FILE if config.data_dir else None
        return StaticMembership(StaticCluster(config.cluster, path=path), protocol=PROTOCOL_VERSION)
    try:
        from kvpool.placement.etcd.settings import EtcdSettings
        from kvpool.placement.membership.etcd import EtcdMembership
    except ModuleNotFoundError as error:
        raise _not_installed("join", error) from None
    settings = EtcdSettings.from_url(
        config.join,
        password=config.join_password,
        ca=_file(config.join_ca),
        cert=_file(config.join_cert),
        key=_file(config.join_key),
    )
    return EtcdMembership(
        settings,
        config.cluster,
        secrets=secrets,
        protocol=PROTOCOL_VERSION,
        ttl_s=config.member_ttl_s,
        clock=clock,
    )


async def open_directory(config: DaemonConfig) -> Directory | None:
    """Redis if the configuration names one. It may be unreachable; invalid settings raise `ConfigError`."""
    if not config.directory:
        return None
    try:
        from kvpool.placement.directory import redis as redis_directory
    except ModuleNotFoundError as error:
        raise _not_installed("directory", error) from None
    return await redis_directory.open_directory(
        _redis_settings(config), cluster=config.cluster, timeout_s=config.directory_timeout_s
    )


def open_catalog(config: DaemonConfig, clock: Callable[[], float]) -> Catalog:
    """The catalog of object storage: in the directory's Redis, or in this node alone."""
    if not (config.object_store and config.join and config.directory):
        return EmbeddedCatalog(clock)
    # Its requirements are met, or the directory had not opened.
    from kvpool.placement.catalog.redis import RedisCatalog

    return RedisCatalog(
        _redis_settings(config), cluster=config.cluster, timeout_s=config.directory_timeout_s
    )


def _redis_settings(config: DaemonConfig) -> RedisSettings:
    from kvpool.placement.redis.settings import parse_url

    return parse_url(
        config.directory,
        password=config.directory_password,
        tls_ca=config.directory_ca,
        tls_cert=config.directory_cert,
        tls_key=config.directory_key,
    )


def _file(path: str) -> Path | None:
    return Path(path) if path else None


def _not_installed(setting: str, error: ModuleNotFoundError) -> ConfigError:
    # A module `google` is there without protobuf, or not at all; the package to install has that name.
    package = "protobuf" if (error.name or "").partition(".")[0] == "google" else error.name
    return ConfigError(
        f"{setting} needs the package {package}, which is not installed: {install('cluster')}"
    )
