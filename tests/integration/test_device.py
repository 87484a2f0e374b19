"""Daemons with a segment of device memory: what engines read again survives its eviction from memory."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.cli.render.tiers import places
from kvpool.client import OperatorClient
from kvpool.errors import LeaseLost, SegmentError
from kvpool.telemetry.tier_stats import DeviceStats
from kvpool.types import NamespaceRecord
from kvpool.wire.frame import NO_ROW
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S, until

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NBYTES = 64 << 10
# MiB of the segment, usual and small. On a GPU each of three tenants needs 20 (`PART_MIN`).
SIZES = {"cpu": (16, 2), "cuda:0": (64, 20)}
RECORD = NamespaceRecord.simple("device", block_bytes=NBYTES, block_tokens=16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def block(number: int) -> bytes:
    return np.random.default_rng(number).bytes(NBYTES)


class Engine:
    """A client of a daemon with device memory."""

    def __init__(self, daemon, **settings) -> None:
        self.daemon = daemon
        self.client: OperatorClient = daemon.client(connect=True, **settings)
        self.ns = self.client.open(RECORD)
        self.device_blocks = 0  # that the segment has room for

    def put(self, numbers: range) -> None:
        for at in range(numbers.start, numbers.stop, 8):
            some = range(at, min(at + 8, numbers.stop))
            assert self.client.put(self.ns, keys_of(some), [block(n) for n in some]) == len(some)

    def read(self, numbers: Iterable[int], wait_s: float = 0.0) -> set[int]:
        """Which of them are found; each found one is whole and right."""
        numbers = list(numbers)
        found = set()
        for at in range(0, len(numbers), 16):
            some = numbers[at : at + 16]
            data = self.client.get(self.ns, keys_of(some), wait_s=wait_s)
            for n, content in zip(some, data, strict=True):
                if content is not None:
                    assert content == block(n), f"block {n} is wrong"
                    found.add(n)
        return found

    def in_memory(self, numbers: Iterable[int]) -> int:
        return int(self.client.contains(self.ns, keys_of(numbers)).sum())

    def forget_memory(self) -> None:
        self.client.evict(tier="dram")

    @property
    def device(self) -> DeviceStats:
        (found,) = self.client.stats().tiers.device
        return found


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda:0", marks=needs_gpu)], name="path"
)
def path_fixture(request) -> str:
    return request.param


def device_arguments(path: str, small: bool) -> tuple[str, str]:
    return "--device", f"{path}={SIZES[path][small]}MiB"


def serving(daemon, path: str, small: bool) -> Engine:
    """An engine beside a daemon whose device memory is in use."""
    engine = Engine(daemon)
    engine.device_blocks = (SIZES[path][small] << 20) // NBYTES
    wait_until_serving(engine)
    return engine


def wait_until_serving(engine: Engine) -> None:
    until(lambda: engine.device.state == "serving", "its process has torch", seconds=4 * PATIENCE_S)


@pytest.fixture
def begin(path, start) -> Iterator:
    """Starts daemons with a segment of device memory, and an engine beside each."""
    engines = []

    def one(*args: str, name: str = "node", **settings) -> Engine:
        if not settings:
            args = ("--memory", "4MiB", *args)
        daemon = start(*device_arguments(path, False), *args, name=name, **settings)
        engines.append(serving(daemon, path, False))
        return engines[-1]

    yield one
    for engine in engines:
        engine.client.close()


@contextmanager
def shared(start_one, path: str, *, small: bool) -> Iterator[Engine]:
    """An engine for the tests of this file: a process of the device takes seconds to import torch."""
    with start_one(*device_arguments(path, small), "--memory", "4MiB") as daemon:
        engine = serving(daemon, path, small)
        with engine.client:
            yield engine


@pytest.fixture(scope="module")
def shared_usual(path, start_one) -> Iterator[Engine]:
    with shared(start_one, path, small=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_small(path, start_one) -> Iterator[Engine]:
    with shared(start_one, path, small=True) as engine:
        yield engine


def emptied(engine: Engine) -> Engine:
    """The engine, when nothing is left of the tests before. Counters are."""
    wait_until_serving(engine)
    engine.client.namespaces.reset(engine.ns)
    until(lambda: engine.device.used_bytes == 0)
    return engine


@pytest.fixture
def engine(shared_usual) -> Engine:
    return emptied(shared_usual)


@pytest.fixture
def small(shared_small) -> Engine:
    """An engine with little device memory."""
    return emptied(shared_small)


@pytest.fixture
def lifted(engine) -> Engine:
    """An engine whose blocks 0 to 31 are in device memory."""
    lift(engine, range(32))
    return engine


def lift(engine: Engine, numbers: range) -> None:
    goal = engine.device.blocks + len(numbers)
    engine.put(numbers)
    assert engine.read(numbers) == set(numbers)
    until(lambda: engine.device.blocks == goal)


def device_process(daemon) -> int | None:
    for pid in daemon.family():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just died
        if b"kvpool.daemon.workers.device_worker" in command.split(b"\0"):
            return pid
    return None


def test_what_was_read_outlives_its_eviction(lifted):
    before = lifted.device.read_blocks
    lifted.put(range(100, 400))  # several times what memory can hold
    there = lifted.in_memory(range(32))
    assert there < 32
    assert len(lifted.read(range(32))) == there, (
        "a reader that does not wait gets what is in memory"
    )
    assert lifted.read(range(32), PATIENCE_S) == set(range(32))
    assert lifted.device.read_blocks >= before + 32 - there


def test_a_prefix_is_leased_whole_whatever_tier_its_blocks_are_in(lifted):
    before = lifted.device.read_blocks
    lifted.client.evict(keys_of(range(0, 32, 2)), tier="dram")
    with lifted.client.acquire(lifted.ns, keys_of(range(32)), wait_s=PATIENCE_S) as lease:
        assert lease.blocks == 32
    assert lifted.device.read_blocks == before + 16
    assert lifted.read(range(32)) == set(range(32))


def test_what_nobody_read_is_not_copied_up(engine):
    engine.put(range(32))
    engine.read(range(8))
    engine.forget_memory()
    assert engine.read(range(8, 32), PATIENCE_S) == set()


def test_the_coldest_goes_when_the_device_is_full(small):
    engine = small
    room = engine.device_blocks
    for at in range(0, 3 * room, 8):
        written = engine.device.written_blocks
        engine.put(range(at, at + 8))
        engine.read(range(at, at + 8))
        until(lambda written=written: engine.device.written_blocks == written + 8)
    assert engine.device.used_bytes <= room * NBYTES
    engine.forget_memory()
    found = engine.read(range(3 * room), PATIENCE_S)
    assert room // 2 <= len(found) <= room


def test_what_is_removed_or_evicted_is_gone(lifted):
    assert lifted.client.remove(lifted.ns, keys_of(range(4))) == 4
    assert lifted.client.evict(keys_of(range(4, 8)), tier="device") == 4
    lifted.forget_memory()
    assert lifted.read(range(32), PATIENCE_S) == set(range(8, 32))


def test_a_reset_ends_what_is_on_the_device(lifted):
    lifted.client.namespaces.reset(lifted.ns)
    assert lifted.read(range(32), PATIENCE_S) == set()
    until(lambda: lifted.device.used_bytes == 0)
    lift(lifted, range(8))


def test_damaged_device_memory_is_a_miss_and_counted(lifted):
    if lifted.device.path != "cpu":
        pytest.skip("no other process can write to the device's memory")
    lifted.forget_memory()
    process = Path(f"/proc/{device_process(lifted.daemon)}/fd")
    # The same memory under one or two descriptors.
    memory = [fd for fd in process.iterdir() if fd.stat().st_size == lifted.device_blocks * NBYTES]
    before = lifted.device.mismatches
    with memory[0].open("r+b") as file:
        file.seek(5 * NBYTES + 1234)
        file.write(b"damage")
    found = lifted.read(range(32), PATIENCE_S)
    assert len(found) == 31
    assert lifted.device.mismatches == before + 1
    assert lifted.device.blocks == 31


def test_a_killed_device_process_is_a_miss_and_begins_anew(lifted):
    lifted.forget_memory()
    first = device_process(lifted.daemon)
    os.kill(first, signal.SIGKILL)
    until(lambda: device_process(lifted.daemon) not in {first, None})
    until(lambda: lifted.device.state == "serving")
    assert lifted.device.blocks == 0
    assert lifted.read(range(32), PATIENCE_S) == set()
    lift(lifted, range(32))
    lifted.forget_memory()
    assert lifted.read(range(32), PATIENCE_S) == set(range(32))


def test_a_stopped_device_process_costs_readers_their_deadline(lifted):
    pid = device_process(lifted.daemon)
    lifted.forget_memory()
    send(pid, signal.SIGSTOP)
    try:
        assert lifted.client.get(lifted.ns, keys_of(range(8)), wait_s=0.3) == [None] * 8
        lifted.put(range(200, 232))
        assert lifted.read(range(200, 232)) == set(range(200, 232))
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_peer_pulls_what_is_only_on_our_device(begin, start):
    owner = begin("--listen", "tcp://127.0.0.1:0", name="owner")
    lift(owner, range(32))
    owner.forget_memory()
    url = owner.daemon.ready.rsplit("peers at ", 1)[1].strip()
    reader = Engine(start("--memory", "8MiB", "--peer", url, name="reader"))
    with reader.client:
        assert reader.client.pull(reader.ns, keys_of(range(32)), wait_s=PATIENCE_S) == 32
        assert reader.read(range(32)) == set(range(32))


def test_tenants_see_nothing_of_each_other(begin):
    config = "[tenants.red]\nmemory = '4MiB'\n[tenants.blue]\nmemory = '4MiB'\n"
    config += "[tenants.default]\nmemory = '4MiB'\n"
    engine = begin(config=config)
    red, blue = (Engine(engine.daemon, tenant=name) for name in ("red", "blue"))
    with red.client, blue.client:
        lift(red, range(16))
        assert blue.read(range(16), PATIENCE_S) == set()
        assert blue.client.put(blue.ns, keys_of(range(16)), [bytes(NBYTES)] * 16) == 16
        blue.client.get(blue.ns, keys_of(range(16)))
        until(lambda: red.device.blocks == 32)
        red.forget_memory()
        blue.forget_memory()
        assert red.read(range(16), PATIENCE_S) == set(range(16))
        assert (
            blue.client.get(blue.ns, keys_of(range(16)), wait_s=PATIENCE_S) == [bytes(NBYTES)] * 16
        )


def test_a_device_that_is_not_there_is_told_and_the_node_serves(start):
    engine = Engine(start("--memory", "4MiB", "--device", "cuda:99=64MiB"))
    with engine.client:
        until(lambda: engine.device.state == "failed")
        assert "cuda:99" in engine.device.error
        engine.put(range(8))
        assert engine.read(range(8)) == set(range(8))


def test_operators_see_where_blocks_are(lifted):
    (memory, _), (tier, device) = places(lifted.client.stats(), "default")
    assert (memory, tier) == ("dram", "device")
    assert (device.state, device.blocks, device.used_bytes) == ("serving", 32, 32 * NBYTES)
    (found,) = lifted.client.locate([key(3)])
    assert [replica.tier for replica in found.replicas] == ["dram", "device"]
    lifted.forget_memory()
    (found,) = lifted.client.locate([key(3)])
    assert [replica.tier for replica in found.replicas] == ["device"]


# ---- read where it is --------------------------------------------------------------------------------


class DirectEngine(Engine):
    """An engine that has attached to the device memory."""

    def __init__(self, daemon, **settings) -> None:
        super().__init__(daemon, **settings)
        self.memory = self.client.attach_device()
        assert self.memory is not None

    def lease(self, numbers: Iterable[int], **settings):
        return self.client.acquire(
            self.ns, keys_of(numbers), **({"device": self.memory, "wait_s": PATIENCE_S} | settings)
        )

    def close(self) -> None:
        self.client.close()
        self.memory.close()


def content(lease) -> list[bytes]:
    """The bytes of each of its blocks, from wherever they are."""
    slots = lease.slots[0]
    device_rows = slots.device_rows if slots.device_rows is not None else [NO_ROW] * len(slots)
    found = []
    for row, device_row in zip(slots.rows.tolist(), list(device_rows), strict=True):
        assert (row == NO_ROW) != (device_row == NO_ROW)
        if row != NO_ROW:
            found.append(slots.table[row, : slots.nbytes].tobytes())
        else:
            data = slots.device_table[int(device_row), : slots.nbytes]
            found.append(data.cpu().numpy().tobytes())
    lease.check()
    return found


def direct_rows(lease) -> int:
    rows = lease.slots[0].device_rows
    return 0 if rows is None else int((rows != NO_ROW).sum())


@pytest.fixture
def direct(lifted) -> Iterator[DirectEngine]:
    """A client beside an engine whose blocks 0 to 31 are in device memory, and only there."""
    lifted.forget_memory()
    assert lifted.in_memory(range(32)) == 0
    engine = DirectEngine(lifted.daemon, instance="direct")
    yield engine
    engine.close()


def test_an_attached_client_reads_the_device_itself(direct):
    before = direct.device.read_blocks
    with direct.lease(range(32)) as lease:
        assert lease.blocks == 32
        assert direct_rows(lease) == 32
        assert content(lease) == [block(n) for n in range(32)]
    assert direct.device.read_blocks == before, "nothing was brought through memory"
    assert direct.in_memory(range(32)) == 0
    assert direct.device.leased_blocks == 32
    assert direct.device.leased_bytes == 32 * NBYTES
    with direct.lease(range(32), wait_s=0.0) as lease:
        assert content(lease) == [block(n) for n in range(32)]


def test_a_prefix_in_memory_and_on_the_device_is_one_lease(direct):
    direct.client.evict(keys_of(range(0, 32, 3)), tier="device")
    direct.put(range(1))
    direct.put(range(3, 4))
    with direct.lease(range(32), wait_s=0.0) as lease:
        assert lease.blocks == 6, "up to the first that is nowhere"
        assert direct_rows(lease) == 4
        assert content(lease) == [block(n) for n in range(6)]
    assert direct.client.acquire(direct.ns, keys_of(range(6))).blocks == 1, "as others see it"


def test_what_is_on_another_node_is_pulled_and_what_is_on_the_device_is_not(begin, start):
    other = Engine(start("--memory", "8MiB", "--listen", "tcp://127.0.0.1:0", name="other"))
    url = other.daemon.ready.rsplit("peers at ", 1)[1].strip()
    owner = begin("--peer", url, name="owner")
    lift(owner, range(16))
    owner.forget_memory()
    engine = DirectEngine(owner.daemon)
    with other.client:
        other.put(range(32))
        with engine.lease(range(32)) as lease:
            assert (lease.blocks, direct_rows(lease)) == (32, 16)
            assert content(lease) == [block(n) for n in range(32)]
    assert engine.in_memory(range(16)) == 0
    assert engine.device.read_blocks == 0
    engine.close()


def test_leased_slots_on_the_device_are_not_used_again(small):
    owner = small
    lift(owner, range(32))
    owner.forget_memory()
    engine = DirectEngine(owner.daemon)
    lease = engine.lease(range(16))
    assert direct_rows(lease) == 16
    turn_over(owner, range(100, 100 + 2 * owner.device_blocks))
    assert content(lease) == [block(n) for n in range(16)]
    owner.client.evict(tier="device")
    assert owner.device.used_bytes == 16 * NBYTES, "the slots of what is leased"
    assert content(lease) == [block(n) for n in range(16)]
    lease.release()
    until(lambda: owner.device.used_bytes == 0)
    engine.close()


def turn_over(engine: Engine, numbers: range) -> None:
    """Have as many blocks copied up, eight at a time."""
    for at in range(numbers.start, numbers.stop, 8):
        written = engine.device.written_blocks
        engine.put(range(at, at + 8))
        assert engine.read(range(at, at + 8)) == set(range(at, at + 8))
        until(lambda written=written: engine.device.written_blocks == written + 8)


def test_a_lease_on_the_device_ends_at_its_deadline(small):
    owner = small
    lift(owner, range(32))
    owner.forget_memory()
    engine = DirectEngine(owner.daemon)
    lease = engine.lease(range(16), lease_s=2.0)
    assert direct_rows(lease) == 16
    owner.client.evict(tier="device")
    until(lambda: owner.device.used_bytes == 0)
    assert not lease.valid
    with pytest.raises(LeaseLost):
        lease.check()
    assert engine.lease(range(16), wait_s=0.0) is None
    engine.close()


READER = """
import sys
from kvpool.client import Client
from kvpool.types import NamespaceRecord
client = Client(sys.argv[1], connect=True, timeout_s=60.0)
ns = client.open(NamespaceRecord.simple("device", block_bytes=65536, block_tokens=16))
memory = client.attach_device()
keys = [n.to_bytes(16, "big") for n in range(16)]
lease = client.acquire(ns, keys, device=memory, lease_s=60.0)
print(int((lease.slots[0].device_rows != 0xFFFFFFFF).sum()), flush=True)
sys.stdin.read()
"""


def test_the_death_of_a_reader_gives_the_device_its_slots_back(small):
    owner = small
    lift(owner, range(32))
    owner.forget_memory()
    command = [sys.executable, "-c", READER, owner.daemon.socket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        try:
            assert int(reader.stdout.readline()) == 16
            turn_over(owner, range(100, 100 + owner.device_blocks * 3 // 2))
            owner.client.evict(tier="device")
            assert owner.device.used_bytes == 16 * NBYTES
        finally:
            reader.kill()
    until(lambda: owner.device.used_bytes == 0)


def test_the_death_of_the_device_process_under_a_reader_is_told_by_its_check(direct):
    lease = direct.lease(range(32))
    assert content(lease) == [block(n) for n in range(32)]
    pid = device_process(direct.daemon)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not direct.memory.alive)
    with pytest.raises(LeaseLost):
        lease.check()
    lease.release()
    until(lambda: device_process(direct.daemon) not in {pid, None})
    until(lambda: direct.device.state == "serving")
    assert direct.lease(range(32), wait_s=0.0) is None
    lift(direct, range(32))
    direct.forget_memory()
    with direct.lease(range(32)) as through_memory:
        assert direct_rows(through_memory) == 0, "the client is attached to what is gone"
        assert content(through_memory) == [block(n) for n in range(32)]
    direct.memory.close()
    direct.memory = direct.client.attach_device()
    direct.forget_memory()
    with direct.lease(range(32)) as again:
        assert direct_rows(again) == 32
        assert content(again) == [block(n) for n in range(32)]


def test_the_device_process_is_known_to_be_dead_before_the_daemon_knows(direct):
    lease = direct.lease(range(32))
    daemon = direct.daemon
    pid = device_process(daemon)
    daemon.signal(signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not direct.memory.alive)
        with pytest.raises(LeaseLost):
            lease.check()
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: device_process(daemon) not in {pid, None})


def test_who_names_another_life_gets_a_lease_on_memory(direct):
    another = SimpleNamespace(alive=True, life=direct.memory.life + 1)
    with direct.lease(range(32), device=another) as lease:
        assert (lease.blocks, direct_rows(lease)) == (32, 0)
        assert content(lease) == [block(n) for n in range(32)]


def test_another_process_of_the_instance_joins_the_lease(direct):
    lease = direct.lease(range(32))
    worker = DirectEngine(direct.daemon, instance="direct")
    joined = worker.client.join(lease.token, device=worker.memory)
    assert content(joined) == [block(n) for n in range(32)]
    assert worker.client.join(lease.token) is None, "it could not read what is on the device"
    lease.release()
    assert content(joined) == [block(n) for n in range(32)]
    joined.release()
    worker.close()


def test_one_who_is_not_attached_acquires_in_the_name_of_those_who_are(direct):
    """As an engine's scheduler does for its ranks."""
    life = direct.memory.life
    with direct.daemon.client(connect=True, instance="direct") as scheduler:
        ns = scheduler.open(RECORD)
        lease = scheduler.acquire(ns, keys_of(range(32)), life=life)
        assert (lease.blocks, lease.life, lease.device) == (32, life, None)
        assert direct_rows(lease) == 32
        joined = direct.client.join(lease.token, device=direct.memory)
        assert content(joined) == [block(n) for n in range(32)]
        assert joined.life == life
        joined.release()
        lease.release()
        assert scheduler.acquire(ns, keys_of(range(32)), life=life + 1) is None
        assert scheduler.acquire(ns, keys_of(range(32))) is None


