"""Objects of any size under string keys, over the pool's blocks.

    object of a usual size     block = its bytes | label
    other objects              head  = label | the bytes, if they fit; else the chunks' name
                               chunk = bytes | zeros up to the rung | label

A *label* has the whole key (or, if it is long, its SHA-256) and the length. It is compared by every read, so that two
keys with one hash are a miss and never each other's bytes. A chunk's label has its name and number.

Chunks are stored before their head, under a name that was drawn for this version of the object: a head never leads to
other bytes than those that were put with it. A new version (`Objects.replace`) removes the old block or head from all
nodes and stores a new one. So a reader gets one version or the other, whole, or nothing in between; a node that does
not answer meanwhile may go on giving the old one, and the writer is told (`UNAVAILABLE`).

Two puts of a key at a time may each find nothing, and store a block and a head. So a new version, like a removal, asks
nobody where the key is: it removes it from all namespaces, on all nodes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from kvpool.client import NO_ROW, Client, Lease, Presence
from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.pieces import (
    Addresses,
    BadAddressError,
    Bytes1D,
    Made,
    Pieces,
    View,
)
from kvpool.engine_plugins.mooncake.spaces import (
    CHUNK_BYTES,
    EXACT_BYTES_MAX,
    HEAD_BYTES,
    INLINE_BYTES_MAX,
    LABEL_BYTES,
    LOOKUP_S,
    Space,
    Spaces,
    rung_for,
)
from kvpool.errors import KvpoolError, LimitExceeded, PoolFull, Unavailable
from kvpool.types import KEY_BYTES, NO_PARENT, Namespace

logger = logging.getLogger(__name__)

LEASE_S = 5.0
KEYS_MAX = 65_536
"""In one request."""
OBJECT_BYTES_MAX = KEYS_MAX * CHUNK_BYTES
"""All its chunks are stored, and leased, by one request."""
UNASKED_BYTES = 64 << 20
"""Before the chunks of larger objects are stored, the daemon is asked how much it can hold."""
DROPPED_MAX = 32
DROPPED_BYTES_MAX = 32 << 20
TOGETHER_BYTES = 1 << 20
"""Puts of up to so many bytes take one request instead of two, and copy through the kernel."""

_HEAD = struct.Struct(
    "<4sBBHQ"
)  # magic, kind, whether the key is a digest, its length, the object's length
_MAGIC = b"kvpM"
_WHOLE, _INLINE, _CHUNKED, _CHUNK = range(4)
_KEY_BYTES_MAX = LABEL_BYTES - _HEAD.size
_NAME_BYTES = 16
_ZEROS = np.zeros(CHUNK_BYTES, np.uint8)


@dataclass(frozen=True)
class Limits:
    """read_s: how long a read waits for blocks that are on disks or other nodes. others_s: how long a removal waits for
    other nodes.
    """

    read_s: float = 5.0
    others_s: float = 2.0


def _label(kind: int, key: bytes, length: int) -> bytes:
    long = len(key) > _KEY_BYTES_MAX
    if long:
        key = hashlib.sha256(key).digest()
    return _HEAD.pack(_MAGIC, kind, long, len(key), length) + key.ljust(_KEY_BYTES_MAX, b"\0")


@contextmanager
def _reading(lease: Lease) -> Iterator[None]:
    """Released with the next request: to say so at once takes as long as a small read."""
    try:
        yield
    finally:
        lease.release_later()


def _view(data: bytes) -> View:
    return View(np.frombuffer(data, np.uint8))


def _write(block: Sequence[Pieces], slot: Bytes1D, fd: int, at: int) -> None:
    """A block's pieces one after the other. Raises `BadAddressError`."""
    start = 0
    for piece in block:
        end = start + piece.nbytes
        if end > start:
            piece.write(slot[start:end], fd, at + start)
        start = end


