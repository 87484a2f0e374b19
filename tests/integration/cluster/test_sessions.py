"""Sessions whose turns are served on several nodes: a client of one node tells the others what it knows."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.wire.operator import ShowSession
from tests.support.waiting import until


@pytest.fixture(scope="module")
def seats(shared_cluster: Any) -> Iterator[list[Any]]:
    with shared_cluster(memory="64MiB") as world:
        yield world.seats()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def turn(seat: Any, session: str, some: Any, **told: Any) -> None:
    """Tell of it, and wait until it is known: what another node says of it might be heard before."""
    seat.client.sessions.turn(seat.ns, session, [key(number) for number in some], **told)
    until(lambda: seat.client.ask_node(ShowSession(session)), f"{seat.name} knows {session}")


def expended(seat: Any) -> int:
    return int(seat.counter("expended"))


def test_a_session_ends_on_all_nodes_that_are_named(seats: list[Any], numbers: Any) -> None:
    a, b, c = seats
    before = [expended(seat) for seat in seats]
    some = numbers(6)
    for seat in seats:
        seat.put(some)
        turn(seat, "chat", some)
    a.client.sessions.end("chat", [a.name, b.name, "nobody"])
    until(lambda: expended(a) == before[0] + 6, "it has ended here")
    lost = [1]  # for nobody

    def ended_there() -> bool:
        if a.counter("session_news_lost") > lost[0]:  # a busy node did not answer in time
            lost[0] += 1
            a.client.sessions.end("chat", [b.name])
        return expended(b) == before[1] + 6

    until(ended_there)
    assert expended(c) == before[2]
    assert a.counter("session_news_lost") == lost[0]
    # They are not gone, and ordinary again once they are read.
    assert b.read(some) == 6
    c.client.sessions.end("chat")
    until(lambda: expended(c) == before[2] + 6, "its own node without a name")


def test_what_is_no_news_is_refused_and_ends_no_connection(seats: list[Any], numbers: Any) -> None:
    a, b, _ = seats
    some = numbers(3)
    b.put(some)
    turn(b, "other", some)
    before = expended(b)
    a.client.sessions.end("x" * 1000, [b.name])
    a.client.sessions.end("", [b.name])
    a.client.sessions.end("other", [b.name] * 17)
    a.client.sessions.end("unknown", [b.name])
    assert a.here(some) == 0  # its connections still answer

    def heard() -> bool:
        """Told again and again: what a busy node does not take in time is lost."""
        a.client.sessions.end("other", [b.name])
        return expended(b) == before + 3

    until(heard, "the good one was heard")


def test_very_many_at_once_cost_a_count(seats: list[Any], numbers: Any) -> None:
    a, b, _ = seats
    some = numbers(3)
    b.put(some)
    turn(b, "last", some)
    before, lost = expended(b), a.counter("session_news_lost")
    for number in range(10_000):
        a.client.sessions.end(f"flood-{number}", [b.name])
    assert b.read(some) == 3
    turn(b, "last", some)

    def ended() -> bool:
        a.client.sessions.end("last", [b.name])
        return expended(b) == before + 3

    until(ended, "news is heard again")
    assert a.counter("session_news_lost") >= lost
