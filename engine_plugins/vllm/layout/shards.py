"""How the blocks of a cache group are cut into parts, so that what is stored does not depend on the ranks. Pure.

A canonical group is cut three ways, and each cut has a part of its own:

    pieces    of layers: one a pipeline stage, or as many as `layer_pieces` says
    shards    of KV heads: the largest power of two up to `SHARDS_MAX` that divides the model's heads
    classes   of tokens: one a rank of decode context parallelism

In a group, part number `(piece * shards + shard) * classes + class`. A rank holds the pieces of its stage, the
shards of its heads and the class of its tokens; ranks with the same KV hold the same parts, and take turns in
writing them. A part holds the layers of its piece in order, in each the heads of its shard, in each the tokens of
its class, in each the head's content: `layout.shard_rows`.

A group that cannot be cut so has a part for each rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

SHARDS_MAX = 8
"""Measured (`bench/shapes.py`): eight parts a block cost a rank that holds them all a few per cent at most."""

CONTENT_BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"})
"""Attention backends in whose blocks each head's token is its K, then its V."""
HALVES_BACKENDS = frozenset({"CPU_ATTN"})
"""Those in whose blocks each head is the K of all tokens (in any order), then their V."""


class Kind(StrEnum):
    """What lies in a group's blocks.

    CONTENT: of each head, each token's K and V together. HALVES: of each head, the K of a kernel block's tokens,
    packed for the CPU at hand, then their V. LATENT: one vector a token, for all heads. RANKS: unknown, so that each
    rank has a part of its own.
    """

    CONTENT = "content"
    HALVES = "halves"
    LATENT = "latent"
    RANKS = "ranks"


@dataclass(frozen=True)
class Rank:
    """Where a rank is. vLLM counts tensor-parallel ranks innermost, then context-parallel ones, then stages.

    tp, pcp, pp, dcp: sizes. dcp: without pcp, of groups of neighbours among the tensor-parallel ranks.
    """

    rank: int
    tp: int = 1
    pcp: int = 1
    pp: int = 1
    dcp: int = 1

    @property
    def stage(self) -> int:
        return self.rank // (self.tp * self.pcp)

    @property
    def ranks(self) -> int:
        return self.tp * self.pcp * self.pp


@dataclass(frozen=True)
class Cut:
    """Into how many parts a group's blocks are cut, on all ranks together."""

    pieces: int = 1
    shards: int = 1
    classes: int = 1

    @property
    def parts(self) -> int:
        return self.pieces * self.shards * self.classes


@dataclass(frozen=True)
class Share:
    """What one rank holds of a group.

    pieces, shards: ranges of them. class_: of its tokens.
    turn, turns: which of the ranks that hold the same it is, and how many they are.
    """

    cut: Cut
    pieces: range
    shards: range
    class_: int = 0
    turn: int = 0
    turns: int = 1

    def part(self, piece: int, shard: int) -> int:
        """Its number within the group."""
        return (piece * self.cut.shards + shard) * self.cut.classes + self.class_


def shard_count(heads: int) -> int:
    """Into how many shards so many KV heads are cut."""
    shards = 1
    while shards < SHARDS_MAX and heads % (2 * shards) == 0:
        shards *= 2
    return shards


def share(
    at: Rank, *, heads: int, local_heads: int, pieces: int = 1, sharded_tokens: bool = True
) -> Share | str:
    """What a rank holds of a group of `heads` KV heads, of which it has `local_heads`; or why it has to be by rank.

    heads: 1 where one vector serves all. pieces: of the rank's own layers.
    sharded_tokens: whether context parallelism shares out the group's tokens.
    """
    if not (heads % at.tp == 0 or at.tp % heads == 0) or local_heads != max(1, heads // at.tp):
        return f"a rank has {local_heads} KV heads of {heads}, with {at.tp} tensor-parallel ranks"
    copies = max(1, at.tp // heads)
    shards = shard_count(heads)
    size = heads // shards
    if local_heads % size:
        return f"a rank has {local_heads} KV heads, and shards have {size}"
    if at.pcp > 1:
        # vLLM's slots depend on DCP alone, and DCP spans these ranks first.
        return (
            "with prefill context parallelism, which ranks have which tokens depends on the engine"
        )
    if at.dcp > 1 and not sharded_tokens:
        return "its tokens are not shared out over the context-parallel ranks"
    if copies % at.dcp:
        return f"{at.dcp} context-parallel ranks do not share the same KV heads"
    tensor_rank = at.rank % at.tp
    first = tensor_rank // copies * local_heads // size
    return Share(
        Cut(pieces * at.pp, shards, at.dcp),
        range(at.stage * pieces, (at.stage + 1) * pieces),
        range(first, first + local_heads // size),
        tensor_rank % at.dcp,
        tensor_rank % copies // at.dcp,
        copies // at.dcp,
    )


def by_rank(at: Rank) -> Share:
    """A part of its own for each rank."""
    return Share(Cut(pieces=at.ranks), range(at.rank, at.rank + 1), range(1))


def layer_order(name: str) -> list[tuple[int, str]]:
    """Sorts names of layers as the model counts them: numbers by their value."""
    return [(int(each), "") if each.isdigit() else (-1, each) for each in re.split(r"(\d+)", name)]


def cut_layers(names: Sequence[Any], pieces: int) -> list[list[Any]]:
    """Layers in order, in pieces that are as equal as possible."""
    edges = [len(names) * each // pieces for each in range(pieces + 1)]
    return [list(names[start:stop]) for start, stop in pairwise(edges)]


def my_turn(key: bytes, blocks: int, turn: int, turns: int) -> slice:
    """Which of a run of blocks one of `turns` ranks that hold the same is to write: a run of them itself.

    key: of the run's first block; it moves the turns on, so that single blocks are shared out too.
    """
    turn = (turn + key[-1]) % turns
    return slice(blocks * turn // turns, blocks * (turn + 1) // turns)


@dataclass(frozen=True)
class Held:
    """What one rank reports of a stored group.

    parts: their numbers in the group, and bytes. layers: of each of its pieces, by number, the layers' names with
    their KV heads and the bytes of a shard. facts: what else has to agree. why: what stands against cutting it.
    """

    kind: Kind
    cut: Cut
    parts: Mapping[int, int]
    layers: Mapping[int, Sequence[tuple[str, int, int]]]
    facts: Mapping[str, Any]
    why: str = ""
