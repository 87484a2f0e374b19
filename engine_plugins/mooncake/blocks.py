"""Reading and storing blocks of one namespace, whatever objects they belong to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvpool.client import NO_ROW, Client, Lease
from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.pieces import BadAddressError, Bytes1D, Pieces, View
from kvpool.engine_plugins.mooncake.spaces import chosen
from kvpool.errors import KvpoolError, LimitExceeded, PoolFull, Unavailable
from kvpool.types import NO_PARENT, Namespace

logger = logging.getLogger(__name__)

Block = list[Pieces]
"""What a block is made of, in order."""
LEASE_S = 5.0
TOGETHER_BYTES = 1 << 20
"""Puts of up to so many bytes take one request instead of two, and copy through the kernel."""


@dataclass(frozen=True)
class How:
    """replicas: 0 for one. pin: "hard", "soft" or empty."""

    replicas: int = 0
    pin: str = ""


@contextmanager
def reading(lease: Lease) -> Iterator[None]:
    """Released with the next request: to say so at once takes as long as a small read."""
    try:
        yield
    finally:
        lease.release_later()


class Blocks:
    """Blocks of any namespace of the client. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def away(self) -> bool:
        """Whether the daemon did not answer the last request: then nothing was found because nobody was asked."""
        return not self._client.available

    def code_of(self, error: KvpoolError) -> int:
        """The code of an error; of any while the daemon is away, that it is unavailable."""
        return codes.UNAVAILABLE if self.away else codes.code_of(error)

    def acquire(self, ns: Namespace, packed: bytes, wait_s: float) -> Lease | None:
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

    def store(self, ns: Namespace, packed: bytes, blocks: Sequence[Block], how: How) -> list[int]:
        """Store blocks that are independent of each other. `OK` for each that is there then."""
        found = [codes.OK] * len(blocks)
        views = [[piece.bytes for piece in block if isinstance(piece, View)] for block in blocks]
        all_views = all(map(_same_length, views, blocks))
        if all_views and len(blocks) * ns.parts[0].nbytes <= TOGETHER_BYTES:
            stored = self._client.put_each(ns, packed, views, replicas=how.replicas)
            for at in np.flatnonzero(~stored).tolist():
                found[at] = codes.NO_SPACE
        else:
            self._store_in_turns(ns, packed, blocks, how, found)
        if how.pin:
            self._pin(ns, packed, how.pin, found)
        return found

    def _store_in_turns(
        self, ns: Namespace, packed: bytes, blocks: Sequence[Block], how: How, found: list[int]
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
        self, ns: Namespace, packed: bytes, left: list[int], blocks: Sequence[Block], how: How
    ) -> tuple[int, set[int]]:
        """How many of the first are stored then; or, none being stored, which ones hold a bad address."""
        keys = packed if len(left) == len(blocks) else chosen(packed, left)
        try:
            [reservation] = self._client.reserve_parts(ns, keys, [0], NO_PARENT * len(left))
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


def _write(block: Block, slot: Bytes1D, fd: int, at: int) -> None:
    """A block's pieces one after the other. Raises `BadAddressError`."""
    start = 0
    for piece in block:
        end = start + piece.nbytes
        if end > start:
            piece.write(slot[start:end], fd, at + start)
        start = end


def _same_length(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other)
