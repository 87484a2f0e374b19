"""Group commit: many calls' writes are made durable by one sync of the segment and one transaction.

The order that makes a crash harmless:

    forget: entry deleted, durable
            data written
            segment synced
            entries added, durable → the write returns

So an entry never points to a slot that is being filled with something else, and never to missing
bytes. While one group is made durable the next one gathers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvpool.storage.ssd.files import SegmentFile
from kvpool.storage.ssd.index import FORGET, NO_ENTRIES, Entries, SsdIndex
from kvpool.types import BlockStatus

log = logging.getLogger(__name__)

Statuses = npt.NDArray[np.uint8]


class Pending:
    """A write between its registration and its entries: the entries to add, and their results.

    entries: one record a block, all but generation and check filled in.
    statuses: DONE where the block's bytes were written; the committer corrects them.
    """

    __slots__ = ("ended", "entries", "epoch", "forgotten", "statuses")

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.statuses: Statuses = np.full(len(entries), BlockStatus.PRESENT, np.uint8)
        self.forgotten = np.zeros(len(entries), np.bool_)
        self.epoch = 0
        self.ended = False

    def wanted(self) -> npt.NDArray[np.bool_]:
        """The blocks that should have entries."""
        wanted: npt.NDArray[np.bool_] = (self.statuses == BlockStatus.PRESENT) & ~self.forgotten
        return wanted

    def fail(self, *, keep: int = 0) -> None:
        """Mark as not durable: all but the first `keep` of the wanted blocks. Their places are not at fault."""
        self.statuses[np.flatnonzero(self.wanted())[keep:]] = BlockStatus.NO_SPACE


class Committer:
    """See the module's docstring. Thread-safe; one thread of its own does the work."""

    def __init__(self, segment: SegmentFile, index: SsdIndex) -> None:
        self.sync_errors = 0
        self.index_errors = 0
        self._segment = segment
        self._index = index
        self._changed = threading.Condition()
        self._operations: dict[int, int] = {}  # one a slot at most: bounded by the number of slots
        self._queued = 0  # the number of the last forget or pin
        self._durable = 0  # all up to here are in the index
        self._groups = 0  # begun
        self._refused = 0  # the last group whose operations failed
        self._wanted = False  # operations are queued, or waited for
        self._writing: dict[int, tuple[Pending, int]] = {}  # slot → the write that fills it
        self._ready: list[Pending] = []
        # Counts failed syncs. Bytes written before one may be lost though a later sync succeeds:
        # the kernel reports a page once, and then considers it clean.
        self._epoch = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvpool-ssd-commit", daemon=True)
        self._thread.start()

    def queue(self, offsets: Iterable[int], operation: int) -> int:
        """Queue the deletion of entries, or a pin level for them. Does not wait. Returns the number to wait for.

        For a write under way, the entries are not made, or made with that level.
        """
        with self._changed:
            for offset in offsets:
                if (writing := self._writing.get(offset)) is not None:
                    write, at = writing
                    if operation == FORGET:
                        write.forgotten[at] = True
                    else:
                        write.entries["pin"][at] = operation
                if operation == FORGET or self._operations.get(offset) != FORGET:
                    self._operations[offset] = operation
            self._queued += 1
            self._wanted = True
            self._changed.notify_all()
            return self._queued

    def wait(self, number: int) -> bool:
        """Wait until operations up to `number` are durable; False if the index refuses them."""
        with self._changed:
            assert number <= self._queued, f"{number} was not queued: {self._queued} is the last"
            # The current group may have begun too early, or fail: the next one has all that is left.
            last = self._groups + 1
            while self._durable < number and self._refused < last:
                if self._groups < last:
                    self._wanted = True
                    self._changed.notify_all()
                self._changed.wait()
            return self._durable >= number

    def begin(self, entries: Entries) -> Pending:
        """Call before the first byte is written into these slots. `commit` must follow."""
        write = Pending(entries)
        offsets = entries["offset"].tolist()
        with self._changed:
            twice = len(set(offsets)) < len(offsets) or not self._writing.keys().isdisjoint(offsets)
            assert not twice, "a slot is being written twice at a time"
            write.epoch = self._epoch
            for at, offset in enumerate(offsets):
                self._writing[offset] = (write, at)
        return write

    def commit(self, write: Pending) -> None:
        """Call after the last byte was written: sync, and add the entries of DONE blocks.

        Corrects the statuses of the others. Returns when the entries are durable.
        """
        with self._changed:
            self._ready.append(write)
            self._changed.notify_all()
            while not write.ended:
                self._changed.wait()

    def close(self) -> None:
        """Make queued operations durable, then end. No write may be under way, no calls may follow."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._ready or self._wanted or self._closing):
                    self._changed.wait()
                if not self._ready and not self._wanted:
                    return
                self._wanted = False
                self._groups += 1
                number = self._queued
                operations, self._operations = self._operations, {}
                writes, self._ready = self._ready, []
                for write in writes:
                    for offset in write.entries["offset"].tolist():
                        del self._writing[offset]
            got_through = self._make_durable(operations, writes)
            with self._changed:
                if got_through:
                    self._durable = number
                else:
                    self._refused = self._groups
                    self._operations = operations | self._operations
                for write in writes:
                    write.ended = True
                self._changed.notify_all()

    def _make_durable(self, operations: dict[int, int], writes: list[Pending]) -> bool:
        """One group. Returns whether its operations succeeded; the writes' results are in their statuses."""
        if any(write.wanted().any() for write in writes):
            self._sync()
        for write in writes:
            if write.epoch != self._epoch:
                write.fail()
        parts = [write.entries[write.wanted()] for write in writes]
        entries = np.concatenate(parts) if parts else NO_ENTRIES
        outcome = self._index.commit(operations, entries)
        self.index_errors += outcome.failed
        left = outcome.added
        for write, part in zip(writes, parts, strict=True):
            if left < len(part):
                write.fail(keep=left)
            left = max(0, left - len(part))
        return outcome.got_through

    def _sync(self) -> None:
        try:
            self._segment.sync()
        except OSError as error:
            log.warning("the segment of the SSD store cannot be synced: %s", error)
            with self._changed:
                self.sync_errors += 1
                self._epoch += 1
