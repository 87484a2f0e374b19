"""What routers are told of an engine, again and again."""

import threading
from types import SimpleNamespace

import pytest

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.events import reachable
from kvpool.engine_plugins.vllm.plan import GroupRule
from kvpool.engine_plugins.vllm.scheduler.presence import (
    Presence,
    engine_record,
    rank_at_url,
    whole_groups,
)
from kvpool.errors import ConfigError, LimitExceeded
from kvpool.types import PartKind
from tests.support.waiting import PATIENCE_S


def vllm(**events):
    return SimpleNamespace(
        model_config=SimpleNamespace(model="/m", served_model_name=["m", "n"], max_model_len=99),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=77),
        kv_transfer_config=SimpleNamespace(engine_id="0a_dp1"),
        parallel_config=SimpleNamespace(
            data_parallel_index=1,
            data_parallel_size=4,
            data_parallel_rank_local=0,
            data_parallel_external_lb=True,
            data_parallel_hybrid_lb=False,
            pipeline_parallel_size=3,
        ),
        kv_events_config=SimpleNamespace(
            **{
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": "tcp://*:5557",
                "replay_endpoint": "tcp://*:5600",
                "topic": "kv",
                **events,
            }
        ),
    )


def record(config, **events):
    rules = [GroupRule(3)]
    return engine_record(
        vllm(**events), config, rules, hash_tokens=16, none_hash=b"\xab", blocks=101
    )


def test_an_engine_without_a_url_is_not_told_of():
    assert record(PluginConfig()) is None


def test_what_is_told():
    found = record(PluginConfig(url="http://h.example:8000/", engine_role="prefill"))
    assert (found.url, found.role, found.model) == ("http://h.example:8000", "prefill", "m")
    assert (found.events, found.replay) == ("tcp://h.example:5558", "tcp://h.example:5601")
    assert (found.topic, found.groups, found.none_hash) == ("kv", (3,), "ab")
    assert (found.capacity_tokens, found.step_tokens, found.max_len) == (1600, 77, 99)
    assert (found.follows_max, found.steps_at_once) == (8, 3)
    assert record(PluginConfig(url="http://h:1", pull_wait_s=0)).follows_max == 0
    assert record(PluginConfig(url="http://[::1]:1")).events == "tcp://[::1]:5558"


@pytest.mark.parametrize(
    ("balanced_by", "rank"), [("external", None), ("hybrid", 0), ("this server", 1)]
)
def test_ranks_behind_one_url_are_told_of_one_by_one(balanced_by, rank):
    config = vllm()
    config.parallel_config.data_parallel_external_lb = balanced_by == "external"
    config.parallel_config.data_parallel_hybrid_lb = balanced_by == "hybrid"
    found = engine_record(
        config,
        PluginConfig(url="http://h:1"),
        [GroupRule(3)],
        hash_tokens=16,
        none_hash=b"",
        blocks=101,
    )
    assert found.rank == rank
    assert (found.steps_at_once, found.capacity_tokens) == (3, 1600)
    assert found.events == "tcp://h:5558"  # of its own, by its number in the whole


@pytest.mark.parametrize(
    ("size", "index", "engine_id", "rank"),
    [
        (1, 0, "0a", None),
        (1, 0, "0a_dp0", 0),  # as vLLM says it to an engine core of a dense model
        (1, 3, "0a_dp3", 3),
        (4, 0, "0a", 0),
    ],
)
def test_an_engine_with_a_url_of_its_own_has_no_rank(size, index, engine_id, rank):
    parallel = vllm().parallel_config
    parallel.data_parallel_external_lb = False
    parallel.data_parallel_size, parallel.data_parallel_index = size, index
    assert rank_at_url(parallel, engine_id) == rank


@pytest.mark.parametrize(
    ("events", "endpoint"),
    [
        ({"enable_kv_cache_events": False}, ""),
        ({"publisher": "null"}, ""),
        ({"endpoint": "tcp://10.0.0.1:5557"}, ""),  # somebody else is to listen there
    ],
)
def test_events_that_nobody_can_follow(events, endpoint):
    assert reachable(vllm(**events).kv_events_config, 0, "h").endpoint == endpoint


def test_paths_are_told_as_they_are():
    config = vllm(endpoint="ipc:///e", replay_endpoint="ipc:///r").kv_events_config
    found = reachable(config, 0, "h")
    assert (found.endpoint, found.replay) == ("ipc:///e", "ipc:///r")


def test_the_groups_that_say_whether_a_block_is_held():
    window = GroupRule(1, kind=PartKind.WINDOW, window_blocks=4)
    assert whole_groups([GroupRule(0), window, GroupRule(2, stride=4), GroupRule(5)]) == (0, 5)
    assert whole_groups([window]) == ()


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h:1", "http://u@h:1", "http://h:1?x"])
def test_addresses_that_are_none(url):
    with pytest.raises(ConfigError, match="url"):
        PluginConfig(url=url)
    with pytest.raises(ConfigError, match="engine_role"):
        PluginConfig.from_given({"engine_role": "chief"})


def test_it_is_told_again_until_the_end(caplog):
    calls, third = [], threading.Event()

    def announce():
        calls.append(1)
        if len(calls) == 3:
            third.set()
        raise LimitExceeded("one engine too many")

    presence = Presence(announce, every_s=0.001)
    presence.begin()
    assert third.wait(PATIENCE_S)
    presence.end()
    presence.end()
    assert caplog.text.count("one engine too many") == 1
    after = len(calls)
    assert "kvpool-presence" not in {thread.name for thread in threading.enumerate()}
    assert len(calls) == after
