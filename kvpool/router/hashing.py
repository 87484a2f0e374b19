"""The hashes of a prompt's blocks, as vLLM computes them. No I/O, any thread.

A block's hash is that of (hash of the block before it, its tokens, extra keys), encoded as CBOR or
as a pickle. Extra keys: the adapter, in every block; the images in a block, with their positions; the cache
salt, in the first block. Only full blocks have one.

For `sha256_cbor`, vLLM's default, the tokens of many blocks are encoded at once.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cbor2
import numpy as np
import xxhash

from kvpool.errors import ConfigError

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's start of a chain, unless PYTHONHASHSEED is set in its process."""
RUN_BLOCKS = 32
RUNS_MAX = 4096
"""Runs of blocks that are cached: 2 M tokens at 16 a block, some 5 KB each."""

Extra = tuple[tuple[Any, ...], ...] | None
_Run = tuple["HashSpec", bytes, bytes, bytes]
"""Inputs of a run's hashes: the spec, the hash before it, its tokens, and a digest of the extra keys."""


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


_ALGORITHMS: dict[str, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]] = {
    "sha256_cbor": (_cbor, _sha256),
    "sha256": (_pickle, _sha256),
    "xxhash_cbor": (_cbor, _xxh3),
    "xxhash": (_pickle, _xxh3),
}


@dataclass(frozen=True, slots=True)
class HashSpec:
    """Inputs of an engine's block hashes, beside the prompt.

    block_tokens: covered by one hash. algorithm: vLLM's name for it; the two over pickles also depend on the
    Python version of the engine. none_hash: the start of a chain. Raises `ConfigError`.
    """

    block_tokens: int
    algorithm: str
    none_hash: bytes

    def __post_init__(self) -> None:
        _check(self.algorithm)
        if self.block_tokens < 1 or not self.none_hash:
            raise ConfigError("a block needs at least one token, and its chain a start")


@dataclass(frozen=True, slots=True)
class Item:
    """An image or other media in a prompt: vLLM's identifier, and the tokens that stand for it."""

    identifier: str
    offset: int
    length: int


def _check(algorithm: str) -> None:
    if algorithm not in _ALGORITHMS:
        raise ConfigError(
            f"unknown block hash {algorithm!r}; known are {', '.join(sorted(_ALGORITHMS))}"
        )


def none_hash(algorithm: str, seed: str = DEFAULT_SEED) -> bytes:
    """The start of a chain. seed: PYTHONHASHSEED of the engine's process. Raises `ConfigError`."""
    _check(algorithm)
    encode, digest = _ALGORITHMS[algorithm]
    return digest(encode(seed))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the index knows it.

    tokens: empty: they are not known (several prompts, images, embeddings, …). hashes: of its full blocks.
    keys: the same in the `PrefixIndex`; `Request.keys`. kinds: of the engines that serve its model.
    spec: how it was hashed; None: it was not, and has no keys.
    """

    model: str
    tokens: Sequence[int]
    hashes: Sequence[bytes]
    keys: Sequence[int]
    kinds: frozenset[str]
    spec: HashSpec | None


class Hasher:
    """Hashes prompts, and caches runs of blocks, so that a chat's next turn costs only its new part.

    Not thread-safe.
    """

    def __init__(self, runs_max: int = RUNS_MAX) -> None:
        self._runs_max = runs_max
        self._runs: dict[_Run, list[bytes]] = {}  # the most recently used is at the end

    def chain(
        self,
        spec: HashSpec,
        tokens: Sequence[int],
        *,
        salt: str | None = None,
        lora: tuple[str, str] | None = None,
        multimodal: Sequence[Item] = (),
    ) -> list[bytes]:
        """The hashes of a prompt's full blocks, in order.

        tokens: from 0 to 2**32 - 1. lora: name and path of the adapter. multimodal: in the order of their
        places. Raises `ValueError` for other tokens.
        """
        size = spec.block_tokens
        count = len(tokens) // size
        try:
            packed = array("I", tokens[: count * size])
        except OverflowError:
            raise ValueError("a token must be a number from 0 to 2**32 - 1") from None
        extras = _extras(size, count, salt, lora, multimodal)
        hashes: list[bytes] = []
        rest: list[bytes] | None = None  # from the first run on that is not known
        parent = spec.none_hash
        for first in range(0, count, RUN_BLOCKS):
            end = min(count, first + RUN_BLOCKS)
            key = _run(spec, parent, packed[first * size : end * size], extras[first:end])
            known = self._runs.pop(key, None)
            if known is None:
                if rest is None:
                    rest, offset = (
                        _hash(spec, parent, packed[first * size :], extras[first:]),
                        first,
                    )
                known = rest[first - offset : end - offset]
            self._runs[key] = known
            hashes += known
            parent = known[-1]
        while len(self._runs) > self._runs_max:
            del self._runs[next(iter(self._runs))]
        return hashes


def chain(
    spec: HashSpec,
    tokens: Sequence[int],
    *,
    salt: str | None = None,
    lora: tuple[str, str] | None = None,
    multimodal: Sequence[Item] = (),
) -> list[bytes]:
    """As `Hasher.chain`, without a cache."""
    return Hasher().chain(spec, tokens, salt=salt, lora=lora, multimodal=multimodal)


def salt_of(model: str, spec: HashSpec) -> int:
    """Distinguishes keys of one model's blocks from those of others with the same hashes."""
    parts = (model, str(spec.block_tokens), spec.algorithm, spec.none_hash.hex())
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode())


