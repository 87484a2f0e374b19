"""What operators ask of any node through their own, and have done as jobs."""

import json
import os

import msgspec
import pytest

from kvpool.client import Client
from kvpool.errors import (
    ClusterUnavailable,
    InvalidRequest,
    LimitExceeded,
    NotAuthenticated,
    Unavailable,
)
from kvpool.types import NamespaceRecord, PartSpec
from kvpool.wire import client as client_wire
from kvpool.wire import operator as operator_wire
from tests.integration.cluster.conftest import NBYTES, PLAIN, key, keys_of
from tests.support.client_inside import connections_of
from tests.support.local_cluster import SECRET
from tests.support.waiting import PATIENCE_S

DIGEST = PLAIN.digest()
TWO = NamespaceRecord({"model": "of two ranks"}, (PartSpec(NBYTES), PartSpec(NBYTES)))


@pytest.fixture
def pair(start_cluster):
    return start_cluster(nodes=2).seats()


def begin(seat, spec, *, job="j", node="", dry_run=False, **more):
    request = operator_wire.BeginJob(job, json.dumps(spec).encode(), dry_run)
    return seat.client.ask_node(request, node=node, **more)


@pytest.fixture
def ended(until):
    """A job's view, once it has ended."""

    def wait(seat, job="j", node=""):
        found = []

        def done():
            found[:] = seat.client.ask_node(operator_wire.Jobs([job]), node=node)
            return found and found[0].state != "running"

        until(done)
        return msgspec.to_builtins(found[0])

    return wait


def every_block(seat, node="", tier="dram", count=7, digest=DIGEST):
    """All pages, one after the other."""
    found, cursor, pages = [], "", 0
    while cursor is not None:
        page = seat.client.ask_node(
            operator_wire.ListBlocks(tier, cursor, count, digest), node=node
        )
        assert len(page.blocks) <= count
        found += msgspec.to_builtins(page.blocks)
        cursor = page.cursor
        pages += 1
        assert pages < 10_000
    return found


def test_another_node_is_asked_through_ones_own(pair, numbers):
    a, b = pair
    some = numbers(20)
    b.put(some)
    for node, held in (("a", 0), ("b", 20)):
        stats = a.client.inspect(node)
        assert stats.node == node
        assert stats.tenants["default"].blocks == held
    assert a.client.inspect().node == "a"
    assert a.client.ask_node(operator_wire.Cluster(), node="b")["node"] == "b"


def test_what_is_wrong_is_told(pair):
    a, _ = pair
    for message, more, error, text in (
        (operator_wire.Inspect(), {"node": "z"}, InvalidRequest, "in this cluster"),
        (operator_wire.Inspect(), {"tenant": "other"}, InvalidRequest, "no tenant"),
        (
            operator_wire.Inspect(),
            {"tenant": "other", "node": "b"},
            InvalidRequest,
            "b has no tenant",
        ),
        (
            client_wire.Match(0, b"", []),
            {"node": "b"},
            InvalidRequest,
            "Match is not an operator's request",
        ),
        (operator_wire.ListBlocks("tape", "", 10), {"node": "b"}, InvalidRequest, "dram"),
        (operator_wire.ListBlocks("dram", "x", 10), {"node": "b"}, InvalidRequest, "cursor"),
        (operator_wire.ListBlocks("dram", "", 10, b"n" * 16), {}, InvalidRequest, "not open"),
        (operator_wire.ShowBlocks(b"", bytes(16 * 1025)), {}, LimitExceeded, "1024"),
        (operator_wire.BeginJob("j", b"{}"), {"node": "b"}, InvalidRequest, "not a valid job"),
        (
            operator_wire.BeginJob("j", b'{"kind":"evict","keys":["00"]}'),
            {},
            InvalidRequest,
            "regex",
        ),
        (
            operator_wire.BeginJob("", b'{"kind":"evict","everything":true}'),
            {},
            InvalidRequest,
            "name is invalid",
        ),
    ):
        with pytest.raises(error, match=text):
            a.client.ask_node(message, **more)


def test_only_operators(start_cluster):
    world = start_cluster(nodes=1, environ={"KVPOOL_OPERATOR_TOKEN": "o" * 20})
    client = world.node("a").client(connect=True, operator_token="wrong")
    for message in (
        operator_wire.OnNode("", b"", 0.0),
        operator_wire.Inspect(),
        operator_wire.Events(0, 1),
    ):
        with pytest.raises(NotAuthenticated), connections_of(client).request() as connection:
            connection.ask(message, PATIENCE_S)
    client.close()


