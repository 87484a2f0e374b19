"""The contents of an engine's own cache, as reported: tier `gpu`. No I/O, no clock.

Engines report their caches in events (`stream`), and name a block there by 8 bytes: the last ones of
the hash whose last 16 are the block key. `EngineBlocks` keeps the blocks reported by one engine,
`SeenKeys` finds the key that belongs to 8 bytes.

All of it is a hint. Two blocks whose last 8 bytes agree are one block here, and events can be lost; an
error costs a request that is sent to an engine which must compute after all. Nothing is read or leased
by it.

Event loop only; not thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvpool.hit_rule import usable
from kvpool.types import KEY_BYTES, PartSpec

BLOCKS_MAX = 1 << 18
"""Blocks of one engine, summed over its groups. Further ones are not remembered."""

GROUPS_MAX = 64
SEEN_MAX = 1 << 20
CERTAIN_RUN_MIN = 256

_SHORT_BYTES = 8


def short_hash(key: bytes) -> int:
    """The event name of the block with this key, or of a longer hash that ends in it."""
    return int.from_bytes(key[-_SHORT_BYTES:], "big")


class Changes(NamedTuple):
    """The changes that bring a reader of `EngineBlocks` up to date.

    reset: first forget everything reported before; all held blocks are reported again.
    masks[i]: the groups that hold hashes[i] now, as bits; 0: none any more.
    """

    reset: bool
    hashes: list[int]
    masks: list[int]


class _Group:
    """Counts by hash, looked up by key: a container for the hit rule."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and short_hash(key) in self.copies


class EngineBlocks:
    """The blocks in one engine's cache, by group and hash. See the module.

    An engine may hold a block more than once (if it was computed again) and reports each
    copy that comes and goes, so copies are counted.

    complete: all blocks that the engine holds are known here, as far as its events can tell. While it is
        false the engine holds at least these. It becomes true again when the engine clears its cache, or
        by a long run of removals of blocks all known here: engines drop the least recently used
        first, so by then unknown blocks are gone, except those in constant use.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self.complete = False
        self.refused = 0
        """Blocks that were not remembered for lack of room, in total."""
        self._blocks_max = blocks_max
        self._groups: dict[int, _Group] = {}
        self._held = 0
        self._known_run = 0  # removals in a row of blocks that were known
        self._changed: dict[int, None] = {}
        self._reset = False

    def __len__(self) -> int:
        """Blocks, each counted once for each group that holds it."""
        return self._held

    # ---- what the events say -------------------------------------------------------------------------

    def holds(self, group: int, hashes: Iterable[int]) -> bool:
        """Whether the group holds all of these. Stops at the first missing one."""
        known = self._groups.get(group)
        return known is not None and all(each in known.copies for each in hashes)

    def stored(self, group: int, hashes: Sequence[int]) -> None:
        """The engine has one copy more of each of these. O(hashes)."""
        if not 0 <= group < GROUPS_MAX:
            self._refuse(len(hashes))
            return
        copies = self._groups.setdefault(group, _Group()).copies
        for each in hashes:
            count = copies.get(each, 0)
            if not count:
                if self._held >= self._blocks_max:
                    self._refuse(1)
                    continue
                self._held += 1
                self._changed[each] = None
            copies[each] = count + 1
        self._bound_changes()

    def removed(self, group: int, hashes: Sequence[int]) -> None:
        """The engine has one copy less of each of these. Unknown ones are ignored. O(hashes)."""
        known = self._groups.get(group)
        copies = known.copies if known is not None else {}
        for each in hashes:
            count = copies.get(each, 0)
            if count > 1:
                copies[each] = count - 1
            elif count:
                del copies[each]
                self._held -= 1
                self._changed[each] = None
            self._known_run = self._known_run + 1 if count else 0
        if not self.complete and self._known_run >= max(CERTAIN_RUN_MIN, self._held):
            self.complete = True
        self._bound_changes()

    def clear(self, *, complete: bool) -> None:
        """Forget everything. complete: because the engine holds nothing, not because events were lost."""
        self._groups = {}
        self._held = self._known_run = 0
        self._changed = {}
        self._reset = True
        self.complete = complete

    def _refuse(self, count: int) -> None:
        self.refused += count
        self.complete = False
        self._known_run = 0

    def _bound_changes(self) -> None:
        """Changes pile up if nobody takes them: restart from the held blocks."""
        if len(self._changed) > 2 * self._blocks_max:
            self._reset = True
            self._changed = {}
            for group in self._groups.values():
                self._changed.update(dict.fromkeys(group.copies))

    # ---- what is asked -------------------------------------------------------------------------------

    def masks(self, keys: Iterable[bytes]) -> list[int]:
        """For each key the groups that hold it, as bits; 0: none does."""
        return self.masks_of([short_hash(key) for key in keys])

    def masks_of(self, hashes: Sequence[int]) -> list[int]:
        """The same by the event names of the blocks."""
        masks = [0] * len(hashes)
        for number, group in self._groups.items():
            bit, copies = 1 << number, group.copies
            masks = [m | bit if h in copies else m for m, h in zip(masks, hashes, strict=True)]
        return masks

    def usable(self, rules: Mapping[int, PartSpec], keys: Sequence[bytes]) -> int:
        """The longest prefix of a chain, in blocks, that the engine has in its cache.

        rules: by group, what the engine needs of a prefix (`PartSpec.kind`, `window_blocks`, `stride`).
        keys: 16 bytes each, one for every `stride` 1.
        """
        nothing = _Group()
        held = [self._groups.get(group, nothing) for group in rules]
        return usable(list(rules.values()), held, keys)

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` has changes."""
        return self._reset or bool(self._changed)

    def take_changes(self, limit: int) -> Changes:
        """Changes since the last call, `limit` hashes at most; call until there are none.

        One reader. Reports the current state, so a block that came and went is reported once.
        """
        reset, self._reset = self._reset, False
        changed = self._changed
        hashes = [changed.popitem()[0] for _ in range(min(limit, len(changed)))]
        return Changes(reset, hashes, self.masks_of(hashes))


class SeenKeys:
    """Block keys by their event names: of one namespace, the last `limit` that were seen.

    Fed with the keys of puts, pulls and lookups. An event may arrive before its key is seen: after adding
    keys, check which of the new ones engines hold.
    """

    def __init__(self, limit: int = SEEN_MAX) -> None:
        self._limit = limit
        self._keys: dict[int, bytes] = {}  # in the order of being added

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, packed: bytes) -> dict[int, bytes]:
        """Remember packed keys; returns the new ones, by their event names. O(keys).

        Of keys that share their last 8 bytes only one is remembered.
        """
        halves = array("Q", packed)
        halves.byteswap()
        known = self._keys
        new = {
            short: packed[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            for at, short in enumerate(halves[1::2])
            if short not in known
        }
        known.update(new)
        self._forget()
        return new

    def keys_of(self, hashes: Iterable[int]) -> Iterator[bytes | None]:
        """The key of each, None if it was not seen, or too long ago."""
        return map(self._keys.get, hashes)

    def _forget(self) -> None:
        """Down to the limit, the oldest first."""
        surplus = len(self._keys) - self._limit
        if surplus <= 0:
            return
        oldest = iter(self._keys)
        for short in [next(oldest) for _ in range(surplus)]:
            del self._keys[short]
