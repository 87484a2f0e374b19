"""A kernel that moves blocks between paged KV and the pool's segments by itself: a `Strategy`.

One launch moves all blocks of all layers and shards, whatever their sizes: pieces of a few KiB, as tensor parallelism
leaves them, go as fast as large ones. Few programs fill the bus; more would take multiprocessors away from
the engine and bring nothing.

Needs triton, and memory that the device can reach: registered with the driver, or its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from kvpool.engine_plugins.vllm.layout.pages import Index
from kvpool.engine_plugins.vllm.worker.device_copies import WORD, Paged, Strategy

PROGRAMS = 32
PIECE = 1024
"""Units that a program moves at a time."""


# Specialised for nothing that differs from call to call: each new kind of launch is compiled, while it waits.
@triton.jit(do_not_specialize=["blocks", "rows", "count", "layers", "pieces"])
def _move(
    places: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    segment: tl.tensor,
    row_units: tl.tensor,
    count: tl.tensor,
    layers: tl.tensor,
    pieces: tl.tensor,
    wide: tl.constexpr,
    dense: tl.constexpr,
    store: tl.constexpr,
    piece: tl.constexpr,
) -> None:
    """Each program takes its share of (block, stretch, piece of a stretch), block by block.

    places: `Paged.places`, of `layers` stretches; dense: each is one run. segment: rows of `row_units` units. pieces: of the largest stretch.
    """
    unit = tl.int64 if wide else tl.uint8
    for work in range(tl.program_id(0), count * layers * pieces, tl.num_programs(0)):
        at = (work % pieces) * piece + tl.arange(0, piece)
        place = places + (work // pieces % layers) * 6
        block = work // pieces // layers
        start = tl.load(place + 2)
        inside = at < tl.load(place + 5)
        memory = tl.load(place).to(tl.pointer_type(unit))
        device = memory + tl.load(blocks + block) * tl.load(place + 1)
        if dense:  # divisions take longer than copies on the device
            device += at
        else:
            run = tl.load(place + 3)
            device += at // run * tl.load(place + 4) + at % run
        host = segment + tl.load(rows + block) * row_units + start + at
        if store:
            tl.store(host, tl.load(device, mask=inside), mask=inside)
        else:
            tl.store(device, tl.load(host, mask=inside), mask=inside)


def _launch(paged: Paged, blocks: Index, segment: Any, rows: Index, *, store: bool) -> None:
    if not len(blocks):
        return
    numbers = paged.index(np.concatenate([blocks, rows]))
    units = segment.view(paged.layers[0].dtype)
    largest = max(place.units for place in paged.stretches)
    _move[(PROGRAMS,)](
        paged.places,
        numbers[: len(blocks)],
        numbers[len(blocks) :],
        units,
        units.stride(0),
        len(blocks),
        len(paged.stretches),
        triton.cdiv(largest, PIECE),
        wide=paged.unit == WORD,
        dense=all(place.units == place.run for place in paged.stretches),
        store=store,
        piece=PIECE,
    )


def _store(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    _launch(paged, blocks, segment, rows, store=True)


def _load(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    _launch(paged, blocks, segment, rows, store=False)


KERNEL = Strategy(_store, _load, _load)
