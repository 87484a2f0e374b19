"""Failed logins: collected by workers, and told as events at a bounded pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.ops.event_log import AUDITED, LOGIN_FAILED, EventLog
from kvpool.daemon.ops.logins import A_SECOND, BURST, TEXT_CHARACTERS_MAX, Logins
from kvpool.security.failed_logins import OTHERS, SOURCES_MAX, TELL_S, FailedLogins, Failures


class Collected:
    """What one has told, and the timers that it has set."""

    def __init__(self) -> None:
        self.told: list[Failures] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.failed = FailedLogins(self.told.append, lambda s, work: self.timers.append((s, work)))

    @staticmethod
    def refuse(seconds: float, work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    def ring(self) -> None:
        (_, work) = self.timers.pop()
        work()


def test_they_are_told_together_a_moment_later() -> None:
    collected = Collected()
    for source in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        collected.failed.add(source, "a wrong token")
    assert not collected.told
    assert [seconds for seconds, _ in collected.timers] == [TELL_S], "one for all of them"
    collected.ring()
    assert collected.told == [[("10.0.0.1", "a wrong token", 2), ("10.0.0.2", "a wrong token", 1)]]
    collected.failed.add("10.0.0.3", "another")
    collected.ring()
    assert collected.told[1:] == [[("10.0.0.3", "another", 1)]]


@given(st.lists(st.integers(0, 3 * SOURCES_MAX), max_size=500))
def test_none_is_lost_and_few_are_told_apart(sources: list[int]) -> None:
    collected = Collected()
    for source in sources:
        collected.failed.add(str(source), "")
    if sources:
        collected.ring()
    (found,) = collected.told or [[]]
    assert sum(count for _, _, count in found) == len(sources)
    assert len(found) <= SOURCES_MAX + 1
    assert (len(set(sources)) > SOURCES_MAX) == (OTHERS in {source for source, _, _ in found})


def test_texts_are_cut_and_a_machine_without_threads_goes_on() -> None:
    collected = Collected()
    collected.failed.add("x" * 70_000, "y" * 70_000)
    collected.ring()
    assert [(len(a), len(b), n) for a, b, n in collected.told[0]] == [(200, 200, 1)]
    refuse = [Collected.refuse]

    def later(seconds, work):
        (refuse.pop() if refuse else lambda *timer: collected.timers.append(timer))(seconds, work)

    refused = FailedLogins(collected.told.append, later)
    refused.add("a", "")
    refused.add("b", "")
    collected.ring()
    assert collected.told[1:] == [[("b", "", 1)]]


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.audited: list[Any] = []
        self.events = EventLog("a", lambda: 5.0, self.audited.append)
        self.logins = Logins(self.events, lambda: self.now)

    def details(self) -> list[dict[str, Any]]:
        return [dict(event.details) for event in self.events.after(0, 10_000)]


def test_each_is_an_event_and_a_record() -> None:
    world = World()
    world.logins.fail("socket", "uid 7", "unknown tenant, or wrong token")
    world.logins.fail_all("peer", [("10.0.0.1", "no secret in common", 3), ("10.0.0.2", "", 1)])
    assert world.logins.failed == {"socket": 1, "peer": 4}
    first, second, _ = world.details()
    assert first == {
        "door": "socket",
        "source": "uid 7",
        "reason": "unknown tenant, or wrong token",
        "count": 1,
    }
    assert second["count"] == 3
    assert [event.kind for event in world.audited] == [LOGIN_FAILED] * 3
    world.events.note("node joined", of="b")
    assert len(world.audited) == 3, "other events are none of the audit's"
    assert LOGIN_FAILED in AUDITED


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5)), max_size=200))
def test_a_flood_is_counted_and_told_slowly(steps: list[tuple[float, int]]) -> None:
    world = World()
    for seconds, count in steps:
        world.now += seconds
        world.logins.fail("http", "10.0.0.1", "a wrong token", count)
    told = world.details()
    assert world.logins.failed.total() == sum(count for _, count in steps)
    assert len(told) <= BURST + (world.now - 100.0) * A_SECOND + 1
    world.now += 2 / A_SECOND
    world.logins.fail("http", "10.0.0.1", "a wrong token")
    said = sum(each["count"] + each.get("unsaid", 0) for each in world.details())
    assert said == world.logins.failed.total(), "nothing is left out for good"


def test_texts_of_strangers_are_short_and_plain() -> None:
    world = World()
    world.logins.fail("socket", "tenant \x1b[2J" + "x" * 1000, "\u202e")
    (found,) = world.details()
    assert len(found["source"]) == TEXT_CHARACTERS_MAX
    assert found["source"].startswith("tenant \ufffd[2J")
    assert found["reason"] == "\ufffd"
