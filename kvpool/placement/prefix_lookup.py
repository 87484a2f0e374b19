"""How much of a prefix each node could provide, by known replicas. No I/O, any thread."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import compress

from kvpool.hit_rule import usable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.types import PartKind, PartSpec

_MEMORY = frozenset({TIERS["dram"], TIERS["device"]})
_OWN = _MEMORY | {TIERS["ssd"]}


def reach(
    specs: Sequence[PartSpec], keys: Sequence[bytes], entries: Iterable[Sequence[Entry]]
) -> dict[bytes, tuple[int, int]]:
    """For each incarnation, the blocks of the prefix that are usable from its memory, and with its disks.

    entries: of the first keys, for each in order; the others have none. Nodes without usable blocks are left out.
    O(keys x incarnations that have any).
    """
    n = len(keys)
    masks: dict[bytes, tuple[list[int], list[int]]] = {}
    last: Sequence[Entry] | None = None
    having: Mapping[bytes, tuple[int, int]] = {}
    for at, found in enumerate(entries):
        if found != last:  # adjacent keys of a chain mostly have the same entries
            last, having = found, _by_incarnation(found)
        for incarnation, (memory, both) in having.items():
            known = masks.get(incarnation)
            if known is None:
                known = masks[incarnation] = ([0] * n, [0] * n)
            known[0][at] = memory
            known[1][at] = both
    found_of = {
        incarnation: (usable_by_masks(specs, keys, memory), usable_by_masks(specs, keys, both))
        for incarnation, (memory, both) in masks.items()
    }
    return {incarnation: lengths for incarnation, lengths in found_of.items() if lengths[1]}


def _by_incarnation(entries: Sequence[Entry]) -> dict[bytes, tuple[int, int]]:
    """The parts that each has in memory, and in memory or on disks."""
    found: dict[bytes, tuple[int, int]] = {}
    for incarnation, tier, mask in entries:
        if tier in _OWN:
            memory, both = found.get(incarnation, (0, 0))
            found[incarnation] = (memory | mask if tier in _MEMORY else memory, both | mask)
    return found


def usable_by_masks(specs: Sequence[PartSpec], keys: Sequence[bytes], masks: Sequence[int]) -> int:
    """The longest usable prefix, in blocks, where masks[i] is the available parts of keys[i]."""
    if all(spec.kind is PartKind.FULL and spec.stride == 1 for spec in specs):
        whole = (1 << len(specs)) - 1
        return next((at for at, mask in enumerate(masks) if mask & whole != whole), len(masks))
    held = [
        frozenset(compress(keys, [mask >> part & 1 for mask in masks]))
        for part in range(len(specs))
    ]
    return usable(specs, held, keys)


def somewhere(
    parts: Sequence[int],
    local: Sequence[Container[bytes]],
    keys: Sequence[bytes],
    entries: Sequence[Iterable[Entry]],
    lives: Callable[[bytes], bool],
) -> list[set[bytes]]:
    """For each part, which of these keys exist here or on a living node; for `usable`.

    parts: their numbers, as bits of entries' masks. local[i]: keys of parts[i] that are here.
    entries[j]: the directory's entries of keys[j]. lives: whether an incarnation's entries count. Leave
    out this node's own: `local` has the current state.

    Blocks of one prompt are mostly on the same nodes, so that few masks differ and most of the work is done on
    whole sets.
    """
    by_mask: dict[int, list[bytes]] = {}
    last: object = None
    having: list[bytes] = []
    for key, known in zip(keys, entries, strict=True):
        if known is not last:
            last = known
            mask = 0
            for incarnation, _, bits in known:
                if lives(incarnation):
                    mask |= bits
            having = by_mask.setdefault(mask, [])
        having.append(key)
    by_mask.pop(0, None)
    found = []
    for part, has in zip(parts, local, strict=True):
        there = set(filter(has.__contains__, keys))
        for mask, having in by_mask.items():
            if mask >> part & 1:
                there.update(having)
        found.append(there)
    return found