def test_all_blocks_are_listed_once(pair, numbers):
    a, b = pair
    some = numbers(100)
    b.put(some)
    listed = every_block(a, "b")
    assert sorted(each["key"] for each in listed) == sorted(k.hex() for k in keys_of(some))
    by_key = {each["key"]: each for each in listed}
    for before, number in zip([None, *some], some, strict=False):
        shown = by_key[key(number).hex()]
        assert shown["parent"] == ("" if before is None else key(before).hex())
        assert shown["depth"] == some.index(number)
        assert shown["parts"] == 1 and shown["bytes"] >= NBYTES and shown["pin"] == "none"
        assert 0 <= shown["age_s"] < 120 and not shown["reused"]
    assert every_block(a) == []
    (one,) = a.client.ask_node(operator_wire.ShowBlocks(DIGEST, key(some[5])), node="b")
    assert (one.key, one.tier) == (key(some[5]).hex(), "dram")


def test_a_chain_is_evicted_from_where_it_is(pair, numbers, ended):
    a, b = pair
    chain, other = numbers(60), numbers(30)
    b.put(chain)
    b.put(other)
    spec = {"kind": "evict", "keys": [key(chain[40]).hex()], "chains": True}
    begin(a, spec, job="dry", node="b", dry_run=True, by="somebody")
    view = ended(a, "dry", "b")
    assert (view["state"], view["blocks"], view["dry_run"]) == ("done", 20, True), view
    assert view["by"] == "somebody on a"
    assert b.here(chain) == 60
    begin(a, spec, node="b")
    view = ended(a, node="b")
    assert (view["state"], view["blocks"], view["kept"]) == ("done", 20, 0)
    assert view["nbytes"] >= 20 * NBYTES
    assert (b.here(chain), b.here(chain[:40]), b.here(other)) == (40, 40, 30)


def test_pinned_blocks_stay(pair, numbers, ended):
    a, b = pair
    some = numbers(40)
    b.put(some)
    pins = operator_wire.PinBlocks(b"".join(keys_of(some[:4])), "hard", DIGEST)
    assert a.client.ask_node(pins, node="b") == 4
    begin(a, {"kind": "evict", "namespace": DIGEST.hex()}, node="b")
    view = ended(a, node="b")
    assert (view["blocks"], view["kept"]) == (36, 4)
    assert b.here(some) == b.here(some[:4]) == 4


def test_what_is_worth_least_goes_first(start_cluster, numbers, ended):
    (b,) = start_cluster(nodes=1, environ={"KVPOOL_POLICY": "lru"}).seats()
    old, young = numbers(40), numbers(40)
    b.put(old)
    b.put(young)
    assert b.read(old) == 40, "so they were used later"
    stride = every_block(b)[0]["bytes"]
    begin(b, {"kind": "evict", "least_bytes": 10 * stride})
    view = ended(b)
    assert (view["state"], view["blocks"], view["nbytes"]) == ("done", 10, 10 * stride)
    assert (b.here(old), b.here(young)) == (40, 30)
    begin(b, {"kind": "evict", "least_bytes": 5 * stride}, job="dry", dry_run=True)
    assert ended(b, "dry")["blocks"] == 5
    assert (b.here(old), b.here(young)) == (40, 30)


def test_what_was_not_used_for_a_while(pair, numbers, ended, until):
    _, b = pair
    old, young = numbers(10), numbers(10)
    b.put(old)

    def aged():
        shown = b.client.ask_node(operator_wire.ShowBlocks(DIGEST, key(old[0])))
        return shown[0].age_s >= 8

    until(aged)
    b.put(young)
    begin(b, {"kind": "evict", "unused_s": 7.0})
    assert ended(b)["blocks"] == 10
    assert (b.here(old), b.here(young)) == (0, 10)


def test_blocks_are_brought_and_moved(pair, numbers, ended, until):
    a, b = pair
    some = numbers(50)
    b.put(some)
    until(lambda: b.announced)
    named = {"kind": "warm", "namespace": DIGEST.hex()}
    begin(b, {**named, "keys": [k.hex() for k in keys_of(some[:8])]}, node="a")
    view = ended(b, node="a")
    assert (view["state"], view["blocks"], view["total"]) == ("done", 8, 8), view
    assert (a.here(some), b.here(some)) == (8, 50)
    begin(b, {**named, "source": "b", "move": True}, node="a", job="m")
    view = ended(b, "m", "a")
    assert (view["state"], view["blocks"], view["seen"]) == ("done", 42, 50), view
    assert (a.get(some), b.here(some)) == (50, 0)


