"""The plugin against the vLLM that is installed: names, signatures, start-up, memory views."""

from __future__ import annotations

import inspect
import pickle
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
    supports_hma,
)

from kvpool.engine_plugins.vllm import MODULE, NAME, connector, register
from kvpool.engine_plugins.vllm.layout.pages import HostPages, byte_rows
from kvpool.engine_plugins.vllm.metrics import COUNTERS
from kvpool.engine_plugins.vllm.plan import RankReport, StepDone, StepPlan
from kvpool.engine_plugins.vllm.prometheus import KvpoolPromMetrics, KvpoolStats
from kvpool.engine_plugins.vllm.worker.device import DevicePages, PinnedSegments
from kvpool.errors import ConfigError

# --- names and signatures


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is connector.KvpoolConnector
    assert connector.KvpoolConnector.__name__ == NAME
    assert connector.__name__ == MODULE


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="kvpool")
    assert found.load() is register


def test_it_keeps_the_hybrid_cache_manager() -> None:
    assert supports_hma(connector.KvpoolConnector)
    assert issubclass(connector.KvpoolConnector, SupportsHMA)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, _ in inspect.getmembers(KVConnectorBase_V1, callable)
        if name in vars(connector.KvpoolConnector) and not name.startswith("__")
    ],
)
def test_each_hook_takes_what_vllm_gives(name: str) -> None:
    """Positions and names of the base class's parameters, so that both ways of calling work."""
    theirs = inspect.signature(getattr(KVConnectorBase_V1, name)).parameters
    ours = inspect.signature(getattr(connector.KvpoolConnector, name)).parameters
    assert list(ours) == list(theirs)
    for mine, base in zip(ours.values(), theirs.values(), strict=True):
        assert mine.kind == base.kind, name
        assert (mine.default is inspect.Parameter.empty) >= (
            base.default is inspect.Parameter.empty
        )


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(connector.KvpoolConnector)


def test_vllm_calls_the_constructor_with_the_cache_config() -> None:
    assert "kv_cache_config" in inspect.signature(connector.KvpoolConnector).parameters


def test_messages_cross_processes() -> None:
    report = RankReport(0, "cpu", "L", "", [[("a", 1)]], {"a": "B"})
    for message in (
        connector.KvpoolMetadata(StepPlan(want_report=True)),
        connector.KvpoolWorkerMetadata(StepDone(loads={1: 1}, reports=[report])),
        connector.KvpoolHandshake(report),
        KvpoolStats(data={"loads": 1}),
    ):
        assert pickle.loads(pickle.dumps(message)) == message


def test_ranks_messages_are_merged() -> None:
    one = connector.KvpoolWorkerMetadata(StepDone(loads={1: 1}))
    both = one.aggregate(connector.KvpoolWorkerMetadata(StepDone(loads={1: 1}, failed_loads={1})))
    assert both.done == StepDone(loads={1: 2}, failed_loads={1})


# --- metrics


def test_stats_are_summed_and_reduced() -> None:
    stats = KvpoolStats(data={"loads": 1, "load_seconds": 0.25})
    stats.aggregate(KvpoolStats(data={"loads": 2, "saved_blocks": 3}))
    assert stats.reduce() == {"loads": 3, "load_seconds": 0.25, "saved_blocks": 3}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_prometheus_shows_every_counter() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = KvpoolPromMetrics(
        SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"], 1: ["1"]}
    )
    metrics.observe({"loaded_blocks": 5, "load_seconds": 0.5}, engine_idx=1)
    text = generate_latest(registry).decode()
    assert 'vllm:kvpool_loaded_blocks_total{engine="1"} 5.0' in text
    assert 'vllm:kvpool_load_seconds_total{engine="1"} 0.5' in text
    for name in COUNTERS:
        assert f'vllm:kvpool_{name}_total{{engine="0"}} 0.0' in text


# --- start-up


def test_hashes_that_differ_between_processes_are_refused(
    kit: Any, llama: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match=r"xxhash.*sha256_cbor.*PYTHONHASHSEED"),
        kit.run_engine(llama, str(tmp_path / "nobody"), prefix_caching_hash_algo="xxhash"),
    ):
        pass


def test_unknown_settings_are_refused(kit: Any, llama: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="lease_seconds"),
        kit.run_engine(llama, str(tmp_path / "nobody"), {"lease_seconds": 3}),
    ):
        pass


