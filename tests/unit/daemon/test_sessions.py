"""Sessions: what they leave goes first, what others use does not, and nobody gains by what they tell of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.features.sessions import SETTLE_S, Session, Sessions, common_blocks
from kvpool.errors import PoolFull
from kvpool.types import KEY_BYTES, split_keys
from tests.unit.daemon.conftest import Pool


class Told(Pool):
    """A pool whose clients tell of their sessions. time: seconds, moved by the tests."""

    def __init__(self, slabs: int = 4, **settings: Any) -> None:
        super().__init__(slabs, **settings)
        self.time = 0.0
        self.below: list[tuple[int, ...]] = []
        self.sessions = Sessions(
            self.node,
            lambda _, keys: self.below.append(tuple(int.from_bytes(key, "big") for key in keys)),
        )

    def turn(self, name: str, numbers: Iterable[int], **told: Any) -> Session | None:
        """Reads and puts these blocks, and tells of it."""
        numbers = list(numbers)
        if here := self.here(numbers):
            self.release(self.lease(here))
        self.put(numbers)
        return self.tell(name, numbers, **told)

    def tell(
        self, name: str, numbers: Iterable[int] = (), agent: str = "", **told: Any
    ) -> Session | None:
        self.node.settle()
        session = self.sessions.turn(
            self.tenant, self.namespace, name, agent, self.keys(numbers), self.time, **told
        )
        self.sessions.settle(self.time + SETTLE_S)  # all of its blocks are saved
        while self.sessions.work(3):
            pass
        return session

    def expendable(self) -> list[int]:
        """The blocks that go before others, the next one first."""
        self.node.settle()
        slot_class = self.tenant.classes[1024]
        blocks: Any = slot_class.policy.coldest(slot_class.policy.expendable)
        return [int.from_bytes(block.key, "big") for block in blocks]

    def wait(self, seconds: float) -> None:
        self.time += seconds
        self.node.idle_age.note(self.time, self.node.ledger.tick)


def test_what_a_turn_leaves_goes_first_and_from_its_end() -> None:
    pool = Told(slabs=4)
    pool.put(range(90, 94))
    pool.turn("a", range(8))
    pool.turn("a", [0, 1, 2, 20, 21])
    assert pool.expendable() == [7, 6, 5, 4, 3]
    assert pool.below == [(7, 6, 5), (4, 3)], "tiers below are told, in pieces"
    pool.put([30, 31, 32, 33])
    assert pool.here([*range(8), *range(90, 94)]) == [*range(6), *range(90, 94)]
    assert pool.node.counters.evicted_expendable == 2


def test_what_is_read_again_is_an_ordinary_block_again() -> None:
    pool = Told()
    pool.turn("a", range(6))
    pool.turn("a", [0, 20])
    pool.release(pool.lease([0, 1, 2, 3]))
    assert pool.expendable() == [5, 4]


def test_a_name_that_conversations_share_leaves_only_ends() -> None:
    pool = Told(slabs=8)
    pool.turn("key", range(8), shared=True)
    pool.turn("key", [0, 1, *range(20, 26)], shared=True)  # of another conversation
    assert pool.expendable() == []
    pool.turn("key", [0, 1, *range(20, 24), 30], shared=True)
    assert pool.expendable() == [25, 24]


def test_the_end_of_a_session_makes_all_of_it_expendable() -> None:
    pool = Told()
    pool.turn("a", range(4))
    pool.turn("a", [40, 41], agent="sub")
    assert pool.tell("a", ended=True) is None
    assert sorted(pool.expendable()) == [0, 1, 2, 3, 40, 41]
    assert pool.sessions.get(pool.tenant, "a") is None
    assert not pool.sessions.end(pool.tenant, "a")


def test_agents_of_a_session_do_not_replace_each_other() -> None:
    pool = Told()
    pool.turn("a", [0, 1, 2, 3])
    pool.turn("a", [0, 1, 10, 11], agent="sub")
    assert pool.expendable() == []
    pool.turn("a", [0, 30], agent="sub")
    assert pool.expendable() == [11, 10], "the main agent still has the others"


def test_what_another_session_uses_stays() -> None:
    pool = Told()
    pool.turn("b", [0, 1, 2, 50])
    pool.turn("a", [0, 1, 2, 3])
    pool.tell("a", ended=True)
    assert pool.expendable() == [3]


def test_what_anybody_has_read_since_the_turn_stays() -> None:
    pool = Told()
    pool.turn("a", [0, 1, 2, 3])
    pool.release(pool.lease([0, 1]))  # by who tells of no session
    pool.tell("a", ended=True)
    assert pool.expendable() == [3, 2]


def test_leased_and_pinned_blocks_are_left_alone() -> None:
    pool = Told()
    pool.turn("a", [0, 1, 2, 3])
    pool.pin([1], "soft")
    lease = pool.lease([0])
    pool.node.settle()
    pool.tell("a", [0, 1, 2, 3])
    pool.tell("a", ended=True)
    assert pool.expendable() == [3, 2]
    pool.release(lease)


def test_blocks_of_an_ended_epoch_are_nobodys() -> None:
    pool = Told()
    pool.turn("a", [0, 1, 2, 3])
    pool.reset()
    pool.put([0, 1])
    pool.tell("a", ended=True)
    assert pool.expendable() == []


# Limits


def test_a_block_that_is_named_twice_is_one_block() -> None:
    pool = Told()
    pool.put([0, 1, 2, 3])
    pool.tell("a", [3, 2, 3, 0])
    pool.tell("a", [10])
    assert sorted(pool.expendable()) == [0, 2, 3]
    pool.release(pool.lease([2]))
    assert pool.put(range(20, 34)) == 14
    assert pool.here(range(4)) == [1, 2]


def known_of(pool: Pool) -> Any:
    """What is known of the tenant's sessions."""
    return pool.sessions._known[pool.tenant.name]


