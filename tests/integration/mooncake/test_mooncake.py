"""`mooncake.store` over a real daemon: its codes and conventions, and its bytes against a plain dict."""

import ctypes
import mmap
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvpool.engine_plugins.mooncake import spaces
from kvpool.engine_plugins.mooncake.catalog import size_keys
from kvpool.engine_plugins.mooncake.labels import OBJECT_BYTES_MAX
from kvpool.engine_plugins.mooncake.store import MooncakeDistributedStore
from kvpool.engine_plugins.mooncake.values import ReplicateConfig, SoftPinAction
from kvpool.types import KEY_BYTES
from tests.support.client_inside import note_requests
from tests.support.waiting import PATIENCE_S, until

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 700, 768, 769, 5000, 64 * KIB, 64 * KIB, 200_001, MIB, 4 * MIB + 1, 9 * MIB)
NO_SPACE, INVALID, MISSING, EXISTS, AWAY = -200, -600, -704, -705, -900
SLOWEST_S = 30.0
"""Of one call whose daemon has died: a limit of the interface, far above what it takes."""


def data_of(seed: int, size: int) -> bytes:
    return np.random.default_rng([seed, size]).bytes(size)


def set_up(socket: str, tenant_id: str = "default") -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    settings = {"local_hostname": "host:1", "kvpool_socket": socket, "tenant_id": tenant_id}
    assert store.setup(settings) == 0
    return store


@pytest.fixture(scope="module")
def pool(start_one):
    with start_one("--memory", "192MiB") as daemon:
        yield daemon


@pytest.fixture
def store(pool, request) -> Iterator[MooncakeDistributedStore]:
    """Of a tenant of its own: no test sees another's objects."""
    store = set_up(pool.socket, request.node.name)
    yield store
    store.close()


@pytest.fixture
def memory(store) -> np.ndarray:
    """4 MiB, registered."""
    found = np.zeros(4 * MIB, np.uint8)
    assert store.register_buffer(found.ctypes.data, found.nbytes) == 0
    return found


def address(array: np.ndarray, offset: int = 0) -> int:
    return array.ctypes.data + offset


# ---- bytes against a model ---------------------------------------------------------------------------

KEYS = [f"key/{number}" for number in range(10)] + ["k" * 300, "ключ"]
keys = st.sampled_from(KEYS)
sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 1 << 30)


