"""What is made of an engine by its announcement, its configuration, and its own word."""

from dataclasses import fields

import pytest

from kvpool.errors import ConfigError
from kvpool.router.hashing import HashSpec, none_hash
from kvpool.router.upstream.specs import (
    Place,
    by_rank,
    differs,
    of_rank,
    scheduled,
    spec_of,
    with_models,
)
from kvpool.scheduler.values import Role

ANNOUNCED = {
    "url": "http://h:8000",
    "role": "prefill",
    "model": "m",
    "events": "tcp://h:5557",
    "replay": "tcp://h:5558",
    "topic": "kv",
    "groups": [2],
    "hash_algorithm": "sha256_cbor",
    "none_hash": "ab" * 32,
    "block_tokens": 32,
    "block_bytes": 4096,
    "capacity_tokens": 1000,
    "step_tokens": 512,
    "steps_at_once": 6,
    "max_len": 900,
    "follows_max": 8,
    "tenant": "default",
    "namespace": "cd" * 16,
    "node": "n",
    "incarnation": "00",
    "labels": {"zone": "z"},
    "here": False,
}


def test_what_was_announced():
    spec = spec_of("http://h:8000/", announced=ANNOUNCED, table=None)
    assert (spec.url, spec.name, spec.node, spec.role) == (
        "http://h:8000",
        "h:8000",
        "n",
        Role.PREFILL,
    )
    assert (spec.model, spec.kind, spec.labels) == ("m", "m@cdcdcdcd", {"zone": "z"})
    assert (spec.events, spec.replay, spec.topic) == ("tcp://h:5557", "tcp://h:5558", "kv")
    assert (spec.groups, spec.namespace) == ((2,), bytes.fromhex("cd" * 16))
    assert spec.hashing == HashSpec(32, "sha256_cbor", bytes.fromhex("ab" * 32))
    assert (spec.capacity_tokens, spec.step_tokens, spec.max_len) == (1000, 512, 900)
    engine = scheduled(spec)
    assert engine.gpu == "gpu:h:8000"
    assert engine.tiers == ("dram:n/cdcdcdcd", "ssd:n/cdcdcdcd")
    assert (engine.capacity_tokens, engine.follows_max, engine.labels) == (1000, 8, {"zone": "z"})
    assert engine.steps_at_once == 6


def test_an_announced_url_with_the_path_of_the_api_is_refused():
    with pytest.raises(ConfigError, match="leave out /v1"):
        spec_of("http://h:8000/v1/", announced=ANNOUNCED, table=None)


def test_the_configuration_goes_before_it_field_by_field():
    table = {"url": "http://h:8000", "name": "e", "role": "decode", "max_len": 5, "hash_seed": "7"}
    spec = spec_of("http://h:8000", announced=ANNOUNCED, table=table)
    assert (spec.name, spec.role, spec.max_len, spec.node) == ("e", Role.DECODE, 5, "n")
    assert spec.hashing == HashSpec(32, "sha256_cbor", none_hash("sha256_cbor", "7"))
    other = spec_of("http://h:8000", announced=ANNOUNCED, table={"hash": "sha256"})
    assert other.hashing == HashSpec(32, "sha256", none_hash("sha256"))


def test_what_is_configured_alone():
    spec = spec_of(
        "http://h:1",
        announced=None,
        table={"block_tokens": 16, "events": "ipc:///e", "follows_max": 4},
    )
    assert spec.hashing == HashSpec(16, "sha256_cbor", none_hash("sha256_cbor"))
    assert (spec.events, spec.groups, spec.node) == ("ipc:///e", (0,), "")
    assert scheduled(spec).tiers == ()
    assert scheduled(spec).follows_max == 0
    assert spec_of("http://h:1", announced=None, table={}).hashing is None
    # Of an unknown namespace, nobody knows what its engines could use of each other's blocks.
    assert scheduled(spec_of("http://h:1", announced=None, table={"node": "n"})).tiers == ()


def test_a_rank_is_an_engine_of_its_own():
    spec = spec_of("http://h:8000/", announced={**ANNOUNCED, "rank": 3}, table=None)
    assert (spec.name, spec.place) == ("h:8000-dp3", Place("http://h:8000", 3))
    assert spec.rank_header == {"X-data-parallel-rank": "3"}
    assert scheduled(spec).gpu == "gpu:h:8000-dp3"
    first = spec_of("http://h:8000/", announced={**ANNOUNCED, "rank": 0}, table=None)
    assert (first.name, first.rank_header) == ("h:8000-dp0", {"X-data-parallel-rank": "0"})
    older = spec_of("http://h:8000/", announced=ANNOUNCED, table=None)
    assert (older.name, older.rank, older.rank_header) == ("h:8000", None, {})


