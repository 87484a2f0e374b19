"""Which settings do not fit together, and which files cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

from kvpool.config.parse import HTTP_UNIX, host_and_port
from kvpool.config.settings import DaemonConfig
from kvpool.errors import ConfigError
from kvpool.net import is_loopback


def check(config: DaemonConfig) -> None:
    """Raises `ConfigError`, which names the settings and what to do."""
    if config.advertise and len(config.advertise) != len(config.listen):
        raise ConfigError("advertise: one URL for each of listen")
    if config.rails and len(config.rails) != len(config.listen):
        raise ConfigError('rails: one name for each of listen; "-" for none')
    if config.object_store and not (config.join or config.data_dir):
        raise ConfigError(
            "object_store: a node without join must remember the epochs of namespaces by itself, or it took old "
            "blocks for new ones after a restart: give it --data-dir FOLDER"
        )
    _check_nixl(config)
    _check_tls(config)
    _check_http(config)
    if config.join and not config.listen:
        raise ConfigError(
            "join: other nodes pull from this one, so it has to listen: give --listen tcp://HOST:PORT"
        )
    config.ssd_shares()  # raises for parts that are more than there is


def _nixl_urls(config: DaemonConfig) -> list[str]:
    return [url for url in config.listen if url.startswith("nixl://")]


def _check_nixl(config: DaemonConfig) -> None:
    nixl = _nixl_urls(config)
    if len(nixl) > 1 or (nixl and len(nixl) == len(config.listen)):
        raise ConfigError(
            f"listen: {', '.join(nixl)}: one nixl:// URL at most, and a tcp:// URL beside it, which peers "
            f"ask and fall back to"
        )
    if any(url.startswith("nixl://") for url in config.peers):
        raise ConfigError("peers: give tcp:// URLs; nodes learn of NIXL from the membership (join)")


def _check_tls(config: DaemonConfig) -> None:
    """Files that do not belong together, or cannot be read, or can be by anybody."""
    files = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_crl")}
    missing = [name for name in ("tls_cert", "tls_key", "tls_ca") if not files[name]]
    if any(files.values()) and missing:
        raise ConfigError(
            f"{', '.join(missing)}: not set, and with TLS all of tls_cert, tls_key and tls_ca are needed: "
            f"`kvpool certs init` and `kvpool certs node` make them"
        )
    for name, path in files.items():
        if path:
            _check_readable(name, path, secret=name == "tls_key")
    chosen = config.plaintext or config.pull_over == "nixl"
    if config.tls_cert and _nixl_urls(config) and not chosen:
        raise ConfigError(
            "listen: a nixl:// URL, and tls_cert: what NIXL moves is not encrypted. Leave that URL out, or where "
            "its network is trusted, say so: plaintext (--plaintext), or pull_over nixl (--pull-over nixl)"
        )


def _check_http(config: DaemonConfig) -> None:
    """A gateway that whoever reaches it could use, or overhear."""
    if config.http_tokens:
        _check_readable("http_tokens", config.http_tokens, secret=True)
    for address in config.http:
        if address.startswith(HTTP_UNIX) or is_loopback(host_and_port(address)[0]):
            continue
        if not config.http_tokens:
            raise ConfigError(
                f"http: {address} is not loopback, so clients need a token: make one with "
                f"`kvpool token NAME --role admin --file FILE`, and name that file (http_tokens, --http-tokens)"
            )
        if not config.tls_cert and not config.plaintext:
            raise ConfigError(
                f"http: {address} is not loopback, so tokens must be encrypted in transit: give tls_cert, tls_key and "
                f"tls_ca, which `kvpool certs init` and `kvpool certs node` make; or, in a network that is "
                f"trusted, plaintext (--plaintext)"
            )


def _check_readable(name: str, path: str, *, secret: bool) -> None:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None
    if secret and mode & 0o007:
        raise ConfigError(f"{name}: every user of this machine can open {path}: chmod 600 {path}")
