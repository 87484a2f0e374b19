"""The directory is a hint: without it hits are fewer, and nothing is wrong, stuck or lost for good."""

import time

import pytest

from tests.support.proxy import Fault, Proxy
from tests.support.waiting import PATIENCE_S

WRONG = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "forbidden": (
        ("ACL", "SETUSER", "default", "-@all", "+acl|setuser"),
        ("ACL", "SETUSER", "default", "+@all"),
    ),
}


@pytest.fixture(scope="module")
def lasting(shared_cluster):
    with shared_cluster(nodes=2, memory="64MiB", environ={"KVPOOL_MEMBER_TTL_S": "5"}) as world:
        yield world


@pytest.fixture
def world(lasting, until):
    """Two nodes on a Redis that is well before and after each test."""
    yield lasting
    redis = lasting.redis
    if not redis.alive:
        redis.start()
    redis.resume()
    for _, remedy in WRONG.values():
        redis.command(*remedy)
    seats = [lasting.seat(node.name) for node in lasting.nodes]
    until(lambda: all(s.stats.cluster.directory.settled for s in seats))


def away(world, how: str) -> None:
    if how == "killed":
        world.redis.kill()
    elif how == "stopped":
        world.redis.pause()
    else:
        world.redis.command(*WRONG[how][0])


def back(world, how: str) -> None:
    if how == "killed":
        world.redis.start()
    elif how == "stopped":
        world.redis.resume()
    else:
        world.redis.command(*WRONG[how][1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "full", "forbidden"])
def test_without_redis_the_pool_serves_what_is_local_and_what_it_remembers(
    world, numbers, until, how
):
    a, b = world.seats()
    local, remembered, unseen = numbers(16), numbers(16), numbers(16)
    a.put(remembered)
    a.put(unseen)
    b.put(local)
    until(lambda: a.announced and b.announced)
    assert b.read(remembered) == 16
    b.client.remove(b.ns, [n.to_bytes(16, "big") for n in remembered])
    until(lambda: b.announced)

    away(world, how)
    new = numbers(64)
    begun = time.monotonic()
    for at in range(0, 64, 8):
        assert a.put(new[at : at + 8]) == 8, "writes never fail"
    assert b.read(local) == 16
    assert b.read(remembered, wait_s=10) == 16, "where they were is remembered"
    assert a.read(new) == 64
    if how != "full":  # which answers reads
        assert b.read(unseen, wait_s=2) == 0
    assert time.monotonic() - begun < PATIENCE_S

    back(world, how)
    until(lambda: b.read(new, wait_s=2) == 64, "what was put meanwhile is announced")
    until(lambda: b.read(unseen, wait_s=2) == 16, "and so is what was put before")
    assert b.read(local) == 16


def test_an_emptied_redis_is_filled_again_by_those_who_hold_the_blocks(world, numbers, until):
    a, b = world.seats()
    some = numbers(200)
    for at in range(0, 200, 50):
        a.put(some[at : at + 50])
    until(lambda: a.announced)
    world.redis.flush()
    until(lambda: b.replicas(some) == [1] * 200, "all are announced again")
    assert b.read(some) == 200


def test_a_redis_that_comes_back_empty_is_filled_again_and_old_lives_stay_misses(
    world, numbers, until
):
    a, b = world.seats()
    kept, gone = numbers(100), numbers(100)
    a.put(kept)
    b.put(gone)
    until(lambda: a.announced and b.announced)
    world.redis.kill()
    world.node("b").kill()
    world.redis.start()
    world.node("b").start()
    again = world.seat("b")
    until(lambda: again.read(kept, wait_s=2) == 100, "what a holds")
    assert again.read(gone, wait_s=1) == 0
    assert a.read(gone, wait_s=1) == 0


def test_a_daemon_starts_without_its_redis_and_finds_it_later(world, numbers, until):
    a, _ = world.seats()
    some = numbers(20)
    a.put(some)
    until(lambda: a.announced)
    world.redis.kill()
    world.node("b").restart()
    again = world.seat("b")
    assert again.put(numbers(5)) == 5
    assert again.read(some, wait_s=1) == 0
    world.redis.start()
    until(lambda: again.read(some, wait_s=2) == 20, "its directory is back")


def test_a_redis_that_talks_nonsense_costs_hits_and_nothing_else(
    servers, start_cluster, numbers, until
):
    _, redis = servers
    with Proxy(("127.0.0.1", redis.port)) as proxy:
        host, port = proxy.address
        world = start_cluster(nodes=2, directory=f"redis://{host}:{port}")
        a, b = world.seats()
        some, new = numbers(20), numbers(20)
        a.put(some)
        until(lambda: a.announced)
        proxy.set(Fault(flip=("down", 0), flip_every=1))
        assert a.put(new) == 20
        assert b.read(some, wait_s=1) in {0, 20}
        assert a.read(new) == 20
        until(lambda: not a.stats.cluster.directory.connected)
        proxy.set()
        until(lambda: b.read(new, wait_s=2) == 20, "it talks sense again")
        assert b.read(some) == 20
