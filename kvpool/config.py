"""The daemon's configuration: one TOML file, `KVPOOL_*` variables and flags, read once, then frozen.

Later ones win: defaults, file, environment, flags. Each setting has one name everywhere: `memory` in
the file is `KVPOOL_MEMORY` in the environment and `--memory` on the command line. Every value is checked
here, at the edge; inside, nothing reads the environment. A secret may stand in a file instead, which
`KVPOOL_NAME_FILE` names, as containers and systemd hand them over.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvpool.errors import ConfigError
from kvpool.loopback import is_loopback
from kvpool.types import DEFAULT_TENANT

SECRET_CHARACTERS_MIN = 16
SECRET_FILE_BYTES_MAX = 4096
LABELS_MAX = 32
DISKS_MAX = 16
DISK_BYTES_MIN = 4 << 20
DEVICE_BYTES_MIN = 2 << 20
WRITE_MODES = ("back", "through", "none")
REMOTE_SCHEMES = ("s3", "gs", "az", "file")
REMOTE_WRITE_MODES = ("back", "none")
PULL_OVER = ("auto", "nixl", "tcp")
REMOTE_BYTES_MIN = 64 << 20
SOCKET_PATH_MAX = 107  # sockaddr_un
HTTP_ADDRESSES_MAX = 16
HTTP_UNIX = "unix:"
HTTP_RATE_MAX = 100_000.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)
_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def default_socket_path(environ: Mapping[str, str] = os.environ) -> str:
    """Where daemon and clients of one user meet when nothing else is said."""
    if path := environ.get("KVPOOL_SOCKET"):
        return path
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return f"{runtime}/kvpool/kvpool.sock"
    if os.getuid() == 0:
        return "/run/kvpool/kvpool.sock"
    folder = f"/tmp/kvpool-{os.getuid()}"  # noqa: S108  (the daemon makes it with mode 0700)
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        pass
    else:
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise ConfigError(
                f"{folder} is not a folder of this user, so what listens there may be anyone's. "
                f"Set KVPOOL_SOCKET or XDG_RUNTIME_DIR"
            )
    return f"{folder}/kvpool.sock"


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """A tenant with a segment of its own.

    memory: bytes, or a share of the free memory. token: what its clients must show; None: anyone who
    can open the socket. ssd: its part of the disks, all together, in bytes or as a share; None: what is left
    is divided equally.
    """

    name: str
    memory: int | float
    token: str | None = field(default=None, repr=False)
    ssd: int | float | None = None


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A disk of tier ssd: a folder, and the bytes that all in it may take.

    threads: reads and writes at a time.
    """

    path: str
    size: int
    threads: int = 8


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Spare memory of one device, `cuda:N` or `cpu`: tier device."""

    device: str
    size: int


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """All settings of `kvpool serve`.

    socket: path of the control socket; its folder is made with mode 0700 if absent.
    socket_mode: permissions of the socket.
    memory: the default tenant's DRAM segment: bytes, or a share of the memory that is free at start.
    policy: eviction policy, by name; empty: the default one.
    listen: URLs on which peers may pull from this node, such as tcp://127.0.0.1:7070. None by default.
    advertise: the URLs that peers are told to use instead, one for each of `listen`.
    rails: for each of `listen`, which network cards of other nodes its own one reaches best: a name; "-": no
        matter.
    bind_source: connect to others from the address of the network card that was chosen for it, rather than
        from what this machine's routes say.
    pull_over: by which transport peers are pulled from where there are several: "auto" (what is faster for the
        pair), "nixl" or "tcp". The other one is what is left when that fails.
    probe_s: how often nodes that nothing is pulled from are asked for the time that an answer takes; 0: never.
    peers: URLs of the nodes that blocks are pulled from, where no membership names them.
    cluster, cluster_secret: peers must agree on both. Without a secret only loopback is listened on.
    tls_cert, tls_key, tls_ca: files: our certificate, its key, and who signs those of the nodes. With them all
        that daemons say to each other is in TLS, and both show a certificate; without, only loopback is listened on.
    tls_crl: which certificates are revoked, a file. Empty: nobody asks.
    plaintext: listen off loopback without TLS, and let NIXL move bytes, which it does not encrypt.
    join: the etcd that keeps the membership, etcd://HOST:PORT[,HOST:PORT...], etcds:// with TLS. Empty:
        this node is alone, but for `peers`.
    join_password, join_ca, join_cert, join_key: for etcd; the last three are files. A user stands in the
        URL, etcd://USER@HOST.
    member_ttl_s: a node that etcd has not heard of for so long is taken for dead.
    directory: the Redis that keeps the directory, redis://, redis+sentinel://, redis+cluster://, or rediss
        for TLS. Empty: peers are asked one by one what they have.
    directory_password, directory_ca, directory_cert, directory_key: for Redis; the last three are files.
    directory_timeout_s: the longest that a lookup waits for it.
    labels: where this node stands: zone, rack, and anything else.
    copies_max: the most copies of a block that are made on request.
    copy_bandwidth: bytes a second that copying in the background may take, in and out each.
    forward: offer what must be evicted to nodes that have room.
    operator_token: what whoever inspects, drains or resets through the socket must show; empty: anyone
        who may open it and has the daemon's own user id, or root's.
    tenants: further tenants, each with a segment.
    ssd: folders on disks, each with its size: PATH=SIZE. What memory gives up is kept there, and what was
        there when the daemon ended is found again.
    ssd_write: when a block is written there, unless its namespace says otherwise: "through" (when it was
        put), "back" (ahead of its eviction from memory), or "none".
    ssd_bytes_per_day: how much may be written there in a day, all disks together; 0: no limit.
    ssd_drain_s: how long a node that is drained goes on copying what is only on its disks; 0: not at all.
    ssd_flush_s: how long a daemon that is told to stop goes on writing what is only in memory; 0: not at all.
    remote: where object storage begins, s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER: what memory gives
        up, and somebody has read again, is kept there, for all nodes of the cluster. Empty: there is none.
        Credentials are the environment's.
    remote_bytes_max: of what this node keeps there.
    remote_instance_credentials: where the environment has none, ask the metadata service of the cloud.
    device: spare memory of a GPU for what engines here read again, DEVICE=SIZE; None: no such tier.
    events: follow the KV events of this node's engines, and tell others what their caches hold.
    http: addresses of the HTTP gateway, HOST:PORT or unix:PATH. None: there is no gateway. Off loopback it takes
        http_tokens, and TLS (tls_cert) or `plaintext`.
    http_tokens: a TOML file of those who may ask it, by the digests of their tokens. Empty: the daemon makes one
        token, in a file beside the control socket.
    http_rate: requests a second that each of them may make.
    routers: URLs of routers that the gateway asks about requests and engines. router_token: their operator's.
    otlp: where a collector takes traces by OTLP over HTTP, http://HOST:4318. Empty: none are recorded.
    movers: processes that move bytes.
    data_dir: where the node keeps what outlives it; empty: nothing is kept.
    node: this node's name.
    clients_max, peers_max: open connections; those of peers in each mover process.
    engines_max: engines whose KV events are followed, and as many that are announced to routers.
    lease_s_max: the longest lease.
    """

    socket: str
    socket_mode: int = 0o600
    memory: int | float = 0.25
    policy: str = ""
    listen: tuple[str, ...] = ()
    advertise: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()
    bind_source: bool = False
    pull_over: str = "auto"
    probe_s: float = 10.0
    peers: tuple[str, ...] = ()
    cluster: str = "kvpool"
    cluster_secret: str = field(default="", repr=False)
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_crl: str = ""
    plaintext: bool = False
    join: str = ""
    join_password: str = field(default="", repr=False)
    join_ca: str = ""
    join_cert: str = ""
    join_key: str = ""
    member_ttl_s: float = 5.0
    directory: str = field(default="", repr=False)
    directory_password: str = field(default="", repr=False)
    directory_ca: str = ""
    directory_cert: str = ""
    directory_key: str = ""
    directory_timeout_s: float = 0.5
    labels: Mapping[str, str] = field(default_factory=dict)
    copies_max: int = 8
    copy_bandwidth: int = 256 << 20
    forward: bool = True
    operator_token: str = field(default="", repr=False)
    tenants: tuple[TenantConfig, ...] = ()
    ssd: tuple[DiskConfig, ...] = ()
    ssd_write: str = "back"
    ssd_bytes_per_day: int = 0
    ssd_drain_s: float = 600.0
    ssd_flush_s: float = 20.0
    remote: str = ""
    remote_bytes_max: int = 100 << 30
    remote_instance_credentials: bool = False
    device: DeviceConfig | None = None
    events: bool = True
    http: tuple[str, ...] = ()
    http_tokens: str = ""
    http_rate: float = 50.0
    routers: tuple[str, ...] = ()
    router_token: str = field(default="", repr=False)
    otlp: str = ""
    movers: int = 1
    data_dir: str = ""
    node: str = ""
    clients_max: int = 1024
    peers_max: int = 256
    engines_max: int = 16
    lease_s_max: float = 60.0

    def all_tenants(self) -> tuple[TenantConfig, ...]:
        """The default tenant, unless the file gives it settings of its own, and the others."""
        if any(tenant.name == DEFAULT_TENANT for tenant in self.tenants):
            return self.tenants
        return (TenantConfig(DEFAULT_TENANT, self.memory), *self.tenants)

    def ssd_shares(self) -> dict[str, float]:
        """Each tenant's part of each disk, by name.

        It follows from the configuration alone, not from how much memory was free at the start: a part
        that moves has nothing left of what was in it. Raises `ConfigError` when there is not so much.
        """
        total = sum(disk.size for disk in self.ssd)
        if not total:
            return {}
        tenants = self.all_tenants()
        shares = {
            tenant.name: tenant.ssd / total if isinstance(tenant.ssd, int) else tenant.ssd
            for tenant in tenants
            if tenant.ssd is not None
        }
        left, others = 1 - sum(shares.values()), len(tenants) - len(shares)
        if left < -1e-9 or (others and left < 1e-9):
            raise ConfigError(
                f"tenants' parts of the disks (ssd) are {1 - left:.0%} of them, and {others} more have none "
                f"named: give less"
            )
        return {tenant.name: shares.get(tenant.name, left / max(1, others)) for tenant in tenants}


def parse_size(value: object, name: str) -> int | float:
    """Bytes ("8GiB", 1048576) or a share between 0 and 1 ("25%")."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.endswith("%"):
            try:
                share = float(text[:-1]) / 100
            except ValueError:
                share = 0.0
            if 0 < share <= 1:
                return share
        elif match := _SIZE.fullmatch(text):
            size = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
            if size > 0:
                return size
    raise ConfigError(f'{name} = {value!r}: give bytes ("8GiB") or a share of free memory ("25%")')


