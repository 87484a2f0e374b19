"""Who waits for which blocks: each is woken once, by what it waits for, and by nothing else."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.daemon.core.blocks import Origin
from kvpool.daemon.core.commit_waiters import DROPPED_MAX, DROPPED_S, CommitWaiters
from kvpool.errors import LimitExceeded
from kvpool.types import PartSpec, split_keys
from tests.support.memory import longest

RED, BLUE = b"r" * 16, b"b" * 16


class Bell:
    """Counts how often it was rung."""

    def __init__(self) -> None:
        self.rung = 0

    def __call__(self) -> None:
        self.rung += 1


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_a_commit_wakes_those_who_wait_for_it_once():
    awaited = CommitWaiters(10, 10)
    bells = [Bell() for _ in range(4)]
    for bell, (name, wanted) in zip(
        bells, [(RED, (1, 2)), (RED, (2, 3)), (RED, (4,)), (BLUE, (2,))], strict=True
    ):
        awaited.add("peer", name, keys(*wanted), bell)
    awaited.came(RED, keys(2, 1))
    awaited.came(RED, keys(2))
    assert [bell.rung for bell in bells] == [1, 1, 0, 0]
    awaited.came(b"x" * 16, keys(2, 4))
    assert [bell.rung for bell in bells] == [1, 1, 0, 0]


def test_who_waits_no_longer_is_not_woken_and_leaves_nothing_behind():
    awaited = CommitWaiters(10, 10)
    first, second = Bell(), Bell()
    one = awaited.add("peer", RED, keys(1, 1, 2), first)
    two = awaited.add("peer", RED, keys(2), second)
    awaited.remove(one)
    awaited.remove(one)
    awaited.came(RED, keys(1, 2))
    assert (first.rung, second.rung) == (0, 1)
    assert awaited
    awaited.remove(two)
    assert not awaited
    assert len(awaited) == 0
    assert longest(awaited) == 0


def test_limits_are_for_peers_each_and_all_and_free_again():
    awaited = CommitWaiters(3, 2)
    of_a = [awaited.add("a", RED, keys(n), Bell()) for n in range(2)]
    with pytest.raises(LimitExceeded, match="node a"):
        awaited.add("a", RED, keys(9), Bell())
    awaited.add("b", RED, keys(1), Bell())
    with pytest.raises(LimitExceeded, match="3 Await requests"):
        awaited.add("b", RED, keys(9), Bell())
    for number in range(5):
        awaited.add(None, RED, keys(number), Bell())  # our own are counted elsewhere
    awaited.remove(of_a[0])
    awaited.add("b", RED, keys(9), Bell())


def test_ends_that_wake():
    awaited = CommitWaiters(9, 9)
    red, blue, ours = Bell(), Bell(), Bell()
    awaited.add("a", RED, keys(1), red)
    awaited.add("a", BLUE, keys(1), blue)
    awaited.add(None, BLUE, keys(1), ours)
    awaited.end(RED)
    assert (red.rung, blue.rung, ours.rung) == (1, 0, 0)
    awaited.end_peers()
    assert (red.rung, blue.rung, ours.rung) == (1, 1, 0)


def test_who_waits_for_nothing_may_leave_after_others():
    awaited = CommitWaiters(9, 9)
    some = [awaited.add("a", RED, [], Bell()), awaited.add("b", RED, keys(1), Bell())]
    some.append(awaited.add("a", RED, [], Bell()))
    for waiter in some:
        awaited.remove(waiter)
    assert not awaited


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), st.lists(st.integers(0, 4), max_size=4)),
        st.tuples(st.just("remove"), st.integers(0, 8), st.just([])),
        st.tuples(st.just("came"), st.integers(0, 1), st.lists(st.integers(0, 4), max_size=4)),
    ),
    max_size=30,
)


@given(STEPS)
def test_as_a_plain_list_would_do_it(steps):
    awaited = CommitWaiters(100, 100)
    plain: list[
        list[Any]
    ] = []  # [waiter, name, numbers, bell, whether it should have been woken, whether it waits]
    for what, which, numbers in steps:
        name = (RED, BLUE)[which % 2]
        if what == "add":
            bell = Bell()
            waiter = awaited.add("p", name, keys(*numbers), bell)
            plain.append([waiter, name, set(numbers), bell, 0, True])
        elif what == "remove" and which < len(plain):
            awaited.remove(plain[which][0])
            plain[which][5] = False
        elif what == "came":
            awaited.came(name, keys(*numbers))
            for one in plain:
                if one[5] and one[1] == name and one[2] & set(numbers):
                    one[4] = 1
        assert [one[3].rung for one in plain] == [one[4] for one in plain]
        assert len(awaited) == sum(one[5] for one in plain)


# ---- as the rules tell of commits


@pytest.mark.parametrize("how", ["commit", "store", "a copy from a peer"])
def test_the_rules_tell_of_what_is_committed(make_pool, how):
    pool = make_pool()
    bell, other = Bell(), Bell()
    name = pool.namespace.directory_digest
    pool.node.commit_waiters.add("peer", name, keys(5), bell)
    pool.node.commit_waiters.add("peer", name, keys(6), other)
    if how == "store":
        rows = pool.node.grants.grant(pool.holder, pool.namespace, 0, 1)
        pool.node.grants.store(
            pool.holder, pool.namespace, 0, rows, split_keys(pool.keys([5])), bytes(16)
        )
    else:
        origin = Origin(secondary=how != "commit")
        ticket, _ = pool.reserve([5])
        pool.node.settle()
        assert bell.rung == 0, "reserved is not there"
        pool.node.puts.commit(pool.holder, ticket, bytes(16), None, origin)
    pool.node.settle()
    assert (bell.rung, other.rung) == (1, 0)


def test_each_part_of_a_block_is_news(make_pool):
    pool = make_pool(parts=(PartSpec(1024), PartSpec(1024)))
    name = pool.namespace.directory_digest
    pool.put([1])
    pool.node.settle()
    bell = Bell()
    pool.node.commit_waiters.add("peer", name, keys(1), bell)
    pool.put([1], part=1)
    pool.node.settle()
    assert bell.rung == 1


def test_what_is_evicted_or_there_already_is_no_news(make_pool):
    pool = make_pool()
    pool.put([1])
    pool.node.settle()
    bell = Bell()
    pool.node.commit_waiters.add("peer", pool.namespace.directory_digest, keys(1), bell)
    pool.put([1])
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([1])))
    pool.node.settle()
    assert bell.rung == 0


def test_the_end_of_an_epoch_wakes(make_pool):
    pool = make_pool()
    bell = Bell()
    pool.node.commit_waiters.add("peer", pool.namespace.directory_digest, keys(1), bell)
    pool.reset()
    assert bell.rung == 1


def test_who_asks_for_a_dropped_block_is_told_for_a_moment():
    awaited = CommitWaiters(10, 10)
    bell, other = Bell(), Bell()
    awaited.remove(awaited.add("peer", RED, keys(1, 2, 3), other))
    one = awaited.add("peer", RED, keys(1, 2, 3), bell)
    awaited.drop(BLUE, keys(1), 5.0)
    assert bell.rung == 0
    awaited.drop(RED, keys(3, 2), 5.0)
    assert (bell.rung, other.rung) == (1, 0)
    awaited.remove(one)
    assert not awaited, "no commit needs to be reported"
    assert awaited.dropped(RED, keys(1, 2, 3), 5.0) == [1, 2]
    awaited.came(RED, keys(2))
    assert awaited.dropped(RED, keys(1, 2, 3), 5.0) == [1, 2], "it may lack another part"
    awaited.drop(RED, keys(3), 5.5)
    assert awaited.dropped(RED, keys(3), 5.0 + DROPPED_S) == [0]
    assert awaited.dropped(RED, keys(3), 5.5 + DROPPED_S) == []
    assert awaited.dropped(RED, keys(3), 5.5) == [], "it is not remembered"
    awaited.drop(RED, keys(4), 9.0)
    awaited.forget_dropped(9.0)
    assert awaited.dropped(RED, keys(4), 9.0) == [0]
    awaited.forget_dropped(9.0 + DROPPED_S)
    assert awaited.dropped(RED, keys(4), 9.0) == []


def test_dropped_blocks_that_are_remembered_are_bounded():
    awaited = CommitWaiters(10, 10)
    many = range(DROPPED_MAX + 2)
    awaited.drop(RED, keys(*many), 0.0)
    assert awaited.dropped(RED, keys(*many), 0.0) == list(many[2:])
