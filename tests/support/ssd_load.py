"""A load on an SSD store, in a process of its own that is to be killed, or traced.

    python -m tests.support.ssd_load FOLDER SIZE NBYTES FIRST_VERSION BATCHES THREADS PACKED

Each thread has its share of the slots; it writes, forgets and reads there. Every write has a version
of its own, from which its bytes follow. PACKED: 1 for blocks of even versions to be packed. Lines on stdout, those of one batch in one system call:

    F offset            the block is about to be forgotten
    A offset version    the block is durable: `write` has returned

It ends after BATCHES batches a thread, or when it is killed, and never closes the store.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.memory.buffers import Bytes1D
from kvpool.storage import codecs
from kvpool.storage.codecs import BLOSC2, Blosc2
from kvpool.storage.ssd.index import Entries
from kvpool.storage.ssd.pack import pack
from kvpool.storage.ssd.store import ReadBatch, SsdStore, WriteBatch, slot_bytes
from kvpool.types import BlockStatus

TABLE = b"the table of the load"
BATCH = 8
DROPPED_SHARE = 0.2  # of what is forgotten and not written again at once

Block = tuple[int, int]  # offset of its slot, version
Lengths = npt.NDArray[np.int64]


@lru_cache(4096)
def content(offset: int, version: int, nbytes: int) -> Bytes1D:
    """The bytes of a block, as its slot and version say. Read-only. Those of even versions can be packed."""
    data = np.random.Generator(np.random.PCG64([offset, version])).bytes(nbytes)
    noise = np.frombuffer(data, np.uint8)
    if version % 2:
        return noise
    halves = noise.copy()
    halves[1::2] = 0x3F
    halves.flags.writeable = False
    return halves


def key_of(offset: int, version: int) -> bytes:
    return offset.to_bytes(8, "little") + version.to_bytes(8, "little")


def block_of(key: bytes) -> Block:
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")


def checksums_of(blocks: Iterable[Block], nbytes: int) -> Bytes1D:
    digests = [xxhash.xxh3_128_digest(content(*block, nbytes).data) for block in blocks]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def write_batch(table: int, nbytes: int, blocks: Sequence[Block]) -> WriteBatch:
    """Blocks of which nothing is regular: rows in reverse order, each with its version as depth."""
    n = len(blocks)
    keys = np.frombuffer(b"".join(key_of(*block) for block in blocks), np.uint8).reshape(n, 16)
    return WriteBatch(
        table=table,
        nbytes=nbytes,
        offsets=np.array([offset for offset, _ in blocks], np.uint64),
        keys=keys,
        parents=keys[:, ::-1],
        depths=np.array([version for _, version in blocks], np.uint32),
        pins=np.zeros(n, np.uint8),
        checksums=checksums_of(blocks, nbytes),
        source=np.stack([content(*block, nbytes) for block in reversed(blocks)]),
        rows=np.arange(n)[::-1].copy(),
    )


def packed_batch(batch: WriteBatch) -> tuple[WriteBatch, Lengths]:
    """The same with its blocks packed, and how long their slots are."""
    packed = pack(batch.source, batch.rows, batch.nbytes)
    stored = packed.stored
    assert stored.max() < batch.nbytes, "blocks of even versions get smaller"
    lengths = np.array([codecs.slot_bytes(one, batch.nbytes) for one in stored.tolist()])
    rows = np.arange(len(stored))
    return replace(batch, source=packed.rows, rows=rows, stored=stored, codec=BLOSC2), lengths


def lengths_of(entries: Entries, nbytes: int) -> Lengths:
    """How long the slots are, as the index says."""
    sizes = zip(entries["stored"].tolist(), entries["codec"].tolist(), strict=True)
    lengths = [
        codecs.slot_bytes(one, nbytes) if codec else slot_bytes(nbytes) for one, codec in sizes
    ]
    return np.array(lengths, np.int64)


@dataclass
class Findings:
    """What a store holds, held against what was said about it."""

    held: dict[int, int] = field(default_factory=dict)  # offset → version, right to the byte
    wrong: int = 0  # read as right, with other bytes than the key stands for
    torn: int = 0  # in the index, and its bytes are not there
    packed: int = 0  # of those that are held
    lost: int = 0  # was said to be durable, and is not there


def inspect(store: SsdStore, nbytes: int, durable: dict[int, int]) -> Findings:
    """Read all that the index has, through fresh eyes: no entry is believed.

    durable: offset → version of what must be there.
    """
    found = Findings()
    for entries in store.entries():
        out = np.zeros((len(entries), nbytes), np.uint8)
        places = (entries["offset"], entries["checksum"], out, np.arange(len(out)))
        statuses = store.read(ReadBatch(nbytes, *places, lengths_of(entries, nbytes), Blosc2()))
        offsets = entries["offset"].tolist()
        columns = (entries["key"], offsets, statuses, out, entries["codec"].tolist())
        for key, place, status, data, codec in zip(*columns, strict=True):
            offset, version = block_of(key.tobytes())
            if status != BlockStatus.PRESENT:
                found.torn += 1
            elif offset != place or not np.array_equal(data, content(offset, version, nbytes)):
                found.wrong += 1
            else:
                found.held[offset] = version
                found.packed += codec > 0
    found.lost = len(durable.items() - found.held.items())
    return found


class _Load:
    def __init__(self, store: SsdStore, nbytes: int, first_version: int, packed: bool) -> None:
        self.store = store
        self.nbytes = nbytes
        self.packed = packed
        self.table = store.add_table(TABLE)
        self.version = first_version
        self.lock = threading.Lock()  # forget is for one thread at a time, and so are the lines

    def work(self, slots: list[int], batches: int, seed: int) -> None:
        dice = random.Random(seed)
        held: dict[int, int] = {}
        lengths: dict[int, int] = {}
        for _ in range(batches):
            offsets = dice.sample(slots, min(BATCH, len(slots)))
            with self.lock:
                _say(f"F {offset}" for offset in offsets)
                after = self.store.forget(offsets)
                self.version += 1
                blocks = [(offset, self.version) for offset in offsets]
            for offset in offsets:
                held.pop(offset, None)
            if dice.random() < DROPPED_SHARE:
                continue
            batch = write_batch(self.table, self.nbytes, blocks)
            long = np.full(len(blocks), slot_bytes(self.nbytes))
            if self.packed and self.is_even(blocks):
                batch, long = packed_batch(batch)
            statuses = self.store.write(batch, after)
            assert (statuses == BlockStatus.PRESENT).all()
            with self.lock:
                _say(f"A {offset} {version}" for offset, version in blocks)
            held.update(blocks)
            lengths.update(zip(offsets, long.tolist(), strict=True))
            some = dice.sample(sorted(held.items()), min(BATCH, len(held)))
            self.read(some, [lengths[offset] for offset, _ in some])

    @staticmethod
    def is_even(blocks: list[Block]) -> bool:
        """Whether they can be packed: those of one batch have one version."""
        return blocks[0][1] % 2 == 0

    def read(self, blocks: list[Block], lengths: list[int]) -> None:
        out = np.zeros((len(blocks), self.nbytes), np.uint8)
        offsets = np.array([offset for offset, _ in blocks], np.uint64)
        sums = checksums_of(blocks, self.nbytes)
        rows = np.arange(len(out))
        batch = ReadBatch(self.nbytes, offsets, sums, out, rows, np.array(lengths), Blosc2())
        statuses = self.store.read(batch)
        assert (statuses == BlockStatus.PRESENT).all()
        assert (out == np.stack([content(*block, self.nbytes) for block in blocks])).all()


def _say(lines: Iterable[str]) -> None:
    os.write(1, "".join(line + "\n" for line in lines).encode())


def main() -> None:
    size, nbytes, first_version, batches, threads, packed = map(int, sys.argv[2:])
    store = SsdStore.open(sys.argv[1], size, threads=2)
    load = _Load(store, nbytes, first_version, bool(packed))
    slot = slot_bytes(nbytes)
    slots = list(range(0, store.segment_bytes - slot + 1, slot))
    workers = [
        threading.Thread(target=load.work, args=(slots[n::threads], batches, first_version + n))
        for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os._exit(0)


if __name__ == "__main__":
    main()
