"""Where announced engines may be: prompts go nowhere that the operator did not allow. Pure, but for the resolver.

Any client of a tenant that may announce engines names a URL, and whoever answers there reads prompts and writes answers.
So an announcement counts only if its host is in a network, or has a name, that the router's `announced_from` lists. Some
addresses never count, whatever is listed, and no name may lead to them: link-local ones, at which clouds answer with
the machine's credentials, and the clouds' other addresses of that kind.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from kvpool.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK = ("127.0.0.0/8", "::1/128")
ENTRIES_MAX = 256

# Of Amazon, Alibaba, Oracle and Azure; the usual one, 169.254.169.254, is link-local.
_METADATA = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"))
)
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*")


def never(address: Address) -> bool:
    """Whether no engine is at this address."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address in _METADATA
    )


class EngineHosts:
    """See the module. Immutable."""

    def __init__(self, entries: Iterable[str]) -> None:
        """entries: networks (`10.0.0.0/8`), addresses, names (`gpu-7`), or ends of names (`*.engines.local`).

        Raises `ConfigError`.
        """
        networks: list[Network] = []
        names: list[str] = []
        for entry in entries:
            text = entry.strip().lower().removesuffix(".")
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                # An address with a mistake in it is no name.
                if text.replace(".", "").isdigit() or ":" in text or "/" in text:
                    raise ConfigError(f"announced_from: {entry!r}: {error}") from None
                if not _NAME.fullmatch(text):
                    raise ConfigError(
                        f"announced_from: {entry!r}: must be a network (10.0.0.0/8), a name, or the end of one (*.local)"
                    ) from None
                names.append(text)
        if len(networks) + len(names) > ENTRIES_MAX:
            raise ConfigError(f"announced_from: at most {ENTRIES_MAX} entries")
        self._networks = tuple(networks)
        self._names = tuple(names)

    def refusal(self, url: str) -> str:
        """Why requests are not sent to this URL; empty: they are."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            return f"it is not a URL: {error}"
        if parts.username is not None or parts.query or parts.fragment or not host:
            return "its URL has more, or less, than a host, a port and a path"
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return self._refusal_of_name(host.lower().removesuffix("."))
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if never(address):
            return f"no engine is at {host}, a link-local, metadata or multicast address"
        if any(address in network for network in self._networks):
            return ""
        return f"{host} is in no network of announced_from"

    def _refusal_of_name(self, name: str) -> str:
        if name == "localhost":
            return self.refusal("http://127.0.0.1")
        for allowed in self._names:
            if name == allowed or (allowed.startswith("*.") and name.endswith(allowed[1:])):
                return ""
        return f"{name} is no name of announced_from"


class EngineResolver(AbstractResolver):
    """Resolves engines' names, and leaves out addresses at which there is no engine."""

    def __init__(self, resolver: AbstractResolver | None = None) -> None:
        self._resolver = resolver or aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        good = [each for each in found if not never(ipaddress.ip_address(_bare(each["host"])))]
        if not good:
            raise OSError(f"{host} leads only to addresses at which no engine can be")
        return good

    async def close(self) -> None:
        await self._resolver.close()


def _bare(host: str) -> str:
    """Without the zone of a link-local address."""
    return host.partition("%")[0]


def parse_entries(value: object, where: str) -> Sequence[Any]:
    """For the setting: texts, or one with commas. Raises `ConfigError`."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(each, str) for each in items):
        raise ConfigError(f'{where}: must be a list such as ["10.0.0.0/8", "*.engines.local"]')
    entries = tuple(each.strip() for each in items if each.strip())
    EngineHosts(entries)
    return entries