def _whole(value: object, name: str, least: int, most: int) -> int:
    try:
        number = int(value, 0) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ConfigError(f"{name} = {value!r}: a whole number from {least} to {most}")
    return number


def _mode(value: object, name: str) -> int:
    """Permissions. A text is octal, as `chmod` takes it; a number is what TOML's 0o660 gives."""
    try:
        mode = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        mode = None
    if not isinstance(mode, int) or isinstance(mode, bool) or not 0 <= mode <= 0o777:
        raise ConfigError(f'{name} = {value!r}: octal permissions such as 0o660 (a text: "660")')
    return mode


def _seconds(value: object, name: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number <= 86_400:
        raise ConfigError(f"{name} = {value!r}: seconds, above 0 and at most 86400")
    return number


def _seconds_or_none(value: object, name: str) -> float:
    """Seconds, or 0: not at all."""
    try:
        none = not isinstance(value, bool) and float(value) == 0  # type: ignore[arg-type]
    except (TypeError, ValueError):
        none = False
    return 0.0 if none else _seconds(value, name)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{name} = {value!r}: a text")
    return value


def _hidden(value: object, name: str) -> str:
    """A text that no message may show."""
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{name}: a text, in quotes")
    return value


def _secret(value: object, name: str) -> str:
    text = _hidden(value, name)
    if text and len(text) < SECRET_CHARACTERS_MIN:
        # Whoever connects sees a proof made with it, and can try guesses at home.
        raise ConfigError(
            f"{name}: a cluster secret has at least {SECRET_CHARACTERS_MIN} characters, at random; "
            f"`openssl rand -hex 32` makes one"
        )
    return text


def _word(value: object, name: str) -> str:
    text = _text(value, name)
    if not _NAME.fullmatch(text):
        raise ConfigError(f"{name} = {text!r}: letters, digits and ._- only, at most 63")
    return text


def _urls(value: object, name: str) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f"{name} = {value!r}: a list of URLs such as tcp://127.0.0.1:7070")
    urls = tuple(_text(item, name).strip() for item in items if item)
    for url in urls:
        try:
            parts = urlsplit(url)
            good = bool(parts.scheme and parts.hostname) and parts.port is not None
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"{name}: {url!r} is not a URL such as tcp://127.0.0.1:7070")
    return urls


