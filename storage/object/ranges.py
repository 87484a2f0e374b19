"""Which byte ranges to request, so that few requests bring many blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.storage.object.packs import Array


class Piece(NamedTuple):
    """A block's piece of a range: `length` bytes from `at` in the range are those from `inside` in the
    block. block: its index in the batch.
    """

    block: int
    at: int
    inside: int
    length: int


@dataclass(slots=True)
class Range:
    """One request: the bytes [start, end) of a pack, and their pieces."""

    pack: bytes
    start: int
    end: int
    pieces: list[Piece]


def plan(
    locations: Array, wanted: Iterable[int], *, range_bytes: int, gap_bytes: int
) -> list[Range]:
    """Ranges of at most `range_bytes` with all of the wanted blocks, the earliest block's first.

    wanted: indices into `locations`, of dtype `LOCATION`. Blocks of a pack that are at most `gap_bytes`
    apart share a range; one that is larger than a range comes in several. Locations may overlap.
    """
    found = []
    for index in wanted:
        where = locations[index]
        found.append((where["pack"].tobytes(), int(where["offset"]), int(where["stored"]), index))
    found.sort()
    ranges: list[Range] = []
    for pack, offset, stored, index in found:
        if stored > range_bytes:
            for inside in range(0, stored, range_bytes):
                length = min(range_bytes, stored - inside)
                start = offset + inside
                ranges.append(Range(pack, start, start + length, [Piece(index, 0, inside, length)]))
            continue
        end = offset + stored
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and last.pack == pack
            and last.start <= offset <= last.end + gap_bytes
            and end - last.start <= range_bytes
        ):
            last.pieces.append(Piece(index, offset - last.start, 0, stored))
            last.end = max(last.end, end)
        else:
            ranges.append(Range(pack, offset, end, [Piece(index, 0, 0, stored)]))
    ranges.sort(key=lambda one: min(piece.block for piece in one.pieces))
    return ranges
