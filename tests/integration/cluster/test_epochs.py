"""A reset makes old blocks misses everywhere at once, and they stay so."""

import time

import pytest

from kvpool.errors import ClusterUnavailable, StaleEpoch
from kvpool.types import NamespaceRecord
from tests.support.waiting import PATIENCE_S


def record(name: str) -> NamespaceRecord:
    return NamespaceRecord.simple(name, block_bytes=32 << 10, block_tokens=16)


def epoch(seat) -> int:
    """The epoch of the namespace, as this node knows it."""
    entries = seat.client.cluster()["namespaces"]
    return next(n["epoch"] for n in entries if n["digest"] == seat.ns.digest.hex())


def count(seat, some) -> tuple[int, int, int]:
    """What is found by each way of looking."""
    return seat.match(some), seat.here(some), seat.read(some, wait_s=0.5)


def test_a_reset_makes_all_old_blocks_misses_on_all_nodes(shared, numbers, until):
    a, b, c = shared.seats(record("reset"))
    some = numbers(50)
    a.put(some)
    until(lambda: a.announced)
    assert b.read(some) == 50
    a.client.namespaces.reset(a.ns)
    assert count(a, some) == (0, 0, 0), "at once"
    until(lambda: count(b, some) == (0, 0, 0))
    until(lambda: count(c, some) == (0, 0, 0))
    assert count(b, some) == (0, 0, 0)


def test_who_resets_goes_on_with_new_bytes_under_old_keys(shared, numbers, until):
    a, b, _ = shared.seats(record("weights"))
    some = numbers(30)
    a.put(some)
    until(lambda: a.announced)
    assert b.read(some) == 30
    a.client.namespaces.reset(a.ns)
    a.version = 1
    assert a.put(some) == 30
    assert a.read(some) == 30
    until(lambda: a.announced)
    until(lambda: b.read(some, wait_s=0.2) == 0, "b's engine has the old weights")
    with pytest.raises(StaleEpoch):
        b.put(some)
    b.client.namespaces.reset(b.ns)
    b.version = 1
    assert b.read(some) == 30, "it entered the epoch that a has begun, and did not end it"
    assert a.read(some) == 30


def test_opening_again_enters_the_new_epoch(shared, numbers, until):
    a, b, _ = shared.seats(record("reopened"))
    some = numbers(10)
    a.put(some)
    a.client.namespaces.reset(a.ns)
    a.version = 1
    a.put(some)
    until(lambda: a.announced)
    until(lambda: epoch(b) == 1, "b has heard of it")
    assert b.read(some, wait_s=0.2) == 0
    b.ns = b.client.open(b.record)
    b.version = 1
    assert b.read(some) == 10


def test_an_operators_clear_needs_nobody_to_do_anything(shared, numbers, until):
    a, b, c = shared.seats(record("cleared"))
    some = numbers(20)
    a.put(some)
    until(lambda: a.announced)
    assert b.read(some) == 20
    assert c.client.clear(c.ns.digest) == 1
    assert count(c, some) == (0, 0, 0)
    for seat in (a, b):
        until(lambda one=seat: count(one, some) == (0, 0, 0))
    assert a.put(some) == 20, "engines go on by themselves"
    until(lambda: a.announced)
    assert b.read(some) == 20


def test_slots_of_an_ended_epoch_come_back(shared, numbers, until):
    a, _, _ = shared.seats(record("garbage"))
    a.put(numbers(200))
    full = a.stats.tenants["default"].space.bytes_used
    reclaimed = a.counter("reclaimed_blocks")
    a.client.namespaces.reset(a.ns)
    until(lambda: a.counter("reclaimed_blocks") >= reclaimed + 200)
    assert a.stats.tenants["default"].space.bytes_used <= full - 200 * (32 << 10)


def test_two_engines_that_reset_at_once_begin_one_epoch(shared, numbers):
    a, b, _ = shared.seats(record("both"))
    a.put(numbers(5))
    a.client.namespaces.reset(a.ns)
    b.client.namespaces.reset(b.ns)
    namespaces = a.client.cluster()["namespaces"]
    assert [n["epoch"] for n in namespaces if n["digest"] == a.ns.digest.hex()] == [1]


def test_old_blocks_stay_misses_after_restarts_and_for_nodes_that_join_later(
    start_cluster, numbers, until
):
    world = start_cluster(nodes=2)
    a, b = world.seats(record("restarts"))
    some = numbers(20)
    a.put(some)
    until(lambda: a.announced)
    assert b.read(some) == 20
    a.client.namespaces.reset(a.ns)
    until(lambda: count(b, some) == (0, 0, 0))
    world.node("a").restart()
    world.add("c")
    restarted, late = (world.seat(name, record("restarts")) for name in ("a", "c"))
    for seat in (restarted, late):
        assert count(seat, some) == (0, 0, 0)
    for seat in (restarted, late):
        seat.version = 1
    assert restarted.put(some[:5]) == 5
    until(lambda: restarted.announced)
    assert late.read(some) == 5
    again = world.seat("b", record("restarts"))
    world.until_all_see([restarted, again, late])
    again.version = 1
    assert again.read(some[:5]) == 5
    epochs = {n["digest"]: n["epoch"] for n in again.client.cluster()["namespaces"]}
    assert epochs[again.ns.digest.hex()] == 1


@pytest.mark.slow
def test_a_reset_while_etcd_is_away_fails_and_the_client_goes_on(start_cluster, numbers, until):
    world = start_cluster(own_servers=True, nodes=2)
    a, b = world.seats(record("away"))
    some = numbers(10)
    a.put(some)
    until(lambda: a.announced)
    world.etcd.members[0].pause()
    begun = time.monotonic()
    with pytest.raises(ClusterUnavailable):
        a.client.namespaces.reset(a.ns)
    assert time.monotonic() - begun < PATIENCE_S
    assert a.client.available
    assert a.read(some) == 10
    assert b.read(some) == 10
    world.etcd.members[0].resume()
    until(lambda: a.standing == "member")
    a.client.namespaces.reset(a.ns)
    assert count(a, some) == (0, 0, 0)
    until(lambda: count(b, some) == (0, 0, 0))
