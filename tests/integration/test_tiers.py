"""Daemons with disks: what memory gives up is found again, whole and right, through deaths of all kinds."""

import errno
import itertools
import os
import random
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.errors import LimitExceeded
from kvpool.telemetry.memory_stats import NamespaceUsage
from kvpool.types import NamespaceRecord
from tests.support import refusing
from tests.support.jobs import finished
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S

NBYTES = 64 << 10
RECORD = NamespaceRecord.simple("tiers", block_bytes=NBYTES, block_tokens=16)
MEMORY_BLOCKS = 64  # of the daemons here


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def block(number: int, version: int = 0) -> bytes:
    return np.random.default_rng((number, version)).bytes(NBYTES)


class Engine:
    """A client of a daemon with disks."""

    def __init__(self, daemon) -> None:
        self.daemon = daemon
        self.client: Client = daemon.client(connect=True)
        self.ns = self.client.open(RECORD)

    def put(self, numbers: range, version: int = 0) -> None:
        """In chains of eight, so that the pool may give up whole ones."""
        for at in range(numbers.start, numbers.stop, 8):
            some = range(at, min(at + 8, numbers.stop))
            self.client.put(self.ns, keys_of(some), [block(n, version) for n in some])

    def read(self, numbers: Iterable[int], version: int = 0) -> set[int]:
        """Which of them are found, in any tier; each found one is whole and right."""
        numbers = list(numbers)
        found = set()
        for at in range(0, len(numbers), 16):
            some = numbers[at : at + 16]
            for n, data in zip(
                some, self.client.get(self.ns, keys_of(some), wait_s=PATIENCE_S), strict=True
            ):
                if data is not None:
                    assert data == block(n, version), f"block {n} is wrong"
                    found.add(n)
        return found

    def in_memory(self, numbers: Iterable[int]) -> int:
        return int(self.client.contains(self.ns, keys_of(numbers)).sum())

    @property
    def tiers(self):
        return self.client.stats().tiers

    @property
    def disk(self):
        return self.tiers.ssd[0]

    @property
    def written(self) -> int:
        return sum(disk.written_blocks for disk in self.tiers.ssd)


@pytest.fixture
def disked(start, folder, until) -> Iterator:
    """Starts daemons with one disk each, and an engine beside them; a name has its disk for ever."""
    engines = []

    def begin(
        *args: str,
        name: str = "node",
        size: str = "64MiB",
        mode: str = "through",
        **settings: object,
    ) -> Engine:
        ssd = f"{folder / f'{name}-disk'}={size}"
        given = ("--memory", "4MiB", "--ssd", ssd, "--ssd-write", mode)
        daemon = start(*given, *args, name=name, **settings)
        engine = Engine(daemon)
        engines.append(engine)
        # A node does not wait long for its disk before it is ready.
        until(lambda: engine.disk.state == "serving", "the disk is open")
        return engine

    yield begin
    for engine in engines:
        engine.client.close()


@pytest.fixture
def written(disked, until):
    """An engine whose blocks 0 to 199 are on disk; memory has room for a quarter of them."""
    engine = disked()
    write(engine, range(200), until)
    return engine


def write(engine: "Engine", numbers: range, until) -> None:
    """Put at the pace of the disks: what memory gives up before its turn has come is not written."""
    for at in range(numbers.start, numbers.stop, 32):
        some = range(at, min(at + 32, numbers.stop))
        goal = engine.written + len(some)
        engine.put(some)
        until(lambda goal=goal: engine.written == goal)


def segment_file(folder: Path) -> Path:
    return folder / "node-disk" / "segment"


# ---- down and up -----------------------------------------------------------------------------------


def test_what_memory_gave_up_is_read_from_disk(written):
    assert written.in_memory(range(200)) <= MEMORY_BLOCKS
    assert written.read(range(200)) == set(range(200))
    assert written.disk.read_blocks >= 200 - MEMORY_BLOCKS


