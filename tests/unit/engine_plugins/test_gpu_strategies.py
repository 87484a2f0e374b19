"""The ways to move paged KV between a device and the pool: the bytes, on the CPU device and on a GPU.

Whoever runs these without a GPU sees which bytes go where, not how streams overlap.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.engine_plugins.vllm import device  # noqa: E402
from kvpool.engine_plugins.vllm.device import (  # noqa: E402
    BATCH,
    EACH,
    STAGED,
    DevicePages,
    PinnedSegments,
    Strategy,
)

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
BLOCKS, ROWS = 12, 20


@dataclass
class Slots:
    table: np.ndarray
    nbytes: int


@pytest.fixture
def drivers_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's operator by its contract: it is not in builds for the CPU."""

    def swap(source: Any, target: Any, sizes: Any, any_order: bool) -> None:
        for from_, to, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(to, from_, size)

    monkeypatch.setattr(device, "_driver_batch", lambda: swap)


def cases() -> list[Any]:
    names = {"each": EACH, "staged": STAGED, "batch": BATCH}
    return [
        pytest.param(strategy, on, id=f"{name}-{on}")
        for name, strategy in names.items()
        for on in (DEVICES if name != "batch" else DEVICES[:1])
    ]


@pytest.mark.parametrize(("strategy", "on"), cases())
@pytest.mark.parametrize("sizes", [(64, 128), (24, 7)])
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("chunk_bytes", [1, 400, 1 << 20])
def test_bytes_go_where_they_belong(
    strategy: Strategy,
    on: str,
    sizes: tuple[int, int],
    gap: int,
    chunk_bytes: int,
    drivers_batch: None,
) -> None:
    random = np.random.default_rng(0)
    content = [random.integers(0, 256, (BLOCKS, size), np.uint8) for size in sizes]
    slots = Slots(np.zeros((ROWS, sum(sizes) + gap), np.uint8), sum(sizes))
    blocks, rows = np.array([3, 11, 4, 0, 7]), np.array([19, 2, 3, 4, 9])  # 2, 3, 4: a run
    segments = PinnedSegments(torch.device(on))

    layers = [torch.from_numpy(each.copy()).to(on) for each in content]
    pages = DevicePages(layers, segments, chunk_bytes, strategy)
    pages.to_slots(blocks, slots, rows)
    expected = np.zeros_like(slots.table)
    expected[rows, : slots.nbytes] = np.concatenate([each[blocks] for each in content], axis=1)
    assert np.array_equal(slots.table, expected)

    cleared = [torch.zeros_like(layer) for layer in layers]
    DevicePages(cleared, segments, chunk_bytes, strategy).from_slots(slots, rows, blocks)
    for layer, each in zip(cleared, content, strict=True):
        wanted = np.zeros_like(each)
        wanted[blocks] = each[blocks]
        assert np.array_equal(layer.cpu().numpy(), wanted)
    segments.close()


@pytest.mark.parametrize("strategy", [EACH, STAGED, BATCH])
def test_layers_with_gaps_between_blocks(strategy: Strategy, drivers_batch: None) -> None:
    """As where all layers of a block lie together."""
    whole = torch.arange(BLOCKS * 96, dtype=torch.int64).to(torch.uint8).view(BLOCKS, 96)
    layers = [whole[:, :32], whole[:, 32:96]]
    slots = Slots(np.zeros((ROWS, 96), np.uint8), 96)
    segments = PinnedSegments(torch.device("cpu"))
    blocks, rows = np.array([5, 2]), np.array([0, 1])
    pages = DevicePages(layers, segments, strategy=strategy)
    pages.to_slots(blocks, slots, rows)
    assert np.array_equal(slots.table[:2], whole.numpy()[blocks])
    pages.from_slots(slots, rows, np.array([0, 1]))
    assert np.array_equal(whole.numpy()[:2], slots.table[:2])
    segments.close()


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