def host_and_port(address: str) -> tuple[str, int]:
    """Of HOST:PORT, [ADDRESS]:PORT for IPv6. Raises `ValueError`."""
    parts = urlsplit(f"//{address}")
    if not parts.hostname or parts.port is None or parts.netloc != address or "@" in address:
        raise ValueError(address)
    return parts.hostname, parts.port


def _http(value: object, name: str) -> tuple[str, ...]:
    """HOST:PORT or unix:PATH."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or len(items) > HTTP_ADDRESSES_MAX:
        raise ConfigError(f'{name} = {value!r}: a list of addresses such as ["127.0.0.1:7071"]')
    addresses = tuple(_text(item, name).strip() for item in items if item)
    for address in addresses:
        if address.startswith(HTTP_UNIX):
            _socket(address.removeprefix(HTTP_UNIX), name)
            continue
        try:
            host_and_port(address)
        except ValueError:
            raise ConfigError(
                f"{name}: {address!r} is not HOST:PORT, such as 127.0.0.1:7071, nor unix:/PATH"
            ) from None
    return addresses


def _routers(value: object, name: str) -> tuple[str, ...]:
    urls = _urls(value, name)
    for url in urls:
        if urlsplit(url).scheme not in {"http", "https"} or "@" in url:
            raise ConfigError(f"{name}: {url!r} is not a router's URL such as http://10.0.0.9:8080")
    return tuple(url.rstrip("/") for url in urls)


def _rate(value: object, name: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number <= HTTP_RATE_MAX:
        raise ConfigError(
            f"{name} = {value!r}: requests a second, above 0, {HTTP_RATE_MAX:.0f} at most"
        )
    return number


def _rails(value: object, name: str) -> tuple[str, ...]:
    """Names; "-" is none."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f'{name} = {value!r}: a list of names such as "a,b"')
    names = [_text(item, name).strip() for item in items]
    return tuple("" if item == "-" else _word(item, name) for item in names)


