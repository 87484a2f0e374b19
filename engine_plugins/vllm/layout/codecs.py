"""Quantisation of KV on its way to the pool, and back: one byte an element, one scale a head.

Encoding happens on the engine's device before the copy to the pool, decoding after the copy from
it, so both halve the bytes on the bus, the network and in the pool's memory. Decoded KV differs from
computed KV: the codec is part of the namespace, so that engines without it, or with
another one, never see it.

A part is the records of its layers, one after the other. A record of a layer with E elements a
block and H heads (of the part's shard; of the rank, where the group is stored by rank):

    offset 0             E    to a multiple of 8              + 8 * H
           | payload ... | zeros  | scales, H x 2 ...         |
             E bytes               float32, little-endian: K and V of head 0, of head 1, ...

The payload's elements are in the order of the part without a codec (`shards.py`). `int8`: x = q *
scale, q from -127 to 127, rounded to even. `fp8`: x = q * scale, q in float8 e4m3 without
infinities, up to 448. The scale is the largest magnitude of that head in that block, layer and half
(K or V) divided by 127 or 448, and at least the smallest normal float32, so that heads of zeros stay
zeros. A head with an infinity or a NaN has the scale NaN: all of it reads back as NaN, but no
other head, other layer or its other half does. CODEC_VERSION (config.py) changes with any of
this.

A decoded head without those is encoded as the same bytes again: its largest element is restored
exactly, so the scale is the same, and rounding to the engine's dtype moves no other element by half
a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from kvpool.engine_plugins.vllm.config import Codec
from kvpool.engine_plugins.vllm.layout.pages import Index, Pages, SlotTable, chunks, spans
from kvpool.engine_plugins.vllm.layout.shards import CONTENT_BACKENDS, HALVES_BACKENDS
from kvpool.errors import ConfigError
from kvpool.memory.device_stream import finished_stream

WORD = 8
SCALE_BYTES = 4

CHUNK_BYTES = 8 << 20
"""KV encoded at a time. Working memory on the device is about six times that, for each thread."""

SAMPLE_EVERY = 64
"""One block of this many is decoded again at once, to measure its error."""

KINDS = {Codec.INT8: (torch.int8, 127.0), Codec.FP8: (torch.float8_e4m3fn, 448.0)}
"""The payload's dtype, and the magnitude that a head's largest element gets in it."""


@dataclass(frozen=True)
class HeadLayout:
    """Where in a layer's block the elements of a head's K and V are.

    shape: lengths of the block's axes, outermost in memory first, dense.
    heads, kv: the axes that count heads and K/V. Along all others a scale is shared.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    heads: int
    kv: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def scales(self) -> tuple[int, ...]:
        """`shape` with 1 for the axes along which a scale is shared."""
        return tuple(
            length if axis in (self.heads, self.kv) else 1 for axis, length in enumerate(self.shape)
        )

    @property
    def shared(self) -> list[int]:
        """Those axes, counted from the end."""
        return [
            axis - len(self.shape)
            for axis in range(len(self.shape))
            if axis not in (self.heads, self.kv)
        ]

    @property
    def scales_at(self) -> int:
        """Where in the record the scales begin."""
        return -(-self.elements // WORD) * WORD

    @property
    def encoded_bytes(self) -> int:
        """Size of the record: a multiple of 8."""
        return self.scales_at + math.prod(self.scales) * SCALE_BYTES


def head_layout(tensor: Any, num_blocks: int, backend: str) -> HeadLayout:
    """The layout of a layer's paged KV, which `byte_rows` takes and `check_codec` has nothing against.

    tensor: of logical shape (blocks or kernel blocks, heads, tokens, content), as vLLM registers it.
    Raises `ConfigError` where heads, or K and V, cannot be told apart.
    """
    if backend not in CONTENT_BACKENDS | HALVES_BACKENDS:
        raise ConfigError(
            f"codec: the K and V layout of attention backend {backend} is unknown; set codec to none, or choose one "
            f"of {', '.join(sorted(CONTENT_BACKENDS | HALVES_BACKENDS))}"
        )
    per_block = tensor.shape[0] // num_blocks
    heads, tokens, content = tensor.shape[1:]
    inner = sorted((1, 2, 3), key=lambda axis: -tensor.stride(axis))
    halves = backend in HALVES_BACKENDS
    if content % 2 or inner[-1] != 3 or (halves and inner != [1, 2, 3]):
        raise ConfigError(
            f"codec: K and V cannot be told apart in the KV of {backend}, with shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}; set codec to none"
        )
    head_size = content // 2
    if halves:
        return HeadLayout(tensor.dtype, (per_block, heads, 2, tokens, head_size), heads=1, kv=2)
    if inner[0] == 1:
        return HeadLayout(tensor.dtype, (per_block, heads, tokens, 2, head_size), heads=1, kv=3)
    return HeadLayout(tensor.dtype, (per_block, tokens, heads, 2, head_size), heads=2, kv=3)


def shard_layout(tensor: Any, num_blocks: int, heads: int, *, halves: bool) -> HeadLayout:
    """The layout of `heads` heads of a layer in the order of `layout.shard_rows`, whatever the engine's own.

    tensor: as for `head_layout`. halves: each head of a kernel block is the K of all tokens, then their V.
    """
    per_block = tensor.shape[0] // num_blocks
    tokens, content = tensor.shape[2:]
    if content % 2:
        raise ConfigError(
            f"codec: K and V cannot be told apart in {content} elements; set codec to none"
        )
    if halves:
        shape = (heads, per_block, 2, tokens, content // 2)
        return HeadLayout(tensor.dtype, shape, heads=0, kv=2)
    return HeadLayout(tensor.dtype, (heads, per_block, tokens, 2, content // 2), heads=0, kv=3)


class CodecPages:
    """Paged KV of one group, encoded in the pool. Used by one thread at a time, which owns the
    stream and the working memory.

    layers: of each layer its uint8 rows, as in `HostPages`, on any device, and the layout of one.
    make_pages: gives pages over one layer of encoded rows; they do the copies to and from slots.
    count: takes amounts by the names in metrics.py.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Any, HeadLayout]],
        codec: Codec,
        make_pages: Callable[[Any], Pages],
        count: Callable[..., None],
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._layers = list(layers)
        self._dtype, self._peak = KINDS[codec]
        self._make_pages = make_pages
        self._count = count
        self.nbytes = sum(layout.encoded_bytes for _, layout in layers)
        self._raw_bytes = sum(rows[0].numel() for rows, _ in layers)
        self._chunk_bytes = chunk_bytes
        self._device = layers[0][0].device
        self._module = torch.get_device_module(self._device)
        self._stream = self._module.Stream()
        self._seen = 0
        self._bands: list[_Band] = []
        self._encoded: Pages | None = None

    @torch.inference_mode()  # the engine's threads may or may not be in it: working memory must work with both
    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any = None) -> None:
        pages = self._prepared()
        with self._module.stream(self._stream):
            if ready is not None:
                ready.wait(self._stream)
            for chunk in chunks(len(blocks), self._raw_bytes, self._chunk_bytes):
                index = self._index(blocks[chunk])
                for band in self._bands:
                    band.encode(index)
                sample = self._measure(len(index))
                pages.to_slots(np.arange(len(index)), slots, rows[chunk], self._event())
                self._tell(sample)

    @torch.inference_mode()
    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any = None) -> None:
        pages = self._prepared()
        decoded = None
        # Blocks that are still decoded into after a failed load would be the engine's next ones.
        with finished_stream(self._module, self._stream):
            if ready is not None:
                ready.wait(self._stream)
            for chunk in chunks(len(blocks), self._raw_bytes, self._chunk_bytes):
                index = self._index(blocks[chunk])
                pages.from_slots(slots, rows[chunk], np.arange(len(index)), decoded)
                for band in self._bands:
                    band.decode(index)
                decoded = self._event()

    def _prepared(self) -> Pages:
        """Working memory, made on first use so that an engine which never saves pays nothing."""
        if self._encoded is None:
            count = max(1, self._chunk_bytes // self._raw_bytes)
            encoded = torch.empty((count, self.nbytes), dtype=torch.uint8, device=self._device)
            alike = [list(band) for _, band in groupby(self._layers, key=lambda each: each[1])]
            sizes = [sum(layout.encoded_bytes for _, layout in band) for band in alike]
            self._bands = [
                _Band(band, self._dtype, self._peak, encoded[:, start:stop])
                for band, (start, stop) in zip(alike, spans(sizes), strict=True)
            ]
            self._encoded = self._make_pages(encoded)
        return self._encoded

    def _index(self, blocks: Index) -> Any:
        return torch.from_numpy(np.ascontiguousarray(blocks)).to(self._device)

    def _event(self) -> Any:
        event = self._module.Event()
        event.record(self._stream)
        return event

    def _measure(self, count: int) -> Any:
        """Sums of squares of the sampled blocks: (error or signal, block); None where none is due."""
        first, self._seen = -self._seen % SAMPLE_EVERY, self._seen + count
        if first >= count:
            return None
        rows = slice(first, count, SAMPLE_EVERY)
        return torch.stack([band.squares(rows) for band in self._bands]).sum(0)

    def _tell(self, sample: Any) -> None:
        if sample is None:
            return
        for error, signal in sample.T.tolist():
            if math.isfinite(error) and math.isfinite(signal):
                loss = math.sqrt(error / signal) if signal else 0.0
                self._count(measured_blocks=1, measured_error=loss)
            else:
                self._count(nonfinite_blocks=1)


class _Band:
    """Consecutive layers of one layout, encoded and decoded together: the same few kernels however
    many they are.

    encoded: their share of the encoded rows, (rows, bytes).
    """

    def __init__(
        self,
        layers: Sequence[tuple[Any, HeadLayout]],
        dtype: torch.dtype,
        peak: float,
        encoded: Any,
    ) -> None:
        layout = layers[0][1]
        shape = (len(layers), len(encoded), *layout.shape)
        # A tensor: by a number, CUDA multiplies with its reciprocal, which gives other bytes than division.
        self._peak = torch.tensor(peak, device=encoded.device)
        self._rounds = not dtype.is_floating_point
        self._shared = layout.shared
        self._values = torch.empty(shape, dtype=layout.dtype, device=encoded.device)
        self._floats = torch.empty(shape, dtype=torch.float32, device=encoded.device)
        lanes = _lanes([rows for rows, _ in layers])
        self._layers = [rows.view(lanes) for rows, _ in layers]
        self._pages = [
            values.view(lanes).view(len(values), *rows.shape[1:])
            for values, rows in zip(self._values.flatten(2), self._layers, strict=True)
        ]
        records = encoded.unflatten(1, (len(layers), layout.encoded_bytes)).transpose(0, 1)
        payload, self._padding, scales = records.tensor_split(
            (layout.elements, layout.scales_at), dim=2
        )
        self._payload = payload.view(dtype).unflatten(2, layout.shape)
        self._scales = scales.view(torch.float32).unflatten(2, layout.scales)

    def encode(self, index: Any) -> None:
        """Fill the first rows from the blocks `index`."""
        rows = slice(len(index))
        for layer, pages in zip(self._layers, self._pages, strict=True):
            torch.index_select(layer, 0, index, out=pages[rows])
        values, floats = self._values[:, rows], self._floats[:, rows]
        scale = values.abs().amax(self._shared, keepdim=True).float() / self._peak
        scale.clamp_(min=torch.finfo(torch.float32).tiny)
        scale.masked_fill_(scale.isinf(), math.nan)
        self._scales[:, rows] = scale
        floats.copy_(values)
        floats.div_(scale)
        if self._rounds:
            floats.round_()
        self._payload[:, rows] = floats
        self._padding[:, rows] = 0

    def decode(self, index: Any) -> None:
        """Fill the blocks `index` from the first rows."""
        rows = slice(len(index))
        self._values[:, rows] = self._decoded(rows)
        for layer, pages in zip(self._layers, self._pages, strict=True):
            layer[index] = pages[rows]

    def squares(self, rows: slice) -> Any:
        """Of rows just encoded, the squares of what each lost and of what it was: (2, rows)."""
        was = self._values[:, rows].float()
        # As the engine will see it: rounded to its own dtype.
        lost = self._decoded(rows).to(self._values.dtype).float() - was
        everything = [axis for axis in range(was.dim()) if axis != 1]
        return torch.stack([each.square().sum(everything) for each in (lost, was)])

    def _decoded(self, rows: slice) -> Any:
        floats = self._floats[:, rows]
        floats.copy_(self._payload[:, rows])
        return floats.mul_(self._scales[:, rows])


def _lanes(layers: Sequence[Any]) -> torch.dtype:
    """Eight bytes where possible: indexing kernels move elements, however small."""
    wide = all(
        each % WORD == 0
        for rows in layers
        for each in (rows.shape[-1], *rows.stride()[:-1], rows.storage_offset())
    )
    return torch.int64 if wide else torch.uint8