def test_a_prefix_is_leased_whole_whatever_tier_its_blocks_are_in(written):
    assert written.client.pull(written.ns, keys_of(range(40)), wait_s=PATIENCE_S) == 40
    with written.client.acquire(written.ns, keys_of(range(40)), wait_s=PATIENCE_S) as lease:
        assert lease.blocks == 40


def test_a_namespace_that_only_a_disk_has_blocks_of_is_not_freed(written, until):
    """A tenant may have 1,024, and others make room first."""
    operator = written.daemon.client()
    operator.evict(tier="dram")
    before = operator.stats().clients
    written.client.close()
    until(lambda: operator.stats().clients == before - 1, "its end")
    with written.daemon.client() as short:
        for number in range(1100):
            name = NamespaceRecord.simple(f"{number}", block_bytes=4096, block_tokens=16)
            try:
                short.open(name)
            except LimitExceeded:
                break
    assert number == 1023, "the last one found no room"
    known = operator.stats().tenants["default"].namespaces
    assert written.ns.digest.hex() in known
    operator.close()
    written.client = written.daemon.client(connect=True)
    assert written.read(range(32)) == set(range(32))


def test_a_reader_that_does_not_wait_gets_what_is_in_memory(written):
    written.client.evict(keys_of(range(8)), tier="dram")
    assert written.client.get(written.ns, keys_of(range(8))) == [None] * 8
    assert written.read(range(8)) == set(range(8))


def test_what_is_written_back_outlives_its_eviction(disked, until):
    engine = disked(mode="back")
    for at in range(0, 160, 8):
        engine.put(range(at, at + 8))
        # At the pace of the disk: what comes faster than it writes may be lost to this node.
        until(lambda: engine.tiers.clean_share["default"] >= 1 / 8)
    for at in range(0, 160, 8):
        # Reads take memory too, and what makes way for them is to be written first.
        assert engine.read(range(at, at + 8)) == set(range(at, at + 8))
        until(lambda: engine.tiers.clean_share["default"] >= 1 / 8)


def test_nothing_is_written_where_that_is_not_wanted(disked, until):
    engine = disked(mode="none")
    engine.put(range(200))
    until(lambda: engine.in_memory(range(200)) <= MEMORY_BLOCKS)
    assert engine.disk.written_blocks == 0


def test_the_disk_gives_up_its_coldest_when_it_is_full(disked, until):
    engine = disked(size="8MiB")
    engine.put(range(400))
    until(lambda: not engine.tiers.queued_writes and not engine.disk.writing_bytes)
    assert engine.disk.used_bytes <= engine.disk.segment_bytes < 8 << 20
    found = engine.read(range(400))
    assert 32 < len(found) < 200
    engine.put(range(400, 408))
    assert engine.read(range(400, 408)) == set(range(400, 408))


def test_what_is_removed_is_gone_from_all_tiers(written):
    assert written.client.remove(written.ns, keys_of(range(10))) == 10
    assert written.read(range(10)) == set()


def test_blocks_larger_than_a_staging_buffer(start, folder, until):
    nbytes = (9 << 20) + 4096 + 17
    record = NamespaceRecord.simple("large", block_bytes=nbytes, block_tokens=16)
    daemon = start(
        *("--memory", "64MiB", "--ssd", f"{folder / 'd'}=256MiB", "--ssd-write", "through")
    )
    with daemon.client(connect=True) as client:
        ns = client.open(record)
        blocks = [np.random.default_rng(n).bytes(nbytes) for n in range(4)]
        assert client.put(ns, keys_of(range(4)), blocks) == 4
        until(lambda: client.stats().tiers.ssd[0].written_blocks == 4)
        client.evict(tier="dram")
        assert client.get(ns, keys_of(range(4)), wait_s=PATIENCE_S) == blocks


