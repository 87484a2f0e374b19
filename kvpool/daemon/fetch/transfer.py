"""What a transfer is: blocks of one namespace on their way here from one source.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.daemon.core.blocks import NamespaceState, PartTable, Reservation
from kvpool.daemon.workers.turns import Turn, Turns


@dataclass(eq=False, slots=True)
class Transfer:
    """Blocks of one namespace from one source: of several parts, if it is a node.

    blocks: the keys by part, each once. nbytes: asked for. patience_s: for so long it may take, and its source may let it wait without letting others
    go on. since: it was made, or has its turn, which is when it has begun. line: of its source. background: nobody
    waits for it. only_spare: it takes no ordinary block's place. late: it was counted as slow. kept: leases on what has arrived, until those who wait for it have
    noticed. no_room: those for which there was no slot, so that the source was not asked for them: then those that have
    slots are another transfer's, and this one ends. reserved: the slots, by ticket. called_off: it was late,
    and was cancelled for the sake of another source. removed: keys that are not kept, since they were removed after this
    began.
    """

    blocks: Mapping[PartTable, Sequence[bytes]]
    source: bytes
    nbytes: int
    patience_s: float
    since: float
    line: Line
    background: bool = False
    only_spare: bool = False
    late: bool = False
    expected_s: float = 0.0
    begun: bool = False
    kept: list[str] = field(default_factory=list)
    no_room: dict[PartTable, Sequence[bytes]] = field(default_factory=dict)
    reserved: dict[int, Reservation] = field(default_factory=dict)
    called_off: bool = False
    removed: set[bytes] = field(default_factory=set)
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    turn: Turn = field(init=False)
    task: asyncio.Task[None] = field(init=False)

    @property
    def namespace(self) -> NamespaceState:
        return next(iter(self.blocks)).namespace

    @property
    def hedge_at(self) -> float:
        """When a second source may be asked for the same blocks."""
        return (self.since if self.begun else max(self.since, self.line.moved_at)) + self.patience_s


@dataclass(eq=False, slots=True)
class Line:
    """The transfers from one source. moved_at: when one of them had its turn, last. count: of them now."""

    turns: Turns
    moved_at: float
    count: int = 0
