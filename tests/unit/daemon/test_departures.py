"""The memory of blocks that have left, against a list of all departures."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.daemon.core.events import TierInfo
from kvpool.daemon.core.idle_age import IdleAge
from kvpool.daemon.features import departures as module
from kvpool.daemon.features.departures import Cause, Departures
from kvpool.telemetry.misses import Reason

SPACES = (1, 0x9E37_0000_0000_0001, (1 << 64) - 1)


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def ages() -> IdleAge:
    """A tick is a second."""
    found = IdleAge()
    for second in range(100):
        found.note(float(second), second)
    return found


@settings(max_examples=80, deadline=None)
@given(
    most=st.integers(1, 40),
    together=st.integers(1, 30),
    told=st.lists(
        st.tuples(
            st.sampled_from(SPACES),
            st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True),
            st.sampled_from([Reason.FULL, Reason.TTL, Reason.REMOVED]),
            st.sampled_from(["dram", "ssd"]),
            st.booleans(),
        ),
        max_size=40,
    ),
)
def test_the_last_departures_are_known_and_no_others(most, together, told):
    memory = Departures(most)
    memory.begin(100.0)
    clock, seconds = ages(), 100.0
    every: list[tuple[int, bytes, Cause, float]] = []
    before = module.ENTERED_TOGETHER
    module.ENTERED_TOGETHER = together  # however they are gathered
    try:
        for space, numbers, reason, tier, later in told:
            if later:
                seconds += 1.0
                memory.pass_time(seconds)
            keys = [key(number) for number in numbers]
            cause = Cause(reason, tier)
            memory.add(TierInfo(tier, clock), space, keys, reason, 40)
            every += [(space, each, cause, seconds) for each in keys]
    finally:
        module.ENTERED_TOGETHER = before
    memory.pass_time(seconds)
    known = every[-most:]
    for space in SPACES:
        for number in range(31):
            found = memory.find(space, key(number))
            mine = [one for one in known if one[:2] == (space, key(number))]
            if not mine:
                assert found is None
                continue
            assert found is not None
            assert found.cause == mine[-1][2]
            # Those of one second may have been entered a moment before or after it was told.
            assert mine[-1][3] <= found.at <= mine[-1][3] + 1.0 or found.at == mine[-1][3]
            assert 59.0 <= found.idle_s <= found.at - 40 + 1
    assert (memory.reach_s() is None) == (len(every) <= most)


def test_how_far_back_it_reaches():
    memory = Departures(4)
    tier = TierInfo("dram", ages())
    memory.begin(1000.0)
    for second in range(8):
        memory.pass_time(1000.0 + second)
        memory.add(tier, 1, [key(second)], Reason.FULL, 0)
    memory.pass_time(1010.0)
    assert memory.reach_s() == 1010.0 - 1005.0, "the oldest of four came in the sixth second"
    assert memory.find(1, key(3)) is None
    assert memory.find(1, key(4)) is not None


def test_too_many_causes_are_told_apart_no_more_but_remembered():
    memory = Departures(8)
    tier = TierInfo("dram", ages())
    before, module.CAUSES_MAX = module.CAUSES_MAX, 3
    try:
        for number in range(6):
            tier.room_for = f"{number:032x}"
            memory.add(tier, 1, [key(number)], Reason.FULL, 0)
        memory.pass_time(1.0)
    finally:
        module.CAUSES_MAX = before
    whose = [memory.find(1, key(number)).cause for number in range(6)]  # type: ignore[union-attr]
    assert [each.by for each in whose] == [*(f"{n:032x}" for n in range(3)), "", "", ""]
    assert {each.reason for each in whose} == {"full"}


def test_one_of_several_spaces_is_found():
    memory = Departures(64)
    tier = TierInfo("dram", ages())
    assert memory.first_of(SPACES, key(1)) == -1
    memory.add(tier, SPACES[1], [key(1), key(2)], Reason.FULL, 0)
    memory.pass_time(1.0)
    assert memory.first_of(SPACES, key(2)) == 1
    assert memory.first_of(SPACES[:1], key(2)) == -1
    assert memory.first_of(SPACES, key(3)) == -1


def test_nothing_is_remembered_where_nothing_is_to_be():
    memory = Departures(0)
    assert not memory.handlers, "no event is observed"
    memory.pass_time(1.0)
    assert memory.find(1, key(1)) is None
    assert memory.reach_s() is None
    assert memory.nbytes == 0


def test_it_takes_as_many_bytes_as_is_said():
    assert Departures(1 << 17).nbytes == 34 << 17
