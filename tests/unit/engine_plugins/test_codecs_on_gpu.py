"""The codecs on a CUDA device: the same bytes as on the CPU device, which `test_codecs.py` is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.engine_plugins.vllm.config import Codec  # noqa: E402
from kvpool.engine_plugins.vllm.layout.codecs import CodecPages, head_layout  # noqa: E402
from kvpool.engine_plugins.vllm.layout.pages import HostPages, byte_rows  # noqa: E402
from kvpool.engine_plugins.vllm.worker.device import DevicePages, PinnedSegments  # noqa: E402

pytestmark = pytest.mark.torch
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 40, 4, 16, 64, 3


@dataclass
class Slots:
    table: np.ndarray
    nbytes: int


def pages_on(device: str, layers: list[Any], codec: Codec, segments: PinnedSegments) -> CodecPages:
    """Pages over these layers, (blocks, heads, tokens, 2 x size), which are on that device."""

    def plain(encoded: Any) -> Any:
        if device == "cpu":
            return HostPages([encoded.numpy()])
        return DevicePages([encoded], segments)

    rows = [
        (byte_rows(layer, BLOCKS), head_layout(layer, BLOCKS, "FLASH_ATTN")) for layer in layers
    ]
    return CodecPages(rows, codec, plain, lambda **_: None, chunk_bytes=1 << 17)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
def test_the_same_bytes_as_on_the_host(codec: Codec, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = (BLOCKS, HEADS, TOKENS, 2 * SIZE)
    on_host = [torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS)]
    on_host[1][3] = 0  # heads of zeros
    on_gpu = [layer.to("cuda:0") for layer in on_host]
    segments = PinnedSegments(torch.device("cuda:0"))
    made = [pages_on("cpu", on_host, codec, segments), pages_on("cuda:0", on_gpu, codec, segments)]
    blocks = np.random.default_rng(1).permutation(BLOCKS)[:30]
    rows = np.random.default_rng(2).permutation(BLOCKS)[:30]
    stored = []
    for pages in made:
        slots = Slots(np.zeros((BLOCKS, pages.nbytes), np.uint8), pages.nbytes)
        pages.to_slots(blocks, slots, rows)
        stored.append(slots)
    assert np.array_equal(stored[0].table, stored[1].table)

    for layer in (*on_host, *on_gpu):
        layer.zero_()
    for pages, slots in zip(made, stored, strict=True):
        pages.from_slots(slots, rows, blocks)
    for host, gpu in zip(on_host, on_gpu, strict=True):
        assert torch.equal(host, gpu.cpu())
        assert bool((host[torch.from_numpy(blocks)] != 0).any())
    segments.close()
