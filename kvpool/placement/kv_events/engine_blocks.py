"""What an engine's own cache holds, by hearsay: tier `gpu`. No I/O, no clock.

Engines tell of their caches in events (`event_stream`), and name a block there by 8 bytes: the last ones of
the hash of which our block key is the last 16. `EngineBlocks` keeps what one engine is said to hold,
`SeenKeys` finds the key that belongs to 8 bytes.

All of it is a hint. Two blocks whose last 8 bytes agree are one block here, and events can be lost; what is
wrong costs a request that is sent to an engine which has to compute after all. Nothing is read or leased by
what this says.

Event loop only: nothing here is safe to share among threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvpool.hit_rule import usable
from kvpool.types import KEY_BYTES, PartSpec

BLOCKS_MAX = 1 << 18
"""Blocks of one engine, summed over its groups. What it stores beyond is not remembered."""

GROUPS_MAX = 64
SEEN_MAX = 1 << 20
CERTAIN_RUN_MIN = 256

_SHORT_BYTES = 8


def short_hash(key: bytes) -> int:
    """What engines' events call the block of this key, or of a longer hash that ends in it."""
    return int.from_bytes(key[-_SHORT_BYTES:], "big")


class Changes(NamedTuple):
    """What a reader of `EngineBlocks` has to do to be up to date.

    reset: first forget all that was told before; everything held is told anew.
    masks[i]: the groups that hold hashes[i] now, as bits; 0: none does any more.
    """

    reset: bool
    hashes: list[int]
    masks: list[int]


class _Group:
    """Copies by hash, asked by key: a container for the hit rule."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and short_hash(key) in self.copies


class EngineBlocks:
    """The blocks in one engine's cache, by group and hash. See the module.

    An engine may hold a block more than once (whoever computes it again keeps it again) and tells of each
    copy that comes and goes, so copies are counted.

    complete: nothing that the engine holds is missing here, as far as its events can tell. While it is
        false the engine holds at least this. It becomes true again when the engine empties its cache, or
        by a long run of removals of which every block was known here: engines drop what was used longest
        ago first, so by then what is unknown has gone, but for what is used all the time.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self.complete = False
        self.refused = 0
        """Blocks that were not remembered for lack of room, all in all."""
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
        """Whether the group holds all of these. Stops at the first that it does not."""
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
        """The engine has one copy less of each of these. What is not known here is ignored. O(hashes)."""
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
        """Forget everything. complete: because the engine holds nothing, not because we lost track."""
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
        """Blocks that came and went pile up if nobody takes the changes: begin anew with what is held."""
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
        """The same by what events call the blocks."""
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
        """Whether `take_changes` has something to tell."""
        return self._reset or bool(self._changed)

    def take_changes(self, limit: int) -> Changes:
        """What has changed since it was last taken, `limit` hashes at most; call until nothing comes.

        One reader. What is told is what is held now, so a block that came and went is told once.
        """
        reset, self._reset = self._reset, False
        changed = self._changed
        hashes = [changed.popitem()[0] for _ in range(min(limit, len(changed)))]
        return Changes(reset, hashes, self.masks_of(hashes))


class SeenKeys:
    """Block keys by what engines' events call them: of one namespace, the last `limit` that were seen.

    Fed with the keys of puts, pulls and lookups. An event may come before its key is seen: whoever adds
    keys asks what engines hold of the new ones.
    """

    def __init__(self, limit: int = SEEN_MAX) -> None:
        self._limit = limit
        self._keys: dict[int, bytes] = {}  # in the order of being added

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, packed: bytes) -> dict[int, bytes]:
        """Remember packed keys; gives those that are new here, by what events call them. O(keys).

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
        """The key of each, None where it was not seen, or too long ago."""
        return map(self._keys.get, hashes)

    def _forget(self) -> None:
        """Down to the limit, the oldest first."""
        surplus = len(self._keys) - self._limit
        if surplus <= 0:
            return
        oldest = iter(self._keys)
        for short in [next(oldest) for _ in range(surplus)]:
            del self._keys[short]
