"""Connections that are kept: how many, which of them go, and which one is taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvpool.transfer.base import Deadline, Identity, TransferLimits
from kvpool.transfer.connections import IDLE_MAX, IDLE_PER_PEER_MAX, Connections
from kvpool.transfer.stream import Stream
from tests.support.waiting import PATIENCE_S, until


class Pairs:
    """Streams whose other ends are open, until they are closed here."""

    def __init__(self) -> None:
        self._ends: dict[Stream, socket.socket] = {}

    def make(self) -> Stream:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        stream = Stream(ours, Deadline(PATIENCE_S))
        self._ends[stream] = theirs
        return stream

    def are_open(self, streams: list[Stream], expected: list[bool]) -> None:
        """Which of them are: what is closed here is heard of at the other end a moment later."""
        until(lambda: [self.is_open(stream) for stream in streams] == expected)

    def is_open(self, stream: Stream) -> bool:
        theirs = self._ends[stream]
        theirs.setblocking(False)
        try:
            return theirs.recv(1) != b""
        except BlockingIOError:
            return True

    def end(self, stream: Stream) -> None:
        self._ends[stream].close()

    def close(self) -> None:
        for stream, theirs in self._ends.items():
            stream.close()
            theirs.close()


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = Pairs()
    yield made
    made.close()


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections(Identity("c", "n", "i"), TransferLimits())
    yield made
    made.close()


def test_the_newest_is_taken_first(pairs: Pairs, connections: Connections) -> None:
    first, second = pairs.make(), pairs.make()
    connections.give("tcp://a:1", first)
    connections.give("tcp://a:1", second)
    assert connections.take_idle("tcp://b:1") is None
    taken = [connections.take_idle("tcp://a:1") for _ in range(3)]
    assert taken == [second, first, None]


def test_one_that_the_peer_has_ended_is_not_given_out(
    pairs: Pairs, connections: Connections
) -> None:
    first, second = pairs.make(), pairs.make()
    connections.give("tcp://a:1", first)
    connections.give("tcp://a:1", second)
    pairs.end(second)
    while not second.readable():
        pass
    assert connections.take_idle("tcp://a:1") is first


def test_of_one_peer_the_longest_idle_goes(pairs: Pairs, connections: Connections) -> None:
    streams = [pairs.make() for _ in range(IDLE_PER_PEER_MAX + 1)]
    for stream in streams:
        connections.give("tcp://a:1", stream)
    pairs.are_open(streams, [False] + [True] * IDLE_PER_PEER_MAX)


def test_peers_that_are_not_asked_any_more_keep_nobody_out(
    pairs: Pairs, connections: Connections
) -> None:
    old = [pairs.make() for _ in range(IDLE_MAX)]
    for number, stream in enumerate(old):
        connections.give(f"tcp://gone{number}:1", stream)
    new = pairs.make()
    connections.give("tcp://a:1", new)
    pairs.are_open(old, [False] + [True] * (IDLE_MAX - 1))
    assert connections.take_idle("tcp://a:1") is new


def test_nothing_is_kept_after_the_end(pairs: Pairs, connections: Connections) -> None:
    before, after = pairs.make(), pairs.make()
    connections.give("tcp://a:1", before)
    connections.close()
    connections.give("tcp://a:1", after)
    pairs.are_open([before, after], [False, False])