class AgainstADict(RuleBasedStateMachine):
    """A model of what each key may give: nothing at any time, since blocks are evicted, and never other bytes.

    Two stores take turns: what one has put the other finds.
    """

    socket: str

    @initialize()
    def begin(self) -> None:
        self.stores = [set_up(self.socket) for _ in range(2)]
        self.model: dict[str, bytes] = {}
        self.memory = np.zeros(16 * MIB, np.uint8)
        for store in self.stores:
            assert store.register_buffer(address(self.memory), self.memory.nbytes) == 0

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self.stores[0].remove_all(True)
            for store in self.stores:
                store.close()

    def was_put(self, key: str, data: bytes, there: int, code: int) -> None:
        """there: whether the key was, before the put."""
        assert code in {0, NO_SPACE}
        if code == 0 and not there:
            self.model[key] = data
        elif not there:
            self.model.pop(key, None)

    def compare(self, key: str, got: bytes) -> None:
        if got:
            assert key in self.model, "removed, or never put"
            assert got == self.model[key]

    @rule(who=st.integers(0, 1), key=keys, size=sizes, seed=seeds)
    def put(self, who: int, key: str, size: int, seed: int) -> None:
        there = self.stores[1 - who].is_exist(key)
        data = data_of(seed, size)
        self.was_put(key, data, there, self.stores[who].put(key, data))

    @rule(
        who=st.integers(0, 1),
        some=st.lists(keys, unique=True, max_size=6),
        size=sizes,
        seed=seeds,
        cut=st.floats(0, 1),
    )
    def put_batch(self, who: int, some: list[str], size: int, seed: int, cut: float) -> None:
        size = min(size, 2 * MIB)
        there = self.stores[1 - who].batch_is_exist(some)
        all_data = [data_of(seed + at, size) for at in range(len(some))]
        self.memory[: len(some) * size] = np.frombuffer(b"".join(all_data), np.uint8)
        first = int(cut * size)
        pieces = [(0, first), (first, size)] if 0 < first < size else [(0, size)]
        got = self.stores[who].batch_put_from_multi_buffers(
            some,
            [
                [address(self.memory, at * size + low) for low, _ in pieces]
                for at in range(len(some))
            ],
            [[high - low for low, high in pieces] for _ in some],
        )
        for key, data, was, code in zip(some, all_data, there, got, strict=True):
            self.was_put(key, data, was, code)

    @rule(who=st.integers(0, 1), key=keys, size=sizes, seed=seeds)
    def upsert(self, who: int, key: str, size: int, seed: int) -> None:
        data = data_of(seed, size)
        code = self.stores[who].upsert(key, data)
        assert code in {0, NO_SPACE}
        if code == 0:
            self.model[key] = data
        elif self.stores[who].is_exist(key) == 0:
            self.model.pop(key, None)

    @rule(who=st.integers(0, 1), key=keys)
    def remove(self, who: int, key: str) -> None:
        assert self.stores[who].remove(key, True) in {0, MISSING}
        self.model.pop(key, None)
        assert self.stores[1 - who].is_exist(key) == 0

    @rule(who=st.integers(0, 1), key=keys)
    def get(self, who: int, key: str) -> None:
        self.compare(key, self.stores[who].get(key))

    @rule(
        who=st.integers(0, 1),
        some=st.lists(keys, unique=True, max_size=6),
        each=st.integers(1, 2 * MIB),
    )
    def get_batch(self, who: int, some: list[str], each: int) -> None:
        """Into room that may be too small, in pieces of a third."""
        third = max(each // 3, 1)
        self.memory.fill(0)
        got = self.stores[who].batch_get_into_multi_buffers(
            some,
            [
                [address(self.memory, 2 * MIB * at + third * i) for i in range(3)]
                for at in range(len(some))
            ],
            [[third] * 3 for _ in some],
        )
        for at, (key, code) in enumerate(zip(some, got, strict=True)):
            begin = 2 * MIB * at
            if code > 0:
                self.compare(key, self.memory[begin : begin + code].tobytes())
            else:
                assert code in {INVALID, MISSING}
                assert code == MISSING or len(self.model[key]) > 3 * third

    @rule(who=st.integers(0, 1))
    def sizes(self, who: int) -> None:
        for key in KEYS:
            size = self.stores[who].get_size(key)
            assert size == MISSING or size == len(self.model[key])


@pytest.mark.parametrize("disk", [False, True])
def test_what_is_read_is_what_was_put_or_nothing(start_one, tmp_path, disk):
    """Also where blocks are written to a disk while others take their place, and come back from there."""
    flags = ("--ssd", f"{tmp_path}/disk=96MiB", "--ssd-write", "through") if disk else ()
    with start_one("--memory", "24MiB" if disk else "48MiB", *flags) as daemon:
        machine = type("Machine", (AgainstADict,), {"socket": daemon.socket})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=12,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_an_object_put_by_another_process_is_found_at_once(pool, store):
    """In a namespace that did not exist when this store was set up."""
    code = """
import sys
from kvpool.engine_plugins.mooncake import install
install()
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup({"local_hostname": "h", "kvpool_socket": sys.argv[1], "tenant_id": sys.argv[2]}) == 0
for line in sys.stdin:
    size = int(line)
    print(store.put_batch([f"{size}/{i}" for i in range(3)], [bytes([i]) * size for i in range(3)]), flush=True)
"""
    tenant = "test_an_object_put_by_another_process_is_found_at_once"
    with subprocess.Popen(
        [sys.executable, "-c", code, pool.socket, tenant],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        for size in (10, 1000, 3000, 5000):
            assert store.is_exist(f"{size}/0") == 0
            other.stdin.write(f"{size}\n")
            other.stdin.flush()
            assert other.stdout.readline() == "0\n"
            assert store.batch_is_exist([f"{size}/{i}" for i in range(3)]) == [1, 1, 1]
            assert store.get(f"{size}/2") == b"\2" * size
        other.stdin.close()


def test_threads_find_what_threads_have_put(pool):
    """Of several sizes, by readers of one store that hear of their namespaces at the same time."""
    sizes = (10, 1000, 3000, 70_000)
    with ThreadPoolExecutor(len(sizes)) as threads:
        for number in range(8):
            tenant = f"threads {number}"
            writer, reader = set_up(pool.socket, tenant), set_up(pool.socket, tenant)
            names = {size: [f"{size}/{i}" for i in range(3)] for size in sizes}

            def put(size: int, writer=writer, names=names) -> int:
                return writer.put_batch(names[size], [bytes([1]) * size] * 3)

            def get(size: int, reader=reader, names=names) -> list[int]:
                return [len(data) for data in reader.get_batch(names[size])]

            assert list(threads.map(put, sizes)) == [0] * len(sizes)
            assert list(threads.map(get, sizes)) == [[size] * 3 for size in sizes]
            writer.remove_all()
            writer.close()
            reader.close()


def test_keys_of_one_hash_are_a_miss(store, monkeypatch):
    monkeypatch.setattr(spaces.Spaces, "packed", lambda self, keys: bytes(range(16)) * len(keys))
    for size in (100, 5000):  # a head; a block
        assert store.put_batch([f"a{size}"], [b"x" * size]) == 0
        assert store.get(f"a{size}") == b"x" * size
        assert store.get(f"b{size}") == b""
        assert store.remove(f"a{size}") == 0


def test_a_reader_gets_one_version_or_the_other(store, pool):
    """Large ones, in chunks, of one byte each: a mixture would show."""
    writer = set_up(pool.socket, "test_a_reader_gets_one_version_or_the_other")
    versions = [bytes([number]) * (5 * MIB + number) for number in range(1, 5)]
    done = threading.Event()
    found: set[int] = set()
    wrong: list[str] = []

    def read() -> None:
        while not done.is_set():
            got = store.get("changing")
            if got and got != versions[got[0] - 1]:
                wrong.append(f"{len(got)} bytes that begin with {got[0]}")
            found.add(got[0] if got else 0)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        number = 0
        while len(found - {0}) < len(versions) and time.monotonic() < deadline:
            assert writer.upsert("changing", versions[number % len(versions)]) == 0
            number += 1
    finally:
        done.set()
        reader.join()
        writer.close()
    assert not wrong
    assert found >= {1, 2, 3, 4}


def spaces_of(store) -> spaces.Spaces:
    """What finds the namespace of an object."""
    return store._batches.objects.spaces


def put_unseen(store, monkeypatch, key: str, data: bytes) -> None:
    """A put whose lookup was answered before another's put of the key."""

    def nothing(packed: bytes) -> tuple[list[None], bytes]:
        n = len(packed) // KEY_BYTES
        return [None] * n, bytes(n)

    with monkeypatch.context() as patch:
        patch.setattr(spaces_of(store), "find", nothing)
        assert store.put(key, data) == 0


@pytest.mark.parametrize("exact_first", [True, False])
@pytest.mark.parametrize("size", [20, 3000, 2 * MIB])
def test_a_key_in_two_namespaces_is_replaced_and_removed_in_both(
    store, pool, request, monkeypatch, size, exact_first
):
    other = set_up(pool.socket, request.node.name)
    assert store.put_batch(["w0", "w1"], [b"w" * 2000] * 2) == 0
    assert other.get("w0")
    puts = [(store, b"A" * 2000), (other, b"B" * 1999)]
    for number, key in enumerate(("replaced", "removed", "removed in a batch")):
        for writer, data in puts if exact_first else reversed(puts):
            put_unseen(writer, monkeypatch, key, data)
        writer, *readers = (store, other, store) if number % 2 else (other, store, other)
        for reader in readers:
            assert reader.get(key)
        if number == 0:
            assert writer.upsert(key, b"C" * size) == 0
            assert {reader.get(key) for reader in readers} == {b"C" * size}
            assert writer.remove(key) == 0
        elif number == 1:
            assert writer.remove(key) == 0
        else:
            assert writer.batch_remove([key, "missing"]) == [0, MISSING]
        for reader in readers:
            assert (reader.is_exist(key), reader.get(key)) == (0, b"")
    other.close()


def test_an_upsert_hears_of_a_namespace_that_another_has_added(
    store, pool, request, monkeypatch, memory
):
    other = set_up(pool.socket, request.node.name)
    assert store.put("a", b"1") == other.put("b", b"1") == 0
    assert other.get("a") == b"1"
    assert store.put_batch(["w0", "w1"], [b"w" * 2000] * 2) == 0
    put_unseen(store, monkeypatch, "a", b"2" * 2000)
    assert store.get_into("a", address(memory), 2000) == 2000
    assert other.upsert("a", b"3") == 0
    assert store.get_into("a", address(memory), 2000) == 1
    assert memory[0] == ord("3")
    other.close()


def test_a_catalog_that_was_evicted_is_entered_again(store, pool, request):
    """By who knows what was in it, with the next look after a miss."""
    assert store.put_batch(["a", "b"], [b"1" * 2000] * 2) == store.put("small", b"s") == 0
    known = spaces_of(store)
    client = store._client
    keys = b"".join(size_keys(space.size) for space in known.all)
    assert client.remove(known.catalog.ns, keys) > 0
    fresh = set_up(pool.socket, request.node.name)

    def entered() -> bool:  # with the next look, which is due within `LOOK_S`
        assert store.get("missing") == b""
        return fresh.get_batch(["a", "small"]) == [b"1" * 2000, b"s"]

    until(entered, "the catalog has all again")
    assert fresh.upsert("a", b"2" * 2000) == 0
    assert store.get("a") == b"2" * 2000
    fresh.close()


# ---- codes and conventions ---------------------------------------------------------------------------


def test_puts(store):
    assert store.put("a", b"first") == 0
    assert store.put("a", b"second") == 0
    assert store.get("a") == b"first", "a duplicate is no error, and changes nothing"
    assert store.put("", b"x") == store.put("empty", b"") == INVALID
    assert store.put_batch(["b", "c"], [b"1", b"22"]) == 0
    assert store.put_batch(["d"], [b"1", b"2"]) == INVALID
    assert store.put_batch([], []) == 0
    assert store.put_parts("parts", b"abc", bytearray(b"def"), b"") == 0
    assert store.put_parts("none") == 0
    assert store.get_batch(["parts", "none", "b"]) == [b"abcdef", b"", b"1"]
    assert store.put("array", np.arange(3, dtype=np.int32)) == 0
    assert store.get("array") == np.arange(3, dtype=np.int32).tobytes()
    with pytest.raises(TypeError):
        store.put("text", "text")
    assert store.put("larger than the pool", bytes(200 * MIB)) == NO_SPACE
    assert store.is_exist("larger than the pool") == 0


def test_what_no_node_holds_is_refused_before_it_is_read(store, memory, requests):
    at = address(memory)
    assert store.put("here", b"1" * 5000) == 0
    requests.clear()
    for size in (OBJECT_BYTES_MAX + 1, 1 << 40):
        assert store.put_from("huge", at, size) == store.upsert_from("huge", at, size) == INVALID
    assert store.put_from("large", at, 8 << 30) == NO_SPACE
    assert store.upsert_from("here", at, 8 << 30) == NO_SPACE
    assert store.batch_put_from(["large"], [at], [OBJECT_BYTES_MAX]) == [NO_SPACE]
    assert not {"Reserve", "Store"} & set(requests), "no room was asked for"
    assert store.get("here") == b"1" * 5000
    assert store.is_exist("large") == 0


def test_a_batch_with_a_key_twice_keeps_the_first(store, memory):
    memory[:] = np.arange(memory.size) % 251
    at = address(memory)
    assert store.batch_put_from(["a", "b", "a"], [at, at + 1, at + 2], [100, 100, 50]) == [0, 0, 0]
    assert store.get("a") == memory[:100].tobytes()


def test_upserts(store):
    assert store.upsert("a", b"1") == 0
    assert store.upsert("a", b"another") == 0
    assert store.get("a") == b"another"
    assert store.put("a", b"put") == 0
    assert store.get("a") == b"another"
    assert store.upsert_batch(["a", "b", "b"], [b"x" * 5000, b"y", b"z" * 9]) == 0
    assert store.get_batch(["a", "b"]) == [b"x" * 5000, b"z" * 9]
    assert store.upsert_parts("b", b"p", b"q") == 0
    assert store.get("b") == b"pq"
    assert store.remove("b") == 0
    assert store.upsert("b", b"again") == 0
    assert store.get("b") == b"again"


def test_a_new_version_of_a_usual_size_takes_the_place_of_the_old_one(store, pool, request):
    """Block for block; one of another size is found all the same."""
    other = set_up(pool.socket, request.node.name)
    usual = [bytes([n]) * 5000 for n in range(4)]
    assert store.put_batch(["a", "b"], usual[:2]) == 0
    assert other.get("a") == usual[0]
    for writer, reader in ((store, other), (other, store)):
        for data in (usual[2], b"small", b"L" * 12_345, usual[3], b"M" * (2 * MIB), usual[0]):
            assert writer.upsert("a", data) == 0
            assert writer.get("a") == data
            assert reader.get("a") == data
            assert reader.get_size("a") == len(data)
    assert store.batch_remove(["missing", "a", "b", "a"]) == [MISSING, 0, 0, 0]
    assert other.batch_is_exist(["a", "b"]) == [0, 0]
    other.close()


@pytest.fixture
def requests(monkeypatch) -> list[str]:
    """The names of the requests that are sent."""
    return note_requests(monkeypatch)


@pytest.mark.parametrize("sizes", [[64 * KIB], [16 * KIB, 64 * KIB, 256 * KIB]])
def test_how_many_requests_a_call_takes(store, requests, monkeypatch, sizes):
    monkeypatch.setattr(spaces, "LOOK_S", 1e9)  # it does not look into the catalog meanwhile
    data = [bytes([1]) * size for size in sizes]
    for number, each in enumerate(data):
        assert store.put_batch([f"{number}/{at}" for at in range(12)], [each] * 12) == 0
    name = f"{len(sizes) - 1}/"
    assert store.upsert("warm", data[-1]) == store.upsert("warm", data[-1]) == 0
    assert store.get("nobody") == b"", "after which the next read asks first"
    for call, wanted, answer in (
        (lambda: store.is_exist(name + "1"), ["Present"], 1),
        (lambda: store.is_exist("nobody"), ["Present"], 0),
        (lambda: store.batch_is_exist(["nobody", name + "2", "0/3"]), ["Present"], [0, 1, 1]),
        (lambda: store.get("nobody"), ["Present"], b""),
        (lambda: store.put("new", data[-1]), ["Present", "Store"], 0),
        (lambda: store.remove(name + "4"), ["Remove"], 0),
        (lambda: store.batch_remove([name + "4", name + "5"]), ["Remove"], [MISSING, 0]),
        (lambda: store.upsert(name + "6", data[-1]), ["Remove", "Store"], 0),
    ):
        requests.clear()
        assert call() == answer
        assert requests == wanted


def test_reads(store, memory):
    assert store.put_batch(["a", "b"], [b"x" * 50, b"y" * 5000]) == 0
    at = address(memory)
    assert store.get_into("a", at, 50) == 50
    assert store.get_into("a", at, 4000) == 50
    assert store.get_into("a", at, 49) == INVALID
    assert store.get_into("missing", at, 50) == MISSING
    assert store.batch_get_into(["a", "no", "b"], [at, at, at + 100], [50, 9, 5000]) == [
        50,
        MISSING,
        5000,
    ]
    assert memory[:50].tobytes() == b"x" * 50
    assert memory[100:5100].tobytes() == b"y" * 5000
    assert store.get("missing") == b""
    assert store.get_buffer("missing") is None
    assert store.batch_get_buffer(["a", "missing"])[1] is None
    handle = store.get_buffer("a")
    assert handle.size() == len(handle) == 50
    assert ctypes.string_at(handle.ptr(), 50) == bytes(memoryview(handle)) == b"x" * 50
    assert store.get_size("b") == 5000
    assert store.get_size("missing") == MISSING
    assert [store.is_exist("a"), store.is_exist("no"), store.is_exist("")] == [1, 0, 0]
    assert store.batch_is_exist(["b", "no", "a"]) == [1, 0, 1]


def test_batches_of_unequal_lengths_are_refused_key_by_key(store, memory):
    at = address(memory)
    assert store.batch_put_from(["a", "b"], [at], [10]) == [INVALID] * 2
    assert store.batch_get_into(["a", "b"], [at], [10]) == [INVALID] * 2
    assert store.batch_put_from_multi_buffers(["a"], [[at, at]], [[10]]) == [INVALID]
    assert store.batch_put_from_multi_buffers(["a"], [[]], [[]]) == [INVALID]
    assert (
        store.batch_put_from(["a"], [at], [0]) == store.batch_get_into(["a"], [0], [4]) == [INVALID]
    )
    assert store.batch_put_from([], [], []) == store.batch_is_exist([]) == []
    with pytest.raises(TypeError):
        store.batch_is_exist("ab")


@pytest.mark.parametrize("step", [4096, 3000, 64, 7])
def test_many_pieces(store, memory, step):
    """Of a size for one numpy call; of one that the kernel gathers; too many for one system call."""
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.size, dtype=np.uint8)
    at, count = address(memory), 1500 if step < 1000 else 200
    ptrs = [at + 2 * step * i for i in range(count)]
    assert store.batch_put_from_multi_buffers(
        ["a", "b"], [ptrs, ptrs[:3]], [[step] * count, [step] * 3]
    ) == [0, 0]
    put = b"".join(memory[2 * step * i : 2 * step * i + step].tobytes() for i in range(count))
    assert store.get("a") == put
    assert store.get("b") == put[: 3 * step]
    memory.fill(0)
    got = store.batch_get_into_multi_buffers(
        ["a", "b"], [ptrs, [at + step]], [[step] * count, [3 * step]]
    )
    assert got == [count * step, 3 * step]
    assert memory[:step].tobytes() == put[:step]
    assert store.batch_get_into_multi_buffers(["a"], [ptrs[:-1]], [[step] * (count - 1)]) == [
        INVALID
    ]


def test_removals(store):
    assert store.put_batch(["a", "b", "c"], [b"1", b"2" * 5000, b"3"]) == 0
    assert store.remove("a") == 0
    assert store.remove("a") == MISSING
    assert store.batch_remove(["b", "missing"], True) == [0, MISSING]
    assert store.batch_is_exist(["a", "b", "c"]) == [0, 0, 1]
    assert store.remove_by_regex("^c$") == -1012
    assert store.put_batch([f"x{i}" for i in range(9)], [b"z" * 5000] * 9) == 0
    assert store.remove_all() == 10
    assert store.remove_all(True) == 0
    assert store.batch_is_exist(["c", "x1"]) == [0, 0]
    assert store.put("x1", b"new") == 0
    assert store.get("x1") == b"new"


def test_configurations(store, pool):
    config = ReplicateConfig()
    config.group_ids = ["one"]
    assert store.put("g", b"x", config) == 0
    assert store.put_batch(["h", "i"], [b"x", b"y"], config) == INVALID
    config = ReplicateConfig()
    config.soft_pin_ttl_ms = 1000
    assert store.put("p", b"x", config) == INVALID
    config.soft_pin_action = SoftPinAction.ENABLE
    assert store.put("p", b"x", config) == 0
    config = ReplicateConfig()
    config.replica_num = 0
    assert store.put("r", b"x", config) == INVALID
    config.replica_num, config.with_hard_pin = 2, True
    with pool.client() as client:
        before = client.stats().tenants["default"].hard_pinned_bytes
        assert store.put("r", b"x" * 5000, config) == 0
        assert client.stats().tenants["default"].hard_pinned_bytes > before
    with pytest.raises(AttributeError):
        config.unknown = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        store.put("t", b"x", {"replica_num": 1})


def test_a_bad_entry_of_a_batch_fails_alone(store, memory):
    at = address(memory)
    memory[:9] = 7
    keys, ptrs, sizes = ["", "empty", "nowhere", "good"], [at, at, 0, at], [9, 0, 9, 9]
    runs = [[ptr] for ptr in ptrs], [[size] for size in sizes]
    expected = [INVALID] * 3 + [0]
    assert store.batch_put_from(keys, ptrs, sizes) == expected
    assert store.remove("good") == 0
    assert store.batch_put_from_multi_buffers(keys, *runs) == expected
    assert store.batch_upsert_from(keys, ptrs, sizes) == expected
    assert store.batch_is_exist(keys) == [0, 0, 0, 1]
    keys = ["good"] * 4
    assert store.batch_get_into(keys, ptrs, sizes) == [9, INVALID, INVALID, 9]
    assert store.batch_get_into_multi_buffers(keys, *runs) == [9, INVALID, INVALID, 9]
    config = ReplicateConfig()
    config.group_ids = ["one", "two"]
    assert store.batch_put_from(["a", "b"], [at, 0], [9, 9], config) == [0, INVALID]
    assert store.get("good") == store.get("a") == b"\x07" * 9


# Sizes that are all different are stored in chunks.
@pytest.mark.parametrize(("size", "step"), [(64 * KIB, 0), (3 * MIB + 1, 1)])
def test_hard_pins_are_kept_or_their_put_fails(start, size, step):
    daemon = start("--memory", "128MiB")  # a quarter of which may have hard pins
    store, other = set_up(daemon.socket), set_up(daemon.socket)
    config = ReplicateConfig()
    config.with_hard_pin = True
    objects = {f"{n}": data_of(n, size + n * step) for n in range(40 * MIB // size)}
    found = [store.put(key, data, config) for key, data in objects.items()]
    kept = list(objects)[: found.index(NO_SPACE)]
    assert len(kept) >= 2
    assert found == [0] * len(kept) + [NO_SPACE] * (len(objects) - len(kept))
    assert other.batch_is_exist(list(objects)) == [int(code == 0) for code in found]
    for number in range(160 * MIB // size):
        assert other.put(f"passing/{number}", data_of(0, size + number * step)) == 0
    assert other.is_exist("passing/0") == 0, "memory was full"
    assert all(other.get(key) == objects[key] for key in kept)
    # What is replaced, removed or not stored keeps no pin, whoever has put it.
    assert store.upsert(kept[0], b"small", config) == 0
    assert store.upsert(kept[0], objects[kept[1]], config) == 0
    assert other.get(kept[0]) == objects[kept[1]]
    assert other.batch_remove(kept) == [0] * len(kept)
    assert daemon.space().hard_pinned_bytes == 0
    assert store.put("again", objects[kept[0]], config) == 0
    store.close()
    other.close()


def test_descriptors(store):
    assert store.put("a", b"x" * 5000) == 0
    [found] = store.get_replica_desc("a")
    assert (
        found.is_memory_replica()
        and not found.is_disk_replica()
        and not found.is_local_disk_replica()
    )
    assert found.get_memory_descriptor().buffer_descriptor.size == 5000
    assert found.get_memory_descriptor().buffer_descriptor.transport_endpoint == "host:1"
    assert store.get_replica_desc("no") == []
    assert list(store.batch_get_replica_desc(["no", "a"])) == ["a"]
    assert store.get_hostname() == "host:1"


def test_ranges(store, memory):
    data = data_of(3, 5000)
    assert store.put("a", data) == 0
    at = address(memory)
    got = store.get_into_ranges(
        [at, at + 1000],
        [["a", "no"], ["a"]],
        [[[0, 30], [50]], [[0]]],
        [[[10, 4990], [0]], [[4000]]],
        [[[20, 20], [5]], [[1000]]],
    )
    assert got == [[[20, INVALID], [MISSING]], [[1000]]]
    assert memory[:20].tobytes() == data[10:30]
    assert memory[1000:2000].tobytes() == data[4000:]
    assert store.batch_get_session_start(["a", "no"]) == [0, MISSING]
    read = store.batch_get_into_multi_buffer_ranges
    assert read(["a"], [[at, at + 500]], [[100, 200]], [[7, 300]]) == [300]
    assert memory[:100].tobytes() == data[7:107]
    assert memory[500:700].tobytes() == data[300:500]
    assert read(["a"], [[at]], [[10]], [[4995]]) == [INVALID]
    assert store.batch_get_session_end(["a", "no"]) == 0
    assert read(["a"], [[at]], [[10]], [[0]]) == [INVALID]


@pytest.mark.parametrize("size", [20, 2000, 2 * MIB])
def test_a_session_reads_one_version(store, memory, size):
    at, half = address(memory), size // 2
    start, end = store.batch_get_session_start, store.batch_get_session_end
    read = store.batch_get_into_multi_buffer_ranges
    assert store.put_batch(["a", "b"], [b"1" * size] * 2) == 0
    assert start(["a", "b"]) == [0, 0]
    assert read(["a"], [[at]], [[half]], [[0]]) == [half]
    assert store.upsert_batch(["a", "b"], [b"2" * size, b"2" * (size + 1)]) == 0
    assert read(["a", "b"], [[at + half]] * 2, [[half]] * 2, [[half]] * 2) == [MISSING, MISSING]
    assert end(["a"]) == 0
    assert start(["a"]) == [0]
    for offset in (0, half):
        assert read(["a"], [[at + offset]], [[half]], [[offset]]) == [half]
    assert memory[:size].tobytes() == b"2" * size
    assert store.upsert("a", b"3" * size) == store.upsert("a", b"2" * size) == 0
    assert read(["a"], [[at]], [[half]], [[0]]) == [half], "the same bytes again"


def test_writing_in_ranges(store, memory):
    memory[:] = np.arange(memory.size) % 251
    at = address(memory)
    assert store.put("there", b"x") == 0
    assert store.batch_put_session_start(["a", "b", "there"], [100, 100, 5]) == [0, 0, EXISTS]
    write = store.batch_put_from_multi_buffer_ranges
    assert write(
        ["a", "b", "c"], [[at, at + 9], [at], [at]], [[50, 50], [20], [5]], [[50, 0], [90], [0]]
    ) == [100, INVALID, INVALID]
    assert store.is_exist("a") == 0
    assert store.batch_put_session_end(["a", "c"]) == [0, INVALID]
    assert store.batch_put_session_revoke(["b", "c"]) == [0, INVALID]
    assert store.batch_put_session_end(["a"]) == [INVALID]
    assert store.get("a") == memory[9:59].tobytes() + memory[:50].tobytes()
    assert store.is_exist("b") == 0


# ---- addresses ---------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@pytest.fixture
def forbidden() -> Iterator[int]:
    """1 MiB of addresses without any right, as a device's memory has in this process."""
    found = _libc.mmap(None, MIB, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    yield found
    _libc.munmap(found, MIB)


def test_a_wild_address_is_a_code_and_not_the_end(store, memory, forbidden):
    assert store.register_buffer(forbidden, MIB) == INVALID
    assert store.put_batch(["a", "b"], [b"x" * 5000, b"tiny"]) == 0
    for key, size in (("a", 5000), ("b", 4)):
        assert store.get_into(key, forbidden, size) == INVALID
        assert store.put_from(f"new {key}", forbidden, size) == INVALID
        assert store.upsert_from(f"newer {key}", forbidden, size) == INVALID
        for other in (size, 2000, 20):
            assert store.upsert_from(key, forbidden, other) == INVALID
        assert len(store.get(key)) == size, "nothing was removed for what cannot be read"
    at = address(memory)
    got = store.batch_put_from(["c", "d", "e"], [at, forbidden, at + 9], [5000] * 3)
    assert got == [0, INVALID, 0], "only the one is not stored"
    assert store.batch_is_exist(["c", "d", "e"]) == [1, 0, 1]
    pieces = [[at, forbidden], [at, at + 2500]]
    assert store.batch_get_into_multi_buffers(["c", "e"], pieces, [[2500] * 2] * 2) == [
        INVALID,
        5000,
    ]


def test_addresses_and_keys_that_cannot_be_are_codes(store, memory):
    at = address(memory)
    assert store.put("a", b"x" * 5000) == 0
    read = store.batch_get_into_multi_buffer_ranges
    assert store.batch_get_session_start(["a"]) == [0]
    for ptr in (-1, 0, 1 << 47, (1 << 63) - 9, 1 << 63, (1 << 64) - 1, 1 << 64):
        assert store.put_from("b", ptr, 10) == store.upsert_from("b", ptr, 10) == INVALID
        assert store.get_into("a", ptr, 5000) == INVALID
        assert store.batch_put_from_multi_buffers(["b"], [[at, ptr]], [[5, 5]]) == [INVALID]
        assert store.batch_get_into_multi_buffers(["a"], [[at, ptr]], [[9, 4991]]) == [INVALID]
        assert store.get_into_ranges([ptr], [["a"]], [[[0]]], [[[0]]], [[[9]]]) == [[[INVALID]]]
        assert read(["a"], [[ptr]], [[9]], [[0]]) == [INVALID]
        assert store.register_buffer(ptr, 10) == store.unregister_buffer(ptr) == INVALID
    for size in (-1, 0, 1 << 63, 1 << 70):
        assert store.put_from("b", at, size) == store.get_into("a", at, size) == INVALID
        assert store.register_buffer(at, size) == INVALID
    for key in ("\ud800", "a\udfff"):
        assert store.put(key, b"x") == store.upsert(key, b"x") == INVALID
        assert store.put_batch(["c", key], [b"x", b"y"]) == INVALID
        assert (store.get(key), store.is_exist(key), store.get_size(key)) == (b"", 0, MISSING)
        assert store.get_into(key, at, 9) == store.remove(key) == MISSING
        assert store.batch_get_session_start([key]) == [MISSING]
        assert store.batch_put_session_start([key], [9]) == [INVALID]
        assert store.batch_get_replica_desc([key, "a"]).keys() == {"a"}


def test_memory_that_was_not_registered_is_read_and_written_all_the_same(store):
    source = np.random.default_rng(2).integers(0, 256, 3 * MIB, dtype=np.uint8)
    out = np.zeros_like(source)
    for size in (10, 5000, 3 * MIB):
        assert store.put_from(f"{size}", address(source), size) == 0
        assert store.get_into(f"{size}", address(out), size) == size
        assert (out[:size] == source[:size]).all()
        out.fill(0)


def test_registering(store, memory):
    at = address(memory)
    assert store.register_buffer(at, memory.nbytes) == INVALID, "twice"
    assert store.register_buffer(at + 4096, 4096) == INVALID, "in another"
    assert store.register_buffer(0, 10) == store.register_buffer(at - 4096, 0) == INVALID
    assert store.unregister_buffer(at + 1) == INVALID
    assert store.unregister_buffer(at) == 0
    assert store.register_buffer(at, 4096) == 0


def test_memory_that_cannot_be_written_is_not_registered(store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        assert store.register_buffer(address(view), view.nbytes) == INVALID
        assert store.put_from("from a file", address(view), 8192) == 0
        assert store.get_into("from a file", address(view), 8192) == INVALID
        del view


# ---- life --------------------------------------------------------------------------------------------


def test_before_setup_and_after_close(pool):
    store = MooncakeDistributedStore()
    for _ in range(2):
        assert store.health_check() == 1
        assert store.put("a", b"x") == INVALID
        assert store.get("a") == b""
        assert store.is_exist("a") == -1
        assert store.batch_is_exist(["a", "b"]) == [-1, -1]
        assert store.get_into("a", 4096, 1) == INVALID
        assert store.remove("a") == store.remove_all() == INVALID
        assert store.setup("host:2", "", 0, 0, "tcp", "", "", tenant_id="life") != 0, (
            "no such socket"
        )
        assert store.setup({"local_hostname": "h", "kvpool_socket": pool.socket}) == 0
        assert store.health_check() == 0
        assert store.close() == 0


def test_a_tenant_id_has_keys_of_its_own(pool):
    one, other = set_up(pool.socket, "tenant one"), set_up(pool.socket, "tenant other")
    assert one.put("a", b"one") == other.put("a", b"other!") == 0
    assert [one.get("a"), other.get("a")] == [b"one", b"other!"]
    assert one.remove_all() == 1
    assert other.get("a") == b"other!"
    one.close()
    other.close()


def within_limit(call):
    begun = time.monotonic()
    found = call()
    assert time.monotonic() - begun < SLOWEST_S
    return found


def test_the_daemon_dies_in_the_middle_and_comes_back(start):
    daemon = start("--memory", "64MiB")
    store = set_up(daemon.socket)
    memory = np.zeros(8 * MIB, np.uint8)
    at = address(memory)
    assert store.register_buffer(at, memory.nbytes) == 0
    names = [f"k{i}" for i in range(8)]
    codes: list[list[int]] = []
    stop = threading.Event()

    def put() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            codes.append(
                store.batch_put_from([f"{name}/{number}" for name in names], [at] * 8, [MIB] * 8)
            )

    thread = threading.Thread(target=put)
    thread.start()
    while len(codes) < 3:
        time.sleep(0.001)
    daemon.signal(signal.SIGKILL)
    daemon.wait_end()
    before = len(codes)
    while len(codes) < before + 2:
        time.sleep(0.001)
    stop.set()
    thread.join(SLOWEST_S)
    assert not thread.is_alive()
    assert codes[0] == [0] * 8
    assert codes[-1] == [AWAY] * 8
    assert {code for some in codes for code in some} <= {0, AWAY}
    assert within_limit(lambda: store.put("a", b"x")) == AWAY
    assert within_limit(lambda: store.get("k0/1")) == b""
    assert within_limit(lambda: store.get_into("k0/1", at, MIB)) == AWAY
    assert within_limit(lambda: store.batch_get_into(names, [at] * 8, [MIB] * 8)) == [AWAY] * 8
    assert within_limit(lambda: store.is_exist("k0/1")) == -1
    assert within_limit(lambda: store.get_size("k0/1")) == AWAY
    assert within_limit(lambda: store.remove("k0/1")) == AWAY
    assert within_limit(lambda: store.upsert("k0/1", b"x")) == AWAY
    assert within_limit(store.remove_all) == AWAY
    assert store.batch_get_session_start(["k0/1"]) == [AWAY]
    assert store.health_check() == 2
    start("--memory", "64MiB")
    deadline = time.monotonic() + PATIENCE_S
    while store.put("a", b"x" * 5000) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.get("a") == b"x" * 5000
    assert store.get("k0/1") == b"", "memory went with the daemon"
    assert store.batch_put_from(names, [at] * 8, [MIB] * 8) == [0] * 8
    other = set_up(daemon.socket)
    assert other.batch_is_exist([*names, "a"]) == [1] * 9, (
        "another process finds the namespaces again"
    )
    other.close()
    store.close()
