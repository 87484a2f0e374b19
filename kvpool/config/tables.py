"""Settings with several values: tenants, disks, a device; and their written forms."""

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

    memory: bytes, or a share of the free memory. token: required from its clients; None: anyone who
    can open the socket is accepted. ssd: its part of all disks together, in bytes or as a share; None: an equal
    part of the rest.
    """

    name: str
    memory: int | float
    token: str | None = None
    ssd: int | float | None = None

    def __repr__(self) -> str:
        return f"TenantConfig({self.name!r}, memory={self.memory!r}, ssd={self.ssd!r})"


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
        if not isinstance(table, dict) or not set(table) <= {"memory", "ssd", "token"}:
            raise ConfigError(
                f"{where}.{key}: a tenant has only the settings memory, ssd and token"
            )
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
