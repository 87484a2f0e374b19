"""How fast paged KV gets from a GPU into the pool and back, beside a plain copy of as many bytes.

    .venv-vllm/bin/python bench/gpu.py [--quick] [--json FILE] [--only SHAPE]

Blocks lie scattered, one piece in each layer's tensor, and go to slots anywhere in pinned host memory. The
ways to do that are the strategies of the vLLM plugin, called as it calls them, and others that it does not
use (`gpu_ways.py`). The limit is one copy between one contiguous tensor on the device and contiguous pinned
memory. Every way's bytes are compared.

A second part has each way copy all the time beside an engine that does nothing but multiply matrices, and
tells how much longer its multiplications take: what copies cost the one for whom they are made.

A third part copies rows between a segment of device memory and the pool's, as the daemon's device process
does. A fourth loads blocks from rows of device memory, as an engine does that has attached to the daemon's,
beside a plain copy on the device.

The checks are about the strategy that the plugin uses. Without a GPU everything runs on the CPU device:
that shows that the bytes are right and says nothing of speed, so there are no checks then.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gpu_ways import EACH, driver_batch
from harness import Report, in_turns, median, parse_arguments

from kvpool.engine_plugins.vllm.layout.pages import DeviceSlots
from kvpool.engine_plugins.vllm.worker.device import (
    DevicePages,
    PinnedSegments,
    strategy_for,
)
from kvpool.engine_plugins.vllm.worker.device_copies import STAGED, Strategy
from kvpool.storage.device import DeviceSegment, register

KIB, MIB = 1 << 10, 1 << 20
MATRIX = 8192  # bf16, and as many columns: a millisecond and a half on one H200


@dataclass(frozen=True)
class Shape:
    """Paged KV in bf16, blocks of 16 tokens: so many pieces a block, and their bytes."""

    name: str
    pieces: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.pieces * self.piece_bytes


SHAPES = [
    # 32 layers, 8 heads of 128: K and V of a block together, or in the two halves of each layer's tensor.
    Shape("kv-together", 32, 64 * KIB),
    Shape("kv-apart", 64, 32 * KIB),
    # 61 layers of latents of 576.
    Shape("mla", 61, 18 * KIB),
]
JUDGED = SHAPES[0]


@dataclass
class Slots:
    """Slots as the client gives them."""

    table: Any
    nbytes: int


def strategies(device: Any) -> dict[str, Strategy]:
    """Those that can be had here, the plugin's own last; says which cannot."""
    found = {"each": EACH, "staged": STAGED}
    batch = driver_batch() if device.type == "cuda" else None
    if batch is None:
        print("  batch is left out: it needs a driver of CUDA 12.8 or newer")
    else:
        found["batch"] = batch
    used = strategy_for(device)
    if used is STAGED:
        print("  kernel is left out: it needs a CUDA device and triton")
    else:
        found["kernel"] = used
    return found