def test_a_pull_counts_what_is_on_the_device_for_those_who_read_it_there(direct):
    life = direct.memory.life
    before = direct.device.read_blocks
    pull = direct.client.pull
    assert pull(direct.ns, keys_of(range(32)), wait_s=PATIENCE_S, life=life) == 32
    assert (direct.in_memory(range(32)), direct.device.read_blocks) == (0, before)
    assert pull(direct.ns, keys_of(range(8)), wait_s=PATIENCE_S, life=life + 1) == 8
    assert direct.in_memory(range(32)) == 8


def test_memory_on_another_device_is_not_attached_to(direct):
    memory = direct.client.attach_device(direct.memory.device)
    assert memory.life == direct.memory.life
    memory.close()
    with pytest.raises(SegmentError, match="is not on"):
        direct.client.attach_device(torch.device("meta"))


def test_a_reset_ends_what_is_read_on_the_device(direct):
    with direct.lease(range(32)) as lease:
        direct.client.namespaces.reset(direct.ns)
        assert direct.lease(range(32), wait_s=0.0) is None
        assert content(lease) == [block(n) for n in range(32)], "a lease outlives it"


def test_a_tenant_maps_its_own_part_alone(begin):
    config = "[tenants.red]\nmemory = '4MiB'\n[tenants.blue]\nmemory = '4MiB'\n"
    config += "[tenants.default]\nmemory = '4MiB'\n"
    engine = begin(config=config)
    red, blue = (DirectEngine(engine.daemon, tenant=name) for name in ("red", "blue"))
    lift(red, range(16))
    red.forget_memory()
    assert blue.lease(range(16)) is None
    with red.lease(range(16)) as lease:
        assert direct_rows(lease) == 16
        token = lease.token
        assert blue.client.join(token, device=blue.memory) is None
    held = {bytes(row) for row in blue.memory.table(NBYTES).cpu().numpy()}
    assert held.isdisjoint({block(n) for n in range(16)})
    for one in (red, blue):
        one.close()


def test_readers_cannot_write_to_what_tells_of_the_end(direct):
    view = direct.memory._view
    with pytest.raises(TypeError):
        view._page[0] = 0
    assert view.alive


def test_a_node_without_device_memory_has_nothing_to_attach_to(start):
    with start("--memory", "4MiB").client(connect=True) as client:
        assert client.attach_device() is None


def test_peers_still_pull_while_a_client_reads_the_device(begin, start):
    owner = begin("--listen", "tcp://127.0.0.1:0", name="owner")
    lift(owner, range(32))
    owner.forget_memory()
    engine = DirectEngine(owner.daemon)
    url = owner.daemon.ready.rsplit("peers at ", 1)[1].strip()
    reader = Engine(start("--memory", "8MiB", "--peer", url, name="reader"))
    with reader.client, engine.lease(range(32)) as lease:
        assert reader.client.pull(reader.ns, keys_of(range(32)), wait_s=PATIENCE_S) == 32
        assert reader.read(range(32)) == set(range(32))
        assert content(lease) == [block(n) for n in range(32)]
    engine.close()