def test_the_namespace_is_complete_and_loads_by_module_path(
    kit: Any, llama: Path, daemon: Any
) -> None:
    """Also loaded by path, as where no entry point is installed."""
    with kit.run_engine(llama, daemon, kv_connector_module_path=MODULE) as engine:
        fields = engine.namespace.record.fields
        assert fields["model"] == str(llama)
        assert fields["device"] == ["cpu"]
        assert fields["isa"] != [""]
        assert fields["hash_algorithm"] == "sha256"
        assert set(fields["versions"]) == {"python", "vllm"}
        assert fields["groups"][0]["type"] == "FullAttentionSpec"
        assert not {"tp", "pp", "dcp", "pcp", "ranks", "layout"} & fields.keys()
        assert fields["groups"][0]["kind"] == "halves"
        assert fields["groups"][0]["shards"] == 2
        # Of one head, four layers of K and V: 64, four bytes each.
        sizes = [part.nbytes for part in engine.namespace.parts]
        assert sizes == [4 * kit.BLOCK * 2 * 64 * 4] * 2


# --- memory


def test_rows_are_blocks_of_the_engines_memory() -> None:
    storage = torch.arange(2 * 4 * 3 * 8 * 5, dtype=torch.int32)
    layers = storage.view(2, 4, 3, 8, 5)  # layers, blocks, heads, tokens, content
    rows = byte_rows(layers[1], 4)
    assert rows.shape == (4, 3 * 8 * 5 * 4)
    assert rows[2].numpy().tobytes() == layers[1, 2].numpy().tobytes()
    rows[2] = 0
    assert not layers[1, 2].any()
    assert layers[1, 1].all()


def test_rows_of_packed_layers_have_gaps() -> None:
    storage = torch.arange(4 * 2 * 3 * 8 * 5, dtype=torch.int32)
    blocks = storage.view(4, 2, 3, 8, 5)  # blocks, layers, heads, tokens, content
    rows = byte_rows(blocks[:, 1], 4)
    assert rows.stride(0) == 2 * rows.shape[1]
    assert rows[3].numpy().tobytes() == blocks[3, 1].numpy().tobytes()


def test_kernel_blocks_are_put_together() -> None:
    layer = torch.arange(8 * 3 * 4, dtype=torch.int32).view(8, 1, 3, 4)
    rows = byte_rows(layer, 4)
    assert rows[1].numpy().tobytes() == layer[2:4].numpy().tobytes()


@pytest.mark.parametrize("blocks", [3, 16])
def test_a_count_that_does_not_divide_is_refused(blocks: int) -> None:
    with pytest.raises(ValueError, match="rows of KV"):
        byte_rows(torch.zeros(8, 1, 3, 4), blocks)


def test_blocks_that_are_scattered_are_refused() -> None:
    heads_first = torch.zeros(2, 4, 8, 5).transpose(0, 1)  # blocks, heads: heads outermost
    with pytest.raises(ValueError, match="are not contiguous"):
        byte_rows(heads_first, 4)


class Slots:
    def __init__(self, table: np.ndarray, nbytes: int) -> None:
        self.table, self.nbytes = table, nbytes


@pytest.mark.parametrize("sizes", [(64, 128), (24, 7)])
@pytest.mark.parametrize("chunk_bytes", [1, 400, 1 << 20])
def test_the_streams_path_copies_what_the_hosts_does(
    sizes: tuple[int, int], chunk_bytes: int
) -> None:
    """On the CPU device, whose streams do nothing: the bytes, not the overlap."""
    random = np.random.default_rng(0)
    layers = [random.integers(0, 256, (12, size), np.uint8) for size in sizes]
    table = np.zeros((20, sum(sizes) + 8), np.uint8)
    slots = Slots(table, sum(sizes))
    blocks, rows = np.array([3, 11, 4, 0, 7]), np.array([19, 2, 3, 4, 9])
    segments = PinnedSegments(torch.device("cpu"))
    device = DevicePages([torch.from_numpy(layer) for layer in layers], segments, chunk_bytes)
    device.to_slots(blocks, slots, rows)
    expected = np.zeros_like(table)
    HostPages(layers).to_slots(blocks, Slots(expected, sum(sizes)), rows)
    assert np.array_equal(table, expected)

    copies = [np.zeros_like(layer) for layer in layers]
    back = DevicePages([torch.from_numpy(copy) for copy in copies], segments, chunk_bytes)
    back.from_slots(slots, rows, blocks)
    for copy, layer in zip(copies, layers, strict=True):
        assert np.array_equal(copy[blocks], layer[blocks])
        assert copy.any(axis=1).sum() == len(blocks)
    segments.close()
