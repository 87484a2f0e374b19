"""Requests for blocks as a peer sends them."""

from __future__ import annotations

from kvpool.wire.peer import Fetch, PartKeys


def fetch_of(digest: bytes, nbytes: int, keys: bytes, deadline_s: float, part: int = 0) -> Fetch:
    """Return a request of the default tenant for blocks of one part."""
    return Fetch("default", digest, [PartKeys(part, nbytes, keys)], deadline_s)
