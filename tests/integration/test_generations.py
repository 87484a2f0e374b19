"""Engines change their weights one after the other: nobody is given blocks of others' weights."""

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.errors import StaleEpoch, Unavailable
from kvpool.types import NamespaceRecord

NBYTES = 4096
RECORD = NamespaceRecord.simple("weights", block_bytes=NBYTES, block_tokens=16)


def keys_of(numbers: range) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


class Engine:
    """One engine: a client, and the version of the weights that its blocks are made of."""

    def __init__(self, daemon, weights: int = 0) -> None:
        self.client: Client = daemon.client(connect=True)
        self.ns = self.client.open(RECORD)
        self.weights = weights

    def load(self, weights: int) -> None:
        """New weights, and the reset that goes with them."""
        self.weights = weights
        self.client.namespaces.reset(self.ns)

    def back(self) -> bool:
        """Whether it has found the daemon again."""
        try:
            self.client.stats()
        except Unavailable:
            return False
        return True

    def put(self, numbers: range) -> int:
        data = np.full((len(numbers), NBYTES), self.weights, dtype=np.uint8)
        return self.client.put(self.ns, keys_of(numbers), data)

    def found(self, numbers: range) -> set[int]:
        """Of which weights the blocks are that it is given; empty when there are none."""
        got = self.client.get(self.ns, keys_of(numbers))
        return {block[0] for block in got if block is not None}


@pytest.fixture
def engines(daemon):
    both = [Engine(daemon), Engine(daemon)]
    yield both
    for engine in both:
        engine.client.close()


def test_each_engine_resets_once_for_each_change_in_any_order(engines):
    one, two = engines
    one.put(range(8))
    assert two.found(range(8)) == {0}
    for weights, (first, second) in enumerate([(one, two), (two, one), (one, two)], 1):
        first.load(weights)
        assert first.found(range(8)) == set()
        first.put(range(8))
        assert second.found(range(8)) == set()
        with pytest.raises(StaleEpoch):
            second.put(range(8, 16))
        second.load(weights)
        assert second.found(range(16)) == {weights}
        assert (
            one.client.namespaces.generation(one.ns)
            == two.client.namespaces.generation(two.ns)
            == weights
        )


def test_an_engine_that_is_two_changes_behind_is_let_in_after_its_second(engines):
    one, two = engines
    one.load(1)
    one.load(2)
    one.put(range(4))
    with pytest.raises(StaleEpoch, match="more often elsewhere"):
        two.load(1)
    assert two.found(range(4)) == set()
    with pytest.raises(StaleEpoch):
        two.put(range(4, 8))
    assert one.found(range(8)) == {2}
    two.load(2)
    assert two.found(range(4)) == {2}


def test_a_restart_of_the_daemon_lets_nobody_in(daemon, start, engines, until):
    one, two = engines
    one.load(1)
    with pytest.raises(StaleEpoch):
        two.put(range(4))
    daemon.kill()
    again = start("--socket", daemon.socket)
    until(two.back)
    one.client.close()
    one = Engine(again, 1)  # this one knows that its weights are the latest
    one.ns = one.client.open(RECORD, generation=1)
    one.put(range(4))
    with pytest.raises(StaleEpoch):
        two.put(range(4, 8))
    assert two.found(range(8)) == set()
    two.load(1)
    assert two.client.namespaces.generation(two.ns) == 1
    assert two.found(range(8)) == one.found(range(8)) == {1}
    one.client.close()


def test_a_reset_after_a_restart_enters_what_was_begun(daemon, start, engines, until):
    one, two = engines
    one.load(1)
    daemon.kill()
    start("--socket", daemon.socket)
    until(lambda: one.back() and two.back())
    two.load(1)  # before the other one has said what it knows
    two.put(range(4))
    assert one.found(range(4)) == {1}
    assert one.put(range(4, 6)) == 2
    assert two.found(range(6)) == {1}


def test_an_operators_clear_changes_nobodys_weights(engines):
    one, two = engines
    one.load(1)
    one.put(range(4))
    with pytest.raises(StaleEpoch):
        two.put(range(4))
    one.client.clear(one.ns.digest)
    assert one.found(range(4)) == set()
    assert one.put(range(4)) == 4
    with pytest.raises(StaleEpoch):
        two.put(range(4))
    two.load(1)
    assert two.found(range(4)) == {1}
    one.client.clear(one.ns.digest, fence=True)
    for engine in engines:
        with pytest.raises(StaleEpoch):
            engine.put(range(4))
        engine.load(2)
        engine.put(range(4))
        assert engine.found(range(4)) == {2}


def test_processes_of_one_engine_open_with_its_generation(daemon, engines):
    one, two = engines
    one.load(1)
    worker = two.client.open(RECORD, generation=0)
    with daemon.client(connect=True) as client:
        assert client.namespaces.generation(worker) == -1
        ns = client.open(RECORD, generation=one.client.namespaces.generation(one.ns))
        assert client.put(ns, keys_of(range(2)), np.zeros((2, NBYTES), np.uint8)) == 2
        client.open(RECORD, generation=0)
        with pytest.raises(StaleEpoch):
            client.put(ns, keys_of(range(4)), np.zeros((4, NBYTES), np.uint8))
