"""Which of an engine's blocks the pool has, and where: watched by a thread, for the engine's KV events.

The pool tells engines of nothing that it evicts, stores or brings. So the thread asks again and again: for blocks that
became known lately at every turn, for all of them every few seconds. Only this node's memory and disks count.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from kvpool.client import Presence
from kvpool.errors import KvpoolError
from kvpool.types import Namespace, NamespaceRecord

if TYPE_CHECKING:
    from kvpool.client import Client

log = logging.getLogger("kvpool.vllm")

BLOCKS_MAX = 65_536
TURN_S = 0.1
ROUND_S = 5.0
"""How long it takes to ask for all blocks once."""
FRESH_S = 5.0
"""How long blocks that became known are asked for at every turn: they are saved about then."""
SLICE_BLOCKS = 1024
"""How many blocks the lock is held for at a time: whoever schedules waits for it."""
AWAY_S = 2.0
"""A daemon that has not answered for so long has lost the blocks, or will not give them soon."""
REFUSED_S = 1.0

Label = TypeVar("Label")


@dataclass(frozen=True, slots=True)
class Change(Generic[Label]):
    """A block was in one place, as last taken, and is in another; `NOWHERE` counts as one."""

    label: Label
    before: Presence
    now: Presence


@dataclass(slots=True)
class _Block(Generic[Label]):
    """parts: that must be here. told: where it was when that was last taken. fresh_until: see `FRESH_S`."""

    key: bytes
    parts: tuple[int, ...]
    label: Label
    fresh_until: float
    now: Presence = Presence.NOWHERE
    told: Presence = Presence.NOWHERE


class PoolWatch(Generic[Label]):
    """Thread-safe. Labels say whatever the caller needs of a block to report it.

    client: for the thread only. most: how many blocks are watched; of more, those that became known first are given up, as if
    they had left the pool.
    """

    def __init__(
        self,
        client: Client,
        *,
        most: int = BLOCKS_MAX,
        turn_s: float = TURN_S,
        round_s: float = ROUND_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._most = most
        self._turn_s = turn_s
        self._round_s = round_s
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Hashable, _Block[Label]] = OrderedDict()
        self._changed: dict[Hashable, None] = {}
        self._gone: list[Change[Label]] = []
        self._fresh: deque[Hashable] = deque()
        self._round: deque[Hashable] = deque()
        self._record: NamespaceRecord | None = None
        self._generation = -1
        self._digest = b""
        self._entered = 0  # counts calls of `enter` and `leave`
        self._opened: tuple[int, Namespace] | None = None
        self._answered = clock()
        self._asks_again = 0.0
        self._refused = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-watch", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def enter(self, record: NamespaceRecord, generation: int = -1) -> None:
        """The engine is in this namespace, with weights of that generation (`Client.open`)."""
        with self._lock:
            digest = record.digest()
            if digest != self._digest:
                for block in self._blocks.values():
                    self._give_up(block)
                self._blocks.clear()
                self._changed.clear()
                self._fresh.clear()
                self._round.clear()
            self._record, self._generation, self._digest = record, generation, digest
            self._entered += 1
            self._asks_again = 0.0
            self._answered = self._clock()
            # What was known before it left may be there still.
            self._fresh = deque(self._blocks)

    def leave(self) -> None:
        """The engine uses nothing of the pool until it enters a namespace: perhaps this one again."""
        with self._lock:
            self._record = None
            self._entered += 1
            self._none_here()

    def know(
        self, name: Hashable, key: bytes, parts: Sequence[int], label: Callable[[], Label]
    ) -> None:
        """Watch a block, if it is not yet. name: of the block here. parts: that an engine needs. label: makes its label."""
        with self._lock:
            if name in self._blocks:
                self._blocks.move_to_end(name)
                return
            until = self._clock() + FRESH_S
            self._blocks[name] = _Block(key, tuple(parts), label(), until)
            self._fresh.append(name)
            if len(self._blocks) > self._most:
                first, block = self._blocks.popitem(last=False)
                self._changed.pop(first, None)
                self._give_up(block)

    def forget_told(self) -> None:
        """Whoever heard of the blocks has dropped all that it knew."""
        with self._lock:
            self._gone.clear()
            for name, block in self._blocks.items():
                block.told = Presence.NOWHERE
                self._note(name, block)

    @property
    def changed(self) -> bool:
        """Whether there is something to take."""
        return bool(self._changed or self._gone)

    def take(self, most: int = SLICE_BLOCKS) -> list[Change[Label]]:
        """What has changed since the last call, the first of it: blocks that are gone before others."""
        with self._lock:
            changes, self._gone = self._gone[:most], self._gone[most:]
            for name in [*islice(self._changed, most - len(changes))]:
                del self._changed[name]
                block = self._blocks[name]
                changes.append(Change(block.label, block.told, block.now))
                block.told = block.now
            return changes

    def close(self) -> None:
        """Idempotent. Waits for the question that is under way."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    # --- with the lock ----------------------------------------------------------------------------

    def _give_up(self, block: _Block[Label]) -> None:
        if block.told is not Presence.NOWHERE:
            self._gone.append(Change(block.label, block.told, Presence.NOWHERE))

    def _note(self, name: Hashable, block: _Block[Label]) -> None:
        if block.now is block.told:
            self._changed.pop(name, None)
        else:
            self._changed[name] = None

    def _none_here(self) -> None:
        for name, block in self._blocks.items():
            block.now = Presence.NOWHERE
            self._note(name, block)

    def _due(self) -> list[tuple[Hashable, _Block[Label]]]:
        """The blocks of a turn: the fresh ones, and a share of all."""
        found: dict[Hashable, _Block[Label]] = {}
        for _ in range(min(len(self._fresh), SLICE_BLOCKS)):
            name = self._fresh.popleft()
            if (block := self._blocks.get(name)) is not None:
                found[name] = block
        if not self._round:
            self._round = deque(self._blocks)
        share = -(-len(self._blocks) * self._turn_s // self._round_s)
        for _ in range(min(len(self._round), SLICE_BLOCKS, int(share))):
            name = self._round.popleft()
            if (block := self._blocks.get(name)) is not None:
                found[name] = block
        return list(found.items())

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.wait(self._turn_s):
            self.turn()

    def turn(self) -> None:
        """Ask for the blocks of a turn. For the thread."""
        with self._lock:
            record, generation, entered = self._record, self._generation, self._entered
            if record is None or self._clock() < self._asks_again:
                return
            due = self._due()
        if not due:
            return
        try:
            places = self._ask(record, generation, entered, [block for _, block in due])
        except KvpoolError as error:
            places = None
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("the pool's blocks are missing in this engine's KV events: %s", error)
        now = self._clock()
        with self._lock:
            if self._entered != entered:
                return
            if places is not None:
                self._answered = now
                for (name, block), place in zip(due, places, strict=True):
                    if self._blocks.get(name) is block:
                        block.now = place
                        self._note(name, block)
                        if place is Presence.NOWHERE and now < block.fresh_until:
                            self._fresh.append(name)
                return
            # They are asked for again; whether they are there is not known.
            self._fresh.extendleft(name for name, _ in reversed(due))
            self._asks_again = now + REFUSED_S
            if now - self._answered >= AWAY_S:
                self._none_here()

    def _ask(
        self,
        record: NamespaceRecord,
        generation: int,
        entered: int,
        blocks: Sequence[_Block[Label]],
    ) -> list[Presence] | None:
        """Where each block is here; None: the daemon does not answer."""
        if self._opened is None or self._opened[0] != entered:
            self._opened = (entered, self._client.open(record, generation=generation))
        namespace = self._opened[1]
        places = [Presence.MEMORY] * len(blocks)
        by_part: dict[int, list[int]] = {}
        for index, block in enumerate(blocks):
            for part in block.parts:
                by_part.setdefault(part, []).append(index)
        for part, at in by_part.items():
            found = self._client.present(
                namespace, [blocks[index].key for index in at], part=part, wait_s=0.0
            )
            if not self._client.available:
                return None
            for index, place in zip(at, found.tolist(), strict=True):
                here = place if place >= Presence.DISK else Presence.NOWHERE
                places[index] = Presence(min(places[index], here))
        self._refused = ""
        return places
