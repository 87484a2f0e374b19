"""What is stored: a block's key follows from its prompt, and its bytes follow from its key.

So whoever reads a block knows what is right without asking who wrote it. Nothing here uses the pool's code.
"""

from __future__ import annotations

import functools
import hashlib

PARTS = 8
PART_BYTES = 4 << 10
PROMPT_BLOCKS = 8
BLOCK_BYTES = PARTS * PART_BYTES
PROMPT_BYTES = PROMPT_BLOCKS * BLOCK_BYTES


def key(prompt: int, index: int) -> bytes:
    """Of the block at an index of a prompt."""
    return hashlib.blake2b(f"{prompt}/{index}".encode(), digest_size=16).digest()


def keys(prompt: int, blocks: int = PROMPT_BLOCKS) -> list[bytes]:
    """The prefix chain of a prompt."""
    return [key(prompt, index) for index in range(blocks)]


def contents(block: bytes, part: int) -> bytes:
    """What is right for a part of the block with this key."""
    return hashlib.shake_128(block + bytes([part])).digest(PART_BYTES)


def digest(data: bytes | memoryview) -> str:
    """What a history keeps of bytes that were read."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@functools.lru_cache(1 << 18)
def right(prompt: int, index: int, part: int) -> str:
    """The digest of what a reader of this has to see."""
    return digest(contents(key(prompt, index), part))
