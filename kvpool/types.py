"""Frozen values shared by every layer: block keys, namespaces, parts, tiers.

Names as in the glossary: a *block* is the KV of a fixed number of tokens, a *part* the share of it
that one rank and one cache group holds, a *namespace* the facts that must agree for bytes to be exchangeable.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Any

from kvpool.errors import InvalidRequest

__all__ = [
    "CHECKSUM_BYTES",
    "DATA_PARALLEL_RANKS_MAX",
    "DEFAULT_TENANT",
    "FORMAT_VERSION",
    "KEY_BYTES",
    "NO_PARENT",
    "PARTS_MAX",
    "PART_BYTES_MAX",
    "RECORD_BYTES_MAX",
    "BlockStatus",
    "EngineRecord",
    "Intent",
    "IntentAnswer",
    "Keys",
    "Namespace",
    "NamespaceRecord",
    "Outcome",
    "PartKind",
    "PartSpec",
    "Presence",
    "Recompute",
    "api_path_of",
    "pack_keys",
    "plain_parts",
    "split_keys",
]

KEY_BYTES = 16
DIGEST_BYTES = 16
NO_PARENT = bytes(KEY_BYTES)
"""In a list of parents, for the first block of a prompt."""
CHECKSUM_BYTES = 16
FORMAT_VERSION = 1
DEFAULT_TENANT = "default"

PARTS_MAX = 4096
REQUEST_MAX = 256  # characters of a request's label
PART_BYTES_MAX = 1 << 30
RECORD_BYTES_MAX = 64 << 10
DATA_PARALLEL_RANKS_MAX = 4096
ENGINE_SIZE_MAX = 1 << 40  # of what an engine announces of itself: tokens, bytes

Keys = bytes | bytearray | memoryview | Iterable[bytes]
"""Block keys in prefix order: packed, 16 bytes each, or one bytes object a key."""


class BlockStatus(IntEnum):
    """The answer about one part of a block in a batch: one byte each, the same in all tiers and transports.

    Batches of answers are `bytes` or u8 arrays. The numbers travel between the processes of one daemon only.
    """

    ABSENT = 0
    """It is not there: never was, evicted, or its location is out of date."""
    PRESENT = 1
    """Written durably; or read into its slot, whole and with the right checksum."""
    MISMATCH = 2
    """The bytes found are not the block's. The slot holds anything."""
    FAILED = 3
    """An error of the device or the store. Nothing is known of the block, and the slot holds anything."""
    NO_SPACE = 4
    """Not written, and the place is not at fault: there is no room, or nothing may be written."""
    LATE = 5
    """Not begun, or not whole by the deadline. Nothing is known of the block, and the slot holds anything."""


class Presence(IntEnum):
    """Where the nearest replica of a block is: one byte each. Anything above `NOWHERE` can be read from this node."""

    NOWHERE = 0
    """Nobody is known to have it."""
    ELSEWHERE = 1
    """On another node, or in object storage: a hint, as of the latest news."""
    DISK = 2
    """On this node's disks, or in its spare device memory."""
    MEMORY = 3
    """In this node's memory."""


class Intent(StrEnum):
    """What is wanted for blocks of a prompt, or of a session: see `Client.intents`."""

    PIN = "pin"  # evicted last, or never, until they are unpinned
    UNPIN = "unpin"
    KEEP = "keep"  # pinned in memory, for a time
    PREFETCH = "prefetch"  # brought into memory
    EXPEND = "expend"  # evicted before others, until they are read
    DROP = "drop"  # removed from this node


class Outcome(StrEnum):
    """What becomes of an intent."""

    ACCEPTED = "accepted"  # for all blocks that there are
    CLIPPED = "clipped"  # for some of these
    DEFERRED = "deferred"  # later: others are first
    REFUSED = "refused"  # for none
    MISSING = "missing"  # there are none


@dataclass(frozen=True, slots=True)
class IntentAnswer:
    """The answer to an intent.

    blocks, nbytes: for which it holds: the first ones of each chain; of an intent to expend or drop, the last ones.
    asked: blocks of the prompt or session. missing: those of them that could not be found. limit_bytes: what
    the limit that has clipped or refused it leaves for such intents now; None: it was something else. reason: in words;
    may be empty if it was accepted.
    """

    outcome: Outcome
    blocks: int = 0
    nbytes: int = 0
    asked: int = 0
    missing: int = 0
    limit_bytes: int | None = None
    reason: str = ""


