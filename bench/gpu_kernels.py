"""A kernel that moves blocks between paged KV and pinned host memory by itself, for `bench/gpu.py`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvpool.engine_plugins.vllm.device import Paged, Strategy
from kvpool.engine_plugins.vllm.layout import Index

PIECE = 1024  # units that one program moves


@triton.jit
def _move(
    layer,
    segment,
    blocks,
    rows,
    layer_stride,
    row_stride,
    start,
    units,
    store: tl.constexpr,
    piece: tl.constexpr,
):
    """Units of one piece of one block; layer and segment point to units, start is within the row."""
    item = tl.program_id(0)
    at = tl.program_id(1) * piece + tl.arange(0, piece)
    block = tl.load(blocks + item)
    row = tl.load(rows + item)
    device = layer + block * layer_stride + at
    host = segment + row * row_stride + start + at
    if store:
        tl.store(host, tl.load(device, mask=at < units), mask=at < units)
    else:
        tl.store(device, tl.load(host, mask=at < units), mask=at < units)


def _launch(paged: Paged, blocks: Index, segment: Any, rows: Index, *, store: bool) -> None:
    block_index, row_index = paged.index(blocks), paged.index(rows)
    units_of_segment = segment.view(paged.layers[0].dtype)
    for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
        grid = (len(blocks), triton.cdiv(stop - start, PIECE))
        _move[grid](
            layer,
            units_of_segment,
            block_index,
            row_index,
            layer.stride(0),
            units_of_segment.stride(0),
            start,
            stop - start,
            store=store,
            piece=PIECE,
        )


def _store(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    _launch(paged, blocks, segment, rows, store=True)


def _load(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    _launch(paged, blocks, segment, rows, store=False)


KERNEL = Strategy(_store, _load)