def _labels(value: object, name: str) -> dict[str, str]:
    """A table, or "zone=a,rack=7"."""
    if isinstance(value, str):
        value = [item for item in value.split(",") if item]
    if isinstance(value, (list, tuple)):
        pairs = [item.partition("=")[::2] if isinstance(item, str) else ("", "") for item in value]
        value = dict(pairs)
    if not isinstance(value, dict) or len(value) > LABELS_MAX:
        raise ConfigError(f'{name}: at most {LABELS_MAX} labels, such as "zone=a,rack=7"')
    return {_word(key, name): _word(text, f"{name}.{key}") for key, text in value.items()}


def _bandwidth(value: object, name: str) -> int:
    size = parse_size(value, name)
    if not isinstance(size, int):
        raise ConfigError(f'{name} = {value!r}: bytes a second, such as "256MiB"')
    return size


def _switch(value: object, name: str) -> bool:
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise ConfigError(f"{name} = {value!r}: true or false")
    return found


def _disks(value: object, name: str) -> tuple[DiskConfig, ...]:
    """A list of PATH=SIZE, or such a list with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f'{name} = {value!r}: a list such as ["/mnt/nvme0/kvpool=400GiB"]')
    disks = []
    for item in items:
        path, separator, text = _text(item, name).strip().rpartition("=")
        if not separator or not path:
            raise ConfigError(
                f"{name}: {item!r} is not PATH=SIZE, such as /mnt/nvme0/kvpool=400GiB"
            )
        size = parse_size(text, f"{name}: {path}")
        if not isinstance(size, int) or size < DISK_BYTES_MIN:
            raise ConfigError(f"{name}: {path}: a size of at least {DISK_BYTES_MIN >> 20}MiB")
        disks.append(DiskConfig(os.path.abspath(path), size))
    if len({disk.path for disk in disks}) != len(disks) or len(disks) > DISKS_MAX:
        raise ConfigError(f"{name}: at most {DISKS_MAX} folders, each once")
    return tuple(disks)


def _device(value: object, name: str) -> DeviceConfig:
    """DEVICE=SIZE."""
    device, _, text = _text(value, name).strip().partition("=")
    size = parse_size(text, name) if text else 0
    if not _DEVICE.fullmatch(device) or not isinstance(size, int) or size < DEVICE_BYTES_MIN:
        raise ConfigError(
            f"{name} = {value!r}: DEVICE=SIZE, at least {DEVICE_BYTES_MIN >> 20}MiB, such as cuda:0=8GiB"
        )
    return DeviceConfig(device, size)


def _one_of(words: tuple[str, ...]) -> Callable[[object, str], str]:
    def parse(value: object, name: str) -> str:
        text = _text(value, name)
        if text not in words:
            raise ConfigError(f"{name} = {text!r}: one of {', '.join(words)}")
        return text

    return parse


def _bytes(value: object, name: str) -> int:
    """Bytes, or 0."""
    return 0 if value in (0, "0") else _bandwidth(value, name)


def _remote(value: object, name: str) -> str:
    """A URL without credentials, which are of no concern to whoever reads the configuration."""
    text = _hidden(value, name)
    try:
        parts = urlsplit(text)
        good = parts.scheme in REMOTE_SCHEMES and bool(
            parts.path.strip("/") if parts.scheme == "file" else parts.hostname
        )
        bare = not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        good = bare = False
    if text and not (good and bare):
        raise ConfigError(
            f"{name}: where object storage begins, such as s3://BUCKET/PREFIX, with one of "
            f"{', '.join(REMOTE_SCHEMES)}; credentials belong into the environment"
        )
    return text


def _storage_bytes(value: object, name: str) -> int:
    size = parse_size(value, name)
    if not isinstance(size, int) or size < REMOTE_BYTES_MIN:
        raise ConfigError(f"{name} = {value!r}: a size of at least {REMOTE_BYTES_MIN >> 20}MiB")
    return size


def otlp_endpoint(value: object, name: str) -> str:
    """Where a collector is: http://HOST:PORT, with or without a path; or empty. Raises `ConfigError`."""
    text = _text(value, name)
    try:
        parts = urlsplit(text)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if text and (not good or parts.username or parts.query or parts.fragment):
        raise ConfigError(
            f"{name} = {text!r}: where a collector takes OTLP over HTTP, such as http://127.0.0.1:4318"
        )
    return text.rstrip("/")


