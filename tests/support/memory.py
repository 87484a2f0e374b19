"""How much an object keeps, whatever it calls the places."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sized

CONTAINERS = (bytearray, deque, dict, list, set)


def containers_of(kept: object) -> Iterator[Sized]:
    """Containers in the attributes of an object."""
    attributes = getattr(kept, "__dict__", None)
    for each in gc.get_referents(kept):
        if isinstance(each, CONTAINERS) and each is not attributes:
            yield each
    for each in (attributes or {}).values():
        if isinstance(each, CONTAINERS):
            yield each


def longest(kept: object) -> int:
    """Return the length of the longest container in the attributes of an object: what a limit bounds."""
    return max(map(len, containers_of(kept)), default=0)
