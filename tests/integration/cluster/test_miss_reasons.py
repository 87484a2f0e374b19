"""Why a read missed, where other nodes have a part in it."""

import signal

from kvpool.telemetry.misses import Reason
from kvpool.types import Recompute
from tests.support.waiting import PATIENCE_S


def keys(numbers):
    return [number.to_bytes(16, "big") for number in numbers]


def last(seat, numbers):
    return seat.client.routing.why_missing(seat.ns.digest, keys(numbers))["last"]


def counted(seat):
    return seat.stats.tenants["default"].namespaces[seat.ns.digest.hex()].misses


def test_a_node_that_was_lost_and_what_is_computed_sooner(start_cluster, numbers, until):
    world = start_cluster(nodes=3, environ={"KVPOOL_MEMBER_TTL_S": "6"})
    a, b, c = world.seats()
    some, only_there = list(numbers(8)), list(numbers(8))
    a.put(some)
    a.put(only_there)
    until(lambda: a.announced, "they are announced")

    # There, but the engine computes them sooner.
    until(lambda: b.replicas([*some, *only_there]) == [1] * 16)
    cheap = Recompute(1e-9)
    assert b.client.pull(b.ns, keys(some), wait_s=PATIENCE_S, recompute=cheap) == 0
    assert last(b, some)["reason"] == Reason.DECLINED
    assert last(b, some)["found"] == 0

    # From another node's daemon, for a tenant's own client, and of the node itself.
    assert (
        c.client.routing.why_missing(c.ns.digest, keys(some), node="b")["last"]["reason"]
        == "declined"
    )
    told = c.client.routing.why_missing(c.ns.digest, keys(some), node="a")
    assert (told["blocks"], told["missing"]) == (8, None)

    # Gone with its node; the directory still names it. (Of the others b may have loaded some, to measure a's speed.)
    world.node("a").kill()
    until(lambda: "a" not in c.members, "its end is known")
    assert c.client.pull(c.ns, keys(only_there), wait_s=PATIENCE_S) == 0
    found = last(c, only_there)
    told = (found["reason"], found["where"])
    if told != (
        Reason.NODE_LOST,
        "a",
    ):  # its entries were swept before, and then nobody knows of them
        assert told == (Reason.NEVER_STORED, "")
        assert sum(seat.client.cluster()["swept"] for seat in (b, c)) > 0
    until(lambda: counted(c), "it is counted")
    assert {reason: (m.requests, m.blocks) for reason, m in counted(c).items()} == {told[0]: (1, 8)}

    # Never seen by anybody.
    never = list(numbers(4))
    assert c.client.pull(c.ns, keys(never), wait_s=PATIENCE_S) == 0
    assert last(c, never)["reason"] == Reason.NEVER_STORED


def test_a_pull_that_comes_too_late(start_cluster, numbers, until):
    world = start_cluster(nodes=2)
    a, b = world.seats()
    some = list(numbers(4))
    a.put(some)
    until(lambda: a.announced)
    until(lambda: b.replicas(some) == [1] * 4)
    a.node.signal(signal.SIGSTOP)
    try:
        assert b.client.pull(b.ns, keys(some), wait_s=1.0) == 0
    finally:
        a.node.signal(signal.SIGCONT)
    assert last(b, some)["reason"] == Reason.LATE


def test_a_block_that_another_node_has_dropped(start_cluster, numbers, until):
    """The node that is asked does not know; the one that dropped it does, and the command asks all."""
    world = start_cluster(nodes=2)
    a, b = world.seats()
    some = list(numbers(4))
    a.put(some)
    a.client.remove(a.ns, keys(some))
    until(lambda: a.announced)
    assert b.client.pull(b.ns, keys(some), wait_s=PATIENCE_S) == 0
    assert last(b, some)["reason"] == Reason.NEVER_STORED
    told = b.client.routing.why_missing(b.ns.digest, keys(some), node="a")
    assert told["missing"]["reason"] == Reason.REMOVED