def measure(report: Report, shape: Shape, device: Any, name: str) -> None:
    """Store and load by every strategy, in turns with the plain copy."""
    import torch

    on_gpu = device.type == "cuda"
    moved = (64 if on_gpu else 4) * MIB // shape.block_bytes
    blocks_held = 4 * moved
    rounds = (11 if report.quick else 51) if on_gpu else (3 if report.quick else 9)
    rng = np.random.default_rng(5)
    blocks = rng.permutation(blocks_held)[:moved]
    rows = rng.permutation(blocks_held)[:moved]

    layers = [
        torch.randint(0, 256, (blocks_held, shape.piece_bytes), dtype=torch.uint8, device=device)
        for _ in range(shape.pieces)
    ]
    memory = np.frombuffer(mmap.mmap(-1, blocks_held * shape.block_bytes), np.uint8)
    slots = Slots(memory.reshape(blocks_held, shape.block_bytes), shape.block_bytes)
    segments = PinnedSegments(device)
    pinned = segments.tensor(slots.table)[:moved]
    plain = torch.empty_like(pinned, device=device)
    module = torch.get_device_module(device)

    def wait() -> None:
        event = module.Event()
        event.record()
        event.synchronize()

    def plain_store() -> None:
        pinned.copy_(plain, non_blocking=True)
        wait()

    def plain_load() -> None:
        plain.copy_(pinned, non_blocking=True)
        wait()

    ways = {
        way: DevicePages(layers, segments, strategy=strategy)
        for way, strategy in strategies(device).items()
    }
    expected = np.concatenate([layer[blocks].cpu().numpy() for layer in layers], axis=1)
    for way, pages in ways.items():
        prove(way, pages, layers, slots, blocks, rows, expected)

    def calls(call: Callable[[DevicePages], None]) -> list[Callable[[], None]]:
        return [partial(call, pages) for pages in ways.values()]

    stores = in_turns(
        rounds, plain_store, *calls(lambda pages: pages.to_slots(blocks, slots, rows))
    )
    loads = in_turns(
        rounds, plain_load, *calls(lambda pages: pages.from_slots(slots, rows, blocks))
    )
    gigabytes = moved * shape.block_bytes / 1e9
    for way, store_s, load_s in zip(["memcpy", *ways], stores, loads, strict=True):
        store_ratio = median(stores[0]) / median(store_s)
        load_ratio = median(loads[0]) / median(load_s)
        report.row(
            f"{shape.name} {way}",
            device=name,
            store_gb_s=gigabytes / median(store_s),
            store_ratio=store_ratio,
            load_gb_s=gigabytes / median(load_s),
            load_ratio=load_ratio,
        )
        if on_gpu and way == list(ways)[-1] and shape is JUDGED:
            report.check("gpu_store", store_ratio, at_least=0.9)
            report.check("gpu_load", load_ratio, at_least=0.9)
    if on_gpu and shape is JUDGED:
        copies = {"memcpy": (plain_store, plain_load)}
        for way, pages in ways.items():
            copies[way] = (
                partial(pages.to_slots, blocks, slots, rows),
                partial(pages.from_slots, slots, rows, blocks),
            )
        beside_an_engine(report, copies, gigabytes, device)
    segments.close()


def beside_an_engine(
    report: Report,
    copies: dict[str, tuple[Callable[[], None], Callable[[], None]]],
    gigabytes: float,
    device: Any,
) -> None:
    """Time matrix products alone, then while each way copies as often as it can."""
    import torch

    left = torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    right, product = torch.randn_like(left), torch.empty_like(left)
    stream = torch.cuda.Stream()

    def engine() -> tuple[Any, Any]:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begun.record()
            for _ in range(100):
                torch.mm(left, right, out=product)
            ended.record()
        return begun, ended

    def alone_ms() -> float:
        begun, ended = engine()
        ended.synchronize()
        return float(begun.elapsed_time(ended))

    alone_ms()
    for way, both in copies.items():
        told: dict[str, float] = {}
        for name, copy in zip(("store", "load"), both, strict=True):
            before = alone_ms()
            count, start = 0, time.perf_counter()
            begun, ended = engine()
            while not ended.query():
                copy()
                count += 1
            told[f"{name}_gb_s"] = count * gigabytes / (time.perf_counter() - start)
            longer = begun.elapsed_time(ended) / ((before + alone_ms()) / 2)
            told[f"engine_{name}_ratio"] = longer
        report.row(f"beside an engine {way}", **told)


def segment_rows(report: Report, device: Any) -> None:
    """Scattered rows between a segment of device memory and registered host memory, one order at a time."""
    rng = np.random.default_rng(6)
    on_gpu = device.type == "cuda"
    memory = mmap.mmap(-1, (512 if on_gpu else 32) * MIB)
    if on_gpu:
        register(memory)
    whole = DeviceSegment.create(str(device), 1, len(memory))
    for stride in (2 * MIB, 256 * KIB, 64 * KIB):
        segment = whole.cut(stride)
        host = np.frombuffer(memory, np.uint8).reshape(-1, stride)
        count = 16 * MIB // stride
        rows, host_rows = (rng.permutation(len(host))[:count] for _ in range(2))
        host[host_rows] = content = rng.integers(0, 256, (count, stride), np.uint8)
        up, down = in_turns(
            21 if on_gpu else 3,
            lambda: segment.from_host(host, host_rows, rows),
            lambda: segment.to_host(rows, host, host_rows),
        )
        assert np.array_equal(host[host_rows], content), "wrong bytes"
        report.row(
            f"segment rows of {stride >> 10} KiB",
            up_gb_s=count * stride / 1e9 / median(up),
            down_gb_s=count * stride / 1e9 / median(down),
        )


