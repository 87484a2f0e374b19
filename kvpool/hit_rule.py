"""The hit rule: which prefix of a chain an engine can use, given the present parts. No state, any thread.

A prefix of n blocks is usable when n is a multiple of every part's stride and each part has the blocks
it needs: parts of kind full all their blocks, parts of kind window the last `window_blocks` of them
(or all, if the prefix has fewer). `usable` finds the longest one; `needed` names the blocks.

The rule works on containers of keys, one a part, of any kind: a node's own tables, or
`placement.prefix_lookup.somewhere`, which covers the cluster. Both answers come from the same code, so a node
never promises a prefix that it would not accept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import takewhile

from kvpool.types import PartKind, PartSpec


class AnyOf:
    """The union of some collections of keys."""

    __slots__ = ("_held",)

    def __init__(self, held: Sequence[Container[bytes]]) -> None:
        self._held = held

    def __contains__(self, key: object) -> bool:
        return any(key in each for each in self._held)


def usable(
    specs: Sequence[PartSpec], held: Sequence[Container[bytes]], keys: Sequence[bytes]
) -> int:
    """The longest prefix, in blocks, for which every part satisfies its rule.

    held[i]: the keys that the part of specs[i] has; if it has a method `prefix_length`, that is used.
    O(keys x parts); stops at the first gap of a full part. `keys` may be long: keys after the gap
    are not examined.
    """
    n = len(keys)
    uneven = False  # some part does not allow every n
    for spec, has in zip(specs, held, strict=True):
        step = spec.stride
        if spec.kind is PartKind.WINDOW:
            uneven = True
        elif step == 1:
            n = _leading(has, keys[:n])
        else:
            uneven = True
            n = step * _leading(has, keys[step - 1 : n : step])
    return _fit(specs, held, keys[:n]) if uneven and n else n


def _leading(has: Container[bytes], keys: Sequence[bytes]) -> int:
    """How many of the keys it has before the first that it lacks."""
    faster: Callable[[Sequence[bytes]], int] | None = getattr(has, "prefix_length", None)
    return len(list(takewhile(has.__contains__, keys))) if faster is None else faster(keys)


def _fit(specs: Sequence[PartSpec], held: Sequence[Container[bytes]], keys: Sequence[bytes]) -> int:
    """The longest usable prefix of keys that all full parts have: reduce until every part agrees."""
    ends = [_good_ends(spec, has, keys) for spec, has in zip(specs, held, strict=True)]
    n = len(keys)
    while n > 0:
        best = n
        for spec, good in zip(specs, ends, strict=True):
            slots = best // spec.stride
            best = spec.stride * (slots if good is None else good[slots])
        if best == n:
            break
        n = best
    return n


def _good_ends(
    spec: PartSpec, has: Container[bytes], keys: Sequence[bytes]
) -> Sequence[int] | None:
    """For each number of this part's blocks, the largest one up to it whose window is complete.

    None for full parts: they have all of these keys.
    """
    if spec.kind is not PartKind.WINDOW:
        return None
    good = [0]
    run = last = 0
    window = spec.window_blocks
    for slots, key in enumerate(keys[spec.stride - 1 :: spec.stride], 1):
        run = run + 1 if key in has else 0
        if run >= window or run == slots:
            last = slots
        good.append(last)
    return good


def first_needed(spec: PartSpec, n: int) -> int:
    """Index in the chain of the first key that a part needs of a usable prefix of n blocks.

    Every `stride`-th from there on is needed too, up to n.
    """
    slots = n // spec.stride
    window = spec.window_blocks
    skipped = max(0, slots - window) if window else 0
    return skipped * spec.stride + spec.stride - 1


def needed(spec: PartSpec, keys: Sequence[bytes]) -> Sequence[bytes]:
    """Which keys of a usable prefix a part needs, in the order of the chain."""
    if spec.stride == 1 and not spec.window_blocks:
        return keys
    return keys[first_needed(spec, len(keys)) :: spec.stride]