class PartKind(StrEnum):
    """Which blocks of a prefix an engine needs from a cache group, so that it can use the prefix."""

    FULL = "full"  # all of them (full attention, MLA)
    WINDOW = "window"  # the last `window_blocks` (sliding window; state-space groups: the last one)


@dataclass(frozen=True, slots=True)
class Recompute:
    """The price for an engine to compute a run of blocks instead of loading them.

    block_s: seconds for the first block of the run. growth_s: how many more each block takes than the one
        before it, because it attends to one block more.
    """

    block_s: float
    growth_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.block_s < math.inf and 0 <= self.growth_s < math.inf):
            raise InvalidRequest(
                f"{self.block_s} seconds to compute a block, and {self.growth_s} more for each later one: both must "
                "be finite, the first above 0 and the second at least 0"
            )

    def seconds(self, first: int, end: int) -> float:
        """Seconds to compute the blocks `first` to `end` of the run, given those before them."""
        return (end - first) * (self.block_s + self.growth_s * (first + end - 1) / 2)


@dataclass(frozen=True, slots=True)
class PartSpec:
    """The properties of one part number.

    nbytes: size of the part of one block.
    window_blocks: for `WINDOW`, how many trailing blocks of the prefix must be present.
    stride: the group keeps one part for every `stride` blocks of the chain, under the key of the last
        of them (groups whose blocks hold more tokens than the chain's). A usable prefix is a multiple
        of it.
    """

    nbytes: int
    kind: PartKind = PartKind.FULL
    window_blocks: int = 0
    stride: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.nbytes <= PART_BYTES_MAX:
            raise InvalidRequest(
                f"a part of {self.nbytes} bytes: the size must be 1 to {PART_BYTES_MAX} bytes"
            )
        if self.stride < 1:
            raise InvalidRequest(f"a part's stride is {self.stride}; it must be at least 1")
        if (self.kind is PartKind.WINDOW) != (self.window_blocks > 0):
            raise InvalidRequest(
                "window_blocks is only for parts of kind window, and must be at least 1 there"
            )


_API_PATH = re.compile(
    r"/v1(/(chat/completions|completions|responses|messages|embeddings|models))?/*\Z"
)


def api_path_of(url: str) -> str:
    """The path of the OpenAI API at the end of a server's URL, such as `/v1`; empty: none. OpenAI's clients are given it,
    kvpool adds it itself.
    """
    found = _API_PATH.search(url)
    return "" if found is None else found[0].rstrip("/")


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """An engine as its plugin announces it, for routers.

    url: of its HTTP server, as others reach it.
    role: `both`, `prefill` or `decode`: its intended use.
    model: the name that it serves it by.
    events, replay, topic: ZeroMQ addresses of its KV events, as reached from elsewhere, and their topic; or empty.
    groups: the cache groups that must hold a block for it to count as held; none: its cache is unknown.
    hash_algorithm: of its block hashes, by the engine's name.
    none_hash: the start of their chain, as hex digits.
    block_tokens: of a block of the chain.
    block_bytes: of one, all ranks together.
    capacity_tokens: of its own cache.
    step_tokens: of a step.
    steps_at_once: how many steps it computes at a time: one for each stage of its pipeline, and, where ranks are not
        told apart, for each data-parallel rank behind the URL.
    max_len: of prompt and answer.
    follows_max: how many prompts it follows at a time while others compute them.
    tenant: owner of its blocks; filled in by the daemon.
    namespace: their namespace's digest, as hex digits; filled in by the daemon.
    rank: the number by which its server knows it, where several data-parallel ranks share the URL: each is announced
        by itself, with its own events and capacity. None: the URL is its own.
    """

    url: str
    role: str = "both"
    model: str = ""
    events: str = ""
    replay: str = ""
    topic: str = ""
    groups: tuple[int, ...] = ()
    hash_algorithm: str = ""
    none_hash: str = ""
    block_tokens: int = 0
    block_bytes: int = 0
    capacity_tokens: int = 0
    step_tokens: int = 0
    max_len: int = 0
    follows_max: int = 0
    tenant: str = ""
    namespace: str = ""
    steps_at_once: int = 1
    rank: int | None = None