def test_a_node_brings_nothing_from_itself(pair, numbers, until):
    """It would have what it lists, and give it up."""
    _, b = pair
    some = numbers(10)
    b.put(some)
    until(lambda: b.announced)
    spec = {"kind": "warm", "namespace": DIGEST.hex(), "source": "b", "move": True}
    with pytest.raises(InvalidRequest, match="both source and destination"):
        begin(b, spec)
    assert b.here(some) == 10


def test_a_block_of_which_the_source_has_more_stays_there(start_cluster, numbers):
    """Whoever takes blocks over says which of their parts it has."""
    a, b = start_cluster(nodes=2).seats(TWO)
    whole, half = numbers(4), numbers(4)
    b.put([*whole, *half])
    taken, masks = b"".join(keys_of([*whole, *half])), bytes([0b11] * 4 + [0b01] * 4)
    for wrong in (
        operator_wire.Evict(taken, TWO.digest(), masks=masks[:7]),
        operator_wire.Evict(taken, masks=masks),
    ):
        with pytest.raises(InvalidRequest, match="masks"):
            a.client.ask_node(wrong, node="b")
    assert a.client.ask_node(operator_wire.Evict(taken, TWO.digest(), masks=masks), node="b") == 4
    assert (b.here(whole), b.read(half)) == (0, 4)
    again = operator_wire.Evict(taken[64:], TWO.digest(), masks=masks[4:])
    assert a.client.ask_node(again, node="b") == 0, "which is not: all"
    assert b.read(half) == 4


def test_what_finds_no_room_stays_where_it_is(start_cluster, numbers, ended, until):
    """A move ends before what has come pushes out what came before it, or what only the target has."""
    world = start_cluster(nodes=1, environ={"KVPOOL_MEMORY": "32MiB"})
    world.make("small", environ={"KVPOOL_MEMORY": "4MiB", "KVPOOL_FORWARD": "false"}).start()
    big, small = world.seat("a"), world.seat("small")
    mine, some = numbers(40), numbers(600)
    small.put(mine)
    big.put(some)
    until(lambda: big.announced and small.announced)
    keys = [k.hex() for k in keys_of(some)]
    begin(
        big,
        {"kind": "warm", "namespace": DIGEST.hex(), "keys": keys, "source": "a", "move": True},
        node="small",
    )
    view = ended(big, node="small")
    assert view["state"] == "failed" and "no room" in view["error"], view
    assert 0 < view["blocks"] < 600
    assert small.here(mine) == 40
    there, here = (
        {
            k
            for k, flag in zip(some, seat.client.contains(seat.ns, keys_of(some)), strict=True)
            if flag
        }
        for seat in (small, big)
    )
    assert there | here == set(some), "each is somewhere"
    assert len(there) == view["blocks"] and not there & here


def test_a_node_is_warmed_before_its_engines_begin(start_cluster, numbers, ended, until):
    world = start_cluster(nodes=2)
    b, some = world.seat("b"), numbers(30)
    b.put(some)
    until(lambda: b.announced)
    until(lambda: "a" in {found["node"] for found in b.client.cluster()["nodes"]})
    with world.node("a").client(connect=True) as stranger:
        keys = b"".join(keys_of(some))
        until(lambda: stranger.routing.prefixes(DIGEST, keys, wait_s=5.0) == {"b": (30, 30)})
    begin(b, {"kind": "warm", "namespace": DIGEST.hex(), "source": "b"}, node="a")
    view = ended(b, node="a")
    assert (view["state"], view["blocks"]) == ("done", 30), view
    assert world.seat("a").here(some) == 30


def test_a_job_is_stopped_and_remembered(pair, numbers, ended):
    a, b = pair
    b.put(numbers(100))
    begin(a, {"kind": "evict", "unused_s": 1e6}, node="b")
    with pytest.raises(InvalidRequest, match="already"):
        begin(b, {"kind": "evict", "everything": True})
    a.client.ask_node(operator_wire.StopJob("j"), node="b")
    view = ended(a, node="b")
    assert view["state"] in {"cancelled", "done"}
    assert a.client.ask_node(operator_wire.StopJob("j"), node="b") == 0
    assert a.client.ask_node(operator_wire.Jobs(["nobody's"]), node="b") == []
    assert len(a.client.ask_node(operator_wire.Jobs(), node="b")) == 1


