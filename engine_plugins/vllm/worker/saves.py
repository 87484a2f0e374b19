"""The saves of a step on one rank: blocks of several requests are reserved, copied and committed together.

An exchange with the daemon waits for the interpreter lock once or twice, beside a thread that computes; one for each
request that completes a block cost generating engines a fifth of their speed. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.engine_plugins.vllm.layout.pages import CHUNK_BYTES, GroupPages, Index
from kvpool.engine_plugins.vllm.layout.shards import my_turn
from kvpool.engine_plugins.vllm.metrics import Counters
from kvpool.engine_plugins.vllm.plan import GroupSave, SaveJob, label_of
from kvpool.errors import KvpoolError, StaleEpoch
from kvpool.types import KEY_BYTES, NO_PARENT, Namespace

if TYPE_CHECKING:
    from kvpool.client import Client, Reservation

TOGETHER = 4096
"""Parts of blocks in one exchange: the daemon's event loop is busy with it for some milliseconds."""


class Saved(Enum):
    """The result of a save. OUTDATED: another engine has reset the namespace since it was opened."""

    ALL = "all"
    FAILED = "failed"
    OUTDATED = "outdated"


class _Run(NamedTuple):
    """Blocks that follow one another, of the job at that position. keys, parents: packed, one a block. request: its label."""

    job: int
    keys: bytes
    parents: bytes
    blocks: Index
    request: str

    def cut(self, begin: int, end: int) -> _Run:
        a, b = begin * KEY_BYTES, end * KEY_BYTES
        return _Run(
            self.job, self.keys[a:b], self.parents[a:b], self.blocks[begin:end], self.request
        )


class Saves:
    """What puts a rank's blocks into the pool.

    pages: what the rank holds of the stored groups, for the calling thread's use.
    """

    def __init__(self, client: Client, pages: Sequence[GroupPages], counters: Counters) -> None:
        self._client = client
        self._pages = pages
        self._counters = counters

    def save(
        self,
        namespace: Namespace,
        jobs: Sequence[SaveJob],
        ready: Any,
        given_up: Callable[[], bool] = bool,
    ) -> list[Saved]:
        """Store blocks. Returns how each job ended.

        ready: see `Pages.to_slots`.
        given_up: whether the engine may have overwritten blocks. Bytes that were read before it was false are stored.
        """
        results = [Saved.ALL] * len(jobs)
        for position, held in enumerate(self._pages):
            runs = [
                run
                for at, job in enumerate(jobs)
                for save in job.saves
                if save.rule == position and (run := _mine(at, job, save, held)) is not None
            ]
            for batch in self._batches(runs, len(held.parts)):
                try:
                    short = self._store(namespace, held, batch, ready, given_up)
                    found = Saved.FAILED
                except StaleEpoch:
                    short, found = {run.job for run in batch}, Saved.OUTDATED
                except KvpoolError:
                    short, found = {run.job for run in batch}, Saved.FAILED
                for at in short:
                    if results[at] is not Saved.OUTDATED:
                        results[at] = found
        return results

    def _batches(self, runs: Sequence[_Run], parts: int) -> Iterator[list[_Run]]:
        """Yield runs that are reserved together, some of them cut."""
        limit = max(1, TOGETHER // parts)
        batch: list[_Run] = []
        room = limit
        for run in runs:
            at = 0
            while at < len(run.blocks):
                end = min(len(run.blocks), at + room)
                batch.append(run.cut(at, end))
                room -= end - at
                at = end
                if not room:
                    yield batch
                    batch, room = [], limit
        if batch:
            yield batch

    def _store(
        self,
        namespace: Namespace,
        held: GroupPages,
        batch: Sequence[_Run],
        ready: Any,
        given_up: Callable[[], bool],
    ) -> set[int]:
        """Store blocks. Returns the positions of the jobs whose last blocks found no space, or of all if given up."""
        if given_up():
            return {run.job for run in batch}
        blocks = np.concatenate([run.blocks for run in batch])
        reservations = self._reserve(namespace, held, batch)
        try:
            of_part = dict(zip([part.part for part in held.parts], reservations, strict=True))
            for pages, parts in held.together(CHUNK_BYTES // (len(blocks) * held.nbytes)):
                missing = [
                    (part, reserved)
                    for part in parts
                    if len((reserved := of_part[part.part]).missing)
                ]
                if not missing:
                    continue
                rows, own = joined(
                    [(it.slots.rows, part.rows(blocks[it.missing])) for part, it in missing]
                )
                pages.to_slots(own, missing[0][1].slots, rows, ready)
                if given_up():
                    return {run.job for run in batch}
                # Checksums are computed here: soon, while the processor's caches have the bytes.
                stored = sum(self._client.commit_parts([reservation for _, reservation in missing]))
                self._counters.add(saved_blocks=stored, saved_bytes=stored * pages.nbytes)
        finally:
            for reservation in reservations:
                reservation.abort()
        covered = len(blocks) - max(reservation.refused for reservation in reservations)
        short = set[int]()
        for run in batch:
            covered -= len(run.blocks)
            if covered < 0:
                short.add(run.job)
        return short

    def _reserve(
        self, namespace: Namespace, held: GroupPages, batch: Sequence[_Run]
    ) -> list[Reservation]:
        keys, parts = b"".join([run.keys for run in batch]), [part.part for part in held.parts]
        parents = b"".join([run.parents for run in batch])
        requests = [(run.request, len(run.blocks)) for run in batch]
        return self._client.reserve_parts(namespace, keys, parts, parents, requests=requests)


def _mine(at: int, job: SaveJob, save: GroupSave, held: GroupPages) -> _Run | None:
    """This rank's share of a run: ranks that hold the same take turns."""
    mine = my_turn(save.keys[:KEY_BYTES], len(save.block_ids), held.turn, held.turns)
    parents = (save.parent or NO_PARENT) + save.keys[:-KEY_BYTES]
    run = _Run(
        at, save.keys, parents, np.asarray(save.block_ids, np.int64), label_of(job.request_id)
    )
    run = run.cut(mine.start, mine.stop)
    return run if len(run.blocks) else None


def joined(pairs: Sequence[tuple[Index, Index]]) -> tuple[Index, Index]:
    """Slots' rows and pages' rows of several parts, one part after the other."""
    if len(pairs) == 1:
        return pairs[0]
    rows, own = zip(*pairs, strict=True)
    return np.concatenate(rows), np.concatenate(own)