def plain_parts(parts: Iterable[PartSpec]) -> list[tuple[int, str, int, int]]:
    """As in messages and records: [nbytes, kind, window, stride] each."""
    return [(part.nbytes, str(part.kind), part.window_blocks, part.stride) for part in parts]


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """All facts that must agree for KV bytes to be exchangeable, and the resulting sizes.

    fields: JSON-able facts (model, revision, dtypes, layout, platform, hash algorithm and seed, sizes
        of the parallel groups, codec, tenant, epoch, …). Only they determine the digest.
    parts: sizes and hit rules. Not part of the digest: two users whose fields agree and whose parts
        do not have left something out of the fields, and are refused (`NamespaceMismatch`) rather
        than served each other's bytes.
    """

    fields: Mapping[str, Any]
    parts: tuple[PartSpec, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.parts) <= PARTS_MAX:
            raise InvalidRequest(f"{len(self.parts)} parts: a namespace must have 1 to {PARTS_MAX}")
        if len(self.canonical()) > RECORD_BYTES_MAX:
            raise InvalidRequest(
                f"a namespace record must have at most {RECORD_BYTES_MAX} bytes of JSON"
            )

    @classmethod
    def simple(cls, model: str, *, block_bytes: int, block_tokens: int) -> NamespaceRecord:
        """A namespace of one part, for users whose own fields are `model` and the block's tokens."""
        return cls(
            fields={"model": model, "block_tokens": block_tokens},
            parts=(PartSpec(nbytes=block_bytes),),
        )

    def canonical(self) -> bytes:
        """The fields as sorted, compact JSON: equal facts give equal bytes on every machine."""
        body = {"format_version": FORMAT_VERSION, **self.fields}
        try:
            text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"a namespace's fields must be plain JSON values: {error}"
            ) from None
        return text.encode()

    def digest(self) -> bytes:
        """16 bytes that name the namespace: the first half of the SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical()).digest()[:16]


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace as a client holds it once `Client.open` has registered it with the daemon.

    replicas, write, ttl_s, ssd_codec, write_remote: requested by the client; see `Client.open`.
    verify: this client compares what it reads with its checksums.
    """

    record: NamespaceRecord
    digest: bytes
    replicas: int = 0
    write: str = ""
    ttl_s: float = 0.0
    ssd_codec: str = ""
    write_remote: str = ""
    verify: bool = False

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """Its parts, in the order of their numbers."""
        return self.record.parts


def check_digest(digest: bytes) -> bytes:
    """Return a namespace's digest. Raises `InvalidRequest` unless it has 16 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(
            f"a namespace's digest must have {DIGEST_BYTES} bytes, not {len(digest)}"
        )
    return digest


def pack_keys(keys: Keys) -> bytes:
    """Block keys as the wire carries them: one after the other, 16 bytes each.

    Raises `InvalidRequest` when a key is not 16 bytes long.
    """
    if isinstance(keys, bytes):
        packed = keys
    elif isinstance(keys, (bytearray, memoryview)):
        packed = bytes(keys)
    else:
        listed = list(keys)
        for key in listed:
            if len(key) != KEY_BYTES:
                raise InvalidRequest(f"a block key must have {KEY_BYTES} bytes, not {len(key)}")
        packed = b"".join(listed)
    if len(packed) % KEY_BYTES:
        raise InvalidRequest(
            f"packed block keys must be a multiple of {KEY_BYTES} bytes, not {len(packed)}"
        )
    return packed


@lru_cache(maxsize=1024)
def _splitter(n: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * n)


def split_keys(packed: bytes) -> tuple[bytes, ...]:
    """Packed keys, or checksums, which are of the same size, one by one.

    Raises `InvalidRequest` when the length is no multiple of 16.
    """
    n, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise InvalidRequest(
            f"{len(packed)} bytes of packed block keys: must be a multiple of {KEY_BYTES}"
        )
    return _splitter(n).unpack(packed)
