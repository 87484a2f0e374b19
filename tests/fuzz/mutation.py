"""Changes to inputs that keep most of their structure."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import msgspec

from kvpool.wire.frame import HEADER

STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 255, 256, 65536, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *(float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, 0.5),
    *("", "x", "\0", "default", "a" * 5000, "../..", "é\u202e\x1b[2J", "0" * 32, "f" * 16),
    *(b"", b"\0", bytes(16), bytes(17), bytes(32), b"\xff" * 300, b"\xff" * 16),
    *([], {}, [[]], [[[[]]]], {"a": {}}, [0] * 300, {"type": "evict"}),
)  # fmt: skip
SURPLUS = (
    b"\x91" * 10 + b"\xc0",
    b"\x91" * 5000 + b"\xc0",
    b"\xa2\xff\xfe",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xc7\x0c\xff" + bytes(12),
    b"\xc1",
)
CHANGES_MAX = 4
SIZE_MAX = 1 << 16


def mutate(data: bytes, rng: random.Random, choices: int = 0) -> bytes:
    """Another input, near this one. choices: so many first bytes only select something: they are kept apart."""
    head, data = data[:choices], data[choices:]
    if choices and rng.random() < 0.1:
        head = rng.randbytes(choices)
    if rng.random() < 0.6:
        changed = _structured(data, rng)
        if changed is not None:
            data = changed
    if rng.random() < 0.15:
        data = with_surplus(data, rng)
    if rng.random() < 0.4:
        data = damaged(data, rng)
    return head + data[:SIZE_MAX]


def mutate_frames(data: bytes, rng: random.Random, frames: int) -> bytes:
    """The same for inputs that begin with so many frames (-1: consist of frames): mostly one payload is changed, before
    it is framed, so that the changed one is reached.
    """
    parts, tail = split_frames(data, frames)
    if not parts or rng.random() < 0.1:
        return mutate(data, rng)
    at = rng.randrange(len(parts))
    match rng.randrange(12):
        case 0:
            parts.insert(at, parts[rng.randrange(len(parts))])
        case 1 if len(parts) > 1:
            del parts[at]
        case 2:
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        case 3 if tail:
            tail = damaged(tail, rng)
        case _:
            request, payload = parts[at]
            parts[at] = request, mutate(payload, rng)
    return (join_frames(parts) + tail)[:SIZE_MAX]


def split_frames(data: bytes, frames: int) -> tuple[list[tuple[int, bytes]], bytes]:
    """(number, payload) of the first whole frames, at most so many (-1: all), and what follows them."""
    parts: list[tuple[int, bytes]] = []
    while len(data) >= HEADER.size and len(parts) != frames:
        length, request = HEADER.unpack_from(data)
        if length > len(data) - HEADER.size:
            break
        parts.append((request, data[HEADER.size : HEADER.size + length]))
        data = data[HEADER.size + length :]
    return parts, data


def join_frames(parts: list[tuple[int, bytes]]) -> bytes:
    """The inverse."""
    return b"".join(HEADER.pack(len(payload), request) + payload for request, payload in parts)


def _structured(data: bytes, rng: random.Random) -> bytes | None:
    """As MessagePack, or as JSON, with values exchanged; None if it is neither."""
    codecs: tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...] = (
        (msgspec.json.decode, _as_json),
        (msgspec.msgpack.decode, msgspec.msgpack.encode),
    )
    for decode, encode in codecs:
        try:
            tree = decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if not isinstance(tree, (list, dict)):
            continue
        for _ in range(rng.randint(1, CHANGES_MAX)):
            _exchange(tree, rng)
        try:
            return encode(tree)
        except (msgspec.EncodeError, TypeError, ValueError, OverflowError, RecursionError):
            return None
    return None


def _as_json(tree: Any) -> bytes:
    return msgspec.json.encode(tree)


def _exchange(tree: Any, rng: random.Random) -> None:
    """Change one value in it, in place."""
    while True:
        places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not places:
            if isinstance(tree, list):
                tree.append(_strange(rng))
            return
        place = rng.choice(places)
        inner = tree[place]
        if isinstance(inner, (list, dict)) and rng.random() < 0.6:
            tree = inner
            continue
        match rng.randrange(5):
            case 0 if isinstance(tree, list):
                tree.insert(place, _strange(rng))
            case 0:
                tree[rng.choice(("", "x", "type", "kind", "version"))] = _strange(rng)
            case 1:
                del tree[place]
            case 2 if isinstance(inner, int) and not isinstance(inner, bool):
                tree[place] = inner + rng.choice((-1, 1, 1 << 7, -(1 << 31), 1 << 40))
            case 2 if isinstance(inner, (bytes, str)) and inner:
                tree[place] = inner[: rng.randrange(len(inner))] * rng.choice((1, 2))
            case _:
                tree[place] = _strange(rng)
        return


def _strange(rng: random.Random) -> Any:
    """One of its own: some are changed further."""
    return copy.deepcopy(rng.choice(STRANGE))


def with_surplus(data: bytes, rng: random.Random) -> bytes:
    """With one more field, as a newer version may append."""
    if not data or not 0x90 <= data[0] < 0x9F:
        return data
    return bytes([data[0] + 1]) + data[1:] + rng.choice(SURPLUS)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """With bytes changed, left out, put in or repeated, or cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, CHANGES_MAX)):
        at = rng.randint(0, len(changed))
        match rng.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[at : at + rng.randint(1, 20)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                changed[at:at] = changed[:50]
            case 4:
                changed[at:at] = rng.choice(SURPLUS)
            case _:
                del changed[at:]
    return bytes(changed)
