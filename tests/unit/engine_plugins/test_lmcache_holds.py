"""Which leases keep looked-up objects, beside a plain model of LMCache's locks."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.engine_plugins.lmcache.holds import Holds

LAYOUT = "layout"
NAMES = "abcd"


@dataclass(eq=False)
class Lease:
    valid: bool = True
    released: int = 0


def release(leases):
    for lease in leases:
        lease.released += 1


def test_a_lease_is_released_with_its_last_object():
    holds, lease = Holds(10), Lease()
    assert holds.add(lease, LAYOUT, [("a", 0), ("b", 3)])
    assert holds.unlock(["a"]) == []
    assert holds.use("a", LAYOUT) is None
    held = holds.use("b", LAYOUT)
    assert held is not None
    assert (held.hold.lease, held.index) == (lease, 3)
    assert holds.unlock(["b"]) == [], "it is being read"
    assert holds.done([held]) == [lease]
    assert len(holds) == 0


def test_an_object_of_another_layout_is_not_used():
    holds = Holds(10)
    holds.add(Lease(), "one", [("a", 0)])
    assert holds.use("a", "other") is None


def test_what_is_not_locked_may_be_unlocked():
    assert Holds(10).unlock(["a"]) == []


def test_a_reader_gets_the_latest_lease_and_none_that_has_ended():
    holds, early, late = Holds(10), Lease(), Lease()
    holds.add(early, LAYOUT, [("a", 0)])
    holds.add(late, LAYOUT, [("a", 1)])
    assert holds.use("a", LAYOUT).hold.lease is late
    late.valid = False
    assert holds.use("a", LAYOUT).hold.lease is early
    early.valid = False
    assert holds.use("a", LAYOUT) is None


def test_locks_that_nobody_returns_make_room_once_their_leases_have_ended():
    holds, lost = Holds(2), Lease()
    assert holds.add(lost, LAYOUT, [("a", 0), ("b", 1)])
    assert not holds.add(Lease(), LAYOUT, [("c", 0)])
    lost.valid = False
    assert holds.add(Lease(), LAYOUT, [("c", 0)])
    assert len(holds) == 1
    assert not holds.add(Lease(), LAYOUT, []), "nothing would release it"


@given(st.lists(st.lists(st.sampled_from(NAMES), min_size=1), max_size=8))
def test_the_end_releases_each_lease_once(lookups):
    holds, leases = Holds(1000), [Lease() for _ in lookups]
    for lease, names in zip(leases, lookups, strict=True):
        holds.add(lease, LAYOUT, [(name, slot) for slot, name in enumerate(names)])
    release(holds.end())
    assert [lease.released for lease in leases] == [1] * len(leases)
    assert len(holds) == 0


class Locks(RuleBasedStateMachine):
    """Requests that look up, read and unlock, each unlocking what it locked; some leases end meanwhile."""

    def __init__(self):
        super().__init__()
        self.holds = Holds(1000)
        self.leases = []
        self.locked = []  # of each request that has not unlocked yet: its lease and names
        self.reading = []

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5))
    def look_up(self, names):
        lease = Lease()
        self.holds.add(lease, LAYOUT, [(name, slot) for slot, name in enumerate(names)])
        self.leases.append(lease)
        self.locked.append(names)

    @rule(data=st.data())
    def unlock(self, data):
        if self.locked:
            names = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
            some = data.draw(st.integers(0, len(names)))
            if names[some:]:
                self.locked.append(names[some:])
            release(self.holds.unlock(names[:some]))

    @rule(name=st.sampled_from(NAMES))
    def read(self, name):
        held = self.holds.use(name, LAYOUT)
        if held is not None:
            assert held.hold.lease.valid and not held.hold.lease.released
            self.reading.append(held)

    @rule(data=st.data())
    def read_all(self, data):
        if self.reading:
            release(
                self.holds.done(
                    [self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))]
                )
            )

    @rule(data=st.data())
    def end_of_lease(self, data):
        if self.leases:
            data.draw(st.sampled_from(self.leases)).valid = False

    @invariant()
    def nothing_is_released_twice_or_while_it_is_read(self):
        assert all(lease.released <= 1 for lease in self.leases)
        assert not any(held.hold.lease.released for held in self.reading)

    @invariant()
    def every_lock_is_kept(self):
        count = Counter(name for names in self.locked for name in names)
        assert len(self.holds) == count.total()
        if not self.locked and not self.reading:
            assert all(lease.released for lease in self.leases)


TestLocks = Locks.TestCase
