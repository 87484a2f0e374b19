"""The segments of this node as seen by a transport: numbers, rows and spans of bytes.

A row is a slot number within a segment: its bytes begin at `row * stride`.
"""

from __future__ import annotations

from array import array
from mmap import mmap
from typing import TYPE_CHECKING

from kvpool.errors import InvalidRequest
from kvpool.wire.frame import NO_ROW

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Memory:
    """Mapped segments by number.

    Thread-safe by construction: segments are only ever added, each once, and never move. The mappings
    belong to whoever attached them and must outlive every transport that uses this object.
    """

    def __init__(self) -> None:
        self._views: dict[int, memoryview] = {}

    def attach(self, segment: int, mapping: mmap | bytearray | memoryview) -> None:
        """Register a segment. Raises `InvalidRequest` if the number is taken."""
        if segment in self._views:
            raise InvalidRequest(f"segment {segment} is attached already")
        self._views[segment] = memoryview(mapping).cast("B")

    def check(self, segment: int, stride: int, nbytes: int, rows: bytes) -> None:
        """Raises `InvalidRequest` unless all these rows are in the segment, each with room for `nbytes`."""
        view = self._views.get(segment)
        if view is None:
            raise InvalidRequest(f"there is no segment {segment} here")
        if not 0 < nbytes <= stride:
            raise InvalidRequest(f"blocks of {nbytes} bytes do not fit slots of {stride}")
        if rows and (max(array("I", rows)) + 1) * stride > len(view):
            raise InvalidRequest(
                f"row {max(array('I', rows))} of {stride} bytes is outside of segment {segment}"
            )

    def present_rows(self, rows: bytes) -> tuple[bytes, bytes]:
        """Rows with gaps as (one byte a key: 0 or 1, the rows without the gaps)."""
        numbers = array("I", rows)
        if NO_ROW not in numbers:
            return b"\x01" * len(numbers), rows
        present = bytes([number != NO_ROW for number in numbers])
        return present, array("I", [n for n in numbers if n != NO_ROW]).tobytes()

    def table(self, segment: int, stride: int) -> npt.NDArray[np.uint8]:
        """All rows of one stride, as an array [rows, stride]. Raises `InvalidRequest` if there are none."""
        view = self._views.get(segment)
        if view is None or not 0 < stride <= len(view):
            raise InvalidRequest(f"there is no segment {segment} with rows of {stride} bytes here")
        # Imported here: a transfer worker, which needs no arrays, starts in half the time without NumPy.
        import numpy as np

        count = len(view) // stride
        return np.frombuffer(view, dtype=np.uint8, count=count * stride).reshape(count, stride)

    def blocks(self, segment: int, stride: int, nbytes: int, rows: bytes) -> list[memoryview]:
        """One view a row, in order."""
        view = self._views[segment]
        return [view[row * stride : row * stride + nbytes] for row in array("I", rows)]

    def spans(self, segment: int, stride: int, nbytes: int, rows: bytes) -> list[memoryview]:
        """The same bytes in the same order, in as few views as possible: adjacent rows are merged."""
        if nbytes < stride:
            return self.blocks(segment, stride, nbytes, rows)
        view = self._views[segment]
        spans: list[memoryview] = []
        first = last = -2
        for row in array("I", rows):
            if row != last + 1:
                if first >= 0:
                    spans.append(view[first * stride : (last + 1) * stride])
                first = row
            last = row
        if first >= 0:
            spans.append(view[first * stride : (last + 1) * stride])
        return spans
