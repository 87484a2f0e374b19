"""Rejects combinations of settings that are invalid, and files that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from kvpool.config.parse import HTTP_UNIX, SOCKET_PATH_MAX, host_and_port
from kvpool.config.settings import DaemonConfig
from kvpool.errors import ConfigError
from kvpool.net import is_loopback, names_loopback


def check(config: DaemonConfig) -> None:
    """Raises `ConfigError`, which names the settings and what to do."""
    if config.advertise and len(config.advertise) != len(config.listen):
        raise ConfigError("advertise: give one URL for each of listen")
    if config.rails and len(config.rails) != len(config.listen):
        raise ConfigError('rails: give one name for each of listen; "-" for none')
    if config.object_store and not (config.join or config.data_dir):
        raise ConfigError(
            "object_store: without join, the node must store the epochs of its namespaces itself, to recognise old "
            "blocks after a restart: set --data-dir FOLDER"
        )
    if len(os.fsencode(config.operators_at())) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"operator_socket: {config.operators_at()} is longer than {SOCKET_PATH_MAX} bytes: set a shorter path"
        )
    if config.operators_at() == config.socket:
        raise ConfigError("operator_socket: must be another path than socket")
    if config.cluster_secret and config.cluster_secret_file:
        raise ConfigError("cluster_secret_file: cluster_secret is set as well; set one of them")
    if config.encryption_secret_file and config.encryption_secret_command:
        raise ConfigError(
            "encryption_secret_command: encryption_secret_file is set as well; set one of them"
        )
    _check_nixl(config)
    _check_passwords(config)
    _check_tls(config)
    _check_http(config)
    if config.join and not config.join.startswith(("etcd://", "etcds://")):
        raise ConfigError(
            f"join = {config.join!r:.100}: must be the URL of etcd, such as etcd://10.0.0.1:2379, or etcds:// with TLS"
        )
    if config.join and not config.listen:
        raise ConfigError(
            "join: other nodes pull from this one, so it must listen: set --listen tcp://HOST:PORT"
        )
    for stream in config.publish_events:
        if stream.tenant not in {tenant.name for tenant in config.all_tenants()}:
            raise ConfigError(
                f"publish_events.{stream.name}.tenant: there is no tenant {stream.tenant!r}"
            )
    config.ssd_shares()  # raises if the parts exceed the disks


def _check_passwords(config: DaemonConfig) -> None:
    """Checks that nobody on the network reads the passwords of etcd and Redis."""
    if config.plaintext_passwords:
        return
    login = urlsplit(config.directory).netloc.rpartition("@")[0]
    for name, url, password in (
        ("join", config.join, config.join_password),
        ("directory", config.directory, config.directory_password or ":" in login),
    ):
        scheme, _, rest = url.partition("://")
        hosts = rest.rpartition("@")[2].partition("/")[0].split(",")
        away = [host for host in hosts if not names_loopback(host)]
        if password and away and scheme.partition("+")[0] in {"etcd", "redis"}:
            secure = scheme.replace("etcd", "etcds", 1).replace("redis", "rediss", 1)
            raise ConfigError(
                f"{name}: the password would be sent to {away[0]} unencrypted: write {secure}://; or, in a trusted "
                "network, set plaintext_passwords (--plaintext-passwords)"
            )


def _nixl_urls(config: DaemonConfig) -> list[str]:
    return [url for url in config.listen if url.startswith("nixl://")]


def _check_nixl(config: DaemonConfig) -> None:
    nixl = _nixl_urls(config)
    if len(nixl) > 1 or (nixl and len(nixl) == len(config.listen)):
        raise ConfigError(
            f"listen: {', '.join(nixl)}: give at most one nixl:// URL, together with a tcp:// URL for requests and "
            "as a fallback"
        )
    if any(url.startswith("nixl://") for url in config.peers):
        raise ConfigError("peers: give tcp:// URLs; nodes learn of NIXL from the membership (join)")


def _check_tls(config: DaemonConfig) -> None:
    """Checks files: certificate and key match, readable, and not readable by everyone."""
    files = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_crl")}
    missing = [name for name in ("tls_cert", "tls_key", "tls_ca") if not files[name]]
    if any(files.values()) and missing:
        raise ConfigError(
            f"{', '.join(missing)}: not set; TLS needs all of tls_cert, tls_key and tls_ca: `kvpool certs init` and "
            "`kvpool certs node` create them"
        )
    if config.operated_by and not config.tls_cert:
        raise ConfigError(
            "operated_by: without TLS any node can claim any name: set tls_cert, tls_key and tls_ca"
        )
    for name, path in files.items():
        if path:
            _check_readable(name, path, secret=name == "tls_key")
    if config.router_ca:
        _check_readable("router_ca", config.router_ca, secret=False)
    chosen = config.plaintext or config.pull_over == "nixl"
    if config.tls_cert and _nixl_urls(config) and not chosen:
        raise ConfigError(
            "listen: a nixl:// URL with tls_cert: NIXL transfers are not encrypted. Remove that URL; or, in a "
            "trusted network, set plaintext (--plaintext) or pull_over nixl (--pull-over nixl)"
        )


def _check_http(config: DaemonConfig) -> None:
    """Checks that the gateway is not open to, or overheard by, everyone on the network."""
    if config.http_tokens:
        _check_readable("http_tokens", config.http_tokens, secret=True)
    for address in config.http:
        if address.startswith(HTTP_UNIX) or is_loopback(host_and_port(address)[0]):
            continue
        if not config.http_tokens:
            raise ConfigError(
                f"http: {address} is not loopback, so clients need a token: create one with `kvpool token NAME "
                "--role admin --file FILE`, and set http_tokens (--http-tokens) to that file"
            )
        if not config.tls_cert and not config.plaintext:
            raise ConfigError(
                f"http: {address} is not loopback, so tokens must be encrypted in transit: set tls_cert, tls_key and "
                "tls_ca, created by `kvpool certs init` and `kvpool certs node`; or, in a trusted network, "
                "plaintext (--plaintext)"
            )


def _check_readable(name: str, path: str, *, secret: bool) -> None:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None
    if secret and mode & 0o007:
        raise ConfigError(
            f"{name}: other users can access {path}: chmod 600 {path}, or 640 if its group may read it"
        )
