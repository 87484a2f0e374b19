"""Settings of a namespace, between a client and the daemon of a node that is alone."""

import msgspec
import pytest

from kvpool.errors import InvalidRequest, Unavailable
from kvpool.placement.records import DEFAULT_SETTINGS
from kvpool.types import NamespaceRecord

DEFAULTS = msgspec.to_builtins(DEFAULT_SETTINGS)
RECORD = NamespaceRecord.simple("settings", block_bytes=4096, block_tokens=16)
WISH = {"write": "through", "ttl_s": 60.0, "ssd_codec": "blosc2"}


def kept(client) -> dict[str, object]:
    namespaces = client.stats().tenants["default"].namespaces
    return namespaces[RECORD.digest().hex()].settings


def back(client) -> bool:
    """Whether it has found the daemon again."""
    try:
        client.stats()
    except Unavailable:
        return False
    return True


def test_a_client_asks_for_them_and_asks_again_after_a_restart(daemon, start, until):
    with daemon.client(connect=True) as client:
        ns = client.open(RECORD, replicas=2, **WISH)
        assert kept(client) == DEFAULTS | {"replicas": 2, **WISH}
        daemon.kill()
        start("--socket", daemon.socket)
        until(lambda: back(client))
        client.put(ns, [bytes(16)], [bytes(4096)])
        assert kept(client) == DEFAULTS | {"replicas": 2, **WISH}


def test_an_operator_changes_them_one_by_one(daemon, client):
    client.open(RECORD, replicas=2, **WISH)
    for name, value, shown in (
        ("replicas", 3, "replicas"),
        ("write", "none", "write"),
        ("ttl_s", 0.0, "ttl_s"),
        ("ssd_codec", "", "ssd_codec"),
        ("dram_quota", 0.5, "dram_quota"),
        ("dram_quota", 1.0, "dram_quota"),
        ("ssd_quota", 1 << 40, "ssd_quota"),
    ):
        before = kept(client)
        client.configure(RECORD.digest(), **{name: value})
        assert kept(client) == before | {shown: value}
    (entry,) = client.cluster()["namespaces"]
    assert entry["settings"] == kept(client)


def test_what_an_operator_has_changed_outlives_the_daemon(start, folder):
    data = ("--data-dir", str(folder / "data"))
    first = start(*data)
    with first.client(connect=True) as client:
        client.open(RECORD, write="back")
        client.configure(RECORD.digest(), write="none", ttl_s=3600.0)
    first.stop()
    second = start(*data, name="second")
    with second.client(connect=True) as client:
        client.open(RECORD, write="back")
        assert (kept(client)["write"], kept(client)["ttl_s"]) == ("none", 3600.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"write": "later"}, "back, through, none"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ssd_codec": "zip"}, "blosc2"),
        ({"replicas": -1}, "replicas"),
    ],
)
def test_what_no_namespace_can_have_is_refused_with_a_reason(daemon, client, wrong, words):
    with pytest.raises(InvalidRequest, match=words):
        client.open(RECORD, **wrong)
    client.open(RECORD)
    with pytest.raises(InvalidRequest, match="dram_quota"):
        client.configure(RECORD.digest(), dram_quota=1.5)
    with pytest.raises(InvalidRequest, match=words):
        client.configure(RECORD.digest(), **wrong)
    assert kept(client) == DEFAULTS


def test_a_change_of_nothing_and_of_nobodys_namespace(daemon, client):
    client.open(RECORD)
    with pytest.raises(InvalidRequest, match="name at least one setting"):
        client.configure(RECORD.digest())
    with pytest.raises(InvalidRequest, match="knows no namespace"):
        client.configure(b"x" * 16, replicas=2)
