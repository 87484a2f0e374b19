"""Byte views of a host pool's pages.

A host pool tells where the pieces of a page are (`get_page_buffer_meta`), by addresses. Of each piece the addresses
go up by the same distance from page to page in all layouts that are taken here, so that one array a piece, made once,
has a row for every page. The arrays are views of the pool's own tensors and keep these alive; a piece outside of them
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpool.errors import ConfigError, InvalidRequest

Rows = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
COPY_BYTES = 4 << 20


class HostPages:
    """The pages of one host pool, each in one or more pieces.

    pieces: one u8 array of (pages, bytes of the piece) each; a row is contiguous. Rows belong to SGLang, which
        says by the indices of a call which ones may be read or written until it returns.
    nbytes: of a page, all pieces together. tokens: of a page.
    """

    def __init__(self, pool: Any) -> None:
        """Raises `ConfigError` for a pool that cannot be stored page by page, with the reason."""
        self.tokens = int(getattr(pool, "page_size", 1) or 1)
        size = int(pool.size)
        count = size // self.tokens
        self._name = type(pool).__name__
        self.pieces = self._pieces(pool, count)
        self.count = count
        self.nbytes = sum(piece.shape[1] for piece in self.pieces)

    def _pieces(self, pool: Any, count: int) -> list[Rows]:
        layout = getattr(pool, "layout", "")
        if getattr(pool, "shared_allocation_domain", None) is not None:
            raise ConfigError(
                f"{self._name}: the pages of a shared host arena move, so that they cannot be stored in place"
            )
        if getattr(pool, "dcp_size", 1) > 1:
            raise ConfigError(
                f"{self._name}: with decode context parallelism a rank has a part of each page only, which kvpool does "
                "not store"
            )
        if count < 1:
            raise ConfigError(f"{self._name} has no pages")
        meta = [
            self._meta(pool, page, layout) for page in sorted({0, min(1, count - 1), count - 1})
        ]
        first, second, last = meta[0], meta[min(1, len(meta) - 1)], meta[-1]
        if not {len(ptrs) for ptrs, _ in meta} == {len(first[0])} or first[1] != last[1]:
            raise ConfigError(f"{self._name}: its pages are not all of the same pieces")
        memory = list(_memory(pool))
        pieces = []
        for index, nbytes in enumerate(first[1]):
            begin, step = first[0][index], second[0][index] - first[0][index]
            if last[0][index] != begin + step * (count - 1) or step < 0:
                raise ConfigError(
                    f"{self._name}, layout {layout}: its pages do not lie at equal distances"
                )
            if nbytes:
                pieces.append(self._rows(memory, begin, step, nbytes, count))
        if not pieces:
            raise ConfigError(f"{self._name}: its pages are empty")
        return pieces

    def _meta(self, pool: Any, page: int, layout: str) -> tuple[list[int], list[int]]:
        indices = torch.arange(page * self.tokens, (page + 1) * self.tokens)
        try:
            ptrs, sizes = pool.get_page_buffer_meta(indices)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._name}, layout {layout}: SGLang gives no addresses of its pages ({error}). Use "
                "--hicache-mem-layout page_first (or page_first_direct, with --hicache-io-backend direct)"
            ) from error
        return [int(each) for each in ptrs], [int(each) for each in sizes]

    def _rows(self, memory: list[Rows], begin: int, step: int, nbytes: int, count: int) -> Rows:
        for flat in memory:
            at = begin - flat.ctypes.data
            if at >= 0 and at + step * (count - 1) + nbytes <= flat.size:
                return np.lib.stride_tricks.as_strided(flat[at:], (count, nbytes), (step, 1))
        raise ConfigError(f"{self._name}: its pages are not in its own tensors")

    def numbers(self, host_indices: Any, n: int) -> Numbers:
        """The numbers of n pages, named as SGLang does: by the indices of all their tokens.

        Raises `InvalidRequest` for indices that are not those of n whole pages.
        """
        indices = np.asarray(host_indices, dtype=np.int64).reshape(-1)
        if len(indices) != n * self.tokens:
            raise InvalidRequest(
                f"{len(indices)} indices for {n} pages of {self.tokens} tokens in {self._name}"
            )
        by_page = indices.reshape(n, self.tokens)
        pages, rest = np.divmod(by_page[:, 0], self.tokens)
        whole = not rest.any() and (by_page == by_page[:, :1] + np.arange(self.tokens)).all()
        if not whole or (n and not 0 <= pages.min() <= pages.max() < self.count):
            raise InvalidRequest(f"the indices are not those of whole pages of {self._name}")
        return pages

    def views(self, numbers: Numbers) -> list[list[Rows]]:
        """The pieces of each of these pages."""
        return [[piece[page] for piece in self.pieces] for page in numbers.tolist()]

    def fill(self, numbers: Numbers, table: Rows, rows: Numbers) -> None:
        """Copy rows of the segment `table` into these pages, one each.

        In few large copies: SGLang's scheduler computes in the same process, and after each copy its interpreter
        lock has to be waited for. In no larger ones: what is gathered for a copy is to stay in the processor's cache.
        """
        step = max(1, COPY_BYTES // self.nbytes)
        for start in range(0, len(rows), step):
            chosen, into, at = rows[start : start + step], numbers[start : start + step], 0
            for piece in self.pieces:
                width = piece.shape[1]
                piece[into] = table[chosen, at : at + width]
                at += width


def _memory(pool: Any) -> Iterator[Rows]:
    """The bytes of all host tensors of a pool, whatever their shapes."""
    for value in vars(pool).values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.numel():
                storage = each.untyped_storage()
                yield torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
