"""What `test_network.py` runs inside of a network namespace. Not collected by itself."""

import contextlib
import time

import pytest

from tests.support.local_cluster import KVPOOL
from tests.support.netns import HOST, Network
from tests.support.proxy import Proxy
from tests.support.waiting import PATIENCE_S

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def network():
    with Network(NAMES) as network:
        yield network


@pytest.fixture
def seats(network, servers, start_cluster):
    """One node on each machine. etcd and Redis are where the test is, behind proxies on the bridge."""
    etcd, redis = servers
    host, port = etcd.endpoints[0].split(":")
    with (
        Proxy((host, int(port)), HOST) as to_etcd,
        Proxy(("127.0.0.1", redis.port), HOST) as to_redis,
        contextlib.ExitStack() as stack,
    ):
        world = start_cluster(
            nodes=0,
            memory="32MiB",
            etcd_url=lambda _: f"etcd://{HOST}:{to_etcd.address[1]}",
            directory=f"redis://{HOST}:{to_redis.address[1]}",
            # This network is trusted.
            environ={"KVPOOL_PLAINTEXT": "true", "KVPOOL_MEMBER_TTL_S": "5"},
        )
        for name in NAMES:
            node = world.make(
                name, program=(*network.at(name), *KVPOOL), host=network.address(name)
            )
            stack.callback(node.stop)
            node.start()
        yield world.seats()


def test_a_cut_pair_misses_each_others_blocks_in_time_and_nobody_else_notices(
    network, seats, numbers, until
):
    a, b, c = seats
    of_a, of_b, everywhere = numbers(20), numbers(20), numbers(20)
    a.put(of_a)
    b.put(of_b)
    for seat in (a, c):
        seat.put(everywhere)
    until(lambda: all(seat.announced for seat in seats))
    assert b.read(of_a[:2]) == 2, "there is a connection, too"
    network.cut("a", "b")
    try:
        for seat, theirs in ((a, of_b), (b, of_a[2:])):
            begun = time.monotonic()
            assert seat.read(theirs, wait_s=1) == 0
            assert time.monotonic() - begun < PATIENCE_S / 2
        assert b.read(everywhere, wait_s=PATIENCE_S / 2) == 20, "c has them too"
        assert c.read(of_a[:10]) == c.read(of_b[:10]) == 10, "c reaches both"
        assert a.put(numbers(5)) == b.put(numbers(5)) == 5
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 7, "longer than a lease")
        assert all(set(seat.members) == set(NAMES) for seat in seats), "and all of them live"
        assert b.read(of_a[:10]) == 10, "through c, which has copies now"
    finally:
        network.heal("a", "b")
    for seat, theirs in ((a, of_b), (b, of_a)):
        until(lambda one=seat, some=theirs: one.read(some, wait_s=1) == 20, "healed")


def test_a_node_that_is_cut_off_from_all_others_serves_its_own_clients(
    network, seats, numbers, until
):
    a, b, c = seats
    own, others = numbers(20), numbers(20)
    a.put(own)
    b.put(others)
    until(lambda: a.announced and b.announced)
    for other in ("b", "c"):
        network.cut("a", other)
    try:
        assert a.read(own) == 20
        assert a.put(numbers(5)) == 5
        assert a.read(others, wait_s=1) == 0
        assert c.read(others) == 20
        assert c.read(own, wait_s=1) == 0
    finally:
        for other in ("b", "c"):
            network.heal("a", other)
    until(lambda: c.read(own, wait_s=1) == 20)
    until(lambda: a.read(others, wait_s=1) == 20)
