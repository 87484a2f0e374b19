"""Pins: the engine's blocks that saves copy, in the engine's own block pool.

A reset of the engine's cache fails while a block of it is in use, and the engine learns of an ended save in a later step
only, which an idle engine does not make. So a pin is no reference where it need not be one. The engine uses a free block
last if a hash names its content. Such a block is only watched, and counts as free once its requests have left it. If the
engine uses it again, the ranks are told before they overwrite it. A free block without a hash is used first. It is held
by a reference, but not while there is no request: nothing is overwritten then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Pins:
    """Pins of saves, within a budget. A block counts once for each save.

    limit: the most blocks that saves may pin at a time.
    watches: whether ranks are told of blocks that are used again before anything is written into these.
    """

    def __init__(self, limit: int, *, watches: bool) -> None:
        self.pinned = 0
        self._limit = limit
        self._watches = watches
        self._pool: Any = None
        self._numbers: dict[int, Sequence[int]] = {}  # of each save's blocks
        self._held: dict[int, list[Any]] = {}  # of each save, the blocks that are not watched
        self._saves: dict[int, set[int]] = {}  # of each block's number
        self._reused: set[int] = set()
        self._idle = False

    def use(self, block_pool: Any) -> None:
        self._pool = block_pool

    def room(self) -> int:
        return self._limit - self.pinned

    def take(self, save: int, numbers: Sequence[int]) -> None:
        """Pin blocks until the save has ended. They belong to a request, or were left in this step."""
        assert len(numbers) <= self.room(), "saves are cut to the budget before they are pinned"
        watched, held = list[Any](), list[Any]()
        for number in numbers:
            block = self._pool.blocks[number]
            (watched if self._watches and block.block_hash is not None else held).append(block)
            self._saves.setdefault(number, set()).add(save)
        self._pool.touch([*watched, *held])
        self._pool.unpin_blocks(watched, self._note_reuse)
        self._numbers[save], self._held[save] = numbers, held
        self.pinned += len(numbers)

    def give_back(self, save: int) -> None:
        """Unpin the blocks of an ended save."""
        numbers = self._numbers.pop(save)
        self.pinned -= len(numbers)
        for number in numbers:
            self._saves[number].remove(save)
            if not self._saves[number]:
                del self._saves[number]
        held = self._held.pop(save)
        if not self._idle:
            self._free(held)

    def let_go(self) -> None:
        """Hold no block from now on: there is no request."""
        if not self._idle:
            self._idle = True
            for held in self._held.values():
                self._free(held)

    def hold(self) -> None:
        """Hold blocks again: a request came. Until now nothing was written into them."""
        if self._idle:
            self._idle = False
            for held in self._held.values():
                self._pool.touch(held)

    def take_reused(self) -> set[int]:
        """Saves under way of which blocks were used again since the last call, or lost their hash in a reset."""
        reused, self._reused = self._reused & self._numbers.keys(), set()
        return reused

    def _note_reuse(self, block: Any) -> None:
        """Told by the engine's pool; also of blocks whose saves have ended."""
        self._reused |= self._saves.get(block.block_id, set())

    def _free(self, blocks: Sequence[Any]) -> None:
        """Drop references, of the chain's tail first: the engine evicts in that order."""
        self._pool.free_blocks(reversed(blocks))
