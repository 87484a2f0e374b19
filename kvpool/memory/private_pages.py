"""Memory of this process whose pages exist once they are written."""

from __future__ import annotations

import mmap


def private_pages(nbytes: int) -> mmap.mmap:
    """Zeros, at least one byte: as large as it may have to become, for what is used of it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, nbytes, flags=flags)
