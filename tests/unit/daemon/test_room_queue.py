"""Who may take slots next where memory is full: the rules, by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.daemon.fetch.room_queue import GIVE_UP_S, RETRY_S, YIELD_S, RoomQueues, RoomWaiter

RED: Any = SimpleNamespace(tenant=SimpleNamespace(name="red"), base=b"n" * 16, quota=0)
BLUE: Any = SimpleNamespace(tenant=SimpleNamespace(name="blue"), base=b"n" * 16, quota=0)
QUOTA: Any = SimpleNamespace(tenant=SimpleNamespace(name="red"), base=b"q" * 16, quota=1 << 20)


def nobody() -> None:
    """Wakes nobody."""


def test_who_has_not_been_refused_tries_at_once() -> None:
    rooms = RoomQueues()
    one, other = rooms.enter(RED, 0.0, nobody), rooms.enter(RED, 0.0, nobody)
    assert rooms.may_try(one, 0.0)
    assert rooms.may_try(other, 0.0)


def test_behind_one_who_waits_all_younger_ones_wait() -> None:
    rooms = RoomQueues()
    woken: list[str] = []
    old = rooms.enter(RED, 0.0, lambda: woken.append("old"))
    assert rooms.refused(old, 0.0)
    young = rooms.enter(RED, 0.0, lambda: woken.append("young"))
    assert not rooms.may_try(young, 1.0)
    assert not rooms.may_try(old, RETRY_S / 2)
    assert rooms.may_try(old, RETRY_S)
    assert not rooms.may_try(young, 1.0), "while the oldest tries"
    rooms.served(old)
    assert woken == ["young"]
    assert rooms.may_try(young, RETRY_S)


def test_tenants_and_namespaces_with_a_quota_wait_for_themselves_alone() -> None:
    rooms = RoomQueues()
    for namespace in (RED, BLUE, QUOTA):
        assert rooms.may_try(rooms.enter(namespace, 0.0, nobody), 0.0)
        assert rooms.refused(rooms.enter(namespace, 0.0, nobody), 0.0)
        assert not rooms.may_try(rooms.enter(namespace, 0.0, nobody), 9.0)


def test_the_others_yield_and_at_last_the_oldest_gives_up() -> None:
    rooms = RoomQueues()
    old, young = rooms.enter(RED, 0.0, nobody), rooms.enter(RED, 0.0, nobody)
    assert rooms.refused(young, 0.0)
    assert rooms.refused(old, 0.0)
    assert rooms.may_try(old, RETRY_S)
    assert rooms.refused(old, YIELD_S / 2)
    assert not young.yields
    assert rooms.refused(old, YIELD_S)
    assert (old.yields, young.yields) == (False, True)
    rooms.yielded(young)
    rooms.progressed(old, YIELD_S)
    assert rooms.refused(old, YIELD_S * 1.5)
    assert not young.yields, "it got something meanwhile"
    assert not rooms.refused(old, YIELD_S + GIVE_UP_S)
    rooms.leave(old)
    assert rooms.may_try(young, 9.0)
    assert rooms.refused(young, 9.0), "its time as the oldest has only begun"


def test_who_is_served_before_it_has_yielded_need_not_any_more() -> None:
    rooms = RoomQueues()
    old, young = rooms.enter(RED, 0.0, nobody), rooms.enter(RED, 0.0, nobody)
    for waiter in (young, old):
        assert rooms.refused(waiter, 0.0)
    assert rooms.refused(old, YIELD_S)
    assert young.yields
    rooms.served(old)
    assert rooms.may_try(young, 1.0)
    rooms.served(young)
    assert (young.waits, young.yields) == (False, False)


class Queues(RuleBasedStateMachine):
    """However requests come, go, and are refused: one may always try, and it is the oldest that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = RoomQueues()
        self.now = 0.0
        self.woken: set[int] = set()
        self.here: list[RoomWaiter] = []
        self.waited: list[RoomWaiter] = []  # after the last step

    @rule()
    def enter(self) -> None:
        waiter = self.rooms.enter(RED, self.now, lambda: self.woken.add(waiter.number))
        assert not self.here or waiter.number > self.here[-1].number
        self.here.append(waiter)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), seconds=st.floats(0, GIVE_UP_S))
    def try_and_see(self, data: st.DataObject, seconds: float) -> None:
        self.now += seconds
        waiter = data.draw(st.sampled_from(self.here), "who")
        oldest = min((one.number for one in self.here if one.waits), default=0)
        waited, tried = waiter.waits, waiter.tries
        if not self.rooms.may_try(waiter, self.now):
            assert waited
            assert waiter.number > oldest or self.now < waiter.retry_at
            return
        assert not waited or tried or waiter.number == oldest
        came_of_it = data.draw(st.sampled_from(["served", "refused", "nothing yet"]), "outcome")
        if came_of_it == "served":
            self.rooms.served(waiter)
            assert not waiter.waits
        elif came_of_it == "refused":
            waits = self.rooms.refused(waiter, self.now)
            assert waiter.waits == waits
            assert not waiter.tries

    @precondition(lambda self: any(one.yields for one in self.here))
    @rule()
    def release(self) -> None:
        waiter = next(one for one in self.here if one.yields)
        assert waiter.waits
        self.rooms.yielded(waiter)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.here), "who")
        self.here.remove(waiter)
        self.rooms.leave(waiter)

    @invariant()
    def the_oldest_is_never_stuck(self) -> None:
        """It knows when to try, or it is told that it is the oldest now. The others wait to be told."""
        waiting = [one for one in self.here if one.waits]
        for one in waiting:
            knows = self.rooms.due(one, self.now) is not None
            assert knows == (one is waiting[0] or one.tries)
        if waiting and waiting[0] in self.waited[1:]:
            assert waiting[0].number in self.woken
        self.waited = waiting
        self.woken.clear()


TestQueues = Queues.TestCase
