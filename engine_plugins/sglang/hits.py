"""Which prefixes of a chain of pages can be restored, from what is there of each pool. No I/O.

A *length* is a number of pages from the start of the chain. Pools with states or windows need pages at the end of a
prefix only, so that 5 pages may be restorable where 4 and 3 are not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Present = npt.NDArray[np.bool_]


def run(present: Present) -> int:
    """How many pages are there before the first one that is not."""
    return len(present) if present.all() else int(np.argmin(present))


def lengths_of_all(present: Present) -> list[int]:
    """The lengths of which all pages are there."""
    return list(range(1, run(present) + 1))


def lengths_of_trailing(present: Present, trailing: int) -> list[int]:
    """The lengths of which the last `trailing` pages are there; all pages of those that are shorter."""
    ends = np.arange(1, len(present) + 1)
    before = np.concatenate(([0], np.cumsum(present)))
    begins = np.maximum(ends - max(1, trailing), 0)
    found = ends[before[ends] - before[begins] == ends - begins]
    return [int(each) for each in found]
