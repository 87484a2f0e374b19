"""Settings that are more than one value: tenants, disks, a device; and how they are written."""

from __future__ import annotations

import os
import re

import msgspec

from kvpool.config import parse
from kvpool.errors import ConfigError

DISKS_MAX = 16
DISK_BYTES_MIN = 4 << 20
DEVICE_BYTES_MIN = 2 << 20
_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")


class TenantConfig(msgspec.Struct, frozen=True):
    """A tenant with a segment of its own.

    memory: bytes, or a share of the free memory. token: what its clients must show; None: anyone who
    can open the socket. ssd: its part of the disks, all together, in bytes or as a share; None: what is left
    is divided equally.
    """

    name: str
    memory: int | float
    token: str | None = None
    ssd: int | float | None = None

    def __repr__(self) -> str:
        return f"TenantConfig({self.name!r}, memory={self.memory!r}, ssd={self.ssd!r})"


class DiskConfig(msgspec.Struct, frozen=True):
    """A disk of tier ssd: a folder, and the bytes that all in it may take.

    threads: reads and writes at a time.
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
        raise ConfigError(f"{where}: write one table a tenant, [tenants.NAME]")
    found = []
    for key, table in value.items():
        tenant = parse.word(key, f"{where}.{key}")
        if not isinstance(table, dict) or not set(table) <= {"memory", "ssd", "token"}:
            raise ConfigError(f"{where}.{key}: a tenant has memory, ssd and token, nothing else")
        if "memory" not in table:
            raise ConfigError(f"{where}.{key}.memory is missing: each tenant has its own segment")
        token = table.get("token")
        found.append(
            TenantConfig(
                tenant,
                parse.parse_size(table["memory"], f"{where}.{key}.memory"),
                None if token is None else parse.hidden(token, f"{where}.{key}.token"),
                parse.parse_size(table["ssd"], f"{where}.{key}.ssd") if "ssd" in table else None,
            )
        )
    return tuple(found)


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
            raise ConfigError(f"{where}: {path}: a size of at least {DISK_BYTES_MIN >> 20}MiB")
        found.append(DiskConfig(os.path.abspath(path), size))
    if len({disk.path for disk in found}) != len(found) or len(found) > DISKS_MAX:
        raise ConfigError(f"{where}: at most {DISKS_MAX} folders, each once")
    return tuple(found)


def device(value: object, where: str) -> DeviceConfig:
    """DEVICE=SIZE."""
    name, _, text = parse.text(value, where).strip().partition("=")
    size = parse.parse_size(text, where) if text else 0
    if not _DEVICE.fullmatch(name) or not isinstance(size, int) or size < DEVICE_BYTES_MIN:
        raise ConfigError(
            f"{where} = {value!r}: DEVICE=SIZE, at least {DEVICE_BYTES_MIN >> 20}MiB, such as cuda:0=8GiB"
        )
    return DeviceConfig(name, size)
