"""The keys of a prompt's blocks from its tokens, as the engines of a namespace hash them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidRequest
from kvpool.types import KEY_BYTES

CHARACTERS_MAX = 16 << 20
BY_CBOR = ("sha256_cbor", "xxhash_cbor")  # the others depend on the engine's version of Python
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)


def read_tokens(file: Path) -> list[int]:
    """Numbers with anything but digits between them. Raises `InvalidRequest`."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read tokens from {file}: {error}") from None
    if len(text) > CHARACTERS_MAX:
        raise InvalidRequest(f"{file} is too long for a prompt's tokens")
    return [int(number) for number in _NUMBER.findall(text)]


def keys_of_tokens(
    tokens: Sequence[int], engines: Sequence[Mapping[str, Any]], namespace: str
) -> list[bytes]:
    """The keys of a prompt's full blocks. engines: as announced. namespace: its digest, as hex digits.

    Raises `InvalidRequest` where they have not said how they hash, or in a way that cannot be repeated here.
    """
    from kvpool.router.hashing import HashSpec, chain

    found = {
        (each["block_tokens"], each["hash_algorithm"], each["none_hash"])
        for each in engines
        if each["namespace"] == namespace and each["none_hash"]
    }
    if len(found) != 1:
        raise InvalidRequest(
            f"the keys of these tokens are not known: {len(found) or 'no'} ways to hash them were announced by engines "
            f"of namespace {namespace}, and one is needed. Name the keys of the blocks"
        )
    ((block_tokens, algorithm, begins),) = found
    if algorithm not in BY_CBOR:
        raise InvalidRequest(
            f"engines of namespace {namespace} hash with {algorithm}, which depends on their version of Python: name "
            "the keys of the blocks"
        )
    spec = HashSpec(block_tokens, algorithm, bytes.fromhex(begins))
    try:
        hashes = chain(spec, tokens)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if not hashes:
        raise InvalidRequest(f"{len(tokens)} tokens are not even one block of {block_tokens}")
    return [each[-KEY_BYTES:] for each in hashes]
