"""What a router is told on one node of the others: their engines, and how much of a prompt each could give."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.errors import InvalidRequest
from kvpool.types import EngineRecord
from tests.support.waiting import until


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture(scope="module")
def world(shared_cluster: Any) -> Iterator[Any]:
    with shared_cluster(memory="64MiB") as world:
        yield world


@contextlib.contextmanager
def client_of(node: Any) -> Iterator[Any]:
    with node.client(connect=True) as client:
        yield client


def test_prefixes_of_all_nodes(world: Any, numbers: Any) -> None:
    a, b, c = world.seats()
    chain = list(numbers(400))
    keys = [key(number) for number in chain]
    # Another client, which has not opened the namespace: the cluster knows it.
    with client_of(c.node) as asker:
        a.put(chain[:300])
        b.put(chain[:100])
        b.put(chain[200:])
        expected = {a.name: (300, 300), b.name: (100, 100)}
        for seat in (a, b, c):
            until(
                lambda seat=seat: (
                    seat.client.routing.prefixes(a.ns.digest, keys, wait_s=5.0) == expected
                ),
                f"{seat.name} knows what there is",
            )
        assert asker.routing.prefixes(a.ns.digest, keys, wait_s=5.0) == expected
        assert asker.routing.prefixes(a.ns.digest, keys[100:], wait_s=5.0) == {a.name: (200, 200)}
        assert asker.routing.prefixes(bytes(16), keys) == {}
        with pytest.raises(InvalidRequest):
            asker.routing.prefixes(a.ns.digest, b"x" * 17)
        # In no time, only what the node has itself.
        assert a.client.routing.prefixes(a.ns.digest, keys, wait_s=0.0) == {a.name: (300, 300)}


def test_the_hit_rule_decides(world: Any, hybrid: Any, numbers: Any) -> None:
    a, b, c = world.seats(hybrid)
    chain = list(numbers(12))
    keys = [key(number) for number in chain]
    a.put(chain)
    b.put(chain[:7])
    expected = {a.name: (12, 12), b.name: (4, 4)}  # a part of every fourth block
    until(
        lambda: c.client.routing.prefixes(a.ns.digest, keys, wait_s=5.0) == expected,
        "all is announced",
    )


def test_engines_of_all_nodes_while_they_live(world: Any) -> None:
    a, b, _ = world.nodes
    with contextlib.ExitStack() as stack:
        asker = stack.enter_context(client_of(b))
        mine = stack.enter_context(client_of(b))
        seat = world.seat(a.name)
        seat.client.engine.announce(seat.ns, EngineRecord("http://a:1", role="prefill"))
        mine.engine.announce(mine.open(seat.record), EngineRecord("http://b:1", groups=(0, 1)))
        until(lambda: len(asker.routing.engines()) == 2, "both are known")
        found = {engine["url"]: engine for engine in asker.routing.engines()}
        assert found["http://a:1"]["node"] == a.name
        assert found["http://a:1"]["role"] == "prefill"
        assert found["http://b:1"]["node"] == b.name
        assert found["http://b:1"]["groups"] == [0, 1]
        assert found["http://b:1"]["here"]
        assert {engine["namespace"] for engine in found.values()} == {seat.ns.digest.hex()}
        seat.client.engine.announce(seat.ns, None)
        until(
            lambda: [engine["url"] for engine in asker.routing.engines()] == ["http://b:1"],
            "the other node hears of the end",
        )