def _socket(value: object, name: str) -> str:
    text = _text(value, name)
    if not text or len(os.fsencode(text)) > SOCKET_PATH_MAX:
        raise ConfigError(f"{name} = {text!r}: a path of 1 to {SOCKET_PATH_MAX} bytes")
    return text


def _tenants(value: object, name: str) -> tuple[TenantConfig, ...]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: write one table a tenant, [tenants.NAME]")
    tenants = []
    for key, table in value.items():
        tenant = _word(key, f"{name}.{key}")
        if not isinstance(table, dict) or not set(table) <= {"memory", "ssd", "token"}:
            raise ConfigError(f"{name}.{key}: a tenant has memory, ssd and token, nothing else")
        if "memory" not in table:
            raise ConfigError(f"{name}.{key}.memory is missing: each tenant has its own segment")
        token = table.get("token")
        tenants.append(
            TenantConfig(
                tenant,
                parse_size(table["memory"], f"{name}.{key}.memory"),
                None if token is None else _hidden(token, f"{name}.{key}.token"),
                parse_size(table["ssd"], f"{name}.{key}.ssd") if "ssd" in table else None,
            )
        )
    return tuple(tenants)


_PARSERS: dict[str, Any] = {
    "socket": _socket,
    "socket_mode": _mode,
    "memory": parse_size,
    "policy": _text,
    "listen": _urls,
    "advertise": _urls,
    "rails": _rails,
    "bind_source": _switch,
    "pull_over": _one_of(PULL_OVER),
    "probe_s": _seconds_or_none,
    "peers": _urls,
    "cluster": _word,
    "cluster_secret": _secret,
    "tls_cert": _text,
    "tls_key": _text,
    "tls_ca": _text,
    "tls_crl": _text,
    "plaintext": _switch,
    "join": _text,
    "join_password": _hidden,
    "join_ca": _text,
    "join_cert": _text,
    "join_key": _text,
    "member_ttl_s": _seconds,
    "directory": _hidden,
    "directory_password": _hidden,
    "directory_ca": _text,
    "directory_cert": _text,
    "directory_key": _text,
    "directory_timeout_s": _seconds,
    "labels": _labels,
    "copies_max": lambda value, name: _whole(value, name, 1, 64),
    "copy_bandwidth": _bandwidth,
    "forward": _switch,
    "operator_token": _hidden,
    "tenants": _tenants,
    "ssd": _disks,
    "ssd_write": _one_of(WRITE_MODES),
    "ssd_bytes_per_day": _bytes,
    "ssd_drain_s": _seconds_or_none,
    "ssd_flush_s": _seconds_or_none,
    "remote": _remote,
    "remote_bytes_max": _storage_bytes,
    "remote_instance_credentials": _switch,
    "device": _device,
    "events": _switch,
    "http": _http,
    "http_tokens": _text,
    "http_rate": _rate,
    "routers": _routers,
    "router_token": _hidden,
    "otlp": otlp_endpoint,
    "movers": lambda value, name: _whole(value, name, 1, 64),
    "data_dir": _text,
    "node": _word,
    "clients_max": lambda value, name: _whole(value, name, 1, 1 << 16),
    "peers_max": lambda value, name: _whole(value, name, 1, 1 << 16),
    "engines_max": lambda value, name: _whole(value, name, 1, 64),
    "lease_s_max": _seconds,
}
SETTINGS = tuple(_PARSERS)
# Flags that are repeated have the singular.
FLAGS = {"peers": "peer", "labels": "label", "rails": "rail", "routers": "router"}
# Those that KVPOOL_NAME_FILE may be said of. A URL of the directory may hold a password.
SECRETS = (
    "cluster_secret",
    "directory",
    "directory_password",
    "join_password",
    "operator_token",
    "router_token",
)


