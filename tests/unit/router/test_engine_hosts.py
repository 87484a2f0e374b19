"""Where announced engines may be."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.router.upstream.engine_hosts import (
    LOOPBACK,
    EngineHosts,
    EngineResolver,
    never,
    parse_entries,
)

ALLOWED = EngineHosts(["10.0.0.0/8", "fd00::/8", "gpu-7", "*.engines.local", "192.168.1.5"])
EVERYWHERE = EngineHosts(["0.0.0.0/0", "::/0"])


@pytest.mark.parametrize(
    "url",
    [
        "http://10.1.2.3:8000",
        "https://10.255.255.255/v1",
        "http://192.168.1.5",
        "http://[fd00::1]:8000",
        "http://[::ffff:10.1.2.3]:8000",
        "http://gpu-7:8000",
        "http://GPU-7.:8000",
        "http://a.b.engines.local",
        "tcp://10.1.2.3:5557",
    ],
)
def test_allowed(url: str) -> None:
    assert ALLOWED.refusal(url) == ""


@pytest.mark.parametrize(
    "url",
    [
        "http://11.1.2.3:8000",
        "http://192.168.1.6",
        "http://[2001:db8::1]",
        "http://[::ffff:11.1.2.3]",
        "http://gpu-70:8000",
        "http://engines.local",
        "http://evilengines.local",
        "http://engines.local.evil.example",
        "http://user:secret@10.1.2.3",
        "http://10.1.2.3/?x=1",
        "http://10.1.2.3#x",
        "http://10.1.2.3:99999",
        "http://[10.1.2.3",
        "http://",
        "",
        # Forms that some libraries take for addresses.
        "http://167838211",
        "http://0x0a010203",
        "http://012.1.2.3",
        "http://10.66051",
        "http://localhost:8000",
        "http://127.0.0.1:8000",
    ],
)
def test_refused(url: str) -> None:
    assert ALLOWED.refusal(url)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.0.1",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
        "0.0.0.0",
        "[::]",
        "224.0.0.1",
        "[ff02::1]",
        "[::ffff:169.254.169.254]",
    ],
)
def test_some_addresses_are_never_an_engine(address: str) -> None:
    assert "link-local" in EVERYWHERE.refusal(f"http://{address}:80")
    assert EVERYWHERE.refusal("http://203.0.113.9:80") == ""


def test_by_default_engines_are_on_this_machine() -> None:
    hosts = EngineHosts(LOOPBACK)
    for url in (
        "http://127.0.0.1:8000",
        "http://127.3.2.1",
        "http://[::1]:1",
        "http://localhost:8000",
    ):
        assert hosts.refusal(url) == ""
    for url in ("http://10.0.0.5:8000", "http://gpu-7", "http://localhost.evil.example"):
        assert hosts.refusal(url)


def test_nothing_is_allowed_where_nothing_is_listed() -> None:
    assert EngineHosts(()).refusal("http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "entry",
    ["10.0.0.0/33", "10.0.0.1/8", "10.0.0", "a b", "*", "*.", "a.*.b", "", "http://a", "::/129"],
)
def test_entries_that_mean_nothing(entry: str) -> None:
    with pytest.raises(ConfigError, match="announced_from"):
        EngineHosts([entry])


def test_the_setting() -> None:
    assert parse_entries("10.0.0.0/8, gpu-7", "x") == ("10.0.0.0/8", "gpu-7")
    assert parse_entries(["::1"], "x") == ("::1",)
    assert parse_entries("", "x") == ()
    for wrong in (7, ["10.0.0.0/8", 7], ["10/8/8"]):
        with pytest.raises(ConfigError):
            parse_entries(wrong, "x")


@given(st.ip_addresses(), st.ip_addresses())
def test_only_the_addresses_of_a_network_are_allowed(
    listed: ipaddress.IPv4Address, other: ipaddress.IPv4Address
) -> None:
    hosts = EngineHosts([str(listed)])
    for address in (listed, other):
        host = f"[{address}]" if address.version == 6 else str(address)
        allowed = hosts.refusal(f"http://{host}:1") == ""
        plain = getattr(address, "ipv4_mapped", None) or address
        assert allowed == (plain == listed and not never(plain))


class Names(AbstractResolver):
    """A resolver that says what it was told."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=each, port=port, family=family, proto=0, flags=0)
            for each in self.addresses
        ]

    async def close(self) -> None:
        pass


def test_no_name_leads_to_them() -> None:
    async def main() -> None:
        some = EngineResolver(Names("169.254.169.254", "10.0.0.5", "fe80::1%eth0"))
        assert [each["host"] for each in await some.resolve("gpu-7", 80)] == ["10.0.0.5"]
        none = EngineResolver(Names("169.254.169.254"))
        with pytest.raises(OSError, match="no engine can be"):
            await none.resolve("gpu-7", 80)

    asyncio.run(main())
