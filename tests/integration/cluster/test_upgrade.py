"""A cluster is restarted node by node under load, and daemons of another protocol are kept out."""

import sys

import pytest

from kvpool.errors import ProtocolError, Unavailable
from tests.integration.cluster.conftest import Load

# What a daemon of a later protocol runs in place of `kvpool`.
LATER = """
from kvpool.wire import frame
frame.PROTOCOL_VERSION = frame.PROTOCOL_OLDEST = 2
from kvpool.cli import main
main()
"""


def answers(seat) -> bool:
    """A client finds out by itself, after a moment, that its daemon is back."""
    try:
        return bool(seat.stats)
    except Unavailable:
        return False


@pytest.mark.slow
def test_node_by_node(start_cluster, numbers, until):
    world = start_cluster(nodes=3, ssd="64MiB", environ={"KVPOOL_SSD_WRITE": "through"})
    seats = world.seats()
    kept = {seat.name: numbers(30) for seat in seats}
    for seat in seats:
        seat.put(kept[seat.name])
        until(lambda seat=seat: seat.announced)

    def reads_of_the_others(turn: int) -> None:
        reader, other = seats[turn % 3], seats[(turn + 1) % 3]
        reader.read(kept[other.name], wait_s=0.5)

    for writer in seats:
        with Load(reads_of_the_others):
            writer.node.restart()
        until(lambda: all(map(answers, seats)))
        world.until_all_see(seats)
        for reader in seats:
            for blocks in kept.values():
                until(lambda r=reader, b=blocks: r.read(b, wait_s=2.0) == 30)
        more = numbers(10)
        writer.put(more)
        until(lambda w=writer: w.announced)
        for reader in seats:
            assert reader.read(more) == 10
            assert writer.client.inspect(reader.name).node == reader.name


def test_a_node_of_a_later_protocol_is_seen_and_not_pulled_from(start_cluster, numbers, until):
    world = start_cluster(nodes=1)
    a = world.seat("a")
    some = numbers(10)
    a.put(some)
    until(lambda: a.announced)
    later = world.make("b", program=(sys.executable, "-c", LATER))
    later.start()
    until(lambda: a.members.get("b", {}).get("protocol") == 2)
    with pytest.raises(ProtocolError, match=r"speaks protocol 1 .*this side 2 .*install the same"):
        later.client(connect=True)
    assert not a.stats.fetch.peers
    assert a.read(some) == 10
    later.stop()
