"""Copies that were asked for: made, spread over zones, repaired, bounded, and changed later."""

import msgspec
import pytest

from kvpool.errors import LimitExceeded
from kvpool.placement.records import NamespaceSettings
from kvpool.types import NamespaceRecord

ZONES = {"a": "zone=one", "b": "zone=one", "c": "zone=two"}


def record(name: str) -> NamespaceRecord:
    return NamespaceRecord.simple(name, block_bytes=32 << 10, block_tokens=16)


@pytest.fixture(scope="module")
def zoned(shared_cluster):
    """a and b in one zone, c in another one."""
    with shared_cluster(memory="32MiB", labels=ZONES) as world:
        yield world


def test_two_copies_of_a_namespaces_blocks_land_in_two_zones(zoned, numbers, until):
    twice = record("twice")
    a, b, c = zoned.seats(twice, replicas=2)
    some = numbers(40)
    for at in range(0, 40, 4):  # a choice for each
        a.put(some[at : at + 4])
        until(lambda n=at + 4: a.replicas(some[:n]) == [2] * n, what="two replicas of each")
    assert (a.here(some), b.here(some), c.here(some)) == (40, 0, 40)
    assert c.get(some) == 40


def test_copies_of_one_put_are_more_than_its_namespaces(zoned, numbers, until):
    a, b, c = zoned.seats(record("once"))
    more, plain = numbers(10), numbers(10)
    a.put(plain)
    a.put(more, replicas=3)
    until(lambda: a.replicas(more) == [3] * 10, what="three replicas of each")
    assert a.replicas(plain) == [1] * 10
    assert (b.here(more), c.here(more)) == (10, 10)


def test_a_put_asks_for_no_more_copies_than_the_cluster_makes(start_cluster, numbers, until):
    world = start_cluster(environ={"KVPOOL_REPLICAS_MAX": "2"})
    a, _, c = world.seats(record("capped"), replicas=3)
    some, more = numbers(10), numbers(10)
    a.put(some)
    a.put(more, replicas=3)
    until(lambda: a.replicas(some) == a.replicas(more) == [2] * 10, what="two replicas of each")
    until(lambda: a.stats.replication.wanted == 0)
    assert a.replicas(some) == a.replicas(more) == [2] * 10
    with pytest.raises(LimitExceeded, match="replicas_max"):
        c.client.configure(c.ns.digest, replicas=3)


def test_a_later_wish_for_copies_takes_effect_on_what_is_there(zoned, numbers, until):
    later = record("later")
    a, b, c = zoned.seats(later)
    some, more = numbers(30), numbers(30)
    a.put(some)
    until(lambda: a.announced)
    b.client.configure(b.ns.digest, replicas=2, ttl_s=3600.0)
    expected = msgspec.to_builtins(NamespaceSettings(replicas=2, ttl_s=3600.0))
    until(lambda: a.settings == c.settings == expected, what="all nodes follow")
    a.put(more)
    until(lambda: a.replicas(more) == [2] * 30, what="of what is put from now on")
    until(lambda: a.replicas(some) == [2] * 30, what="of what was there before")
    assert c.here(more) == 30


def test_what_a_dead_owner_had_is_read_elsewhere_and_its_copies_are_made_up_for(
    start_cluster, numbers, until
):
    labels = {**ZONES, "d": "zone=three"}
    world = start_cluster(
        nodes=4, memory="32MiB", labels=labels, environ={"KVPOOL_MEMBER_TTL_S": "5"}
    )
    a, b, c, d = world.seats(record("survivor"), replicas=2)
    some = numbers(64)
    a.put(some)
    until(lambda: b.replicas(some) == [2] * 64, what="two replicas of each")
    world.node("a").kill()
    until(lambda: "a" not in b.members, what="the dead node's lease has ended")
    until(lambda: b.replicas(some) == [2] * 64, "two replicas of each, again")
    assert d.read(some) == 64
    assert b.read(some) == 64
    assert c.read(some) == 64


def test_a_restart_that_nobody_saw_as_an_absence_is_a_loss_of_copies_too(
    start_cluster, numbers, until
):
    world = start_cluster(nodes=3, memory="32MiB", environ={"KVPOOL_MEMBER_TTL_S": "5"})
    a, b, _ = world.seats(record("restarted"), replicas=3)
    some = numbers(32)
    a.put(some)
    until(lambda: a.replicas(some) == [3] * 32, what="three replicas of each")
    world.node("c").kill()
    world.node("c").start()
    again = world.seat("c", record("restarted"))
    until(lambda: again.here(some) == 32, what="replicas of all on the node that came back empty")
    assert again.get(some) == 32
    assert b.read(some) == 32
