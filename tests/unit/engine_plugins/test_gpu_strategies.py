"""The ways to move paged KV between a device and the pool: the bytes, on the CPU device and on a GPU.

Whoever runs these without a GPU sees which bytes go where, not how streams overlap.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.engine_plugins.vllm.layout.pages import DeviceSlots, HostPages, shard_rows  # noqa: E402
from kvpool.engine_plugins.vllm.worker.device import (  # noqa: E402
    DevicePages,
    PinnedSegments,
    strategy_for,
)
from kvpool.engine_plugins.vllm.worker.device_copies import STAGED, Paged, Strategy  # noqa: E402
from kvpool.errors import SegmentError  # noqa: E402
from kvpool.storage.device import DeviceSegment  # noqa: E402

pytestmark = pytest.mark.torch
HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
BLOCKS, ROWS = 12, 20


@dataclass
class Slots:
    table: np.ndarray
    nbytes: int


@pytest.fixture(
    params=[
        pytest.param("staged-cpu"),
        pytest.param("staged-cuda:0", marks=needs_gpu),
        pytest.param("kernel-cuda:0", marks=[needs_gpu, needs_triton]),
    ]
)
def way(request: pytest.FixtureRequest) -> tuple[Strategy, Any]:
    """A strategy and the device that it is tried on."""
    name, _, on = request.param.partition("-")
    if name == "staged":
        return STAGED, torch.device(on)
    from kvpool.engine_plugins.vllm.worker.device_kernel import KERNEL

    return KERNEL, torch.device(on)


@pytest.mark.parametrize("sizes", [(64, 128), (24, 7), (8, 8 * 1100, 16)])
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("chunk_bytes", [1, 400, 1 << 20])
def test_bytes_go_where_they_belong(
    way: tuple[Strategy, Any], sizes: tuple[int, ...], gap: int, chunk_bytes: int
) -> None:
    strategy, on = way
    random = np.random.default_rng(0)
    content = [random.integers(0, 256, (BLOCKS, size), np.uint8) for size in sizes]
    slots = Slots(np.zeros((ROWS, sum(sizes) + gap), np.uint8), sum(sizes))
    blocks, rows = np.array([3, 11, 4, 0, 7]), np.array([19, 2, 3, 4, 9])  # 2, 3, 4: a run
    segments = PinnedSegments(on)

    layers = [torch.from_numpy(each.copy()).to(on) for each in content]
    pages = DevicePages(layers, segments, chunk_bytes, strategy)
    pages.to_slots(blocks, slots, rows)
    expected = np.zeros_like(slots.table)
    expected[rows, : slots.nbytes] = np.concatenate([each[blocks] for each in content], axis=1)
    assert np.array_equal(slots.table, expected)
    pages.to_slots(blocks[:0], slots, rows[:0])
    assert np.array_equal(slots.table, expected)

    cleared = [torch.zeros_like(layer) for layer in layers]
    DevicePages(cleared, segments, chunk_bytes, strategy).from_slots(slots, rows, blocks)
    for layer, each in zip(cleared, content, strict=True):
        wanted = np.zeros_like(each)
        wanted[blocks] = each[blocks]
        assert np.array_equal(layer.cpu().numpy(), wanted)
    segments.close()


@pytest.mark.parametrize("sizes", [(64, 128), (24, 7), (8, 8 * 1100, 16)])
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("chunk_bytes", [1, 400, 1 << 20])
def test_rows_on_the_same_device_go_where_they_belong(
    way: tuple[Strategy, Any], sizes: tuple[int, ...], gap: int, chunk_bytes: int
) -> None:
    strategy, on = way
    content = np.random.default_rng(4).integers(0, 256, (ROWS, sum(sizes) + gap), np.uint8)
    table = torch.from_numpy(content.copy()).to(on)
    blocks, rows = np.array([3, 11, 4, 0, 7]), np.array([19, 2, 3, 4, 2])
    layers = [torch.zeros((BLOCKS, size), dtype=torch.uint8, device=on) for size in sizes]
    segments = PinnedSegments(on)
    pages = DevicePages(layers, segments, chunk_bytes, strategy)
    pages.from_slots(DeviceSlots(table, sum(sizes)), rows, blocks)
    pages.from_slots(DeviceSlots(table, sum(sizes)), rows[:0], blocks[:0])
    ends = np.cumsum(sizes)
    for layer, end, size in zip(layers, ends, sizes, strict=True):
        wanted = np.zeros((BLOCKS, size), np.uint8)
        wanted[blocks] = content[rows, end - size : end]
        assert np.array_equal(layer.cpu().numpy(), wanted)
    assert np.array_equal(table.cpu().numpy(), content)
    segments.close()


@pytest.mark.parametrize("rows", [[5, 2, 9], list(range(4, 14))])
def test_device_memory_that_is_the_hosts(rows: list[int]) -> None:
    """As the daemon has it on the CPU device, which is a tensor."""
    segment = DeviceSegment.create("cpu", ROWS, 96)
    content = np.random.default_rng(5).integers(0, 256, (ROWS, 96), np.uint8)
    segment.table[:] = torch.from_numpy(content)
    layers = [np.zeros((BLOCKS, size), np.uint8) for size in (64, 16)]
    blocks = np.arange(1, 1 + len(rows))
    HostPages(layers).from_slots(DeviceSlots(segment.table, 80), np.array(rows), blocks)
    for layer, start, stop in zip(layers, (0, 64), (64, 80), strict=True):
        wanted = np.zeros_like(layer)
        wanted[blocks] = content[rows, start:stop]
        assert np.array_equal(layer, wanted)
    segment.close()


def test_layers_with_gaps_between_blocks(way: tuple[Strategy, Any]) -> None:
    """As where all layers of a block lie together."""
    strategy, on = way
    content = np.random.default_rng(3).integers(0, 256, (BLOCKS, 96), np.uint8)
    whole = torch.from_numpy(content.copy()).to(on)
    layers = [whole[:, :32], whole[:, 32:96]]
    slots = Slots(np.zeros((ROWS, 96), np.uint8), 96)
    segments = PinnedSegments(on)
    blocks, rows = np.array([5, 2]), np.array([0, 1])
    pages = DevicePages(layers, segments, strategy=strategy)
    pages.to_slots(blocks, slots, rows)
    assert np.array_equal(slots.table[:2], content[blocks])
    pages.from_slots(slots, rows, np.array([0, 1]))
    content[[0, 1]] = content[blocks]
    assert np.array_equal(whole.cpu().numpy(), content)
    segments.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("content", [32, 24])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_shards_of_heads_in_any_layout(
    way: tuple[Strategy, Any],
    order: tuple[int, ...],
    shards: int,
    kernel_blocks: int,
    content: int,
    chunk_bytes: int,
) -> None:
    """Heads, then tokens, then content, whatever the order in memory: `order` of (blocks, heads, tokens, content)."""
    strategy, on = way
    heads, tokens = 4, 6
    random = np.random.default_rng(6)
    shape = (BLOCKS * kernel_blocks, heads, tokens // kernel_blocks, content)
    kv = [random.integers(0, 256, shape, np.uint8) for _ in range(2)]
    memory = [torch.from_numpy(each.transpose(order).copy()).to(on) for each in kv]
    layers = [each.permute([order.index(axis) for axis in range(4)]) for each in memory]
    rows = shard_rows(layers[0].shape, layers[0].stride(), 1, blocks=BLOCKS, shards=shards)
    per_shard = heads // shards
    slots = Slots(np.zeros((ROWS, 2 * per_shard * tokens * content), np.uint8), 0)
    slots.nbytes = slots.table.shape[1]
    blocks, places = np.array([3, 11, 0]), np.array([19, 2, 3])
    segments = PinnedSegments(on)
    pages = DevicePages([rows.of(layer) for layer in layers], segments, chunk_bytes, strategy)
    for shard in range(shards):
        own = slice(shard * per_shard, (shard + 1) * per_shard)
        pages.to_slots(blocks * rows.across + shard * rows.along, slots, places)
        apart = [each.reshape(BLOCKS, kernel_blocks, *shape[1:]) for each in kv]
        wanted = [each[blocks][:, :, own].swapaxes(1, 2).reshape(len(blocks), -1) for each in apart]
        assert np.array_equal(slots.table[places], np.concatenate(wanted, axis=1))

        target = blocks + 1 - 12 * (blocks == 11)
        pages.from_slots(slots, places, target * rows.across + shard * rows.along)
        for layer, each in zip(layers, kv, strict=True):
            found = each.reshape(BLOCKS, kernel_blocks, *shape[1:])
            found[target, :, own] = found[blocks, :, own]
            assert np.array_equal(layer.cpu().numpy(), each)
    segments.close()


@pytest.mark.parametrize("wide", [False, True])
def test_stretches_are_what_a_kernel_is_to_move(wide: bool) -> None:
    """By their addresses, as the kernel follows them."""
    unit = 8 if wide else 1
    memory = torch.arange(3 * 4 * 5 * 2 * unit, dtype=torch.int16).to(torch.uint8)
    whole = memory.view(3, 4, 5, 2 * unit)  # rows, tokens, heads, content
    layer = whole[:, :, 1:4].permute(0, 2, 1, 3)
    paged = Paged([memory.view(3, -1)[:, : 2 * unit], layer], 100)
    assert paged.unit == unit
    for row in range(3):
        slot = np.zeros(paged.nbytes, np.uint8)
        for place in paged.stretches:
            for at in range(place.units):
                address = place.address + unit * (
                    row * place.stride + at // place.run * place.jump + at % place.run
                )
                to = unit * (place.start + at)
                slot[to : to + unit] = np.frombuffer(ctypes.string_at(address, unit), np.uint8)
        expected = [memory.view(3, -1)[row, : 2 * unit], layer[row].reshape(-1)]
        assert np.array_equal(slot, torch.cat(expected).numpy())


@needs_gpu
def test_a_copy_waits_for_what_the_engine_has_queued(way: tuple[Strategy, Any]) -> None:
    strategy, on = way
    if on.type == "cpu":
        pytest.skip("the CPU device has no streams")
    layer = torch.zeros((BLOCKS, 1 << 16), dtype=torch.uint8, device=on)
    slots = Slots(np.zeros((ROWS, 1 << 16), np.uint8), 1 << 16)
    segments = PinnedSegments(on)
    pages = DevicePages([layer], segments, strategy=strategy)
    blocks = np.arange(BLOCKS)
    for value in range(1, 5):
        busy = torch.ones((4096, 4096), device=on)
        for _ in range(20):
            busy = busy @ busy / 4096
        layer.fill_(value)
        ready = torch.cuda.Event()
        ready.record()
        pages.to_slots(blocks, slots, blocks, ready)
        assert (slots.table[:BLOCKS] == value).all()
    segments.close()


@needs_gpu
def test_the_pool_is_registered_for_as_long_as_it_is_used() -> None:
    table = np.zeros((64, 1 << 16), np.uint8)
    memory = torch.from_numpy(table)
    segments = PinnedSegments(torch.device("cuda:0"))
    assert not memory.is_pinned()
    tensor = segments.tensor(table)
    assert memory.is_pinned()
    assert tensor.data_ptr() == table.ctypes.data
    assert segments.tensor(table) is tensor
    halves = segments.tensor(table.reshape(128, 1 << 15))  # rows of another class, the same memory
    assert halves.shape == (128, 1 << 15)
    segments.close()
    assert not memory.is_pinned()


@needs_gpu
def test_a_part_is_registered_before_the_whole() -> None:
    table = np.arange(1 << 22, dtype=np.uint64).view(np.uint8).reshape(64, -1)
    segments = PinnedSegments(torch.device("cuda:0"))
    segments.tensor(table[:16])
    whole = segments.tensor(table)
    assert torch.from_numpy(table[63]).is_pinned()
    assert np.array_equal(whole.to("cuda:0", non_blocking=True).cpu().numpy(), table)
    segments.close()


@needs_gpu
def test_memory_that_the_driver_refuses() -> None:
    table = np.zeros((4, 1 << 12), np.uint8)
    missing = np.lib.stride_tricks.as_strided(table, (1 << 28, 1 << 12))  # most of it is not there
    with pytest.raises(SegmentError, match="refused to register"):
        PinnedSegments(torch.device("cuda:0")).tensor(missing)
    # What the engine does next on this thread is not taken for the cause.
    assert int((torch.ones(100, device="cuda:0") * 2).sum()) == 200


def test_what_the_plugin_uses() -> None:
    assert strategy_for(torch.device("cpu")) is STAGED
    if HAS_GPU and HAS_TRITON:
        assert strategy_for(torch.device("cuda:0")) is not STAGED


def test_the_bench_proves_the_bytes(repo_root: Path, tmp_path: Path) -> None:
    written = tmp_path / "gpu.json"
    ran = subprocess.run(
        [
            *(sys.executable, str(repo_root / "bench/gpu.py")),
            *("--quick", "--only", "together", "--json", str(written)),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(written.read_text())
    assert {row["name"] for row in found["rows"]} >= {"kv-together memcpy", "kv-together staged"}
    if not torch.cuda.is_available():
        assert "no GPU here" in ran.stdout
        assert not found["checks"]
        assert {row["device"] for row in found["rows"]} == {"cpu"}
