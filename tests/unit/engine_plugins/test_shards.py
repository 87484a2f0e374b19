"""How blocks are cut into parts, and which rank has which."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm.layout.shards import (
    SHARDS_MAX,
    Rank,
    Share,
    by_rank,
    cut_layers,
    layer_order,
    my_turn,
    shard_count,
    share,
)

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("heads", "shards"),
    [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (10, 2), (12, 4), (32, 8), (40, 8)],
)
def test_shards_follow_from_the_model_alone(heads: int, shards: int) -> None:
    assert shard_count(heads) == shards <= SHARDS_MAX


def held(heads: int, tp: int, pp: int = 1, dcp: int = 1, pieces: int = 1) -> list:
    ranks = tp * pp
    return [
        share(
            Rank(rank, tp, 1, pp, dcp),
            heads=heads,
            local_heads=max(1, heads // tp),
            pieces=pieces,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24, 32])
@pytest.mark.parametrize(("tp", "pp"), list(product(SIZES, (1, 2))))
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_the_ranks_have_every_part_and_take_turns(heads: int, tp: int, pp: int, dcp: int) -> None:
    shares = held(heads, tp, pp, dcp, pieces=2)
    if max(1, tp // heads) % dcp or tp % dcp:
        assert all("do not share the same KV heads" in each for each in shares)
        return
    turns: dict[int, list[int]] = defaultdict(list)
    for rank, mine in enumerate(shares):
        assert mine.cut == shares[0].cut
        assert (mine.cut.pieces, mine.cut.classes) == (2 * pp, dcp)
        assert mine.class_ == rank % dcp, "vLLM's DCP groups are of neighbours"
        # Its heads, as the engine deals them out, are those of its shards.
        size = heads // mine.cut.shards
        first = rank % tp * heads // tp
        own = range(mine.shards.start * size, mine.shards.stop * size)
        assert own == range(first, first + max(1, heads // tp))
        for piece, shard in product(mine.pieces, mine.shards):
            turns[mine.part(piece, shard)].append(mine.turn)
            assert mine.turns == max(1, tp // heads) // dcp
    assert sorted(turns) == list(range(shares[0].cut.parts))
    assert all(sorted(each) == list(range(shares[0].turns)) for each in turns.values())


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("dcp", [1])
def test_parts_are_the_same_for_every_number_of_ranks(heads: int, dcp: int) -> None:
    assert len({held(heads, tp)[0].cut for tp in SIZES}) == 1


@pytest.mark.parametrize(
    ("at", "heads", "local", "why"),
    [
        (Rank(0, 3), 8, 2, "3 tensor-parallel ranks"),
        (Rank(0, 2), 8, 8, "8 KV heads of 8"),
        (Rank(0, 16), 16, 1, "shards have 2"),
        (Rank(0, 4, dcp=2), 8, 2, "do not share the same KV heads"),
        # vLLM's slots depend on DCP alone: with PCP alone all have the same KV, and DCP spans PCP first.
        (Rank(1, 1, pcp=2), 8, 8, "prefill context parallelism"),
        (Rank(1, 2, pcp=2, dcp=2), 1, 1, "prefill context parallelism"),
    ],
)
def test_what_cannot_be_cut_says_why(at: Rank, heads: int, local: int, why: str) -> None:
    found = share(at, heads=heads, local_heads=local)
    assert isinstance(found, str)
    assert why in found


def test_tokens_that_are_not_shared_out() -> None:
    found = share(Rank(0, 2, dcp=2), heads=1, local_heads=1, sharded_tokens=False)
    assert isinstance(found, str)


def test_by_rank_each_has_its_own() -> None:
    shares = [by_rank(Rank(rank, 2, 1, 2)) for rank in range(4)]
    assert [mine.part(*mine.pieces, *mine.shards) for mine in shares] == [0, 1, 2, 3]
    assert {mine.cut.parts for mine in shares} == {4}


def test_layers_are_counted_as_the_model_does() -> None:
    names = [f"model.layers.{number}.attn" for number in (10, 2, 1, 0, 11)]
    numbers = [int(name.split(".")[2]) for name in sorted(names, key=layer_order)]
    assert numbers == [0, 1, 2, 10, 11]


@given(st.integers(1, 100), st.integers(1, 8))
def test_pieces_have_all_layers_in_order(layers: int, pieces: int) -> None:
    cut = cut_layers(range(layers), pieces)
    assert [layer for piece in cut for layer in piece] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize("layers", [4, 28, 30, 32])
def test_pieces_of_stages_are_those_of_the_whole(layers: int) -> None:
    """Where the stages have the same number of layers."""
    whole = cut_layers(range(layers), 4)
    stages = cut_layers(range(layers), 2)
    assert layers % 4 or [*cut_layers(stages[0], 2), *cut_layers(stages[1], 2)] == whole


@given(st.binary(min_size=16, max_size=16), st.integers(1, 40), st.integers(1, 8))
def test_each_block_of_a_run_is_somebodys_turn(key: bytes, blocks: int, turns: int) -> None:
    taken = [
        block for turn in range(turns) for block in range(blocks)[my_turn(key, blocks, turn, turns)]
    ]
    assert sorted(taken) == list(range(blocks))


def test_single_blocks_are_shared_out() -> None:
    writers = {
        turn
        for last in range(8)
        for turn in range(4)
        if len(range(1)[my_turn(bytes(15) + bytes([last]), 1, turn, 4)])
    }
    assert writers == {0, 1, 2, 3}


def test_parts_of_a_share_are_counted_by_piece_shard_and_class() -> None:
    mine = share(Rank(5, 4, 1, 2, 2), heads=2, local_heads=1)
    assert isinstance(mine, Share)
    assert (mine.pieces, mine.shards, mine.class_, mine.turn) == (range(1, 2), range(1), 1, 0)
    assert mine.part(1, 0) == (1 * 2 + 0) * 2 + 1
