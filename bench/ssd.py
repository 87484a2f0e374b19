"""How close is the SSD store to its disk, how fast is it back, and what do crashes cost?

`get` and `put` move 1 MiB blocks at random slots, eight at a time, between rows in memory and the
segment; put ends when the blocks are durable in segment and index. Beside them, in turns, fio on a file
of the same size with the same block size and depth, set as is best for it: the best of libaio and of
eight threads with psync is taken, O_DIRECT, huge-page buffers, and for writes one fdatasync a pass. The
files lie on the disk of the checkout. Reads are cold: both read past the page cache.

`ssd_codec_*`: blocks that look like KV in bf16 (each of 128 channels normal around zero, with a scale of
its own), packed by blosc2 on their way to the disk, beside the same blocks as they are; GB/s of blocks, not
of the disk. `stored`: the part of their bytes that their slots take.

`ssd_encrypted_*`: encrypted blocks (AES-256-GCM) beside the same blocks as they are.

`index_open_1m_s`: a million entries, the process killed, the index not in the page cache.
`crash_*`: a load is killed; what it had acknowledged is looked for. The quick run also replays every tenth
event of a recorded load with power cuts, the full one every event.

    python bench/ssd.py [--quick] [--json FILE] [--only speed|codec|encryption|puts|opening|crashes]

Needs fio and strace, and 3 GiB of free disk.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from harness import REPO, Report, daemon, in_turns, median, parse_arguments, seconds

from kvpool.client import Client
from kvpool.storage.at_rest import EncryptionSecrets
from kvpool.storage.codecs import BLOSC2, Blosc2, slot_bytes
from kvpool.storage.ssd.files import LinuxDisk
from kvpool.storage.ssd.index import ENTRY
from kvpool.storage.ssd.pack import pack
from kvpool.storage.ssd.store import ReadBatch, SsdStore, WriteBatch
from kvpool.types import BlockStatus, NamespaceRecord
from tests.support.servers.find import find_server
from tests.support.ssd_kills import KilledStore
from tests.support.ssd_replay import inspect_image, record

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CALLERS = 2
DEPTH = 8
FREE_BYTES = 3 * GIB
FILE_BYTES = 1 * GIB
PASS_BYTES = 512 * MIB
BATCH_BYTES = 64 * MIB
ENTRIES = 1_000_000
INDEX_SIZE = 28 * GIB  # of a store that may have so many
FIO_ENGINES = {
    "libaio": [f"--iodepth={DEPTH}", "--ioengine=libaio"],
    "threads": [f"--numjobs={DEPTH}", "--thread", "--ioengine=psync", "--group_reporting"],
}


def main() -> int:
    report, arguments = parse_arguments(__doc__.splitlines()[0])
    find_server("fio")  # fetched now, if at all, and not while something is measured
    place = REPO / ".bench"
    place.mkdir(exist_ok=True)
    if (free := shutil.disk_usage(place).free) < FREE_BYTES:
        raise SystemExit(
            f"{place} has {free >> 20} MiB free; the bench takes {FREE_BYTES >> 20} MiB"
        )
    for part in (speed, codec, encryption, puts, opening, crashes):
        if arguments.only in part.__name__:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                part(report, Path(folder))
    return report.finish()


# ---- speed ----------------------------------------------------------------------------------------------


class Blocks:
    """A store full of blocks of one size, and passes over them at random slots."""

    def __init__(
        self, folder: Path, nbytes: int, source: Any = None, *, encrypted: bool = False
    ) -> None:
        secrets = EncryptionSecrets([b"a secret of the bench"]) if encrypted else None
        self.store = SsdStore.open(
            folder, FILE_BYTES + FILE_BYTES // 32, threads=DEPTH, encryption=secrets
        )
        self.nbytes = nbytes
        self.table = self.store.add_table(b"bench")
        self.batch = BATCH_BYTES // nbytes
        self.slots = FILE_BYTES // self.store.slot_bytes(nbytes)
        self.dice = np.random.default_rng(1)
        self.rows = np.arange(self.batch)
        if source is None:
            source = self.dice.integers(0, 256, (self.batch, nbytes), np.uint8)
        self.source = source
        self.outs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(CALLERS):
            self.outs.put(np.zeros_like(self.source))
        self.keys = self.dice.integers(0, 256, (self.slots, 16), np.uint8)
        digests = b"".join(xxhash.xxh3_128_digest(row.data) for row in self.source)
        self.sums = np.frombuffer(digests, np.uint8).reshape(-1, 16)
        self.held = np.zeros(self.slots, np.int64)  # slot → row of the source
        for first in range(0, self.slots, self.batch):
            self._write(np.arange(first, min(first + self.batch, self.slots)))

    def _write(self, slots: Any) -> None:
        n = len(slots)
        offsets, keys, numbers = self._offsets(slots), self.keys[slots], self.rows[:n]
        batch = WriteBatch(
            table=self.table,
            nbytes=self.nbytes,
            offsets=offsets,
            keys=keys,
            parents=keys,
            depths=np.zeros(n, np.uint32),
            pins=np.zeros(n, np.uint8),
            checksums=self.sums[:n],
            rows=numbers,
            **self._stored(numbers),
        )
        assert (self.store.write(batch, self.store.forget(offsets)) == BlockStatus.PRESENT).all()
        self.held[slots] = numbers

    def _offsets(self, slots: Any) -> Any:
        return (slots * self.store.slot_bytes(self.nbytes)).astype(np.uint64)

    def _stored(self, numbers: Any) -> dict[str, Any]:
        """What is written of these rows, as fields of the batch."""
        return {"source": self.source}

    def _passes(self, work: Callable[[Any], None]) -> None:
        chosen = self.dice.permutation(self.slots)[: PASS_BYTES // self.nbytes]
        batches = [chosen[at : at + self.batch] for at in range(0, len(chosen), self.batch)]
        # The daemon, too, has several orders on their way. The disk sees `DEPTH` requests at most.
        with ThreadPoolExecutor(CALLERS) as callers:
            for _ in callers.map(work, batches):
                pass

    def put(self) -> None:
        self._passes(self._write)

    def get(self) -> None:
        self._passes(self._read)

    def _read(self, slots: Any) -> None:
        offsets = self._offsets(slots)
        sums = self.sums[self.held[slots]]
        out = self.outs.get()
        statuses = self.store.read(
            ReadBatch(
                *(self.nbytes, offsets, sums, out, self.rows[: len(slots)]), keys=self.keys[slots]
            )
        )
        self.outs.put(out)
        assert (statuses == BlockStatus.PRESENT).all()


class PackedBlocks(Blocks):
    """The same, packed on the way down and decoded on the way up. All get slots of one length."""

    def __init__(self, folder: Path, nbytes: int, source: Any) -> None:
        stored = pack(source, np.arange(len(source)), nbytes).stored.tolist()
        (self.length,) = {slot_bytes(one, nbytes) for one in stored}
        super().__init__(folder, nbytes, source)

    def _stored(self, numbers: Any) -> dict[str, Any]:
        packed = pack(self.source, numbers, self.nbytes)
        return {"source": packed.rows, "stored": packed.stored, "codec": BLOSC2}

    def _offsets(self, slots: Any) -> Any:
        return (slots * self.length).astype(np.uint64)

    def _read(self, slots: Any) -> None:
        n = len(slots)
        sums, lengths = self.sums[self.held[slots]], np.full(n, self.length)
        out = self.outs.get()
        statuses = self.store.read(
            ReadBatch(
                *(self.nbytes, self._offsets(slots), sums, out, self.rows[:n], lengths, Blosc2())
            )
        )
        self.outs.put(out)
        assert (statuses == BlockStatus.PRESENT).all()


def kv_like(n: int, nbytes: int, dice: np.random.Generator) -> Any:
    """u8[n, nbytes]: bf16, normal around zero, each channel with a scale of its own."""
    scales = np.exp(dice.normal(0, 1, 128))
    values = (dice.standard_normal((n, nbytes // 256, 128)) * scales).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, nbytes)


def timed(name: str, work: Callable[[], None], into: dict[str, list[float]]) -> None:
    """Do a pass, and note its speed in bytes a second."""
    into.setdefault(name, []).append(PASS_BYTES / seconds(work))


def beside(rounds: int, blocks: Blocks | PackedBlocks, plain: Blocks) -> dict[str, float]:
    """Passes of both by turns: the medians, in GB/s."""
    taken: dict[str, list[float]] = {}
    in_turns(
        rounds,
        partial(timed, "put", blocks.put, taken),
        partial(timed, "put_plain", plain.put, taken),
        partial(timed, "get", blocks.get, taken),
        partial(timed, "get_plain", plain.get, taken),
        warmup=1,
    )
    return {name: median(times) / 1e9 for name, times in taken.items()}


def codec(report: Report, folder: Path) -> None:
    print(f"blocks like KV in bf16, packed and as they are, {PASS_BYTES >> 20} MiB a pass, GB/s")
    rounds, sizes = (2, 1) if report.quick else (9, 2)
    for label, nbytes in (("1m", MIB), ("64k", 64 * KIB))[:sizes]:
        source = kv_like(BATCH_BYTES // nbytes, nbytes, np.random.default_rng(1))
        packed = PackedBlocks(folder / f"{label}-packed", nbytes, source)
        plain = Blocks(folder / f"{label}-plain", nbytes, source)
        speeds = beside(rounds, packed, plain)
        report.row(
            f"ssd_codec_{label}",
            **speeds,
            stored=packed.length / nbytes,
        )
        for one, name in ((packed, "packed"), (plain, "plain")):
            one.store.close()
            shutil.rmtree(folder / f"{label}-{name}")


def encryption(report: Report, folder: Path) -> None:
    print(f"encrypted blocks and the same as they are, {PASS_BYTES >> 20} MiB a pass, GB/s")
    rounds = 3 if report.quick else 15
    for label, nbytes in (("1m", MIB), ("64k", 64 * KIB)):
        sealed = Blocks(folder / f"{label}-sealed", nbytes, encrypted=True)
        plain = Blocks(folder / f"{label}-plain", nbytes)
        speeds = beside(rounds, sealed, plain)
        ratio = speeds["get"] / speeds["get_plain"]
        report.row(f"ssd_encrypted_{label}", **speeds, get_ratio=ratio)
        if label == "1m":
            report.check("ssd_encrypted_get_1m", ratio, at_least=0.9)
        for one, name in ((sealed, "sealed"), (plain, "plain")):
            one.store.close()
            shutil.rmtree(folder / f"{label}-{name}")


def fio(path: Path, nbytes: int, mode: str, engine: str) -> float:
    """Bytes a second."""
    jobs = DEPTH if engine == "threads" else 1
    command = [
        *(
            find_server("fio"),
            "--name=peer",
            f"--filename={path}",
            f"--size={FILE_BYTES}",
            f"--rw={mode}",
        ),
        *(f"--bs={nbytes}", "--direct=1", "--mem=malloc", f"--io_size={PASS_BYTES // jobs}"),
        *("--output-format=json", "--randrepeat=0", "--end_fsync=1"),
        *FIO_ENGINES[engine],
    ]
    # Buffers in huge pages, as ours: glibc asks for them where fio has no option for it.
    environ = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=path.parent, env=environ
    )
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read" if mode == "randread" else "write"]["bw_bytes"])


def speed(report: Report, folder: Path) -> None:
    print(f"random blocks, depth {DEPTH}, {PASS_BYTES >> 20} MiB a pass, GB/s, medians")
    peer = folder / "peer"
    with peer.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
    fio(peer, MIB, "randwrite", "libaio")
    rounds = 3 if report.quick else 15
    for label, nbytes in (("1m", MIB), ("64k", 64 * KIB)):
        blocks = Blocks(folder / label, nbytes)
        for what, mode, work, bound in (
            ("put", "randwrite", blocks.put, 0.8),
            ("get", "randread", blocks.get, 0.9),
        ):
            ours: list[float] = []
            theirs: dict[str, list[float]] = {engine: [] for engine in FIO_ENGINES}
            works: list[Callable[[], None]] = [
                lambda: ours.append(PASS_BYTES / seconds(work)),
                *(
                    lambda engine=engine: theirs[engine].append(fio(peer, nbytes, mode, engine))
                    for engine in FIO_ENGINES
                ),
            ]
            in_turns(rounds, *works, warmup=1)
            best = max(theirs, key=lambda engine: median(theirs[engine]))
            ratio = median(ours) / median(theirs[best])
            report.row(
                f"ssd_{what}_{label}",
                kvpool=median(ours) / 1e9,
                **{f"fio_{engine}": median(taken) / 1e9 for engine, taken in theirs.items()},
                ratio=ratio,
                direct=blocks.store.direct,
            )
            if label == "1m":
                report.check(f"ssd_{what}_1m", ratio, at_least=bound)
        blocks.store.close()
        shutil.rmtree(folder / label)


# ---- puts beside a busy disk ----------------------------------------------------------------------------


def puts(report: Report, folder: Path) -> None:
    """Puts into full memory, with nothing to write and with more to write than the disk can take."""
    print("puts of 4 x 1 MiB into full memory, the disk idle and its queue full")
    rounds, count = (3, 150) if report.quick else (9, 300)
    flags = ("--ssd", f"{folder / 'disk'}={GIB}", "--ssd-flush-s", "0")
    taken: dict[str, list[float]] = {"none": [], "through": []}
    data = np.random.default_rng(1).integers(0, 256, (4, MIB), np.uint8)
    numbers = itertools.count()
    with daemon(folder, "node", "256MiB", *flags) as node, Client(node.socket) as client:
        spaces = {
            mode: client.open(
                NamespaceRecord.simple(f"bench-{mode}", block_bytes=MIB, block_tokens=16),
                write=mode,
            )
            for mode in taken
        }

        def put(mode: str) -> None:
            keys = [next(numbers).to_bytes(16, "little") for _ in range(4)]
            client.put(spaces[mode], keys, data)

        def one(mode: str) -> float:
            for _ in range(count // 3):  # fills memory with its own blocks, and the queue
                put(mode)
            times = [seconds(lambda: put(mode)) for _ in range(count)]
            tiers = client.stats().tiers
            assert mode == "none" or tiers.queued_writes > 0, "the disk keeps up with the puts"
            while client.stats().tiers.queued_writes:
                time.sleep(0.01)
            return median(times)

        for number in range(rounds + 1):
            for mode in taken if number % 2 else reversed(taken):
                if number:
                    taken[mode].append(one(mode))
                else:
                    one(mode)
        tiers = client.stats().tiers
    idle, busy = median(taken["none"]), median(taken["through"])
    report.row(
        "put_beside_disk",
        idle_ms=1e3 * idle,
        busy_ms=1e3 * busy,
        written_mib=tiers.ssd[0].written_bytes >> 20,
        dropped=tiers.dropped_writes,
    )
    report.check("put_beside_disk", busy / idle, at_most=1.2)


# ---- opening --------------------------------------------------------------------------------------------


class SparseDisk(LinuxDisk):
    """A segment without space of its own: here nothing but the index is read."""

    def fallocate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)


def fill(folder: Path) -> None:
    """In a process of its own: a million entries at random slots, then an end without a close."""
    store = SsdStore.open(folder, INDEX_SIZE, threads=1, disk=SparseDisk())
    assert store.entries_max >= ENTRIES
    assert not sum(len(entries) for entries in store.entries())
    table = store.add_table(b"bench")
    dice = np.random.default_rng(1)
    slots = dice.permutation(store.segment_bytes // (16 * KIB))[:ENTRIES].astype(np.uint64)
    for part in np.array_split(slots, ENTRIES // 4000):
        entries = np.zeros(len(part), ENTRY)
        entries["offset"] = part * np.uint64(16 * KIB)
        entries["table"] = table
        entries["nbytes"] = entries["stored"] = 16 * KIB
        entries["key"] = dice.integers(0, 256, (len(part), 16))
        assert store._index.commit({}, entries).added == len(part)
    os.kill(os.getpid(), signal.SIGKILL)


def opening(report: Report, folder: Path) -> None:
    print("a million entries: open the store, read them all")
    subprocess.run([sys.executable, __file__, "--fill", str(folder)], check=False)
    taken: dict[str, list[float]] = {"cold": [], "warm": []}
    for state in ("cold", "warm") * (2 if report.quick else 5):
        if state == "cold":
            fd = os.open(folder / "index" / "data.mdb", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        start = time.perf_counter()
        store = SsdStore.open(folder, INDEX_SIZE, threads=8, disk=SparseDisk())
        n = sum(len(entries) for entries in store.entries())
        taken[state].append(time.perf_counter() - start)
        stats = store.stats()
        assert n == stats.entries == ENTRIES
        store.close()
    report.row(
        "index_open_1m",
        **{state: median(times) for state, times in taken.items()},
        bytes_an_entry=stats.index_pages * 4096 / ENTRIES,
    )
    report.check("index_open_1m_s", median(taken["cold"]), at_most=2)


# ---- crashes --------------------------------------------------------------------------------------------


def crashes(report: Report, folder: Path) -> None:
    rounds = 8 if report.quick else 200
    killed = KilledStore(folder / "killed", 32 * MIB, nbytes=16 * KIB, seed=1, packed=True)
    found = [killed.round(lines_max=2000) for _ in range(rounds)]
    wrong, lost = sum(f.wrong + f.torn for f in found), sum(f.lost for f in found)
    small = sum(f.packed for f in found) / sum(len(f.held) for f in found)
    report.row(
        "kills",
        rounds=rounds,
        acknowledged=killed.acknowledged,
        packed=small,
        wrong=wrong,
        lost=lost,
    )

    recording = record(folder, 4 * MIB, nbytes=4096, batches=12, threads=2)
    dice, images = random.Random(1), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for cut in recording.cuts()[:: 10 if report.quick else 1]:
            for image in recording.images(cut, 4, dice):
                one = inspect_image(recording, image, cut, Path(memory))
                wrong, lost, images = wrong + one.wrong + one.torn, lost + one.lost, images + 1
    report.row("power_cuts", events=len(recording.cuts()), images=images, wrong=wrong, lost=lost)
    report.check("crash_wrong", wrong, at_most=0)
    report.check("crash_lost", lost, at_most=0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fill"]:
        fill(Path(sys.argv[2]))
    sys.exit(main())
