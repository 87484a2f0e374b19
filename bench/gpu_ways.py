"""Ways to move blocks between paged KV and pinned host memory that the plugin does not use, for `gpu.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool.engine_plugins.vllm.layout.pages import Index
from kvpool.engine_plugins.vllm.worker.device_copies import Paged, Strategy

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


def _store_each(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    for device, host in _pairs(paged, blocks, segment, rows):
        host.copy_(device, non_blocking=True)


def _load_each(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    for device, host in _pairs(paged, blocks, segment, rows):
        device.copy_(host, non_blocking=True)


def _pairs(paged: Paged, blocks: Index, segment: Any, rows: Index) -> Iterator[tuple[Any, Any]]:
    """The bytes of each block in each layer, on the device and in the segment."""
    import torch

    for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
        there = slice(start * paged.unit, stop * paged.unit)
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            yield layer[block].view(torch.uint8), segment[row, there]


EACH = Strategy(_store_each, _load_each)
"""One copy for each block of each layer."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: how the copies of a batch are ordered; the hints are for managed memory."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def driver_batch() -> Strategy | None:
    """The copies of `EACH`, given to the driver in one call; None where it knows no batches."""
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        return None

    def copy(target: Any, source: Any, sizes: Any) -> None:
        import torch

        failed = ctypes.c_size_t()
        code = driver.cuMemcpyBatchAsync(
            *(ctypes.c_void_p(each.ctypes.data) for each in (target, source, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(_Attributes(IN_STREAM_ORDER)),
            ctypes.byref(ctypes.c_size_t(0)),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        assert code == 0, f"cuMemcpyBatchAsync: {code}, copy {failed.value}"

    def store(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
        device, host, sizes = _addresses(paged, blocks, segment, rows)
        copy(host, device, sizes)

    def load(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
        device, host, sizes = _addresses(paged, blocks, segment, rows)
        copy(device, host, sizes)

    return Strategy(store, load)


def _addresses(paged: Paged, blocks: Index, segment: Any, rows: Index) -> tuple[Any, Any, Any]:
    """Where each block of each layer is on the device and in the segment, and its bytes."""
    unit = paged.unit
    slots = segment.data_ptr() + rows * segment.stride(0)
    device = [layer.data_ptr() + blocks * (layer.stride(0) * unit) for layer in paged.layers]
    host = [slots + start * unit for start, _ in paged.spans]
    sizes = [np.full(len(blocks), (stop - start) * unit) for start, stop in paged.spans]
    found = [np.concatenate(each).astype(np.uint64) for each in (device, host, sizes)]
    return found[0], found[1], found[2]
