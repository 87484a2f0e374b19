"""Engines that are announced to a node that is alone, and what it could give of a prompt."""

from dataclasses import replace

import pytest

from kvpool.errors import InvalidRequest, LimitExceeded, NotAuthenticated
from kvpool.types import EngineRecord, NamespaceRecord
from kvpool.wire import frame

RECORD = NamespaceRecord.simple("script", block_bytes=4096, block_tokens=16)
ENGINE = EngineRecord(
    "http://127.0.0.1:8000",
    role="prefill",
    model="m",
    events="tcp://127.0.0.1:5557",
    groups=(0,),
    hash_algorithm="sha256_cbor",
    none_hash="ab" * 32,
    block_tokens=16,
    max_len=4096,
)
ANNOUNCE = """
from kvpool.types import EngineRecord
client = Client(SOCKET, timeout_s=60.0)
ns = client.open(RECORD)
url = hear()
while url:
    say(client.engine.announce(ns, None if url == "none" else EngineRecord(url)))
    url = hear()
"""


def key(number):
    return number.to_bytes(16, "big")


def test_an_engine_is_known_as_long_as_its_process_lives(start, until):
    daemon = start("--node", "n", "--label", "zone=z")
    with daemon.client() as asker:
        assert asker.routing.engines() == []
        engine = daemon.script(ANNOUNCE)
        for url in ("http://h:1", "http://h:2"):
            engine.say(url)
            assert engine.hear() == "True"
            (found,) = asker.routing.engines()
            assert (found["url"], found["role"], found["node"]) == (url, "both", "n")
            assert found["namespace"] == RECORD.digest().hex()
            assert found["here"] and found["labels"] == {"zone": "z"}
        engine.say("none")
        engine.hear()
        assert asker.routing.engines() == []
        engine.say("http://h:3")
        engine.hear()
        assert asker.routing.engines()
        engine.kill()
        until(lambda: asker.routing.engines() == [], what="the engine is forgotten")


def test_a_client_that_is_idle_keeps_its_engine(daemon, client, until):
    engine = daemon.script(
        ANNOUNCE.replace("url = hear()\nwhile", "url = 'http://h:1'\nwhile", 1).replace(
            "    url = hear()", "    client.close(); url = hear()"
        )
    )
    assert engine.hear() == "True"
    until(lambda: daemon.stats().connections == 2)  # this question's own, and the fixture's
    assert len(client.routing.engines()) == 1


def test_it_is_told_again_to_a_daemon_that_was_started_anew(start, until):
    daemon = start(name="first")
    with daemon.client() as client, daemon.client() as asker:
        ns = client.open(RECORD)
        assert client.engine.announce(ns, ENGINE)
        daemon.kill()
        assert not client.engine.announce(ns, ENGINE)
        start("--socket", daemon.socket, name="second")
        until(lambda: client.engine.announce(ns, ENGINE))
        told = [engine for engine in asker.routing.engines() if engine["url"] == ENGINE.url]
        assert len(told) == 1
        assert told[0].items() >= {"groups": [0], "max_len": 4096, "tenant": "default"}.items()


def test_tenants_know_their_own_only(start):
    daemon = start(
        config='[tenants.a]\nannounce = true\ntoken = "token-of-a-123456"\nmemory = "8MiB"\n'
        '[tenants.b]\ntoken = "token-of-b-123456"\nmemory = "8MiB"\n'
    )
    with (
        daemon.client(tenant="a", token="token-of-a-123456") as one,
        daemon.client(tenant="b", token="token-of-b-123456") as other,
    ):
        ns = one.open(RECORD)
        assert one.engine.announce(ns, replace(ENGINE, tenant="b"))
        assert [engine["url"] for engine in one.routing.engines()] == [ENGINE.url]
        assert other.routing.engines() == []
        with pytest.raises(NotAuthenticated, match="announce = true"):
            other.engine.announce(other.open(RECORD), ENGINE)
        assert other.engine.announce(other.open(RECORD), None), "to withdraw is no right"
        assert other.routing.engines() == []
        one.put(ns, [key(1)], [bytes(4096)])
        assert one.routing.prefixes(ns.digest, [key(1)]) != {}
        assert other.routing.prefixes(ns.digest, [key(1)]) == {}


WRONG = [
    {"url": ""},
    {"url": "ftp://h:1"},
    {"url": "http://u:p@h:1"},
    {"url": "http://h:1/?x"},
    {"url": f"http://{'h' * 300}:1"},
    {"role": "chief"},
    {"events": "tcp://*:5557"},
    {"events": "http://h:1"},
    {"replay": "tcp://h:0"},
    {"model": "m" * 300},
    {"none_hash": "xy"},
    {"none_hash": "ab" * 65},
    {"groups": tuple(range(65))},
    {"groups": (-1,)},
    {"max_len": -1},
    {"block_bytes": 1 << 60},
]


def test_what_no_engine_can_be(client):
    ns = client.open(RECORD)
    for wrong in WRONG:
        with pytest.raises(InvalidRequest):
            client.engine.announce(ns, replace(ENGINE, **wrong))
        assert client.routing.engines() == []
    assert client.engine.announce(ns, None)


def test_engines_of_a_node_are_limited(start):
    daemon = start("--engines-max", "1")
    with daemon.client() as one, daemon.client() as two:
        assert one.engine.announce(one.open(RECORD), ENGINE)
        with pytest.raises(LimitExceeded, match="engines_max"):
            two.engine.announce(two.open(RECORD), ENGINE)
        assert one.engine.announce(one.open(RECORD), None)
        assert two.engine.announce(two.open(RECORD), ENGINE)


def test_prefixes_of_a_node_that_is_alone(start, until):
    daemon = start("--node", "n")
    with daemon.client() as client:
        ns = client.open(RECORD)
        keys = [key(n) for n in range(10)]
        assert client.routing.prefixes(ns.digest, keys) == {}
        assert client.routing.prefixes(bytes(16), keys) == {}
        client.put(ns, keys[:6], [bytes(4096)] * 6)
        client.put(ns, keys[7:], [bytes(4096)] * 3)
        assert client.routing.prefixes(ns.digest, keys) == {"n": (6, 6)}
        assert client.routing.prefixes(ns.digest, keys[7:]) == {"n": (3, 3)}
        assert client.routing.prefixes(ns.digest, []) == {}
        with pytest.raises(LimitExceeded):
            client.routing.prefixes(ns.digest, bytes(16 * (frame.KEYS_MAX + 1)))


def test_prefixes_count_disks(start, folder, until):
    daemon = start("--node", "n", "--ssd", f"{folder / 'd'}=64MiB", "--ssd-write", "through")
    with daemon.client() as client:
        ns = client.open(RECORD)
        keys = [key(n) for n in range(8)]
        client.put(ns, keys, [bytes(4096)] * 8)
        until(lambda: client.stats().tiers.ssd[0].written_blocks == 8)
        client.evict(keys[2:5], tier="dram")
        assert client.routing.prefixes(ns.digest, keys) == {"n": (2, 8)}


def test_the_default_tenant_may_be_told_not_to(start):
    daemon = start("--no-announce")
    with daemon.client() as client, pytest.raises(NotAuthenticated, match="may not announce"):
        client.engine.announce(client.open(RECORD), ENGINE)