def near_rows(report: Report, shape: Shape, device: Any) -> None:
    """Scattered rows of device memory to scattered blocks on the same device."""
    import torch

    on_gpu = device.type == "cuda"
    moved = (64 if on_gpu else 4) * MIB // shape.block_bytes
    rng = np.random.default_rng(7)
    blocks, rows = (rng.permutation(4 * moved)[:moved] for _ in range(2))
    whole = DeviceSegment.create(str(device), 4 * moved, shape.block_bytes)
    content = rng.integers(0, 256, (moved, shape.block_bytes), np.uint8)
    whole.table[torch.from_numpy(rows).to(device)] = torch.from_numpy(content).to(device)
    slots = DeviceSlots(whole.table, shape.block_bytes)
    layers = [
        torch.zeros((4 * moved, shape.piece_bytes), dtype=torch.uint8, device=device)
        for _ in range(shape.pieces)
    ]
    segments = PinnedSegments(device)
    source = torch.empty((moved, shape.block_bytes), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    module = torch.get_device_module(device)

    def plain() -> None:
        target.copy_(source)
        event = module.Event()
        event.record()
        event.synchronize()

    used = strategy_for(device)
    ways = {"staged": STAGED} if used is STAGED else {"staged": STAGED, "kernel": used}
    loads: list[Callable[[], None]] = []
    for way, strategy in ways.items():
        pages = DevicePages(layers, segments, strategy=strategy)
        for layer in layers:
            layer.zero_()
        pages.from_slots(slots, rows, blocks)
        found = np.concatenate([layer.cpu().numpy()[blocks] for layer in layers], axis=1)
        assert np.array_equal(found, content), f"{way} loaded wrong bytes"
        loads.append(lambda pages=pages: pages.from_slots(slots, rows, blocks))  # type: ignore[misc]
    times = in_turns(51 if on_gpu else 3, plain, *loads)
    for way, seconds in zip(["memcpy", *ways], times, strict=True):
        report.row(
            f"near {shape.name} {way}",
            load_gb_s=content.nbytes / 1e9 / median(seconds),
            load_ratio=median(times[0]) / median(seconds),
        )
    segments.close()
    whole.close()


def prove(
    way: str,
    pages: DevicePages,
    layers: Sequence[Any],
    slots: Slots,
    blocks: Any,
    rows: Any,
    expected: Any,
) -> None:
    """The bytes of a store, and of a load of what was stored into blocks that were cleared."""
    slots.table[:] = 0
    pages.to_slots(blocks, slots, rows)
    assert np.array_equal(slots.table[rows], expected), f"{way} stored wrong bytes"
    assert slots.table.any(axis=1).sum() == len(rows), f"{way} wrote to other slots"
    others = [layer.clone() for layer in layers]
    for layer, other in zip(layers, others, strict=True):
        layer[blocks] = 0
        other[blocks] = 0
    pages.from_slots(slots, rows, blocks)
    found = np.concatenate([layer[blocks].cpu().numpy() for layer in layers], axis=1)
    assert np.array_equal(found, expected), f"{way} loaded wrong bytes"
    for layer, other in zip(layers, others, strict=True):
        other[blocks] = layer[blocks]
        assert bool((layer == other).all()), f"{way} wrote to other blocks"


def main() -> int:
    report, arguments = parse_arguments(__doc__ or "")
    try:
        import torch
    except ImportError:
        raise SystemExit("this bench needs torch: .venv-vllm/bin/python bench/gpu.py") from None
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    if not on_gpu:
        print("no GPU here: on the CPU device, for the bytes; the times say nothing of a GPU")
    for shape in SHAPES:
        if arguments.only in shape.name:
            print(f"{shape.name}: {shape.pieces} pieces of {shape.piece_bytes >> 10} KiB a block")
            measure(report, shape, device, name)
    if arguments.only in "segment":
        segment_rows(report, device)
    if arguments.only in "near":
        for shape in SHAPES:
            near_rows(report, shape, device)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
