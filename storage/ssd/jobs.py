"""Copies of the blocks of one batch between rows of memory and slots of the disk, checked on the way."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.memory.buffers import Bytes1D, Rows2D
from kvpool.storage.at_rest import SEAL_BYTES, BlockSealer, block_name
from kvpool.storage.codecs import RAW, Codec
from kvpool.storage.ssd.commit import Statuses
from kvpool.storage.ssd.files import PAGE, SegmentFile
from kvpool.types import BlockStatus

# Below this row size one numpy call for many rows is faster than one call a row.
ROW_BY_ROW_BYTES = 64 << 10
MEDIUM_ERRORS = {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO}
"""What the kernel says of places that cannot be written. All else is of the file system: full, or read-only."""

Offsets = npt.NDArray[np.uint64]
RowNumbers = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int64]
Job = tuple[int, RowNumbers]
"""How long the slots are, and which blocks."""


def slot_bytes(nbytes: int) -> int:
    """The slot size for a block of `nbytes`: whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """n blocks of one table and size. Everything is the caller's, and is not kept after the call.

    offsets: of the slots, u64[n]: multiples of 4096, disjoint, each `SsdStore.slot_bytes(nbytes)` long.
    stored: u32[n]: blocks compressed by `codec`, to this many bytes of their rows. Their slots are
        `codecs.slot_bytes(stored + seal_bytes, nbytes)` long. None: uncompressed.
    keys, parents, checksums: u8[n, 16]. A checksum is xxh3-128 of the block's bytes.
    depths: u32[n]. pins: u8[n].
    source, rows: block i is the first `nbytes` of `source[rows[i]]`; i64[n].
    place: namespace and part, by which encrypted blocks are known; else unused.
    """

    table: int
    nbytes: int
    offsets: Offsets
    keys: Digests
    parents: Digests
    depths: npt.NDArray[np.uint32]
    pins: npt.NDArray[np.uint8]
    checksums: Digests
    source: Rows2D
    rows: RowNumbers
    stored: npt.NDArray[np.uint32] | None = None
    codec: int = RAW
    place: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """n blocks of one size; shapes as in `WriteBatch`.

    lengths: of the slots, i64[n]; slots shorter than `SsdStore.slot_bytes(nbytes)` were stored by
        `codec`. None: no slot is shorter.
    keys, place: as in `WriteBatch`; needed if the store is encrypted.
    destination, rows: block i goes to the first `nbytes` of `destination[rows[i]]`; writable, and
        nobody else's during the call. Without a destination the blocks are only verified.
    """

    nbytes: int
    offsets: Offsets
    checksums: Digests
    destination: Rows2D | None = None
    rows: RowNumbers | None = None
    lengths: npt.NDArray[np.int64] | None = None
    codec: Codec | None = None
    keys: Digests | None = None
    place: bytes = b""