def test_what_waits_to_be_expendable_has_a_limit() -> None:
    class LittleWork(Sessions):
        WORK_BYTES_MAX = 1344  # just two chains of ten blocks

    pool = Told(slabs=32)
    pool.sessions = LittleWork(pool.node)
    for first, told in ((0, 20), (60, 40)):
        pool.put(range(first, first + 60))
        for turn in range(6):
            keys = pool.keys(range(first + 10 * turn, first + 10 * turn + 10))
            pool.sessions.turn(pool.tenant, pool.namespace, f"of {first}", "", keys, pool.time)
        while pool.sessions.work(3):
            pass
        assert len(pool.expendable()) == told, "what was done has left its room"


def test_room_that_must_be_spare_is_not_taken_from_ordinary_blocks() -> None:
    pool = Told(slabs=2)
    pool.turn("a", range(4))
    pool.put(range(50, 54))
    pool.turn("a", [60])
    lease = pool.node.leases.hold(pool.holder, pool.blocks(pool.expendable()))
    before = pool.here(range(50, 54))
    with pytest.raises(PoolFull):
        pool.node.puts.reserve(
            *(pool.holder, pool.namespace, 0, 999, split_keys(pool.keys([70, 71]))),
            only_spare=True,
        )
    assert pool.here(range(50, 54)) == before
    pool.node.leases.release(pool.holder, lease.token)


def test_too_many_sessions_are_forgotten_and_their_blocks_stay() -> None:
    pool = Told(sessions_per_tenant=2)
    for number, name in enumerate("abc"):
        pool.turn(name, [number])
    known = pool.sessions
    assert [known.get(pool.tenant, name) is not None for name in "abc"] == [False, True, True]
    assert known.count(pool.tenant) == 2 and pool.node.counters.sessions_forgotten == 1
    assert pool.expendable() == []


def test_the_books_of_sessions_have_a_limit() -> None:
    pool = Told(slabs=64, session_bytes_per_tenant=4096)
    for number in range(12):
        pool.turn(str(number), range(100 * number, 100 * number + 16))
    assert 1 <= pool.sessions.count(pool.tenant) < 6


@pytest.mark.parametrize("long", ["name", "agent"])
def test_long_names_take_of_that_limit(long: str) -> None:
    pool = Told(session_bytes_per_tenant=1 << 16)

    def known(letter: str) -> int:
        for number in range(100):
            name = f"{number:03}{letter * 197}"
            agent = {"agent": letter * 200} if long == "agent" else {}
            pool.turn(str(number) if agent else name, [0], **agent)
        count = pool.sessions.count(pool.tenant)
        for number in range(100):
            pool.sessions.end(pool.tenant, str(number))
            pool.sessions.end(pool.tenant, f"{number:03}{letter * 197}")
        assert pool.sessions.count(pool.tenant) == 0
        return count

    counts = [
        known(letter) for letter in ("a", "\N{CJK UNIFIED IDEOGRAPH-4E00}", "\N{GRINNING FACE}")
    ]
    assert 0 < counts[2] < counts[1] < counts[0] < 100
    assert known("a") == counts[0], "what has ended is given back"


def test_so_have_agents() -> None:
    pool = Told(agents_per_session=3)
    for number in range(8):
        session = pool.turn("a", [number], agent=str(number))
    assert session is not None
    assert [agent for _, agent in session.chains] == ["5", "6", "7"]


def test_news_of_a_session_that_nobody_knows_is_no_session() -> None:
    pool = Told()
    assert pool.tell("a", ended=True) is None
    assert pool.sessions.count(pool.tenant) == 0


names = st.sampled_from("abcd")
told = st.fixed_dictionaries(
    {},
    optional={
        "ended": st.booleans(),
    },
)


@given(
    st.lists(
        st.tuples(
            names,
            st.lists(st.integers(0, 30), unique=True, max_size=8),
            st.sampled_from(["", "sub"]),
            told,
            st.floats(0, 100),
        ),
        max_size=30,
    )
)
def test_books_stay_right_whatever_is_told(
    turns: list[tuple[str, list[int], str, dict[str, Any], float]],
) -> None:
    """A put always finds room, and bytes add up."""
    pool = Told(slabs=3, sessions_per_tenant=3)
    for name, numbers, agent, what, seconds in turns:
        if numbers:
            pool.turn(name, numbers, agent=agent, **what)
        else:
            pool.tell(name, agent=agent, **what)
        pool.wait(seconds)
        pool.sessions.settle(pool.time)
        assert pool.put([1000]) == 1 or pool.here([1000])
        pool.node.removal.remove(pool.namespace, [pool.keys([1000])])
        known = known_of(pool)
        assert known.nbytes == sum(
            each.nbytes + sum(chain.nbytes for chain in each.chains.values())
            for each in known.sessions.values()
        )


chain = st.lists(st.integers(0, 3), max_size=20)


@given(chain, chain)
def test_common_blocks_of_chained_keys(one: list[int], other: list[int]) -> None:
    def keys(numbers: list[int]) -> bytes:
        return b"".join(
            hash(tuple(numbers[: at + 1])).to_bytes(KEY_BYTES, "big", signed=True)
            for at in range(len(numbers))
        )

    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    assert common_blocks(keys(one), keys(other)) == common
