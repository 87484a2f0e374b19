"""The order of blocks in a pack, so that few ranges bring many of a chain back. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def in_chains(keys: Sequence[bytes], parents: Sequence[bytes]) -> list[int]:
    """Indices of blocks in such an order that each follows its predecessor, as directly as possible.

    Reads of a chain then need few adjacent ranges. Blocks whose predecessor is not among
    them keep their order.
    """
    index = {key: at for at, key in enumerate(keys)}
    followers: dict[int, list[int]] = {}
    heads = []
    for at, parent in enumerate(parents):
        before = index.get(parent, at)
        if before == at:
            heads.append(at)
        else:
            followers.setdefault(before, []).append(at)
    order: list[int] = []
    # A cycle has no head; keys are hashes of their chains, so only forged keys form one.
    seen = [False] * len(keys)
    for head in [*heads, *range(len(keys))]:
        waiting = [] if seen[head] else [head]
        while waiting:
            at = waiting.pop()
            if not seen[at]:
                seen[at] = True
                order.append(at)
                waiting += reversed(followers.get(at, ()))
    return order