def _safe(pieces: Pieces) -> Pieces | None:
    """The same, of memory that is there: nothing is removed for an object that cannot be read. None: it is not there.

    Large objects are stored in chunks before the old one is removed, so that they need not be copied first.
    """
    if not isinstance(pieces, Addresses) or pieces.nbytes > EXACT_BYTES_MAX:
        return pieces
    try:
        return pieces.copied()
    except BadAddressError:
        return None


def _same_length(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other)


def _chunk_label(name: bytes, number: int, length: int) -> bytes:
    return _label(_CHUNK, name + number.to_bytes(8, "little"), length)


def _chunks_of(length: int) -> list[tuple[int, int]]:
    """Where each chunk of an object begins and ends."""
    return [(at, min(at + CHUNK_BYTES, length)) for at in range(0, length, CHUNK_BYTES)]


def _chunk_keys(name: bytes, count: int) -> list[bytes]:
    return [xxhash.xxh3_128_digest(name, number) for number in range(count)]


def _by_rung(chunks: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Numbers of the chunks of each size of blocks: at most two of them."""
    found: dict[int, list[int]] = {}
    for number, (start, end) in enumerate(chunks):
        found.setdefault(rung_for(end - start), []).append(number)
    return found


@dataclass
class Head:
    """What a head says of an object. inline: the bytes of a small one; else name: of the chunks. kept: whether these have
    hard pins.
    """

    length: int
    inline: bytes | None
    name: bytes
    kept: bool = False


@dataclass(frozen=True)
class Owner:
    """What a label says of an object. hashed: its key is longer than a label holds, and `key` the SHA-256 of it."""

    key: bytes
    hashed: bool
    length: int


Heads = dict[int, Head]
"""Those of a request's keys that could be read, by the keys' places."""


@dataclass(frozen=True)
class How:
    """replicas: 0 for one. pin: "hard", "soft" or empty."""

    replicas: int = 0
    pin: str = ""


Target = Callable[[int, int], "Pieces | int"]
"""Where to read object i, of so many bytes, or the code that it gets instead."""


class Objects:
    """Thread-safe. Nothing here raises for what the pool does: keys get the codes of `mooncake.store`.

    verify: compare all that is read with the checksums of what was put; what differs is missing, and is dropped.
    """

    def __init__(
        self,
        client: Client,
        tenant_id: str,
        limits: Limits | None = None,
        *,
        verify: bool = False,
    ) -> None:
        self._client = client
        self._limits = limits or Limits()
        self._seed = xxhash.xxh3_64_intdigest(tenant_id.encode())
        self._lock = threading.Lock()
        self._dropped: list[Head] = []
        self._missing = False  # whether the last read found nothing
        self.spaces = Spaces(client, tenant_id, verify=verify)

    def _hashed(self, key: bytes) -> bytes:
        return xxhash.xxh3_128_digest(key, self._seed)

    def packed(self, keys: Sequence[bytes]) -> bytes:
        digest, seed = xxhash.xxh3_128_digest, self._seed
        return b"".join([digest(key, seed) for key in keys])

    @property
    def _away(self) -> bool:
        """Whether the daemon did not answer the last request: then nothing was found because nobody was asked."""
        return not self._client.available

    # ---- presence ------------------------------------------------------------------------------------

    def exist(self, keys: Sequence[bytes]) -> list[bool] | None:
        """For each key, whether it could be read; None: the daemon does not answer."""
        where, nearest = self.spaces.find(self.packed(keys))
        if 0 not in nearest and self.spaces.heads is None:
            return [True] * len(keys)
        found = [space is not None for space in where]
        in_heads = [at for at, space in enumerate(where) if space is not None and not space.size]
        if in_heads:
            whole = self._whole(self._heads([keys[at] for at in in_heads]))
            for at, is_whole in zip(in_heads, whole, strict=True):
                found[at] = is_whole
        if not all(found) and self._away:
            return None
        return found

    def sizes(self, keys: Sequence[bytes]) -> list[tuple[int, int]] | None:
        """For each key the object's length, or -1, and its `Presence`; None: the daemon does not answer."""
        where, nearest = self.spaces.find(self.packed(keys))
        found = [
            (-1, 0) if space is None else (space.size, near)
            for space, near in zip(where, nearest, strict=True)
        ]
        in_heads = [at for at, (size, _) in enumerate(found) if size == 0]
        if in_heads:
            heads = self._heads([keys[at] for at in in_heads])
            for at, head, whole in zip(in_heads, heads, self._whole(heads), strict=True):
                found[at] = (-1, 0) if head is None or not whole else (head.length, found[at][1])
        if any(size < 0 for size, _ in found) and self._away:
            return None
        return found

    def _whole(self, heads: Sequence[Head | None]) -> list[bool]:
        """For each head, whether it is there and all its chunks are."""
        whole = [head is not None for head in heads]
        wanted: dict[int, list[tuple[int, bytes]]] = {}
        for at, head in enumerate(heads):
            if head is None or head.inline is not None:
                continue
            chunks = _chunks_of(head.length)
            names = _chunk_keys(head.name, len(chunks))
            for rung, numbers in _by_rung(chunks).items():
                wanted.setdefault(rung, []).extend((at, names[number]) for number in numbers)
        for rung, listed in wanted.items():
            for first in range(0, len(listed), KEYS_MAX):
                some = listed[first : first + KEYS_MAX]
                packed = b"".join([key for _, key in some])
                there = self.spaces.present(self.spaces.chunks(rung), packed)
                for (at, _), near in zip(some, there.tolist(), strict=True):
                    whole[at] &= near != Presence.NOWHERE
        return whole

    def _heads(self, keys: Sequence[bytes]) -> list[Head | None]:
        """Those that are in memory here, or come in time."""
        found = self._heads_within(keys, 0.0)
        if None in found:
            found = self._heads_within(keys, self._limits.read_s)
        return found

    def _heads_within(self, keys: Sequence[bytes], wait_s: float) -> list[Head | None]:
        found: list[Head | None] = [None] * len(keys)
        space = self.spaces.heads
        if space is None or not keys:
            return found
        lease = self._acquire(space.ns, self.packed(keys), wait_s)
        if lease is None:
            return found
        with _reading(lease):
            slots = lease.slots[0]
            table = slots.table
            blocks = [
                b"" if row == NO_ROW else table[row, :HEAD_BYTES].tobytes()
                for row in slots.rows.tolist()
            ]
            if not lease.valid:
                return found
        return [_head_of(key, block) for key, block in zip(keys, blocks, strict=True)]

    def _acquire(self, ns: Namespace, packed: bytes, wait_s: float) -> Lease | None:
        """A lease on those of the blocks that are here and, if that is asked, have the bytes that were put."""
        lease = self._client.acquire_each(ns, packed, lease_s=LEASE_S, wait_s=wait_s)
        if lease is None or not ns.verify:
            return lease
        slots = lease.slots[0]
        try:
            wrong = slots.wrong()
        except Unavailable:  # the daemon gives no checksums
            lease.release_later()
            return None
        if wrong.size:
            lease.report(0, wrong)
            slots.rows = slots.rows.copy()
            slots.rows[wrong] = NO_ROW
        return lease

    # ---- reading -------------------------------------------------------------------------------------

    def whose(self, space: Space, packed: bytes, wait_s: float = 0.0) -> list[Owner | None]:
        """For each block of a namespace the object that it holds, or leads to; None: it is not here, or holds none.

        wait_s: for blocks that are not in memory here.
        """
        found: list[Owner | None] = [None] * (len(packed) // KEY_BYTES)
        lease = self._client.acquire_each(space.ns, packed, lease_s=LEASE_S, wait_s=wait_s)
        if lease is None:
            return found
        with _reading(lease):
            slots = lease.slots[0]
            table, start = slots.table, space.size
            for at, row in enumerate(slots.rows.tolist()):
                if row != NO_ROW:
                    found[at] = _owner_of(table[row, start : start + LABEL_BYTES].tobytes())
            return found if lease.valid else [None] * len(found)

    def read(self, keys: Sequence[bytes], hints: Sequence[int], target: Target) -> list[int]:
        """Read objects; for each key how many bytes, or a code.

        hints: the lengths that they may have; 0: unknown. A wrong one costs time.
        """
        n = len(keys)
        found = [codes.NOT_FOUND] * n
        packed = self.packed(keys)
        left = list(range(n))
        exact, first = self.spaces.exact, self.spaces.first
        groups: dict[int, list[int]] = {}
        # After a read that found nothing, ask before reading: nothing again is then one request.
        for at in () if self._missing else left:
            hint = hints[at] if hints[at] in exact else first.size if first is not None else 0
            if hint:
                groups.setdefault(hint, []).append(at)
        for size, some in groups.items():
            self._read_exact(exact[size], keys, packed, some, target, found)
        left = [at for at in left if found[at] == codes.NOT_FOUND]
        if not left:
            return found
        # Not here under that size: elsewhere, of another size, or nowhere.
        where, _ = self.spaces.find(_packed_of(packed, left))
        elsewhere: dict[int, list[int]] = {}
        for at, space in zip(left, where, strict=True):
            if space is not None:
                elsewhere.setdefault(space.size, []).append(at)
        for size, some in elsewhere.items():
            if size:
                wait_s = self._limits.read_s
                self._read_exact(self.spaces.exact[size], keys, packed, some, target, found, wait_s)
            else:
                self._read_heads(keys, some, target, found)
        self._missing = not elsewhere and len(left) == n
        if self._away:
            return [codes.UNAVAILABLE if code == codes.NOT_FOUND else code for code in found]
        return found

    def _read_exact(
        self,
        space: Space,
        keys: Sequence[bytes],
        packed: bytes,
        some: list[int],
        target: Target,
        found: list[int],
        wait_s: float = 0.0,
    ) -> None:
        chosen = packed if len(some) == len(keys) else _packed_of(packed, some)
        lease = self._acquire(space.ns, chosen, wait_s)
        if lease is None:
            return
        size = space.size
        done: list[int] = []
        with _reading(lease):
            slots = lease.slots[0]
            table, fd, stride = slots.table, slots.fd, slots.stride
            rows = slots.rows
            labels = [_label(_WHOLE, keys[at], size) for at in some]
            if len(some) == 1:
                row = int(rows[0])
                if row == NO_ROW or table[row, size : size + LABEL_BYTES].tobytes() != labels[0]:
                    return
                good = [0]
            else:
                here = np.flatnonzero(rows != NO_ROW)
                wanted = np.frombuffer(b"".join(labels), np.uint8).reshape(-1, LABEL_BYTES)
                same = table[rows[here], size : size + LABEL_BYTES] == wanted[here]
                good = here[same.all(axis=1)].tolist()
            listed = rows.tolist()
            for number in good:
                at, row = some[number], listed[number]
                pieces = target(at, size)
                if isinstance(pieces, int):
                    found[at] = pieces
                    continue
                try:
                    pieces.read(table[row, :size], fd, row * stride)
                except BadAddressError:
                    found[at] = codes.INVALID
                else:
                    found[at] = size
                    done.append(at)
            if not lease.valid:
                for at in done:
                    found[at] = codes.LEASE_LOST

    def _read_heads(
        self, keys: Sequence[bytes], some: list[int], target: Target, found: list[int]
    ) -> None:
        for at, head in zip(some, self._heads([keys[at] for at in some]), strict=True):
            if head is None:
                continue
            pieces = target(at, head.length)
            if isinstance(pieces, int):
                found[at] = pieces
            elif head.inline is not None:
                found[at] = self._read_inline(head.inline, pieces)
            else:
                found[at] = self._read_chunks(head, pieces)

    def _read_inline(self, data: bytes, pieces: Pieces) -> int:
        if isinstance(pieces, (Made, View)):
            pieces.read(np.frombuffer(data, np.uint8), -1, 0)
            return len(data)
        fd = os.memfd_create("kvpool-small-object", os.MFD_CLOEXEC)
        try:
            os.write(fd, data)
            pieces.read(np.frombuffer(data, np.uint8), fd, 0)
        except BadAddressError:
            return codes.INVALID
        finally:
            os.close(fd)
        return len(data)

    def _read_chunks(self, head: Head, pieces: Pieces) -> int:
        chunks = _chunks_of(head.length)
        names = _chunk_keys(head.name, len(chunks))
        for rung, numbers in _by_rung(chunks).items():
            packed = b"".join([names[number] for number in numbers])
            lease = self._acquire(self.spaces.chunks(rung), packed, self._limits.read_s)
            if lease is None:
                return codes.NOT_FOUND
            with _reading(lease):
                slots = lease.slots[0]
                table, fd, stride = slots.table, slots.fd, slots.stride
                for number, row in zip(numbers, slots.rows.tolist(), strict=True):
                    start, end = chunks[number]
                    label = _chunk_label(head.name, number, end - start)
                    if row == NO_ROW or table[row, rung : rung + LABEL_BYTES].tobytes() != label:
                        return codes.NOT_FOUND
                    try:
                        part = pieces.cut(start, end) if len(chunks) > 1 else pieces
                        part.read(table[row, : end - start], fd, row * stride)
                    except BadAddressError:
                        return codes.INVALID
                if not lease.valid:
                    return codes.LEASE_LOST
        return head.length

    # ---- writing -------------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[bytes],
        objects: Sequence[Pieces],
        how: How,
    ) -> list[int]:
        """Store objects; `OK` for each that is stored then, by this put or before, else a code."""
        found = [codes.OK] * len(keys)
        try:
            where, _ = self.spaces.find(self.packed(keys))
            missing = [at for at, space in enumerate(where) if space is None]
            if missing and self._away:
                return [codes.UNAVAILABLE] * len(keys)
            in_heads = [at for at, one in enumerate(where) if one is not None and not one.size]
            if in_heads:
                self._put_again(keys, objects, in_heads, found, how)
            self._put_missing(keys, objects, missing, found, how)
        except KvpoolError as error:
            logger.warning("a put of %d objects failed: %s", len(keys), error)
            return [codes.code_of(error)] * len(keys)
        return found

    def _put_again(
        self,
        keys: Sequence[bytes],
        objects: Sequence[Pieces],
        some: list[int],
        found: list[int],
        how: How,
    ) -> None:
        """Objects whose key has a head already: those of which chunks were evicted are stored anew."""
        heads = self._heads([keys[at] for at in some])
        whole = self._whole(heads)
        known = {at: head for at, head in zip(some, heads, strict=True) if head is not None}
        broken = [at for at, good in zip(some, whole, strict=True) if not good and at in known]
        if broken:
            space = self.spaces.for_heads()
            unique = list({keys[at]: at for at in reversed(broken)}.values())
            self._put_heads(space, keys, objects, unique, found, how, known)

    def replace(
        self,
        keys: Sequence[bytes],
        objects: Sequence[Pieces],
        how: How,
    ) -> list[int]:
        """Store objects in place of those of the same keys; `OK`, or a code."""
        found = [codes.OK] * len(keys)
        try:
            last = {key: at for at, key in enumerate(keys)}  # of equal keys the last one counts
            safe = [_safe(each) for each in objects]
            good = [at for at in last.values() if safe[at] is not None]
            chosen = [objects[at] if one is None else one for at, one in enumerate(safe)]
            for at in set(last.values()).difference(good):
                found[at] = codes.INVALID
            self._put_missing(keys, chosen, good, found, how, self._old(keys))
            found = [found[last[key]] for key in keys]
        except KvpoolError as error:
            logger.warning("an upsert of %d objects failed: %s", len(keys), error)
            return [self._code_of(error)] * len(keys)
        return found

    def _put_missing(
        self,
        keys: Sequence[bytes],
        objects: Sequence[Pieces],
        missing: list[int],
        found: list[int],
        how: How,
        old: Heads | None = None,
    ) -> None:
        """old: of a new version: then what has the keys is removed first, from wherever it is."""
        groups: dict[int, list[int]] = {}
        first: dict[bytes, int] = {}
        again: list[int] = []
        for at in missing:
            if first.setdefault(keys[at], at) == at:
                groups.setdefault(objects[at].nbytes, []).append(at)
            else:
                again.append(at)
        in_heads: list[int] = []
        for size, some in groups.items():
            space = self.spaces.space_for(size, len(some))
            if space.size:
                if old is not None:
                    self._remove_those(keys, old, some)
                self._put_exact(space, keys, objects, some, found, how)
            else:
                in_heads += some
        if in_heads:
            space = self.spaces.for_heads()
            self._put_heads(space, keys, objects, in_heads, found, how, old)
        for at in again:
            found[at] = found[first[keys[at]]]

    def _put_exact(
        self,
        space: Space,
        keys: Sequence[bytes],
        objects: Sequence[Pieces],
        some: list[int],
        found: list[int],
        how: How,
    ) -> None:
        packed = self.packed([keys[at] for at in some])
        blocks = [[objects[at], _view(_label(_WHOLE, keys[at], space.size))] for at in some]
        for at, code in zip(some, self._store(space.ns, packed, blocks, how), strict=True):
            found[at] = code

    def _put_heads(
        self,
        space: Space,
        keys: Sequence[bytes],
        objects: Sequence[Pieces],
        some: list[int],
        found: list[int],
        how: How,
        old: Heads | None = None,
    ) -> None:
        """old: what they take the place of; it is removed once their chunks are stored."""
        blocks: dict[int, list[Pieces]] = {}
        chunked: dict[int, Head] = {}
        for at in some:
            size = objects[at].nbytes
            if size <= INLINE_BYTES_MAX:
                label = _view(_label(_INLINE, keys[at], size))
                blocks[at] = [label, objects[at], View(_ZEROS[: INLINE_BYTES_MAX - size])]
                continue
            name = secrets.token_bytes(_NAME_BYTES)
            head = chunked[at] = Head(size, None, name, how.pin == "hard")
            found[at] = self._put_chunks(head, objects[at], how)
            if found[at] == codes.OK:
                start = _label(_CHUNKED, keys[at], size) + head.name + bytes([head.kept])
                blocks[at] = [_view(start), View(_ZEROS[: HEAD_BYTES - len(start)])]
        if not blocks:
            return
        if old is not None:
            try:
                self._remove_those(keys, old, blocks)
            except KvpoolError:
                self._drop(chunked.values())
                raise
        packed = self.packed([keys[at] for at in blocks])
        stored = self._store(space.ns, packed, list(blocks.values()), how)
        for at, code in zip(blocks, stored, strict=True):
            found[at] = code
            if code != codes.OK and at in chunked:
                self._drop([chunked[at]])

    def _put_chunks(self, head: Head, pieces: Pieces, how: How) -> int:
        if head.length > UNASKED_BYTES and head.length > self._held_at_most():
            return codes.NO_SPACE
        chunks = _chunks_of(head.length)
        keys = _chunk_keys(head.name, len(chunks))
        for rung, numbers in _by_rung(chunks).items():
            blocks: list[list[Pieces]] = []
            for number in numbers:
                start, end = chunks[number]
                part = pieces.cut(start, end) if len(chunks) > 1 else pieces
                label = _view(_chunk_label(head.name, number, end - start))
                blocks.append([part, View(_ZEROS[: rung - (end - start)]), label])
            packed = b"".join([keys[number] for number in numbers])
            stored = self._store(self.spaces.chunks(rung), packed, blocks, how)
            failed = next((code for code in stored if code != codes.OK), None)
            if failed is not None:
                self._drop([head])
                return failed
        return codes.OK

    def _held_at_most(self) -> int:
        """Bytes of this node's memory and disks that the tenant may use. Raises `KvpoolError`."""
        usage = self._client.stats().tenants[self._client.tenant].usage
        return sum(place.part_bytes for place in usage.dram + usage.ssd)

    def _store(
        self, ns: Namespace, packed: bytes, blocks: Sequence[list[Pieces]], how: How
    ) -> list[int]:
        """Store blocks that are independent of each other. `OK` for each that is there then."""
        n = len(blocks)
        found = [codes.OK] * n
        views = [[piece.bytes for piece in block if isinstance(piece, View)] for block in blocks]
        if n * ns.parts[0].nbytes <= TOGETHER_BYTES and all(map(_same_length, views, blocks)):
            stored = self._client.put_each(ns, packed, views, replicas=how.replicas)
            for at in np.flatnonzero(~stored).tolist():
                found[at] = codes.NO_SPACE
        else:
            self._store_in_turns(ns, packed, blocks, how, found)
        if how.pin:
            self._pin(ns, packed, how.pin, found)
        return found

    def _store_in_turns(
        self,
        ns: Namespace,
        packed: bytes,
        blocks: Sequence[list[Pieces]],
        how: How,
        found: list[int],
    ) -> None:
        """Sets their codes. As many at a time as there are slots for."""
        left = list(range(len(blocks)))
        turns = 0
        while left:
            turns += 1
            done, bad = self._store_some(ns, packed, left, blocks, how)
            for at in bad:
                found[at] = codes.INVALID
            left = [at for at in left if at not in bad]
            if not done and not bad:
                break
            left = left[done:]
        for at in left:
            found[at] = codes.NO_SPACE
        if turns > 1:
            # What came last may have had the room of what came first.
            there = self._client.contains(ns, packed)
            for at in np.flatnonzero(~there).tolist():
                found[at] = found[at] or codes.NO_SPACE

    def _store_some(
        self,
        ns: Namespace,
        packed: bytes,
        left: list[int],
        blocks: Sequence[list[Pieces]],
        how: How,
    ) -> tuple[int, set[int]]:
        """How many of the first are stored then; or, none being stored, which ones hold a bad address."""
        chosen = packed if len(left) == len(blocks) else _packed_of(packed, left)
        try:
            [reservation] = self._client.reserve_parts(ns, chosen, [0], NO_PARENT * len(left))
        except (PoolFull, LimitExceeded):
            return 0, set()
        bad: set[int] = set()
        with reservation:
            slots = reservation.slots
            table, fd, stride = slots.table, slots.fd, slots.stride
            for number, row in zip(reservation.missing.tolist(), slots.rows.tolist(), strict=True):
                at = left[number]
                try:
                    _write(blocks[at], table[row], fd, row * stride)
                except BadAddressError:
                    bad.add(at)
            if bad:
                # A slot that was not filled is not committed, and with it none of its reservation.
                return 0, bad
            self._client.commit_parts([reservation], replicas=how.replicas)
        return len(left) - reservation.refused, bad

    def _pin(self, ns: Namespace, packed: bytes, pin: str, found: list[int]) -> None:
        """Without its hard pin a block could be evicted, and its writer would never know: it is not stored then."""
        try:
            there = self._client.pin(ns, packed, pin)
        except LimitExceeded as error:
            logger.warning(
                "the pool does not cover a %s pin of %d blocks: %s", pin, len(found), error
            )
            there = 0
        if pin == "hard" and there < found.count(codes.OK):
            self._client.remove(ns, packed)
            found[:] = [code or codes.NO_SPACE for code in found]

    # ---- removing ------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes]) -> list[int]:
        """From all nodes; `OK`, `NOT_FOUND`, or `UNAVAILABLE` where a node may have kept it."""
        if not keys:
            return []
        try:
            gone = self._remove_everywhere(keys, self._old(keys))
        except KvpoolError as error:
            logger.warning("a removal of %d objects failed: %s", len(keys), error)
            return [self._code_of(error)] * len(keys)
        missing = codes.UNAVAILABLE if self._away else codes.NOT_FOUND
        return [codes.OK if one else missing for one in gone]

    def _code_of(self, error: KvpoolError) -> int:
        """Return the code of an error; of any while the daemon is away, that it is unavailable."""
        return codes.UNAVAILABLE if self._away else codes.code_of(error)

    def _old(self, keys: Sequence[bytes]) -> Heads:
        """The heads that are stored under the keys, to drop their chunks; what is not near is not waited for."""
        if self.spaces.heads is None:
            return {}
        found = self._heads_within(keys, LOOKUP_S)
        return {at: head for at, head in enumerate(found) if head is not None}

    def _remove_those(self, keys: Sequence[bytes], old: Heads, some: Collection[int]) -> None:
        """Those at some places."""
        self._remove_everywhere(
            [keys[at] for at in some], {at: old[at] for at in some if at in old}
        )

    def _remove_everywhere(self, keys: Sequence[bytes], old: Heads) -> bytes:
        """From all namespaces, on all nodes; one byte a key, 1 where there was a block. Raises `KvpoolError` if a node
        did not answer.

        old: the heads under some of the keys, whose chunks are dropped.
        """
        gone = self.spaces.remove(self.packed(keys), self._limits.others_s)
        if old:
            self._drop(old.values())
        return gone

    def _drop(self, heads: Iterable[Head]) -> None:
        """Chunks that no head leads to any more: removed together, or evicted if this process ends before. Those with hard
        pins would stay for ever: they are removed at once, on all nodes.
        """
        with self._lock:
            self._dropped += [head for head in heads if head.inline is None]
            kept = any(head.kept for head in self._dropped)
            if (
                not kept
                and len(self._dropped) < DROPPED_MAX
                and sum(head.length for head in self._dropped) < DROPPED_BYTES_MAX
            ):
                return
            dropped, self._dropped = self._dropped, []
        keys: dict[int, list[bytes]] = {}
        for head in dropped:
            chunks = _chunks_of(head.length)
            names = _chunk_keys(head.name, len(chunks))
            for rung, numbers in _by_rung(chunks).items():
                keys.setdefault(rung, []).extend(names[number] for number in numbers)
        for rung, listed in keys.items():
            try:
                others_s = self._limits.others_s if kept else 0.0
                self._client.remove(self.spaces.chunks(rung), b"".join(listed), others_s=others_s)
            except KvpoolError as error:
                logger.info("chunks of removed objects stay until they are evicted: %s", error)

    def clear(self) -> int:
        """Remove all objects of the tenant, from all nodes; how many this node had. Raises `KvpoolError`."""
        self.spaces.look()
        if self._away:
            raise Unavailable("the daemon does not answer")
        tenants = self._client.stats().tenants
        held = {
            digest: sum(stats.blocks)
            for tenant in tenants.values()
            for digest, stats in tenant.namespaces.items()
        }
        gone = 0
        for space in self.spaces.all:
            gone += held.get(space.ns.digest.hex(), 0) - self.spaces.marks_in(space)
        for ns in self.spaces.holding_bytes(held):
            self._client.clear_namespace(ns)
        self.spaces.put_marks()
        return max(gone, 0)


def _packed_of(packed: bytes, indices: Sequence[int]) -> bytes:
    return b"".join([packed[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES] for at in indices])


def _owner_of(label: bytes) -> Owner | None:
    """None: it is none, or a chunk's."""
    magic, kind, hashed, key_bytes, length = _HEAD.unpack_from(label)
    if magic != _MAGIC or kind == _CHUNK or key_bytes > _KEY_BYTES_MAX:
        return None
    return Owner(label[_HEAD.size : _HEAD.size + key_bytes], bool(hashed), length)


def _head_of(key: bytes, block: bytes) -> Head | None:
    """None: it is not there, or another key's."""
    if len(block) < HEAD_BYTES:
        return None
    magic, kind, _, _, length = _HEAD.unpack_from(block)
    if magic != _MAGIC or block[:LABEL_BYTES] != _label(kind, key, length):
        return None
    body = block[LABEL_BYTES:]
    if kind == _INLINE and length <= INLINE_BYTES_MAX:
        return Head(length, body[:length], b"")
    if kind == _CHUNKED and length <= OBJECT_BYTES_MAX:
        return Head(length, None, body[:_NAME_BYTES], bool(body[_NAME_BYTES]))
    return None