@dataclass(eq=False)
class Writer:
    """The work of `write`: rows → staging, encrypted on the way if they are to be → segment."""

    _segment: SegmentFile
    _batch: WriteBatch
    _statuses: Statuses
    _sealer: BlockSealer | None

    def __call__(self, job: Job, memory: Bytes1D) -> None:
        slot, blocks = job
        if slot > len(memory):
            self._write_pieces(int(blocks[0]), memory)
            return
        staged = memory[: len(blocks) * slot].reshape(len(blocks), slot)
        if self._sealer is not None:
            for target, block in zip(staged, blocks.tolist(), strict=True):
                target[self._seal(self._sealer, block, target) :] = 0
        elif self._batch.stored is None:
            self._stage(blocks, staged)
        else:
            for target, block in zip(staged, blocks.tolist(), strict=True):
                data = self._stored(block)
                np.copyto(target[: data.size], data)
                target[data.size :] = 0
        for first, end in adjacent(self._batch.offsets[blocks], slot):
            self._write(blocks[first:end], memory[first * slot : end * slot])

    def _stage(self, blocks: RowNumbers, staged: Rows2D) -> None:
        """Blocks of one length, followed by zeros where another batch has left bytes."""
        batch = self._batch
        rows = batch.rows[blocks]
        if batch.source.shape[1] == staged.shape[1] and batch.source.flags.c_contiguous:
            np.take(batch.source, rows, axis=0, out=staged, mode="clip")
        elif batch.nbytes < ROW_BY_ROW_BYTES:
            staged[:, : batch.nbytes] = batch.source[rows, : batch.nbytes]
        else:
            for target, row in zip(staged, rows.tolist(), strict=True):
                np.copyto(target[: batch.nbytes], batch.source[row, : batch.nbytes])
        staged[:, batch.nbytes :] = 0

    def _seal(self, sealer: BlockSealer, block: int, out: Bytes1D) -> int:
        batch = self._batch
        name = block_name(
            batch.place,
            batch.keys[block].tobytes(),
            batch.checksums[block].tobytes(),
            batch.nbytes,
        )
        return sealer.seal(self._stored(block), name, out)

    def _stored(self, block: int) -> Bytes1D:
        """The contents of a block's slot, before they are encrypted."""
        batch = self._batch
        stored = batch.nbytes if batch.stored is None else int(batch.stored[block])
        return batch.source[batch.rows[block], :stored]

    def _write(self, blocks: RowNumbers, data: Bytes1D, at: int = 0) -> bool:
        try:
            self._segment.write(int(self._batch.offsets[blocks[0]]) + at, data)
        except OSError as error:
            here = error.errno in MEDIUM_ERRORS
            self._statuses[blocks] = BlockStatus.FAILED if here else BlockStatus.NO_SPACE
            return False
        return True

    def _write_pieces(self, block: int, memory: Bytes1D) -> None:
        row = self._stored(block)
        if self._sealer is not None:
            sealed = np.empty(row.size + SEAL_BYTES, np.uint8)
            self._seal(self._sealer, block, sealed)
            row = sealed
        for at in range(0, row.size, len(memory)):
            piece = row[at : at + len(memory)]
            np.copyto(memory[: len(piece)], piece)
            memory[len(piece) : slot_bytes(len(piece))] = 0
            if not self._write(np.array([block]), memory[: slot_bytes(len(piece))], at):
                return