def index_keys(hashes: Sequence[bytes], salt: int) -> list[int]:
    """The keys of blocks in the prefix index: the end of each hash, as events have it, and the salt."""
    if not hashes:
        return []
    ends = np.frombuffer(b"".join(hashes), dtype=">u8")
    width = len(hashes[0]) // 8
    keys: list[int] = (ends[width - 1 :: width] ^ np.uint64(salt)).tolist()
    return keys


def _extras(
    size: int,
    count: int,
    salt: str | None,
    lora: tuple[str, str] | None,
    multimodal: Sequence[Item],
) -> list[Extra]:
    """Each block's extra keys."""
    every: tuple[tuple[Any, ...], ...] = (("lora", *lora),) if lora else ()
    extras: list[Extra] = [every or None] * count
    for item in multimodal:
        for at in range(item.offset // size, min(count, -(-(item.offset + item.length) // size))):
            extras[at] = (*(extras[at] or ()), ("mm", item.identifier, item.offset - at * size))
    if salt and count:
        extras[0] = (*(extras[0] or ()), ("cache_salt", salt))
    return extras


def _run(spec: HashSpec, parent: bytes, tokens: array[int], extras: list[Extra]) -> _Run:
    first = extras[0]
    same = extras.count(first) == len(extras)
    # Digested: a salt may be as long as a request, and callers choose it.
    other = b"" if same and first is None else _sha256(_cbor((first,) if same else extras))
    return spec, parent, tokens.tobytes(), other


def _hash(
    spec: HashSpec, parent: bytes, tokens: array[int], extras: Sequence[Extra]
) -> list[bytes]:
    """Of whole blocks behind the parent."""
    if spec.algorithm == "sha256_cbor":
        return _hash_cbor(spec.block_tokens, parent, tokens, extras)
    encode, digest = _ALGORITHMS[spec.algorithm]
    size, hashes = spec.block_tokens, []
    for at, extra in enumerate(extras):
        parent = digest(encode((parent, tuple(tokens[at * size : (at + 1) * size]), extra)))
        hashes.append(parent)
    return hashes


def _hash_cbor(
    size: int, parent: bytes, tokens: array[int], extras: Sequence[Extra]
) -> list[bytes]:
    # An array of three: a byte string, an array of numbers, and an array or null.
    encoded, stops = _encode_tokens(tokens, size)
    middle = _head(0x80, size)
    begin = b"\x83" + _head(0x40, len(parent))
    own = b"\x83" + _head(0x40, 32)
    tails = {extra: _cbor(extra) for extra in set(extras)}
    sha256 = hashlib.sha256
    hashes = []
    start = 0
    for stop, extra in zip(stops, extras, strict=True):
        parent = sha256(begin + parent + middle + encoded[start:stop] + tails[extra]).digest()
        hashes.append(parent)
        begin, start = own, stop
    return hashes


def _head(major: int, value: int) -> bytes:
    """The head of a CBOR string or array of this length."""
    head = bytearray(cbor2.dumps(value))
    head[0] |= major
    return bytes(head)


def _encode_tokens(tokens: array[int], size: int) -> tuple[bytes, list[int]]:
    """The tokens encoded as CBOR, joined, and where each block of them ends.

    A number is one byte up to 23; else a length byte, and 1, 2 or 4 bytes, the highest first.
    """
    numbers = np.frombuffer(tokens, dtype=np.uint32)
    short, middle, long = numbers > 23, numbers > 0xFF, numbers > 0xFFFF
    rows = np.empty((len(numbers), 5), dtype=np.uint8)
    rows[:, 1:] = numbers.astype(">u4").view(np.uint8).reshape(-1, 4)
    rows[:, 0] = np.where(short, 24 + middle.astype(np.uint8) + long, rows[:, 4])
    kept = np.stack((np.ones_like(short), long, long, middle, short), axis=1)
    ends = np.cumsum(kept.sum(axis=1))[size - 1 :: size]
    return rows[kept].tobytes(), ends.tolist()
