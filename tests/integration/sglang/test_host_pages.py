"""Which host pools can be stored page by page, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.engine_plugins.sglang.pages import HostPages
from kvpool.errors import ConfigError

TOKENS = 4


class Pool:
    """A host pool of 6 pages of 4 tokens, of 8 bytes each, after a gap of 16 bytes."""

    layout = "a-layout"
    page_size = TOKENS
    size = 6 * TOKENS

    def __init__(self, buffer: torch.Tensor | None = None) -> None:
        self.buffer = torch.arange(16 + 6 * 32, dtype=torch.uint8) if buffer is None else buffer

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        begin = self.buffer.data_ptr() + 16
        firsts = indices[::TOKENS].tolist()
        return [begin + first * 8 for first in firsts], [32] * len(firsts)


def test_rows_are_the_pages() -> None:
    pool = Pool()
    pages = HostPages(pool)
    assert (pages.count, pages.nbytes, pages.tokens) == (6, 32, TOKENS)
    indices = torch.cat([torch.arange(20, 24), torch.arange(8, 12)])
    numbers = pages.numbers(indices, 2)
    found = pages.views(numbers)
    assert [[bytes(piece) for piece in each] for each in found] == [
        [bytes(range(16 + 160, 16 + 192))],
        [bytes(range(16 + 64, 16 + 96))],
    ]
    found[0][0][:] = 7
    assert pool.buffer[16 + 160 :].tolist() == [7] * 32
    table = np.arange(3 * 40, dtype=np.uint8).reshape(3, 40)
    pages.fill(numbers, table, np.array([2, 0]))
    assert pool.buffer[16 + 160 :].tolist() == list(range(80, 112))
    assert pool.buffer[16 + 64 : 16 + 96].tolist() == list(range(32))


class Elsewhere(Pool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        ptrs, sizes = super().get_page_buffer_meta(indices)
        return [each + (1 << 40) for each in ptrs], sizes


class PastTheEnd(Pool):
    size = 7 * TOKENS


class Uneven(Pool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        ptrs, sizes = super().get_page_buffer_meta(indices)
        return [each - (indices[0].item() == 20) for each in ptrs], sizes


class OtherPieces(Pool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        ptrs, sizes = super().get_page_buffer_meta(indices)
        return ptrs, [each - (indices[0].item() == 20) for each in sizes]


class WithoutAddresses(Pool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise ValueError("Unsupported layout: a-layout")


class Shared(Pool):
    shared_allocation_domain = object()


class Split(Pool):
    dcp_size = 2


class Empty(Pool):
    size = 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Elsewhere, "own tensors"),
        (PastTheEnd, "own tensors"),
        (Uneven, "equal distances"),
        (OtherPieces, "same pieces"),
        (WithoutAddresses, "page_first"),
        (Shared, "arena"),
        (Split, "decode context"),
        (Empty, "no pages"),
    ],
)
def test_others_are_refused_with_the_reason(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        HostPages(make())
