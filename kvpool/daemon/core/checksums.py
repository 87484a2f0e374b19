"""The checksums of all blocks of a size, by the rows of their slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.memory.private_pages import private_pages
from kvpool.types import CHECKSUM_BYTES


class Checksums:
    """One for each row. Memory is used for those that were ever set. Not thread-safe."""

    __slots__ = ("_all", "_memory")

    def __init__(self, rows: int) -> None:
        self._memory = private_pages(CHECKSUM_BYTES * rows)
        self._all = np.frombuffer(self._memory, dtype=f"V{CHECKSUM_BYTES}")

    def set(self, rows: Sequence[int], packed: bytes) -> None:
        """Set those of these rows."""
        if len(rows) == 1:  # faster
            at = CHECKSUM_BYTES * rows[0]
            self._memory[at : at + CHECKSUM_BYTES] = packed
            return
        self._all[rows] = np.frombuffer(packed, dtype=self._all.dtype)

    def get(self, rows: Sequence[int]) -> bytes:
        """Those of these rows, packed."""
        return self._all[rows].tobytes() if len(rows) else b""
