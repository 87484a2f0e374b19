"""A caller's buffers as bytes without a copy; and copies in few large calls.

One call a batch if the shapes allow it: while another thread of the process runs Python code, each
call that re-takes the GIL waits a switch interval for it, so a loop over 64 blocks can take 60 times as
long as one call over all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import InvalidRequest

Bytes1D = npt.NDArray[np.uint8]
Rows2D = npt.NDArray[np.uint8]
IOV_MAX = 1024
PAGE, WORD_BYTES = 4096, 32  # of memory; what CPUs copy at a time
RUN_BYTES = 1 << 20  # for less, looking whether rows follow each other costs more than it saves


def as_bytes(source: Any, *, writable: bool = False) -> Bytes1D:
    """The bytes of a buffer, numpy array or torch CPU tensor, flat, sharing its memory.

    Raises `InvalidRequest` unless it is contiguous, in host memory, and writable if required.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.Tensor):
        if source.device.type != "cpu":
            raise InvalidRequest(f"the tensor is on {source.device}: copy it to host memory first")
        if not source.is_contiguous():
            raise InvalidRequest("the tensor is not contiguous: pass its pieces, or a copy")
        flat: Bytes1D = source.detach().reshape(-1).view(torch.uint8).numpy()
        return flat
    if isinstance(source, np.ndarray):
        if not source.flags.c_contiguous:
            raise InvalidRequest("the array is not contiguous: pass its pieces, or a copy")
        if source.dtype.hasobject:
            raise InvalidRequest(
                "the array holds Python objects: its bytes are addresses, not data"
            )
        flat = source.reshape(-1).view(np.uint8)
    else:
        try:
            flat = np.frombuffer(source, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidRequest(
                f"{type(source).__name__} is neither a contiguous buffer nor an array ({error})"
            ) from None
    if writable and not flat.flags.writeable:
        raise InvalidRequest("the destination is read-only")
    return flat


class Source:
    """The blocks that a put writes: n rows of `nbytes`, as one buffer, one each, or several each."""

    def __init__(self, blocks: Any, n: int, nbytes: int) -> None:
        """Raises `InvalidRequest` when the sizes are not n times `nbytes`."""
        self.n = n
        self.nbytes = nbytes
        self.rows: Rows2D | None = None
        self.pieces: list[list[Bytes1D]] = []
        if isinstance(blocks, (list, tuple)):
            if len(blocks) != n:
                raise InvalidRequest(f"{len(blocks)} blocks for {n} keys")
            for index, block in enumerate(blocks):
                parts = block if isinstance(block, (list, tuple)) else (block,)
                pieces = [as_bytes(piece) for piece in parts]
                total = sum(piece.size for piece in pieces)
                if total != nbytes:
                    raise InvalidRequest(
                        f"block {index} has {total} bytes, this namespace's part has {nbytes}"
                    )
                self.pieces.append(pieces)
        else:
            flat = as_bytes(blocks)
            if flat.size != n * nbytes:
                raise InvalidRequest(
                    f"{flat.size} bytes for {n} keys: this namespace's part has {nbytes} bytes, "
                    f"so {n * nbytes} are needed"
                )
            self.rows = flat.reshape(n, nbytes)

    @property
    def total(self) -> int:
        return self.n * self.nbytes

    def checksums(self, indices: Iterable[int]) -> bytes:
        """xxh3-128 of the chosen blocks, 16 bytes each. Releases the GIL while it hashes."""
        if self.rows is not None:
            rows, digest = self.rows, xxhash.xxh3_128_digest
            return b"".join([digest(rows[index].data) for index in indices])
        return b"".join([pieces_digest(self.pieces[index]) for index in indices])

    def write(self, indices: npt.NDArray[np.int64], table: Rows2D, rows: Any, fd: int) -> None:
        """Copy the chosen blocks (ascending, at least one) into rows of the segment `table`, whose memfd is `fd`."""
        if self.rows is not None:
            first, count = int(indices[0]), len(indices)
            # Mostly all blocks, or the tail of a prefix, are missing: then nothing is gathered first.
            together = int(indices[-1]) - first + 1 == count
            source = self.rows[first : first + count] if together else self.rows[indices]
            if source.nbytes >= RUN_BYTES and _address(source) % WORD_BYTES:
                rows = as_run(rows)
            if self.nbytes == table.shape[1]:
                table[rows] = source
            else:
                table[rows, : self.nbytes] = source
            return
        stride = table.shape[1]
        for index, row in zip(indices.tolist(), rows.tolist(), strict=True):
            pieces = self.pieces[index]
            if len(pieces) == 1:
                np.copyto(table[row, : self.nbytes], pieces[0])
            else:
                write_pieces(fd, row * stride, pieces)


def as_run(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | slice:
    """The same rows; as a slice if each follows the one before it: numpy then copies all of them as one.

    Rows begin at the start of a page. A C library copies each, if it has less than about 1 MiB, by an instruction that
    some CPUs slow down by a third where the other side does not begin at a multiple of 32, and by half where rows are
    read to just behind the start of a page. Most large arrays of numpy begin 16 bytes behind it.
    """
    low, count = int(rows[0]), len(rows)
    if int(rows[-1]) - low + 1 == count and (rows[1:] - rows[:-1] == 1).all():
        return slice(low, low + count)
    return rows


def _address(rows: Rows2D) -> int:
    return int(rows.__array_interface__["data"][0])


def write_pieces(fd: int, at: int, pieces: Sequence[Bytes1D]) -> None:
    """Gather pieces into one place of a segment: one system call for up to 1024 of them."""
    for start in range(0, len(pieces), IOV_MAX):
        some = pieces[start : start + IOV_MAX]
        want = sum(piece.size for piece in some)
        done = os.pwritev(fd, [piece.data for piece in some], at)
        assert done == want, f"a write into shared memory ended after {done} of {want} bytes"
        at += want


def read_pieces(fd: int, at: int, pieces: Sequence[Bytes1D]) -> None:
    """Scatter one place of a segment into pieces: one system call for up to 1024 of them."""
    for start in range(0, len(pieces), IOV_MAX):
        some = pieces[start : start + IOV_MAX]
        want = sum(piece.size for piece in some)
        done = os.preadv(fd, [piece.data for piece in some], at)
        assert done == want, f"a read of shared memory ended after {done} of {want} bytes"
        at += want


def pieces_digest(pieces: Sequence[Bytes1D]) -> bytes:
    """xxh3-128 of pieces as if they were one. Releases the GIL while it hashes."""
    if len(pieces) == 1:
        return xxhash.xxh3_128_digest(pieces[0].data)
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece.data)
    return state.digest()


def read_rows(table: Rows2D, rows: Any, out: Rows2D) -> None:
    """Copy rows of a segment into the rows of `out`, which may be narrower than the segment's."""
    if out.nbytes >= RUN_BYTES and 0 < _address(out) % PAGE < WORD_BYTES:
        rows = as_run(rows)
    if type(rows) is not slice and out.shape[1] == table.shape[1] and out.flags.c_contiguous:
        table.take(rows, 0, out, "clip")  # a microsecond less than `np.take`
    else:
        out[:] = table[rows, : out.shape[1]]


def row_checksums(table: Rows2D, rows: Any, nbytes: int) -> bytes:
    """xxh3-128 of the first `nbytes` of each row, 16 bytes each."""
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(table[row, :nbytes].data) for row in rows])