def test_what_happened_is_told(pair, numbers, ended):
    a, b = pair
    b.put(numbers(3))
    told = b.client.ask_node(operator_wire.Events(0, 1000))
    assert told.first == 1
    assert [e.number for e in told.events] == list(range(1, told.last + 1))
    joined = [e.details["of"] for e in told.events if e.kind == "node joined"]
    assert set(joined) == {"a", "b"}
    begin(a, {"kind": "evict", "everything": True}, node="b", by="token ops")
    ended(a, node="b")
    a.client.ask_node(operator_wire.PinBlocks(bytes(16), "soft", DIGEST), node="b", by="token ops")
    news = b.client.ask_node(operator_wire.Events(told.last, 1000, 5.0)).events
    assert [e.kind for e in news] == ["job began", "change", "job ended", "change"]
    changes = [e.details for e in news if e.kind == "change"]
    assert [(each["by"], each["what"]) for each in changes] == [
        ("token ops on a", "evict"),
        ("token ops on a", "pin"),
    ]
    # Bare requests are in the name of who asks.
    b.client.pin_blocks(bytes(16), "soft", digest=DIGEST)
    last = b.client.ask_node(operator_wire.Events(0, 1000)).events[-1]
    assert last.details["by"] == f"uid {os.getuid()}"
    nothing = b.client.ask_node(operator_wire.Events(last.number, 10))
    assert nothing.events == []


def test_a_node_that_is_gone(pair):
    a, b = pair
    b.node.kill()
    with pytest.raises(
        (InvalidRequest, ClusterUnavailable), match=r"no node 'b'|reached|ended|closed"
    ):
        a.client.inspect("b")
    assert a.client.inspect().node == "a"


def test_settings_that_may_change(pair):
    a, b = pair

    def shown(seat, node=""):
        return {
            each.name: msgspec.to_builtins(each)
            for each in seat.client.ask_node(operator_wire.Settings(), node=node)
        }

    def change(**changes):
        return a.client.ask_node(
            operator_wire.ChangeSettings(json.dumps(changes).encode()), node="b"
        )

    before = shown(a, "b")
    assert before["cluster_secret"] == {
        "name": "cluster_secret",
        "value": True,
        "secret": True,
        "default": False,
        "changeable": False,
        "help": "The shared secret with which peers authenticate, at least 16 random characters",
        "form": "TEXT",
    }
    assert before["operator_token"]["value"] is False
    assert SECRET not in json.dumps(before)
    wanted = {
        "replication_bandwidth": "1MiB",
        "forward": False,
        "clients_max": 7,
        "log_level": "debug",
    }
    assert change(**wanted) == 4
    after = shown(a, "b")
    differ = {name: after[name]["value"] for name in after if after[name] != before[name]}
    assert differ == {**wanted, "replication_bandwidth": 1 << 20}
    assert shown(a) == {**before, **{n: shown(a)[n] for n in ("node", "socket", "listen")}}
    for changes, text in (
        ({"memory": "1GiB"}, "cannot be changed"),
        ({"colour": "red"}, "is no setting"),
        ({"forward": False, "replicas_max": 1000}, "1 to 64"),
        ({"log_level": "loud"}, "one of"),
        ({}, "at least one setting"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            change(**changes)
    assert shown(a, "b") == after
    # The limit holds at once: three processes of this one's are there at least.
    assert change(clients_max=1) == 1
    with pytest.raises(Unavailable, match="limit"):
        Client(b.node.socket, timeout_s=PATIENCE_S, connect=True)


def test_copies_are_told_beside_what_is_in_use(pair, numbers, until):
    a, b = pair
    some = numbers(20)
    a.put(some)
    until(lambda: a.announced)
    assert until(lambda: b.read(some)) == 20

    def told(node):
        nodes = {each["node"]: each for each in a.client.cluster()["nodes"]}
        return nodes[node]["tiers"][0]

    until(lambda: told("b")["secondary_bytes"] >= 20 * NBYTES, "its record is a second old")
    assert told("b")["used_bytes"] == 0
