"""Copies between the caller's buffers and slots."""

from __future__ import annotations

import _thread
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.copy_tuner import CopyWays, Way
from kvpool.client.slots import Indices, Slots, differing
from kvpool.errors import InvalidRequest
from kvpool.memory.buffers import Rows2D, Source, as_bytes, pieces_digest, read_pieces, read_rows
from kvpool.types import Namespace
from kvpool.wire.frame import NO_ROW

_BYTES = np.dtype(np.uint8)
ALONE_BYTES = 1 << 20  # a smaller put is copied before another thread is awake
PIECE_BYTES = 2 << 20  # a cache holds it
LOOK_S = 0.05  # between two looks whether a helper has ended, which also wakes the one who waits


class CopyIn:
    """Copies blocks into slots and computes their checksums. Thread-safe.

    Large puts go piece by piece: what is hashed and then copied, or the other way round, comes from memory once and
    from the cache after that. Where a second thread makes that faster (`copy_tuner.py`), it takes its share.
    """

    def __init__(
        self, ways: CopyWays | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """ways: by default what this client's puts find out."""
        self._ways = CopyWays() if ways is None else ways
        self._clock = clock
        # Its `put` and `get` are atomic: no exception leaves a lock of it taken.
        self._orders: SimpleQueue[_Copy | None] = SimpleQueue()
        self._has_helper = False
        last = weakref.finalize(self, self._orders.put, None)
        last.atexit = False

    def __call__(
        self, source: Source, indices: Indices, table: Rows2D, rows: Indices, fd: int
    ) -> bytes:
        """Copy the chosen blocks into rows of the segment; returns their checksums.

        Copying releases the GIL, as hashing does for blocks above 64 KiB. When this returns or raises, nobody reads the
        caller's buffers any more.
        """
        nbytes = len(indices) * source.nbytes
        if nbytes < ALONE_BYTES:
            source.write(indices, table, rows, fd)
            return source.checksums(indices.tolist())
        way = self._ways.choose(source.nbytes, nbytes)
        start = self._clock()
        copy = _Copy(source, indices, table, rows, fd, way)
        if way is Way.ALONE:
            copy.run()
        else:
            self._run_with_helper(copy)
        self._ways.learn(source.nbytes, nbytes, way, self._clock() - start)
        return b"".join(copy.checksums)

    def _run_with_helper(self, copy: _Copy) -> None:
        """Run it on this thread and on the helper's.

        An exception between any two steps of this thread must not return the slots while the helper writes to them:
        whichever `stop` it cuts short, another one follows.
        """
        try:
            try:
                if not self._has_helper:
                    _thread.start_new_thread(_help, (self._orders,))
                    self._has_helper = True
                self._orders.put(copy)
            except RuntimeError:
                pass  # no thread is left
            try:
                copy.run()
            finally:
                copy.stop()
        finally:
            copy.stop()
        copy.check()


def _help(orders: SimpleQueue[_Copy | None]) -> None:
    """Take part in copies until None comes. Two helpers do no harm: an exception may have started a second one."""
    while (copy := orders.get()) is not None:
        copy.help()
        del copy
    orders.put(None)  # for the other one


class _Copy:
    """A large put on its way into slots. `run` by as many threads as are to share it.

    checksums: of each piece, once all steps are done.
    """

    def __init__(
        self,
        source: Source,
        indices: Indices,
        table: Rows2D,
        rows: Indices,
        fd: int,
        way: Way,
    ) -> None:
        self._source, self._indices, self._table, self._rows = source, indices, table, rows
        self._fd = fd
        count = len(indices)
        piece_bytes = PIECE_BYTES
        if way is not Way.ALONE:  # so many that both threads end at about the same time
            piece_bytes = min(piece_bytes, count * source.nbytes // 4)
        step = max(1, piece_bytes // source.nbytes)
        pieces = [slice(low, low + step) for low in range(0, count, step)]
        self.checksums = [b""] * len(pieces)
        numbered = enumerate(pieces)
        steps: list[Callable[[], None]]
        if way is Way.BESIDE:
            steps = [partial(self._hash, *each) for each in numbered]
            steps.insert(0, partial(self._write, slice(0, count)))
        else:
            steps = [partial(self._hash_and_write, *each) for each in numbered]
            if way is Way.SHARED:
                # Hashing small blocks holds the GIL: not both threads begin with it.
                steps[0] = partial(self._write_and_hash, 0, pieces[0])
        self._steps = deque(steps)
        self._over = self._helped = self._help_ended = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._failure: BaseException | None = None

    def help(self) -> None:
        """Run it on the helper's thread, unless it is over."""
        self._helped = True
        try:
            if not self._over:
                self.run()
        except BaseException as error:  # noqa: BLE001  (`check` raises it)
            self._failure = error
        self._help_ended = True
        self._bell.put(None)

    def check(self) -> None:
        """Raise what has ended the helper, if anything has."""
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        """Take steps until none is left."""
        while True:
            try:
                step = self._steps.popleft()
            except IndexError:
                return
            step()

    def stop(self) -> None:
        """End it: when this returns nobody begins or carries out a step. Idempotent."""
        self._over = True
        self._steps.clear()
        while self._helped and not self._help_ended:
            try:
                self._bell.get(timeout=LOOK_S)
            except Empty:
                pass

    def _write_and_hash(self, number: int, piece: slice) -> None:
        self._write(piece)
        self._hash(number, piece)

    def _hash_and_write(self, number: int, piece: slice) -> None:
        self._hash(number, piece)
        self._write(piece)

    def _hash(self, number: int, piece: slice) -> None:
        self.checksums[number] = self._source.checksums(self._indices[piece].tolist())

    def _write(self, piece: slice) -> None:
        self._source.write(self._indices[piece], self._table, self._rows[piece], self._fd)


def copy_out(slots: Slots, targets: Any, here: npt.NDArray[np.bool_], *, complete: bool) -> None:
    """Copy slots to their destinations (`targets_of`), within the lease; `here` tells which were present.

    complete: all of them are, as the lease says: looking for those that are not takes longer than a small copy.
    """
    if complete:
        here.fill(True)
    else:
        np.not_equal(slots.rows, NO_ROW, out=here)
    if isinstance(targets, list):
        table, fd, stride = slots.table, slots.fd, slots.stride
        for index in np.flatnonzero(here).tolist():
            pieces, row = targets[index], int(slots.rows[index])
            if len(pieces) == 1:
                np.copyto(pieces[0], table[row, : slots.nbytes])
            else:
                read_pieces(fd, row * stride, pieces)
    elif complete:
        read_rows(slots.table, slots.rows, targets)
    else:
        found = np.flatnonzero(here)
        targets[found] = slots.table[slots.rows[found], : slots.nbytes]


def wrong_blocks(slots: Slots, targets: Any, here: npt.NDArray[np.bool_]) -> Indices:
    """Which of the copied slots are not what was committed, by the copies. Raises as `Slots.wrong`."""

    def digest_of(index: int) -> bytes:
        copied = targets[index]
        return pieces_digest(copied if isinstance(targets, list) else [copied])

    return differing(np.flatnonzero(here), digest_of, slots.expected())


def part_bytes(ns: Namespace, part: int) -> int:
    """The bytes of a part of a block. Raises `InvalidRequest`."""
    if not 0 <= part < len(ns.parts):
        raise InvalidRequest(
            f"there is no part {part}: this namespace has parts 0 to {len(ns.parts) - 1}"
        )
    return ns.parts[part].nbytes


def targets_of(out: Any, n: int, nbytes: int) -> Any:
    """Destinations: rows of one array, or for each block a list of flat arrays. Raises `InvalidRequest`."""
    if isinstance(out, (list, tuple)):
        scattered = [
            [as_bytes(piece, writable=True) for piece in item]
            if isinstance(item, (list, tuple))
            else [as_bytes(item, writable=True)]
            for item in out
        ]
        if len(scattered) != n or any(
            sum(piece.size for piece in pieces) != nbytes for pieces in scattered
        ):
            raise InvalidRequest(
                f"the destination must be {n} buffers of {nbytes} bytes, or as many lists of buffers that have "
                "these bytes together"
            )
        return scattered
    if type(out) is np.ndarray and out.dtype is _BYTES and out.shape == (n, nbytes):
        flags = out.flags
        if flags.c_contiguous and flags.writeable:
            return out  # it is what would be made of it
    flat = as_bytes(out, writable=True)
    if flat.size != n * nbytes:
        raise InvalidRequest(
            f"the destination has {flat.size} bytes, but {n} blocks of {nbytes} bytes are to be "
            "copied"
        )
    return flat.reshape(n, nbytes)
