"""Following on one node, and on two that know no others: what clients see of it."""

import threading
import time

import numpy as np
import pytest

from kvpool.errors import InvalidRequest, LimitExceeded, Unavailable
from kvpool.types import NamespaceRecord
from kvpool.wire import client as client_wire
from tests.support.waiting import PATIENCE_S, until

NBYTES = 64 << 10
RECORD = NamespaceRecord.simple("followed", block_bytes=NBYTES, block_tokens=16)
FOLLOWS_MAX = 48  # of one tenant


def keys_of(numbers) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def block(number: int) -> bytes:
    return np.random.default_rng(number).bytes(NBYTES)


def put(client, numbers) -> None:
    assert client.put(client.open(RECORD), keys_of(numbers), list(map(block, numbers))) > 0


def right(client, numbers) -> bool:
    found = client.get(client.open(RECORD), keys_of(numbers))
    return [bytes(one) for one in found if one is not None] == list(map(block, numbers))


class Follower:
    """A follow in a thread."""

    def __init__(self, client, numbers, **settings) -> None:
        self.outcome = []
        space = client.open(RECORD)

        def run() -> None:
            try:
                self.outcome.append(client.follow(space, keys_of(numbers), **settings))
            except (InvalidRequest, Unavailable) as error:
                self.outcome.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def result(self):
        self.thread.join(2 * PATIENCE_S)
        assert self.outcome, "it goes on"
        return self.outcome[0]


def test_alone_it_waits_for_the_nodes_own_engines(daemon, client):
    with daemon.client() as engine:
        follower = Follower(client, range(8), wait_s=PATIENCE_S)
        until(lambda: engine.stats().prefix_streams.under_way == 1)
        for n in range(8):
            assert not follower.outcome
            put(engine, [n])
        assert follower.result() == 8
        assert right(client, range(8))


def test_with_peers_and_no_directory(start):
    a = start("--listen", "tcp://127.0.0.1:0", name="a")
    url = a.ready.rsplit("peers at ", 1)[1].strip()
    b = start("--peer", url, name="b")
    with a.client(connect=True) as engine, b.client(connect=True) as client:
        for source in ("", url):  # a peer that only its address is known of is called by that
            numbers = range(100, 120) if source else range(20)
            follower = Follower(client, numbers, wait_s=PATIENCE_S, source=source)
            for n in numbers:
                put(engine, [n])
                until(lambda n=n: client.contains(client.open(RECORD), keys_of([n])).all())
            assert follower.result() == 20
            assert right(client, numbers)


def test_it_ends_with_what_will_not_come(start):
    """A save that its engine gave up, here and on the other node; the rest of the prompt comes, late as it is."""
    a = start("--listen", "tcp://127.0.0.1:0", name="a")
    url = a.ready.rsplit("peers at ", 1)[1].strip()
    b = start("--peer", url, "--node", "b", name="b")
    with a.client(connect=True) as engine, b.client(connect=True) as client:
        for begin, writer, source in ((0, engine, url), (100, client, "b")):
            put(writer, [begin])
            follower = Follower(client, range(begin, begin + 8), wait_s=PATIENCE_S, source=source)
            until(lambda at=writer: at.stats().prefix_streams.waiters == 1, "its node is asked")
            writer.dropped(writer.open(RECORD), keys_of(range(begin + 3, begin + 8)))
            put(writer, [begin + 1, begin + 2])
            until(
                lambda one=follower: one.outcome, "long before its deadline", seconds=PATIENCE_S / 2
            )
            assert follower.result() == 3
            assert right(client, range(begin, begin + 3))


def test_what_is_dropped_concerns_nobody_where_the_daemon_does_not_know_it(daemon):
    with daemon.client() as engine:
        space = engine.open(RECORD)
        engine.dropped(space, [])
        daemon.stop()
        engine.dropped(space, keys_of([1]))


def test_by_the_deadline_there_is_what_there_is(client):
    space = client.open(RECORD)
    put(client, [0, 1, 3])
    began = time.monotonic()
    assert client.follow(space, keys_of(range(5)), wait_s=0.3) == 2
    assert time.monotonic() - began >= 0.3
    assert client.follow(space, keys_of(range(2)), wait_s=PATIENCE_S) == 2
    assert client.follow(space, [], wait_s=PATIENCE_S) == 0


def test_a_time_and_parts_that_are_none(client):
    space = client.open(RECORD)
    for wait_s in (0.0, -1.0):
        with pytest.raises(InvalidRequest):
            client.follow(space, keys_of([1]), wait_s=wait_s)
    with pytest.raises(InvalidRequest):
        client.follow(space, keys_of([1]), wait_s=1.0, parts=[7])


def test_a_client_that_closes_gets_its_thread_back(daemon, client):
    with daemon.client() as other:
        follower = Follower(other, range(3), wait_s=PATIENCE_S)
        until(lambda: client.stats().prefix_streams.under_way == 1)
        other.close()
        assert isinstance(follower.result(), Unavailable)
        until(lambda: client.stats().prefix_streams.under_way == 0)
        assert isinstance(Follower(other, range(3), wait_s=PATIENCE_S).result(), Unavailable)


def test_more_than_a_tenant_may_follow_are_refused(daemon, client):
    raws = [daemon.raw() for _ in range(2)]
    number = None
    for raw in raws:
        raw.hello()
        answer = raw.ask(
            client_wire.OpenNamespace(RECORD.digest(), RECORD.canonical(), [(NBYTES, "full", 0, 1)])
        )
        number = answer.number
    for n in range(FOLLOWS_MAX):
        raws[n % 2].send(client_wire.Follow(number, b"".join(keys_of([n])), 60.0))
    until(lambda: client.stats().prefix_streams.under_way == FOLLOWS_MAX)
    with pytest.raises(LimitExceeded):
        client.follow(client.open(RECORD), keys_of([1000]), wait_s=1.0)
    put(client, range(32))
    until(lambda: client.stats().prefix_streams.under_way == FOLLOWS_MAX - 32)
    raws[0].sock.close()
    raws[1].sock.close()
    until(lambda: client.stats().prefix_streams.under_way == 0)
    assert client.stats().prefix_streams.waiters == 0


def test_a_daemon_that_stops_ends_it(daemon, client):
    with daemon.client() as other:
        follower = Follower(other, range(3), wait_s=PATIENCE_S)
        until(lambda: client.stats().prefix_streams.under_way == 1)
        daemon.stop()
        assert isinstance(follower.result(), Unavailable)
