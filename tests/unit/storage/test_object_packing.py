"""The order of blocks in a pack, against what a chain is."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvpool.storage.object.packing import in_chains

chains = st.lists(st.integers(1, 6), max_size=6)


def chain(number: int, length: int) -> list[tuple[bytes, bytes]]:
    """Keys with their predecessors; the first one's is not among them."""
    return [(bytes([number, at + 1]), bytes([number, at])) for at in range(length)]


@given(chains, st.randoms())
def test_each_chain_is_in_one_piece_and_in_its_order(
    lengths: list[int], rng: random.Random
) -> None:
    blocks = [block for number, length in enumerate(lengths) for block in chain(number, length)]
    rng.shuffle(blocks)
    order = in_chains([key for key, _ in blocks], [parent for _, parent in blocks])
    assert sorted(order) == list(range(len(blocks)))
    came = [blocks[at][0] for at in order]
    heads = [key for key, parent in blocks if parent[1] == 0]
    expected = [key for head in heads for key, _ in chain(head[0], lengths[head[0]])]
    assert came == expected, "chains in the order of their heads"


def test_branches_follow_their_stem() -> None:
    keys = [b"b", b"a", b"c", b"d", b"e"]
    parents = [b"a", b"", b"a", b"b", b"c"]
    assert [keys[at] for at in in_chains(keys, parents)] == [b"a", b"b", b"d", b"c", b"e"]


@given(st.lists(st.tuples(st.binary(max_size=1), st.binary(max_size=1)), max_size=12))
def test_whatever_parents_say_each_block_is_there_once(blocks: list[tuple[bytes, bytes]]) -> None:
    order = in_chains([key for key, _ in blocks], [parent for _, parent in blocks])
    assert sorted(order) == list(range(len(blocks)))
