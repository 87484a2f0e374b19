"""Groups of block keys: each shard of the directory and the catalog has whole groups."""

from __future__ import annotations

from kvpool.types import KEY_BYTES

TAGS = 64
"""Groups of keys. Part of the format: all nodes of a cluster agree. Each is in one shard, whole."""


def tag_of(key: bytes) -> int:
    """The group of a block key. Keys are hashes, so any of their bits will do."""
    return key[KEY_BYTES - 1] % TAGS
