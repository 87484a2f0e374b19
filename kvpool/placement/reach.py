"""How much of a prefix each node could give, by what is known of who has what. No I/O, any thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from kvpool.placement.directory import TIERS, Entry
from kvpool.placement.prefix import usable
from kvpool.types import PartKind, PartSpec

_MEMORY = frozenset({TIERS["dram"], TIERS["device"]})
_OWN = _MEMORY | {TIERS["ssd"]}


def reach(
    specs: Sequence[PartSpec], keys: Sequence[bytes], entries: Iterable[Sequence[Entry]]
) -> dict[bytes, tuple[int, int]]:
    """For each incarnation, the blocks of the prefix that are usable from its memory, and with its disks.

    entries: of the first keys, for each in order; nobody has the others. Those that have nothing of use are left out. O(keys x incarnations that have any).
    """
    n = len(keys)
    masks: dict[bytes, tuple[list[int], list[int]]] = {}
    last: Sequence[Entry] | None = None
    having: Mapping[bytes, tuple[int, int]] = {}
    for at, found in enumerate(entries):
        if found != last:  # of neighbours in a chain mostly the same is known
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
    """The longest usable prefix, in blocks, where masks[i] says which parts of keys[i] there are."""
    if all(spec.kind is PartKind.FULL and spec.stride == 1 for spec in specs):
        whole = (1 << len(specs)) - 1
        return next((at for at, mask in enumerate(masks) if mask & whole != whole), len(masks))
    held = [
        frozenset(compress(keys, [mask >> part & 1 for mask in masks]))
        for part in range(len(specs))
    ]
    return usable(specs, held, keys)
