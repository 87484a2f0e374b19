"""Byte ranges against the bytes themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.storage.object.packs import LOCATION
from kvpool.storage.object.ranges import plan

PACKS = (b"a" * 16, b"b" * 16, b"\x00" * 16)
blocks = st.tuples(st.sampled_from(PACKS), st.integers(0, 400), st.integers(1, 90))


def located(found: list[tuple[bytes, int, int]]) -> np.ndarray:
    locations = np.zeros(len(found), LOCATION)
    for location, (pack, offset, stored) in zip(locations, found, strict=True):
        location["pack"] = np.void(pack)
        location["offset"], location["stored"] = offset, stored
    return locations


@given(st.lists(blocks, max_size=25), st.integers(1, 100), st.integers(0, 60), st.data())
def test_the_ranges_bring_every_block_once_and_keep_their_limits(
    found: list[tuple[bytes, int, int]], range_bytes: int, gap_bytes: int, data: st.DataObject
) -> None:
    content = {pack: np.random.default_rng(i).bytes(500) for i, pack in enumerate(PACKS)}
    every = st.lists(st.sampled_from(range(len(found))), unique=True) if found else st.just([])
    wanted = data.draw(every)
    ranges = plan(located(found), wanted, range_bytes=range_bytes, gap_bytes=gap_bytes)
    got = {index: bytearray(found[index][2]) for index in wanted}
    seen = dict.fromkeys(wanted, 0)
    for one in ranges:
        assert 0 < one.end - one.start <= range_bytes
        bytes_there = content[one.pack][one.start : one.end]
        needed = np.zeros(one.end - one.start, np.bool_)
        for index, at, inside, length in one.pieces:
            got[index][inside : inside + length] = bytes_there[at : at + length]
            seen[index] += length
            needed[at : at + length] = True
        # What is read in vain lies between blocks and is never more than a gap in one place.
        assert needed[0] and needed[-1]
        vain = "".join("." if used else "x" for used in needed).split(".")
        assert max(map(len, vain)) <= gap_bytes
    for index in wanted:
        pack, offset, stored = found[index]
        assert seen[index] == stored
        assert bytes(got[index]) == content[pack][offset : offset + stored]
    firsts = [min(piece.block for piece in one.pieces) for one in ranges]
    assert firsts == sorted(firsts)


def test_neighbours_share_a_request() -> None:
    found = [(PACKS[0], 10 * i, 10) for i in range(10)]
    assert len(plan(located(found), range(10), range_bytes=100, gap_bytes=0)) == 1
    assert len(plan(located(found), range(10), range_bytes=99, gap_bytes=0)) == 2
    assert len(plan(located(found), range(0, 10, 2), range_bytes=100, gap_bytes=10)) == 1
    assert len(plan(located(found), range(0, 10, 2), range_bytes=100, gap_bytes=9)) == 5
