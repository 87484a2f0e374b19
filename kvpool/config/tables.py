"""Settings with several values: tenants, disks, a device, streams of events; and their written forms."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from kvpool.config import parse
from kvpool.errors import ConfigError
from kvpool.secret_files import read_secret_file
from kvpool.types import DEFAULT_TENANT

DISKS_MAX = 16
DISK_BYTES_MIN = 4 << 20
DEVICE_BYTES_MIN = 2 << 20
STREAMS_MAX = 16
_STREAM_SETTINGS = {"model", "endpoint", "replay", "topic", "tenant"}
_HERE = re.compile(r"ipc:///.+|tcp://(127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\]):\d{1,5}")
_TENANT_SETTINGS = {"memory", "ssd", "token", "token_file", "announce"}
_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")


class TenantConfig(msgspec.Struct, frozen=True):
    """A tenant with a segment of its own.

    memory: bytes, or a share of the free memory. token: required from its clients; None: anyone who
    can open the socket is accepted. ssd: its part of all disks together, in bytes or as a share; None: an equal
    part of the rest. announce: its clients may announce engines to routers.
    """

    name: str
    memory: int | float
    token: str | None = None
    ssd: int | float | None = None
    announce: bool = False

    def __repr__(self) -> str:
        return (
            f"TenantConfig({self.name!r}, memory={self.memory!r}, ssd={self.ssd!r}, "
            f"announce={self.announce!r})"
        )


class StreamConfig(msgspec.Struct, frozen=True):
    """A stream of KV events: of the namespaces of a tenant whose model has this name.

    endpoint, replay: ZeroMQ addresses to bind, on this machine; replay may be empty. topic: empty: `kv@NODE@MODEL`.
    """

    name: str
    model: str
    endpoint: str
    replay: str = ""
    topic: str = ""
    tenant: str = DEFAULT_TENANT


class DiskConfig(msgspec.Struct, frozen=True):
    """A disk of tier ssd: a folder, and the most bytes that it may use.

    threads: concurrent reads and writes.
    """

    path: str
    size: int
    threads: int = 8


class DeviceConfig(msgspec.Struct, frozen=True):
    """Spare memory of one device, `cuda:N` or `cpu`: tier device."""

    device: str
    size: int


def tenants(value: object, where: str) -> tuple[TenantConfig, ...]:
    """The tables of tenants. Raises `ConfigError`."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: write one table per tenant, [tenants.NAME]")
    found = []
    for key, table in value.items():
        tenant = parse.word(key, f"{where}.{key}")
        if not isinstance(table, dict) or not set(table) <= _TENANT_SETTINGS:
            raise ConfigError(
                f"{where}.{key}: a tenant has only the settings {', '.join(sorted(_TENANT_SETTINGS))}"
            )
        if "memory" not in table:
            raise ConfigError(f"{where}.{key}.memory is missing: each tenant has its own segment")
        announce = table.get("announce", tenant == DEFAULT_TENANT)
        if not isinstance(announce, bool):
            raise ConfigError(f"{where}.{key}.announce must be true or false")
        found.append(
            TenantConfig(
                tenant,
                parse.parse_size(table["memory"], f"{where}.{key}.memory"),
                _token(table, f"{where}.{key}"),
                parse.parse_size(table["ssd"], f"{where}.{key}.ssd") if "ssd" in table else None,
                announce,
            )
        )
    return tuple(found)


def streams(value: object, where: str) -> tuple[StreamConfig, ...]:
    """The tables of streams of KV events. Raises `ConfigError`."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: write one table per stream, [publish_events.NAME]")
    found = []
    for key, table in value.items():
        name, at = parse.word(key, f"{where}.{key}"), f"{where}.{key}"
        if not isinstance(table, dict) or not set(table) <= _STREAM_SETTINGS:
            raise ConfigError(
                f"{at}: a stream has only the settings {', '.join(sorted(_STREAM_SETTINGS))}"
            )
        for needed in ("model", "endpoint"):
            if not table.get(needed):
                raise ConfigError(f"{at}.{needed} is missing")
        texts = {key: parse.text(given, f"{at}.{key}") for key, given in table.items()}
        for setting in ("endpoint", "replay"):
            if texts.get(setting) and not _HERE.fullmatch(texts[setting]):
                raise ConfigError(
                    f"{at}.{setting} = {texts[setting]!r}: must be ipc:///PATH or tcp://127.0.0.1:PORT. ZeroMQ does not "
                    "ask who subscribes, so events are published on this machine only"
                )
        found.append(StreamConfig(name, **texts))
    endpoints = [at for stream in found for at in (stream.endpoint, stream.replay) if at]
    if len(set(endpoints)) != len(endpoints) or len(found) > STREAMS_MAX:
        raise ConfigError(
            f"{where}: give at most {STREAMS_MAX} streams, each with addresses of its own"
        )
    return tuple(found)


def _token(table: Mapping[str, object], where: str) -> str | None:
    """None: the tenant needs none."""
    if "token_file" in table:
        if "token" in table:
            raise ConfigError(f"{where}: set token or token_file, not both")
        path = parse.text(table["token_file"], f"{where}.token_file")
        return parse.secret(read_secret_file(path, f"{where}.token_file"), f"{where}.token_file")
    if "token" not in table:
        return None
    token = parse.secret(table["token"], f"{where}.token")
    if not token:
        raise ConfigError(f"{where}.token is empty: leave it out if the tenant needs none")
    return token


def disks(value: object, where: str) -> tuple[DiskConfig, ...]:
    """A list of PATH=SIZE, or such a list with commas."""
    found = []
    for item in parse.items(value, where, 'a list such as ["/mnt/nvme0/kvpool=400GiB"]'):
        path, separator, text = item.rpartition("=")
        if not separator or not path:
            raise ConfigError(
                f"{where}: {item!r} is not PATH=SIZE, such as /mnt/nvme0/kvpool=400GiB"
            )
        size = parse.parse_size(text, f"{where}: {path}")
        if not isinstance(size, int) or size < DISK_BYTES_MIN:
            raise ConfigError(
                f"{where}: {path}: the size must be at least {DISK_BYTES_MIN >> 20}MiB"
            )
        found.append(DiskConfig(os.path.abspath(path), size))
    if len({disk.path for disk in found}) != len(found) or len(found) > DISKS_MAX:
        raise ConfigError(f"{where}: give at most {DISKS_MAX} folders, each once")
    return tuple(found)


def device(value: object, where: str) -> DeviceConfig:
    """DEVICE=SIZE."""
    name, _, text = parse.text(value, where).strip().partition("=")
    size = parse.parse_size(text, where) if text else 0
    if not _DEVICE.fullmatch(name) or not isinstance(size, int) or size < DEVICE_BYTES_MIN:
        raise ConfigError(
            f"{where} = {value!r}: must be DEVICE=SIZE, at least {DEVICE_BYTES_MIN >> 20}MiB, such as cuda:0=8GiB"
        )
    return DeviceConfig(name, size)
