"""The topology of the daemon's machine: its network cards, and the NUMA nodes of them and of its memory.

Read once, at the start, below `root`; nothing is changed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvpool.errors import ConfigError
from kvpool.extras import install

BONDS_MAX = 8
"""Cards of a bond, or a card below a VLAN, that are examined."""
_POLICY = re.compile(r"(?:bind|prefer)(?:=\w+)?:(\d+)")

Addresses = Callable[[], Iterable[tuple[str, str, str]]]


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card with one of its addresses. net: the network of the address, ADDRESS/BITS."""

    name: str
    net: str
    numa: int = -1


@dataclass(frozen=True, slots=True)
class HostTopology:
    """host: the same for all daemons on this machine. numa: of its memory; -1: several nodes, or
    unknown. nics: by address.
    """

    host: str = ""
    numa: int = -1
    nics: Mapping[str, Nic] = field(default_factory=dict)

    def nic(self, url: str) -> Nic | None:
        """The card that a URL listens on; None for a name, or for all addresses."""
        try:
            address = ipaddress.ip_address(urlsplit(url).hostname or "")
        except ValueError:
            return None
        found = self.nics.get(str(address))
        if found is None and address.is_loopback:
            return self.nics.get("127.0.0.1")  # all of 127.0.0.0/8 is local, and not listed
        return found


def interface_addresses() -> list[tuple[str, str, str]]:
    """Interface, address and netmask of each address of this machine. Raises `ConfigError`."""
    try:
        import psutil
    except ImportError:
        raise ConfigError(f"a cluster needs psutil: {install('cluster')}") from None
    return [
        (name, one.address.partition("%")[0], one.netmask)
        for name, listed in psutil.net_if_addrs().items()
        for one in listed
        if one.family.name in {"AF_INET", "AF_INET6"} and one.netmask
    ]


def look_around(
    root: Path = Path("/"),
    addresses: Addresses = interface_addresses,
    cpus: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
) -> HostTopology:
    """For this machine. cpus: those that this process may use."""
    nics = {}
    for name, address, netmask in addresses():
        net = ipaddress.ip_network(f"{address}/{_bits(netmask)}", strict=False)
        shown = str(ipaddress.ip_address(address))
        nics[shown] = Nic(name, str(net), _nic_numa(root, name))
    return HostTopology(_host(root), memory_numa(root, cpus()), nics)


def _bits(netmask: str) -> int:
    return int(ipaddress.ip_address(netmask)).bit_count()


def _host(root: Path) -> str:
    """One kernel, one machine: containers and network namespaces on it have the same."""
    boot = _read(root, "proc/sys/kernel/random/boot_id")
    return hashlib.sha256(boot.encode()).hexdigest()[:16] if boot else ""


def _nic_numa(root: Path, name: str) -> int:
    """For a card; for a bond or a VLAN, that of the cards below it, if they agree."""
    place = f"sys/class/net/{name}"
    numa = _number(_read(root, f"{place}/device/numa_node"))
    if numa >= 0:
        return numa
    try:
        below = sorted((root / place).glob("lower_*"))[:BONDS_MAX]
    except OSError:
        return -1
    found = {_number(_read(root, f"{place}/{lower.name}/device/numa_node")) for lower in below}
    return found.pop() if len(found) == 1 else -1


def memory_numa(root: Path, cpus: Iterable[int]) -> int:
    """The NUMA node of this process's segments, if there is one; -1: unknown.

    A policy that binds or prefers a node decides (`numactl --membind`), else the nodes that the process may
    take memory from (cpusets), else those of its processors, because memory is allocated where it is first
    written.
    """
    line = _read(root, "proc/self/numa_maps").partition("\n")[0]
    words = line.split()
    if len(words) > 1 and (match := _POLICY.fullmatch(words[1])):
        return int(match[1])
    for status in _read(root, "proc/self/status").splitlines():
        name, _, text = status.partition(":")
        if name == "Mems_allowed_list" and text.strip().isdigit():
            return int(text)
    usable = set(cpus)
    at = set()
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        listed = _read(root, f"sys/devices/system/node/{folder.name}/cpulist")
        if not usable.isdisjoint(_cpus(listed)):
            at.add(int(folder.name.removeprefix("node")))
    return at.pop() if len(at) == 1 else -1


def _cpus(listed: str) -> set[int]:
    """Of a list such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _read(root: Path, path: str) -> str:
    """A small file; empty if it is missing or unreadable."""
    try:
        return (root / path).read_text().strip()
    except OSError:
        return ""
