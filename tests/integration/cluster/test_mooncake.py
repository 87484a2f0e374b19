"""`mooncake.store` on two nodes, with a directory and without: what one has put the other reads, and removals reach it."""

import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvpool.engine_plugins.mooncake.store import MooncakeDistributedStore
from tests.support.waiting import PATIENCE_S, until

SIZES = 10, 5000, 300_000, (2 << 20) + 77
MISSING, AWAY = -704, -900

Two = tuple[MooncakeDistributedStore, MooncakeDistributedStore]


def data_of(seed: int, size: int) -> bytes:
    return np.random.default_rng([seed, size]).bytes(size)


def set_up(socket: str) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "host", "kvpool_socket": socket}) == 0
    return store


@pytest.fixture(params=["directory", "peers"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """Of two nodes; the second one finds what the first one has. Of peers, the first does not know the second."""
    monkeypatch.setenv("KVPOOL_MOONCAKE_WAIT_S", str(PATIENCE_S))
    if request.param == "directory":
        world = request.getfixturevalue("start_cluster")(nodes=2, memory="96MiB")
        sockets = [seat.client.socket_path for seat in world.seats()]
    else:
        start = request.getfixturevalue("start")
        first = start("--listen", "tcp://127.0.0.1:0", "--memory", "96MiB", name="a")
        url = first.ready.rsplit("peers at ", 1)[1].strip()
        sockets = [first.socket, start("--peer", url, "--memory", "96MiB", name="b").socket]
    a, b = map(set_up, sockets)
    yield a, b
    a.close()
    b.close()


def seen(condition: Callable[[], bool], what: str) -> None:
    """The directory is told in batches, and of new namespaces once a second."""
    until(condition, what)


def test_objects_of_all_sizes_are_read_on_the_other_node(reading):
    a, b = reading
    for size in SIZES:
        keys = [f"{size}/{i}" for i in range(3)]
        values = [data_of(i, size) for i in range(3)]
        assert a.put_batch(keys, values) == 0
        seen(lambda keys=keys: b.batch_is_exist(keys) == [1] * 3, f"{size} bytes at the other node")
        # Without a directory the peer is asked each time, and on a busy machine it may answer late.
        seen(lambda keys=keys, size=size: b.get_size(keys[0]) == size, "its size is told")
        seen(
            lambda keys=keys: (
                [d.is_memory_replica() for d in b.get_replica_desc(keys[0])] == [True]
            ),
            "its replica is told",
        )
        seen(lambda keys=keys, values=values: b.get_batch(keys) == values, "they are read")
        assert b.put(keys[0], b"other bytes") == 0
        assert b.get(keys[0]) == values[0], "a duplicate, wherever the first one is"


@pytest.mark.parametrize("reading", ["directory"], indirect=True)
def test_removals_and_new_versions_reach_the_other_node(reading):
    a, b = reading
    for size in SIZES:
        key = f"of {size}"
        assert a.put(key, data_of(1, size)) == 0
        seen(lambda key=key: b.is_exist(key) == 1, "it is known there")
        assert b.get(key) == data_of(1, size), "and a copy is there then"
        assert a.upsert(key, data_of(2, size)) == 0
        assert a.get(key) == data_of(2, size)
        seen(lambda key=key: b.get(key) != b"", "the new one is known there")
        assert b.get(key) == data_of(2, size)
        assert a.remove(key) == 0
        assert a.get(key) == b""
        assert b.get(key) == b""
    assert a.put_batch([f"all {i}" for i in range(5)], [data_of(i, 5000) for i in range(5)]) == 0
    seen(
        lambda: b.batch_is_exist([f"all {i}" for i in range(5)]) == [1] * 5, "they are known there"
    )
    assert b.get("all 1")
    assert a.remove_all(True) >= 5
    seen(lambda: b.get("all 1") == b"" and b.is_exist("all 2") == 0, "the other node is emptied")


def test_an_upsert_and_a_removal_act_on_the_other_node_without_a_lookup(start_cluster):
    world = start_cluster(nodes=2, memory="96MiB")
    a, b = [set_up(seat.client.socket_path) for seat in world.seats()]
    assert a.put_batch(["w0", "w1"], [b"w" * 2000] * 2) == a.put("small", b"s") == 0
    seen(lambda: b.batch_is_exist(["w1", "small"]) == [1, 1], "both namespaces are known there")
    for size in (20, 2000):
        key = f"of {size}"
        assert b.put(key, b"1" * size) == 0
        assert a.upsert(key, b"2" * size) == 0
        assert b.get(key) in {b"", b"2" * size}
        assert a.get(key) == b"2" * size
    assert b.put_batch(["k", "r"], [b"1" * 2000] * 2) == 0
    for store in (a, b):
        store._batches.objects.limits.others_s = 0.2
    world.nodes[1].signal(signal.SIGSTOP)
    try:
        assert [a.upsert("k", b"2" * 2000), a.remove("r")] == [AWAY, AWAY]
    finally:
        world.nodes[1].signal(signal.SIGCONT)
    a.close()
    b.close()