def test_two_disks_share_the_blocks_by_size(start, folder, until):
    one, two = folder / "one", folder / "two"
    daemon = start(
        *("--memory", "4MiB", "--ssd-write", "through"),
        *("--ssd", f"{one}=24MiB", "--ssd", f"{two}=72MiB"),
    )
    engine = Engine(daemon)
    with engine.client:
        write(engine, range(240), until)
        small, large = (disk.written_bytes for disk in engine.tiers.ssd)
        assert small / large == pytest.approx(1 / 3, rel=0.35)
        assert engine.read(range(240)) == set(range(240))


# ---- restarts --------------------------------------------------------------------------------------


def test_a_daemon_that_was_told_to_stop_finds_all_again(disked):
    engine = disked(mode="back")
    engine.put(range(MEMORY_BLOCKS // 2))
    engine.daemon.stop()
    again = disked(mode="back")
    assert again.read(range(MEMORY_BLOCKS // 2)) == set(range(MEMORY_BLOCKS // 2))
    assert again.disk.restored_blocks == MEMORY_BLOCKS // 2


def test_a_daemon_that_was_killed_finds_what_was_written(written, disked, until):
    written.daemon.kill()
    again = disked()
    until(lambda: again.disk.state == "serving")
    assert again.disk.blocks == 200
    assert again.read(range(200)) == set(range(200))
    write(again, range(200, 300), until)
    assert again.read(range(300)) == set(range(300))


@pytest.mark.parametrize("seed", range(3))
def test_kills_under_load_lose_nothing_that_was_safe(disked, until, seed):
    rng = random.Random(seed)
    safe: set[int] = set()
    at = 0
    for _ in range(3):
        engine = disked()
        until(lambda engine=engine: engine.disk.state == "serving")
        assert engine.read(safe) == safe
        more = 8 * rng.randrange(4, 8)
        write(engine, range(at, at + more), until)
        safe.update(range(at, at + more))
        at += more
        # Some more, of which only the next life can tell whether they were safe.
        engine.put(range(at, at + 32))
        at += 32
        engine.daemon.kill()
    engine = disked()
    until(lambda: engine.disk.state == "serving")
    assert engine.read(range(at)) >= safe


def test_a_reset_outlives_the_daemon(written, disked, until):
    written.client.namespaces.reset(written.ns)
    assert written.read(range(200)) == set()
    written.put(range(40), version=1)
    until(lambda: written.written == 240)
    written.daemon.kill()
    again = disked()
    until(lambda: again.disk.state == "serving")
    assert again.read(range(40), version=1) == set(range(40))
    assert again.read(range(40, 200), version=1) == set()
    # The engine of before goes on with the weights that it has.
    until(lambda: written.read(range(8), version=1) == set(range(8)))


def test_a_reset_with_nothing_written_after_it_outlives_the_daemon(written, disked, until):
    written.client.namespaces.reset(written.ns)
    written.daemon.kill()
    again = disked()
    until(lambda: again.disk.state == "serving")
    assert again.read(range(200)) == set()
    assert again.disk.blocks == 0


def test_settings_that_an_operator_changed_outlive_the_daemon(written, disked):
    """Alone and without a data_dir, the disk keeps them; with the blocks that were there before."""
    written.client.configure(RECORD.digest(), write="none", ttl_s=3600.0)
    written.daemon.kill()
    again = disked(mode="through")
    spaces = again.client.stats().tenants["default"].namespaces
    settings = spaces[RECORD.digest().hex()].settings
    assert (settings["write"], settings["ttl_s"]) == ("none", 3600.0)
    assert again.disk.blocks > 0


def test_a_disk_of_another_size_keeps_what_fits(written, disked, until):
    written.daemon.stop()
    smaller = disked(size="10MiB")
    until(lambda: smaller.disk.state == "serving")
    kept = smaller.read(range(200))
    assert 100 < len(kept) < 200
    smaller.put(range(200, 232))
    smaller.daemon.stop()
    larger = disked(size="128MiB")
    until(lambda: larger.disk.state == "serving")
    assert larger.read(range(200, 232)) == set(range(200, 232))


# ---- faults ------------------------------------------------------------------------------------------


def flip(path: Path, count: int, rng: random.Random) -> set[int]:
    """Flip bits of the file; the pages in which."""
    size = path.stat().st_size
    pages = set()
    with path.open("r+b") as file:
        for _ in range(count):
            at = rng.randrange(size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
            pages.add(at // 4096)
        file.flush()
        os.fsync(file.fileno())
    return pages


def test_flipped_bits_are_misses_and_counted(written, folder):
    flip(segment_file(folder), 1000, random.Random(1))
    written.client.evict(tier="dram")
    found = written.read(range(200))  # asserts that what is found is right
    assert 0 < len(found) < 200
    missing = 200 - len(found)
    assert written.disk.mismatches == missing
    assert written.disk.blocks == 200 - missing, "what was bad is found no more"
    bad = set(range(200)) - found
    written.client.evict(tier="dram")
    assert written.read(bad) == set()
    assert written.disk.mismatches == missing, "and not read again"


def test_a_scrub_finds_what_nobody_has_read(written, folder):
    flip(segment_file(folder), 20, random.Random(2))
    job = finished(written.client, kind="scrub")
    bad = job["blocks"]
    assert job["seen"] == 200
    assert 0 < bad <= 20
    written.client.evict(tier="dram")
    assert len(written.read(range(200))) == 200 - bad


def disk_process(daemon) -> int | None:
    """The process that owns the disk: the one whose command says so."""
    for pid in daemon.family():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just died
        if b"kvpool.daemon.workers.disk_worker" in command.split(b"\0"):
            return pid
    return None


def test_a_killed_disk_process_costs_nothing_but_time(written, until):
    first = disk_process(written.daemon)
    os.kill(first, signal.SIGKILL)
    written.put(range(200, 216))  # nobody waits for it
    until(lambda: disk_process(written.daemon) not in {first, None})
    until(lambda: written.disk.state == "serving")
    assert written.read(range(216)) >= set(range(200))


def test_a_disk_that_hangs_costs_readers_their_deadline_and_writers_nothing(written, until):
    pid = disk_process(written.daemon)
    written.client.evict(keys_of(range(8)), tier="dram")
    send(pid, signal.SIGSTOP)
    try:
        assert written.client.get(written.ns, keys_of(range(8)), wait_s=0.3) == [None] * 8
        written.put(range(300, 364))
        assert written.in_memory(range(356, 364)) == 8
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: written.read(range(8)) == set(range(8)))


def test_a_file_system_that_turns_read_only_serves_reads_and_loses_no_place(disked, folder, until):
    """What refuses all writes is not the fault of the places that they were for: none is given up."""
    if reason := refusing.unavailable():
        pytest.skip(reason)
    with refusing.Refusing(folder / "node-disk") as kernel:
        engine = disked(program=[*kernel.python, "-m"])
        write(engine, range(100), until)
        kernel.error = errno.EROFS
        numbers = itertools.count(1000, 8)

        def put_until(condition) -> None:
            def put_more() -> bool:
                engine.put(range(first := next(numbers), first + 8))
                return condition()

            until(put_more)

        for _ in range(3):  # the same places each time
            before = engine.disk.write_errors
            put_until(lambda before=before: engine.disk.write_errors > before)
            assert engine.disk.state == "read-only"
        assert engine.read(range(100)) == set(range(100))
        kernel.error = 0
        put_until(lambda: engine.disk.state == "serving")
        engine.client.evict(digest=engine.ns.digest)  # a place is given up when its block goes
        assert engine.disk.retired_bytes == 0
        engine.client.close()
        engine.daemon.end()


def test_a_disk_that_cannot_be_used_is_told_and_the_node_serves(start, folder, until):
    (folder / "file").write_text("not a folder")
    daemon = start("--memory", "4MiB", "--ssd", f"{folder / 'file' / 'disk'}=16MiB")
    engine = Engine(daemon)
    with engine.client:
        engine.put(range(8))
        assert engine.read(range(8)) == set(range(8))
        until(lambda: engine.disk.state == "failed")
        assert "disk" in engine.disk.error


def test_a_mistyped_path_makes_no_folders(start, folder, until):
    """They would be on the file system of `/`, and fill it."""
    path = folder / "nvm0" / "kvpool"
    daemon = start("--memory", "4MiB", "--ssd", f"{path}=16MiB")
    until(lambda: "there is no folder" in daemon.stderr)
    assert not path.parent.exists()
    assert f"there is no folder {path.parent}. Mount the disk, create the folder" in daemon.stderr
    path.parent.mkdir()
    other = start("--memory", "4MiB", "--ssd", f"{path}=16MiB", name="other")
    with other.client(connect=True) as client:
        until(lambda: client.stats().tiers.ssd[0].state == "serving")


def test_two_daemons_cannot_have_one_disk(disked, start, folder, until):
    engine = disked()
    other = start("--memory", "4MiB", "--ssd", f"{folder / 'node-disk'}=64MiB", name="other")
    with other.client(connect=True) as client:
        until(lambda: client.stats().tiers.ssd[0].state == "failed")
        assert "another process" in client.stats().tiers.ssd[0].error
    engine.put(range(8))
    assert engine.read(range(8)) == set(range(8))


# ---- pins --------------------------------------------------------------------------------------------


def test_hard_pins_stay_on_disk_and_outlive_the_daemon(disked, until):
    engine = disked(size="8MiB")
    engine.put(range(8))
    until(lambda: engine.disk.written_blocks == 8)
    assert engine.client.pin(engine.ns, keys_of(range(8)), "hard") == 8
    engine.daemon.stop()
    again = disked(size="8MiB")
    until(lambda: again.disk.state == "serving")
    again.put(range(100, 400))
    until(lambda: not again.tiers.queued_writes and not again.disk.writing_bytes)
    assert again.read(range(8)) == set(range(8))
    assert again.client.pin(again.ns, keys_of(range(8)), "none") == 8
    with pytest.raises(LimitExceeded, match="the quota is"):
        again.client.pin(again.ns, keys_of(again.read(range(100, 400))), "hard")


# ---- other nodes ---------------------------------------------------------------------------------------


def test_a_peer_pulls_what_is_only_on_our_disk(disked, start, until):
    owner = disked("--listen", "tcp://127.0.0.1:0", name="owner")
    write(owner, range(40), until)
    owner.client.evict(tier="dram")
    url = owner.daemon.ready.rsplit("peers at ", 1)[1].strip()
    reader = Engine(start("--memory", "16MiB", "--peer", url, name="reader"))
    with reader.client:
        assert reader.client.pull(reader.ns, keys_of(range(40)), wait_s=PATIENCE_S) == 40
        assert reader.read(range(40)) == set(range(40))


def test_what_our_disk_has_spoilt_is_pulled_from_a_peer(disked, start, folder, until):
    owner = Engine(start("--memory", "16MiB", "--listen", "tcp://127.0.0.1:0", name="owner"))
    with owner.client:
        owner.put(range(40))
        url = owner.daemon.ready.rsplit("peers at ", 1)[1].strip()
        engine = disked("--peer", url)
        write(engine, range(40), until)
        with segment_file(folder).open("r+b") as file:
            for at in range(0, segment_file(folder).stat().st_size, NBYTES):
                file.seek(at)
                file.write(b"spoilt, as all blocks on this disk")
            file.flush()
            os.fsync(file.fileno())
        engine.client.evict(tier="dram")
        assert engine.client.pull(engine.ns, keys_of(range(40)), wait_s=PATIENCE_S) == 40
        assert engine.read(range(40)) == set(range(40))
        assert engine.disk.mismatches == 40


def test_a_quota_holds_in_every_tier_and_over_restarts(disked, until):
    """Its namespace gives up its own, here and on disk; another one keeps all that it has."""
    engine = disked()
    other = engine.client.open(NamespaceRecord.simple("other", block_bytes=NBYTES, block_tokens=16))
    engine.client.put(other, keys_of(range(16)), [block(n) for n in range(16)])
    until(lambda: engine.written == 16)
    engine.client.configure(RECORD.digest(), dram_quota=0.25, ssd_quota=40 * NBYTES)
    for at in range(0, 96, 8):
        engine.put(range(at, at + 8))
        until(lambda at=at: engine.written == 16 + at + 8)
    usage = engine.client.stats().tenants["default"].usage
    name, others = RECORD.digest().hex(), other.digest.hex()
    in_memory, on_disk = usage.dram[0].namespaces, usage.ssd[0].namespaces
    assert in_memory[name] == NamespaceUsage(1 << 20, 1 << 20)
    assert on_disk[name] == NamespaceUsage(40 * NBYTES, 40 * NBYTES)
    assert in_memory[others] == on_disk[others] == NamespaceUsage(1 << 20, 0)
    assert engine.in_memory(range(96)) == 16
    assert engine.client.contains(other, keys_of(range(16))).all()
    assert engine.read(range(96)) == set(range(56, 96))
    engine.daemon.kill()
    again = disked()
    until(lambda: again.disk.state == "serving")
    (after,) = again.client.stats().tenants["default"].usage.ssd
    assert after.namespaces[name] == on_disk[name], "the quota and what it left"
    again.client.configure(RECORD.digest(), ssd_quota=8 * NBYTES)
    until(
        lambda: (
            again.client.stats().tenants["default"].usage.ssd[0].namespaces[name].held_bytes
            <= 8 * NBYTES
        )
    )
    assert len(again.read(range(96))) == 8


TENANTS = """
memory = "4MiB"
[tenants.red]
memory = "4MiB"
ssd = "{red}"
"""


def test_tenants_have_their_parts_of_a_disk_and_lose_cleanly_what_moves(start, folder, until):
    """Parts lie one after the other, by name: the first keeps what still fits when they change."""

    def begin(red: str):
        disk = f"{folder / 'disk'}=32MiB"
        daemon = start("--ssd", disk, "--ssd-write", "through", config=TENANTS.format(red=red))
        clients = {name: daemon.client(tenant=name, connect=True) for name in ("default", "red")}
        until(lambda: clients["red"].stats().tiers.ssd[0].state == "serving")
        return daemon, clients

    def part(client) -> int:
        (found,) = client.stats().tenants[client.tenant].usage.ssd
        return found.part_bytes

    def on_disk(client) -> int:
        ns = client.open(RECORD)
        return sum(
            data is not None for data in client.get(ns, keys_of(range(40)), wait_s=PATIENCE_S)
        )

    daemon, clients = begin("25%")
    size = clients["red"].stats().tiers.ssd[0].segment_bytes
    assert part(clients["red"]) == pytest.approx(size / 4, abs=4096)
    assert part(clients["default"]) == pytest.approx(3 * size / 4, abs=4096)
    for client in clients.values():
        client.put(client.open(RECORD), keys_of(range(40)), [block(n) for n in range(40)])
    until(lambda: clients["red"].stats().tiers.ssd[0].written_blocks == 80)
    for red, kept in (("25%", 40), ("50%", 0)):
        for client in clients.values():
            client.close()
        daemon.stop()
        daemon, clients = begin(red)
        assert [on_disk(clients["default"]), on_disk(clients["red"])] == [40, kept]
    disk = clients["red"].stats().tiers.ssd[0]
    assert disk.dropped_at_restore == 40
    assert (disk.mismatches, disk.read_errors) == (0, 0)
    for client in clients.values():
        client.close()