def secret_of(variable: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """What `variable` holds, or the file that `variable`_FILE names, less one newline at its end.

    None: neither is set. Raises `ConfigError` when both are, or the file cannot be read.
    """
    path = environ.get(f"{variable}_FILE")
    if path is None:
        return environ.get(variable)
    if variable in environ:
        raise ConfigError(f"{variable} and {variable}_FILE are both set: unset one of them")
    try:
        with open(path, "rb") as file:
            content = file.read(SECRET_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{variable}_FILE: cannot read {path}: {error.strerror}") from None
    if len(content) > SECRET_FILE_BYTES_MAX:
        raise ConfigError(f"{variable}_FILE: {path} has more than {SECRET_FILE_BYTES_MAX} bytes")
    try:
        return content.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{variable}_FILE: {path} is not text in UTF-8") from None


def load(
    *,
    file: str | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> DaemonConfig:
    """The configuration. `flags` that are None were not given.

    Raises `ConfigError` for a file that cannot be read, an unknown name or a value that is not right;
    the message names the place.
    """
    values: dict[str, Any] = {
        "socket": default_socket_path(environ),
        "node": _node_name(socket.gethostname()),
    }
    path = file or environ.get("KVPOOL_CONFIG")
    if path:
        for key, value in _read(path).items():
            values[key] = _parse(key, value, f"{path}: {key}")
    for key in _PARSERS:
        variable = f"KVPOOL_{key.upper()}"
        text = secret_of(variable, environ) if key in SECRETS else environ.get(variable)
        if key != "tenants" and text is not None:
            values[key] = _parse(key, text, variable)
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = _parse(key, value, f"--{FLAGS.get(key, key).replace('_', '-')}")
    if values.get("advertise") and len(values["advertise"]) != len(values.get("listen", ())):
        raise ConfigError("advertise: one URL for each of listen")
    if values.get("rails") and len(values["rails"]) != len(values.get("listen", ())):
        raise ConfigError('rails: one name for each of listen; "-" for none')
    if values.get("remote") and not (values.get("join") or values.get("data_dir")):
        raise ConfigError(
            "remote: a node without join must remember the epochs of namespaces by itself, or it took old "
            "blocks for new ones after a restart: give it --data-dir FOLDER"
        )
    _check_nixl(values.get("listen", ()), values.get("peers", ()))
    _check_tls(values)
    _check_http(values)
    if values.get("join") and not values.get("listen"):
        raise ConfigError(
            "join: other nodes pull from this one, so it has to listen: give --listen tcp://HOST:PORT"
        )
    config = replace(DaemonConfig(socket=values["socket"]), **values)
    config.ssd_shares()  # raises for parts that are more than there is
    return config


def _check_nixl(listen: tuple[str, ...], peers: tuple[str, ...]) -> None:
    nixl = [url for url in listen if url.startswith("nixl://")]
    if len(nixl) > 1 or (nixl and len(nixl) == len(listen)):
        raise ConfigError(
            f"listen: {', '.join(nixl)}: one nixl:// URL at most, and a tcp:// URL beside it, which peers "
            f"ask and fall back to"
        )
    if any(url.startswith("nixl://") for url in peers):
        raise ConfigError(
            "peers: give tcp:// URLs; that a node has NIXL is learnt from the membership (join)"
        )


def _check_tls(values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for files that do not belong together, or cannot be read, or can be by anybody."""
    files = {name: values.get(name, "") for name in ("tls_cert", "tls_key", "tls_ca", "tls_crl")}
    missing = [name for name in ("tls_cert", "tls_key", "tls_ca") if not files[name]]
    if any(files.values()) and missing:
        raise ConfigError(
            f"{', '.join(missing)}: not set, and with TLS all of tls_cert, tls_key and tls_ca are needed: "
            f"`kvpool certs init` and `kvpool certs node` make them"
        )
    for name, path in files.items():
        if path:
            _check_readable(name, path, secret=name == "tls_key")
    nixl = any(url.startswith("nixl://") for url in values.get("listen", ()))
    chosen = values.get("plaintext") or values.get("pull_over") == "nixl"
    if files["tls_cert"] and nixl and not chosen:
        raise ConfigError(
            "listen: a nixl:// URL, and tls_cert: what NIXL moves is not encrypted. Leave that URL out, or where "
            "its network is trusted, say so: plaintext (--plaintext), or pull_over nixl (--pull-over nixl)"
        )


def _check_http(values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a gateway that whoever reaches it could use, or overhear."""
    tokens = values.get("http_tokens", "")
    if tokens:
        _check_readable("http_tokens", tokens, secret=True)
    for address in values.get("http", ()):
        if address.startswith(HTTP_UNIX) or is_loopback(host_and_port(address)[0]):
            continue
        if not tokens:
            raise ConfigError(
                f"http: {address} is not loopback, so whoever asks must show a token: make one with "
                f"`kvpool token NAME --role admin --file FILE`, and name that file (http_tokens, --http-tokens)"
            )
        if not values.get("tls_cert") and not values.get("plaintext"):
            raise ConfigError(
                f"http: {address} is not loopback, and tokens must not be overheard: give tls_cert, tls_key and "
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


def _node_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", host)[:63].lstrip("._-") or "node"


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def parse_setting(name: str, value: object) -> Any:
    """What one setting of `DaemonConfig` is when it is given so. Raises `ConfigError`."""
    return _parse(name, value, name)


def _parse(key: str, value: object, where: str) -> Any:
    if key not in _PARSERS:
        raise ConfigError(f"{where}: there is no such setting. Known: {', '.join(_PARSERS)}")
    return _PARSERS[key](value, where)


assert {item.name for item in fields(DaemonConfig)} == set(_PARSERS), "a setting without a parser"
