"""Peers that the configuration names and that do not answer: told once, and once when they are back."""

import random

import pytest

from kvpool.daemon.cluster.static_peers import SILENT_S, StaticPeers
from kvpool.placement.peers import Peers

A, B = b"a" * 8, b"b" * 8
URLS = {A: "tcp://a:1", B: "tcp://b:1"}


class World:
    def __init__(self) -> None:
        self.peers = Peers({}, random.Random(1))
        self.watch = StaticPeers(URLS)
        self.now = 1000.0

    def probe(self, *answering: bytes) -> None:
        """One of each peer, and a look, ten seconds later than the last."""
        self.now += 10.0
        for incarnation in self.peers.to_probe(URLS, self.now, 5.0, 8):
            if incarnation in answering:
                self.peers.probed(incarnation, 0.001, self.now)
            else:
                self.peers.probe_failed(incarnation, "connection refused")
        self.watch.look(self.peers, self.now)

    @property
    def silent(self) -> list[str]:
        return [each.url for each in self.watch.silent()]


@pytest.fixture
def world() -> World:
    return World()


def told(caplog) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_peer_that_never_answers_is_told_once(world, caplog):
    for _ in range(int(SILENT_S / 10)):
        world.probe(B)
    assert (told(caplog), world.silent) == ([], [])
    world.probe(B)
    [line] = told(caplog)
    assert line.startswith("peer tcp://a:1, named in the configuration, has not answered for 60 s")
    assert "connection refused" in line
    for _ in range(20):
        world.probe(B)
    assert (told(caplog), world.silent) == ([], ["tcp://a:1"])
    assert next(world.watch.silent()).silent_s == 260.0


def test_it_is_told_once_that_it_is_back_and_may_be_silent_again(world, caplog):
    for _ in range(8):
        world.probe(B)
    assert len(told(caplog)) == 1
    world.probe(A, B)
    assert told(caplog) == ["peer tcp://a:1 answers again, after 80 s"]
    assert world.silent == []
    world.probe(A, B)
    assert told(caplog) == []
    for _ in range(8):
        world.probe(A)
    [line] = told(caplog)
    assert "tcp://b:1" in line


def test_a_short_silence_is_not_told(world, caplog):
    for _ in range(20):
        for _ in range(5):
            world.probe(B)
        world.probe(A, B)
    assert told(caplog) == []


def test_one_that_nothing_is_asked_of_is_not_silent(world, caplog):
    for _ in range(100):
        world.now += 10.0
        world.watch.look(world.peers, world.now)
    assert (told(caplog), world.silent) == ([], [])


def test_failed_requests_count_where_there_are_no_probes(world, caplog):
    for _ in range(8):
        world.now += 10.0
        world.peers.started(A, 1, world.now)
        world.peers.failed(A, world.now, error="refused")
        world.watch.look(world.peers, world.now)
    assert len(told(caplog)) == 1
    world.peers.started(A, 1, world.now)
    world.peers.finished(A, 0, 0.0, world.now)
    world.watch.look(world.peers, world.now)
    assert "answers again" in told(caplog)[0]