def test_configured_ranks():
    table = {
        "url": "http://h:1",
        "name": "e",
        "data_parallel_size": 3,
        "events": "tcp://h:5557",
        "replay": "tcp://[::1]:5600",
        "capacity_tokens": 100,
    }
    specs = [spec_of("http://h:1", announced=None, table=each) for each in by_rank(table)]
    assert [spec.name for spec in specs] == ["e-dp0", "e-dp1", "e-dp2"]
    assert [spec.rank for spec in specs] == [0, 1, 2]
    assert [spec.events for spec in specs] == [f"tcp://h:{port}" for port in (5557, 5558, 5559)]
    assert [spec.replay for spec in specs] == [f"tcp://[::1]:{port}" for port in (5600, 5601, 5602)]
    assert {spec.capacity_tokens for spec in specs} == {100}
    assert by_rank({"url": "http://h:1"}) == [{"url": "http://h:1"}]
    assert spec_of("http://h:1", announced=None, table=of_rank({}, 2)).name == "h:1-dp2"
    for events in ("ipc:///e", "tcp://h:65535"):
        with pytest.raises(ConfigError, match="next ports"):
            by_rank({"data_parallel_size": 2, "events": events})
    assert len(by_rank({"data_parallel_size": 1, "events": "ipc:///e"})) == 1


def test_a_path_is_good_on_this_machine_only():
    said = {**ANNOUNCED, "events": "ipc:///e", "replay": "ipc:///r"}
    assert spec_of("http://h:1", announced=said, table=None).events == ""
    assert spec_of("http://h:1", announced=said, table=None).replay == ""
    here = spec_of("http://h:1", announced={**said, "here": True}, table=None)
    assert (here.events, here.replay) == ("ipc:///e", "ipc:///r")


def test_hashes_that_are_not_known():
    """A newer engine is sent requests all the same; whoever configures one has mistaken something."""
    for said in ({"hash_algorithm": "md5"}, {"none_hash": "?"}, {"block_tokens": -1}):
        assert spec_of("http://h:1", announced={**ANNOUNCED, **said}, table=None).hashing is None
    newer = {**ANNOUNCED, "hash_algorithm": "md5"}
    assert spec_of("http://h:1", announced=newer, table={"hash_seed": "7"}).hashing is None
    with pytest.raises(ConfigError, match="md5"):
        spec_of("http://h:1", announced=ANNOUNCED, table={"hash": "md5"})


@pytest.mark.parametrize(
    "said",
    [
        {"role": "cook"},
        {"groups": [-1]},
        {"groups": [1 << 40]},
        {"namespace": "?"},
        {"steps_at_once": -1},
        {"capacity_tokens": 1 << 62},
        {"block_bytes": -4096},
        {"rank": -1},
    ],
)
def test_what_no_engine_can_be(said):
    with pytest.raises(ConfigError):
        spec_of("http://h:1", announced={**ANNOUNCED, **said}, table=None)
    for url in ("http://[h:1", "pigeon://h:1", "h:1"):
        with pytest.raises(ConfigError):
            spec_of(url, announced=ANNOUNCED, table=None)


def test_what_it_says_itself():
    cards = [
        {"id": "m", "root": "/m", "max_model_len": 4096, "parent": None},
        {"id": "alias", "max_model_len": 4096},
        {"id": "lora", "root": "/lora", "parent": "m"},
        {"no": "id"},
    ]
    spec = with_models(spec_of("http://h:1", announced=None, table={}), cards)
    assert (spec.model, spec.kind, spec.models) == ("m", "m", ("m", "alias", "lora"))
    assert (spec.adapters, spec.max_len) == ({"lora": "/lora"}, 4096)
    assert all(spec.serves(name) for name in ("", "m", "alias", "lora"))
    assert not spec.serves("other")
    assert with_models(spec_of("http://h", announced=ANNOUNCED, table=None), cards).max_len == 900
    assert with_models(spec_of("http://h", announced=None, table={}), []).models == ()


def test_the_scheduler_hears_of_what_it_would_see():
    spec = spec_of("http://h:8000", announced=ANNOUNCED, table=None)
    assert not differs(spec, with_models(spec, [{"id": "m"}, {"id": "new"}]))
    for change in ({"node": "o"}, {"role": "decode"}, {"namespace": "ef" * 16}, {"follows_max": 1}):
        other = spec_of("http://h:8000", announced={**ANNOUNCED, **change}, table=None)
        assert differs(spec, other)
        one, two = scheduled(spec), scheduled(other)
        assert any(
            getattr(one, f.name) != getattr(two, f.name)
            for f in fields(one)
            if f.name != "computing"
        )
