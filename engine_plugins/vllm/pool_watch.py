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
"""How many blocks are asked for, or taken, at a time."""
HELD_BLOCKS = 256
"""How many blocks the thread looks at before it lets go of the lock: whoever schedules waits for it."""
PAUSE_S = 0.0005
"""Between two such looks, for whoever waits."""
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
    """parts: that must be here. told: where it was when that was last taken. fresh_until: see `FRESH_S`.

    of: the times in which it became known, was last seen, and was last told of, as `_Times` counts them.
    """

    name: Hashable
    slot: int
    key: bytes
    parts: tuple[int, ...]
    label: Label
    fresh_until: float
    of: _Times
    now: Presence = Presence.NOWHERE
    told: Presence = Presence.NOWHERE


@dataclass(slots=True)
class _Times:
    """Counts what changes all blocks at once: the namespace; that none is here any more; that readers know of none.

    To count is all that is done at once. Each block finds out when it is looked at.
    """

    namespace: int = 0
    here: int = 0
    told: int = 0

    def copy(self) -> _Times:
        return _Times(self.namespace, self.here, self.told)


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
        self._slots: list[_Block[Label] | None] = []  # the same blocks, in an order that stays
        self._free: list[int] = []
        self._changed: OrderedDict[Hashable, None] = OrderedDict()
        self._gone: deque[tuple[int, Change[Label]]] = deque()
        self._fresh: OrderedDict[Hashable, None] = OrderedDict()
        self._times = _Times()
        self._swept = self._to_sweep = 0  # slots: see `_sweep`
        self._asked = 0  # a slot: the next of the round
        self._hurry = 0  # how many slots the round goes through as fast as it can
        self._away = False
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
        digest = record.digest()
        with self._lock:
            if digest != self._digest:
                self._times.namespace += 1
                self._sweep_all()
            self._record, self._generation, self._digest = record, generation, digest
            self._entered += 1
            self._asks_again = 0.0
            self._answered, self._away = self._clock(), False
            # What was known before it left may be there still.
            self._hurry = len(self._slots)

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
            if self._current(name) is not None:
                self._blocks.move_to_end(name)
                return
            slot = self._free.pop() if self._free else len(self._slots)
            if slot == len(self._slots):
                self._slots.append(None)
            until = self._clock() + FRESH_S
            block = _Block(name, slot, key, tuple(parts), label(), until, self._times.copy())
            self._blocks[name] = self._slots[slot] = block
            self._fresh[name] = None
            if len(self._blocks) > self._most:
                self._give_up(next(iter(self._blocks.values())))

    def forget_told(self) -> None:
        """Whoever heard of the blocks has dropped all that it knew."""
        with self._lock:
            self._times.told += 1
            self._sweep_all()

    @property
    def changed(self) -> bool:
        """Whether there may be something to take."""
        return bool(self._changed or self._gone or self._swept < self._to_sweep)

    def take(self, most: int = SLICE_BLOCKS) -> list[Change[Label]]:
        """What has changed since the last call, the first of it: blocks that are gone before others."""
        changes: list[Change[Label]] = []
        with self._lock:
            self._sweep()
            for _ in range(min(most, len(self._gone))):
                time_told, change = self._gone.popleft()
                if time_told == self._times.told:
                    changes.append(change)
            for _ in range(min(most - len(changes), len(self._changed))):
                if self._gone:
                    break
                name, _ = self._changed.popitem(last=False)
                block = self._current(name)
                if block is not None and block.told is not block.now:
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
        """Watch it no more."""
        del self._blocks[block.name]
        self._slots[block.slot] = None
        self._free.append(block.slot)
        self._changed.pop(block.name, None)
        self._fresh.pop(block.name, None)
        if block.told is not Presence.NOWHERE and block.of.told == self._times.told:
            change = Change(block.label, block.told, Presence.NOWHERE)
            self._gone.append((self._times.told, change))

    def _current(self, name: Hashable) -> _Block[Label] | None:
        """A block of that name, as it is in this time; None: there is none, or its namespace is not the present one."""
        block = self._blocks.get(name)
        if block is None:
            return None
        times, of = self._times, block.of
        if of.namespace != times.namespace:
            self._give_up(block)
            return None
        if of.here != times.here:
            of.here, block.now = times.here, Presence.NOWHERE
        if of.told != times.told:
            of.told, block.told = times.told, Presence.NOWHERE
        return block

    def _note(self, block: _Block[Label]) -> None:
        if block.now is block.told:
            self._changed.pop(block.name, None)
        else:
            self._changed[block.name] = None

    def _none_here(self) -> None:
        self._times.here += 1
        self._sweep_all()

    def _sweep_all(self) -> None:
        """All blocks have to be looked at again. Those that become known from now on are of this time."""
        self._swept, self._to_sweep = 0, len(self._slots)

    def _sweep(self) -> None:
        """Look at some of the blocks that have to be."""
        end = min(self._swept + HELD_BLOCKS, self._to_sweep)
        for slot in range(self._swept, end):
            if (block := self._slots[slot]) is not None and self._current(block.name) is block:
                self._note(block)
        self._swept = end

    def _next_fresh(self) -> _Block[Label] | None:
        if not self._fresh:
            return None
        name, _ = self._fresh.popitem(last=False)
        return self._current(name)

    def _next_of_round(self) -> _Block[Label] | None:
        self._hurry = max(self._hurry - 1, 0)
        if not self._slots:
            return None
        self._asked = (self._asked + 1) % len(self._slots)
        block = self._slots[self._asked]
        return None if block is None else self._current(block.name)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.wait(self._turn_s):
            self.turn()

    def turn(self) -> None:
        """Ask for the blocks of a turn. For the thread."""
        while self._swept < self._to_sweep:
            with self._lock:
                self._sweep()
            self._ended.wait(PAUSE_S)
        with self._lock:
            record, generation, entered = self._record, self._generation, self._entered
            if record is None or self._clock() < self._asks_again:
                return
        due = self._due(entered)
        if not due:
            return
        try:
            places = self._ask(record, generation, entered, due)
        except KvpoolError as error:
            places = None
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("the pool's blocks are missing in this engine's KV events: %s", error)
        self._settle(entered, due, places)

    def _due(self, entered: int) -> list[_Block[Label]]:
        """The blocks of a turn: the fresh ones, and a share of all. None if the engine has left meanwhile."""
        with self._lock:
            fresh = min(len(self._fresh), SLICE_BLOCKS)
            share = max(int(-(-len(self._slots) * self._turn_s // self._round_s)), self._hurry)
            steps = [self._next_fresh] * fresh
            steps += [self._next_of_round] * min(len(self._slots), SLICE_BLOCKS, share)
        found: dict[Hashable, _Block[Label]] = {}
        for at in range(0, len(steps), HELD_BLOCKS):
            with self._lock:
                if self._entered != entered:
                    return []
                for step in steps[at : at + HELD_BLOCKS]:
                    if (block := step()) is not None:
                        found[block.name] = block
            self._ended.wait(PAUSE_S)
        return list(found.values())

    def _settle(
        self, entered: int, due: Sequence[_Block[Label]], places: Sequence[Presence] | None
    ) -> None:
        """Keep what the daemon said; None: it did not answer."""
        now = self._clock()
        answers = zip(due, [None] * len(due) if places is None else places, strict=True)
        while some := list(islice(answers, HELD_BLOCKS)):
            with self._lock:
                if self._entered != entered:
                    return
                for block, place in some:
                    if self._current(block.name) is block:
                        self._answer(block, place, now)
            self._ended.wait(PAUSE_S)
        with self._lock:
            if self._entered != entered:
                return
            if places is not None:
                self._answered, self._away = now, False
                return
            # Whether they are there is not known.
            self._asks_again = now + REFUSED_S
            if now - self._answered >= AWAY_S and not self._away:
                self._away = True
                self._none_here()

    def _answer(self, block: _Block[Label], place: Presence | None, now: float) -> None:
        """place: where it is; None: there is no answer. With the lock."""
        if place is None:
            self._fresh[block.name] = None
            self._fresh.move_to_end(block.name, last=False)
            return
        block.now = place
        self._note(block)
        if place is Presence.NOWHERE and now < block.fresh_until:
            self._fresh[block.name] = None

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