@dataclass(eq=False)
class Reader:
    """The work of `read`: segment → staging, verified there → rows; or decrypted and decoded to rows, verified there."""

    _segment: SegmentFile
    _batch: ReadBatch
    _statuses: Statuses
    _sealer: BlockSealer | None

    def __post_init__(self) -> None:
        self._slot = slot_bytes(self._batch.nbytes + (0 if self._sealer is None else SEAL_BYTES))

    def __call__(self, job: Job, memory: Bytes1D) -> None:
        slot, blocks = job
        if slot > len(memory):
            if slot == self._slot and self._sealer is None:
                self._read_pieces(int(blocks[0]), memory)
            else:
                self._decode_large(int(blocks[0]), slot, memory)
            return
        for first, end in adjacent(self._batch.offsets[blocks], slot):
            try:
                self._segment.read(
                    int(self._batch.offsets[blocks[first]]), memory[first * slot : end * slot]
                )
            except OSError:
                self._statuses[blocks[first:end]] = BlockStatus.FAILED
        staged = memory[: len(blocks) * slot].reshape(len(blocks), slot)
        if slot == self._slot and self._sealer is None:
            self._verify(blocks, staged[:, : self._batch.nbytes])
        else:
            for block, data in zip(blocks.tolist(), staged, strict=True):
                if self._statuses[block] != BlockStatus.FAILED:
                    self._decode(block, data)

    def _verify(self, blocks: RowNumbers, staged: Rows2D) -> None:
        batch = self._batch
        for block, data in zip(blocks.tolist(), staged, strict=True):
            if self._statuses[block] != BlockStatus.FAILED:
                self._statuses[block] = self._verdict(block, xxhash.xxh3_128_digest(data.data))
        if batch.destination is not None and batch.rows is not None:
            right = self._statuses[blocks] == BlockStatus.PRESENT
            if right.all():
                _scatter(batch.destination, batch.rows[blocks], staged)
            elif right.any():
                _scatter(batch.destination, batch.rows[blocks[right]], staged[right])

    def _verdict(self, block: int, digest: bytes) -> int:
        return (
            BlockStatus.PRESENT
            if digest == self._batch.checksums[block].tobytes()
            else BlockStatus.MISMATCH
        )

    def _decode(self, block: int, slot: Bytes1D) -> None:
        """From the bytes of a slot to its row; the checksum is that of the block's own bytes."""
        batch = self._batch
        if batch.destination is not None and batch.rows is not None:
            out = batch.destination[batch.rows[block], : batch.nbytes]
        else:
            out = np.empty(batch.nbytes, np.uint8)
        whole = slot.size == self._slot
        if self._sealer is None:
            done = self._decoded(slot, out)
        elif whole:
            done = self._opened(self._sealer, block, slot, out)
        else:
            coded = np.empty(self._sealer.length(slot), np.uint8)
            done = self._opened(self._sealer, block, slot, coded) and self._decoded(coded, out)
        if not done and self._sealer is not None and not self._sealer.has_key(slot):
            self._statuses[block] = BlockStatus.ABSENT
        elif done:
            self._statuses[block] = self._verdict(block, xxhash.xxh3_128_digest(out.data))
        else:
            self._statuses[block] = BlockStatus.MISMATCH

    def _decoded(self, coded: Bytes1D, out: Bytes1D) -> bool:
        codec = self._batch.codec
        assert codec is not None, "a slot is shorter than its block, and no codec was named"
        return codec.decode(coded[: codec.length(coded)], out)

    def _opened(self, sealer: BlockSealer, block: int, slot: Bytes1D, out: Bytes1D) -> bool:
        batch = self._batch
        assert batch.keys is not None, "the blocks are encrypted, and their keys were not given"
        name = block_name(
            batch.place,
            batch.keys[block].tobytes(),
            batch.checksums[block].tobytes(),
            batch.nbytes,
        )
        return sealer.open(slot, name, out)

    def _decode_large(self, block: int, length: int, memory: Bytes1D) -> None:
        offset, slot = int(self._batch.offsets[block]), np.empty(length, np.uint8)
        for at in range(0, length, len(memory)):
            data = memory[: min(len(memory), length - at)]
            try:
                self._segment.read(offset + at, data)
            except OSError:
                self._statuses[block] = BlockStatus.FAILED
                return
            np.copyto(slot[at : at + data.size], data)
        self._decode(block, slot)

    def _read_pieces(self, block: int, memory: Bytes1D) -> None:
        batch = self._batch
        offset, digest = int(batch.offsets[block]), xxhash.xxh3_128()
        for at in range(0, batch.nbytes, len(memory)):
            data = memory[: min(len(memory), batch.nbytes - at)]
            try:
                self._segment.read(offset + at, memory[: slot_bytes(len(data))])
            except OSError:
                self._statuses[block] = BlockStatus.FAILED
                return
            digest.update(data.data)
            if batch.destination is not None and batch.rows is not None:
                np.copyto(batch.destination[batch.rows[block], at : at + len(data)], data)
        self._statuses[block] = self._verdict(block, digest.digest())


def _scatter(table: Rows2D, rows: RowNumbers, staged: Rows2D) -> None:
    if staged.shape[1] == table.shape[1]:
        table[rows] = staged
    else:
        table[rows, : staged.shape[1]] = staged


def adjacent(offsets: Offsets, slot: int) -> Iterator[tuple[int, int]]:
    """First and end of each run of adjacent offsets, ascending."""
    if not len(offsets):
        return iter(())
    breaks = (np.flatnonzero(np.diff(offsets) != slot) + 1).tolist()
    return zip([0, *breaks], [*breaks, len(offsets)], strict=True)
