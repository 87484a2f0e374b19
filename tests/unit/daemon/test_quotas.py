"""Quotas of namespaces: their own blocks make room for them, and nobody else's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.quota_eviction import QuotaEviction
from kvpool.errors import InvalidRequest, LimitExceeded, PoolFull
from kvpool.placement.records import DEFAULT_SETTINGS, SettingsChange, quota_bytes
from kvpool.storage.eviction import Lru, make_policy
from kvpool.storage.expendable import expendable_first, is_expendable
from kvpool.telemetry.memory_stats import NamespaceUsage, PlaceUsage
from kvpool.types import PartSpec, split_keys

QUARTER = (PartSpec(1024),)
POLICIES = ("aged", "lru")
SLOT = 1024

policies = pytest.mark.parametrize("policy", POLICIES)


def other_space(pool: Any, name: bytes = b"o") -> NamespaceState:
    namespace: NamespaceState = pool.open(name * 16, QUARTER)
    return namespace


def held(pool: Any) -> int:
    pool.node.settle()
    return int(pool.namespace.held_bytes)


def put_each(pool: Any, numbers: Iterable[int], **where: Any) -> None:
    for number in numbers:
        assert pool.put([number], **where) == 1


# ---- the rules -------------------------------------------------------------------------------------


@policies
def test_a_namespace_at_its_quota_gives_up_its_own_coldest(make_pool, policy: str) -> None:
    """Also when others are colder, and there is room for all."""
    pool = make_pool(slabs=8, policy=policy)
    other = other_space(pool)
    put_each(pool, range(100, 110), namespace=other)
    pool.node.quotas.set(pool.namespace, 5 * SLOT)
    put_each(pool, range(12))
    assert pool.here(range(12)) == [7, 8, 9, 10, 11]
    assert pool.here(range(100, 110), other) == [*range(100, 110)]
    assert held(pool) == 5 * SLOT
    pool.read([7])
    put_each(pool, [20, 21])
    assert 7 in pool.here(range(12)) or policy != "lru"
    assert len(pool.here(range(30))) == 5


@policies
def test_without_a_quota_and_below_it_the_coldest_of_all_goes(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    other = other_space(pool)
    pool.node.quotas.set(pool.namespace, 7 * SLOT)
    put_each(pool, range(4))
    put_each(pool, range(100, 104), namespace=other)
    put_each(pool, [10, 11])
    assert pool.here(range(4)) == [2, 3]
    assert pool.here(range(100, 104), other) == [100, 101, 102, 103]
    put_each(pool, [110, 111, 112], namespace=other)
    assert pool.here([2, 3, 10, 11]) == [10, 11], "the coldest of all, in a policy of its own"
    assert pool.here([100], other) == []


@policies
def test_a_lower_quota_is_reached_bit_by_bit(make_pool, policy: str) -> None:
    """And the coldest go first, although they came before there was a quota."""
    pool = make_pool(slabs=12, policy=policy)
    other = other_space(pool)
    for number in range(20):
        pool.put([number])
        pool.put([100 + number], namespace=other)
    pool.node.quotas.set(pool.namespace, 4 * SLOT)
    assert len(pool.here(range(20))) == 20, "not at once"
    steps = 0
    while pool.node.quotas.tend(3):
        steps += 1
        assert steps < 30
    assert steps >= 16 // 3
    assert pool.here(range(20)) == [16, 17, 18, 19]
    assert len(pool.here(range(100, 120), other)) == 20
    put_each(pool, [30])
    assert pool.here([*range(20), 30]) == [17, 18, 19, 30]


@policies
def test_a_put_finds_what_has_not_changed_over_yet(make_pool, policy: str) -> None:
    pool = make_pool(slabs=4, policy=policy)
    put_each(pool, range(8))
    pool.read([0])
    pool.node.quotas.set(pool.namespace, 6 * SLOT)
    put_each(pool, [20])
    assert len(pool.here([*range(8), 20])) == 6
    assert 20 in pool.here([20])
    assert 7 in pool.here([7])


def test_a_quota_that_is_taken_back(make_pool) -> None:
    pool = make_pool(slabs=2)
    pool.node.quotas.set(pool.namespace, 2 * SLOT)
    put_each(pool, range(4))
    pool.node.quotas.set(pool.namespace, 0)
    put_each(pool, range(10, 16))
    assert pool.here([*range(4), *range(10, 16)]) == [2, 3, *range(10, 16)]
    assert not pool.node.quotas.tend(100)
    put_each(pool, range(20, 28))
    assert pool.here(range(20, 28)) == [*range(20, 28)]


def test_a_put_larger_than_the_quota_gets_what_there_is(make_pool) -> None:
    pool = make_pool(slabs=4)
    pool.node.quotas.set(pool.namespace, 3 * SLOT + 500)
    assert pool.put(range(10)) == 3
    assert pool.put(range(20, 30)) == 3
    assert pool.here(range(30)) == [20, 21, 22]


@pytest.mark.parametrize("how", ["leased", "pinned", "reserved"])
def test_what_cannot_go_fills_the_quota_and_only_that_refuses(make_pool, how: str) -> None:
    pool = make_pool(slabs=4, hard_pin_share=1.0)
    other = other_space(pool)
    pool.node.quotas.set(pool.namespace, 3 * SLOT)
    if how == "reserved":
        pool.reserve(range(2))
    else:
        pool.put(range(2))
    if how == "leased":
        lease = pool.lease(range(2))
    elif how == "pinned":
        pool.pin(range(2), "hard")
    put_each(pool, [10, 11])
    assert pool.here([10, 11]) == [11]
    ticket, _ = pool.reserve([12])
    with pytest.raises(PoolFull, match="a namespace whose quota here is"):
        pool.put([13])
    assert pool.put([100], namespace=other) == 1
    pool.node.puts.abort(pool.holder, ticket)
    assert pool.put([13]) == 1
    if how == "leased":
        pool.release(lease)
        assert pool.put([14, 15, 16]) == 3


def test_soft_pins_go_last_and_copies_that_others_keep_first(make_pool) -> None:
    pool = make_pool(slabs=4, soft_pin_share=1.0)
    pool.node.quotas.set(pool.namespace, 4 * SLOT)
    put_each(pool, range(4))
    pool.pin([0, 1], "soft")
    pool.demote([3])
    put_each(pool, [10])
    assert pool.here(range(4)) == [0, 1, 2]
    put_each(pool, [11])
    assert pool.here(range(4)) == [0, 1]
    assert pool.put(range(20, 23)) == 3
    assert pool.here([*range(4), 10, 11]) == [1]
    counters = pool.node.counters
    assert (counters.evicted, counters.evicted_soft_pins, counters.evicted_secondary) == (5, 1, 1)


def test_parts_of_several_sizes_share_a_quota(make_pool) -> None:
    pool = make_pool(slabs=8, parts=(PartSpec(1024), PartSpec(2048)))
    pool.node.quotas.set(pool.namespace, 8 * SLOT)
    put_each(pool, range(4))
    put_each(pool, range(2), part=1)
    assert held(pool) == 8 * SLOT
    put_each(pool, [10], part=1)
    assert len(pool.here(range(4))) == 4, "of its own size first"
    assert held(pool) == 8 * SLOT
    for number in (0, 1, 2, 3):
        pool.pin([number], "none")
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([1, 10])))
    put_each(pool, range(20, 24))
    assert held(pool) <= 8 * SLOT


def test_granted_slots_count_when_they_are_stored(make_pool) -> None:
    pool = make_pool(slabs=8, grant_share=0.5)
    other = other_space(pool)
    granted = pool.node.grants.grant(pool.holder, other, 0, 10)
    assert len(granted) == 10
    pool.node.quotas.set(pool.namespace, 4 * SLOT)
    for at, number in enumerate(range(10)):
        key, row = pool.keys([number]), [granted[at]]
        pool.node.grants.store(pool.holder, pool.namespace, 0, row, split_keys(key), bytes(16))
        assert held(pool) <= 4 * SLOT
    assert pool.here(range(10)) == [6, 7, 8, 9]
    assert len(pool.node.grants.grant(pool.holder, pool.namespace, 0, 10)) == 2, (
        "its share of the quota"
    )


def test_pins_are_bounded_by_the_quota_too(make_pool) -> None:
    pool = make_pool(slabs=8, hard_pin_share=0.25, soft_pin_share=0.5)
    put_each(pool, range(8))
    pool.node.quotas.set(pool.namespace, 8 * SLOT)
    for kind, most in (("hard", 2), ("soft", 4)):
        numbers = range(most) if kind == "hard" else range(2, 2 + most)
        pool.pin(numbers, kind)
        pool.pin(numbers, kind)  # nothing changes
        with pytest.raises(
            LimitExceeded, match=f"{kind} pins of namespace {pool.namespace.base.hex()}"
        ):
            pool.pin([7], kind)
    pool.node.quotas.set(pool.namespace, 0)
    pool.pin([7], "hard")


def test_a_new_epoch_has_the_quota_and_begins_empty(make_pool) -> None:
    pool = make_pool(slabs=4)
    pool.node.quotas.set(pool.namespace, 4 * SLOT)
    put_each(pool, range(4))
    pool.reset()
    assert (pool.namespace.quota, held(pool)) == (4 * SLOT, 0)
    put_each(pool, range(10, 16))
    assert pool.here(range(10, 16)) == [12, 13, 14, 15]
    _, own = pool.node.candidates.next_victims(pool.tenant, 3)
    assert (own.place.base, own.held) == (pool.namespace.base, 4)
    assert pool.node.ended_epochs.reclaim(100) + pool.node.counters.reclaimed_blocks >= 4
    assert pool.bytes_used == 4 * SLOT


@policies
def test_what_is_left_of_epochs_before_the_quota(make_pool, policy: str) -> None:
    """It is in the order of all, and changes over with the living."""
    pool = make_pool(slabs=2, policy=policy)
    put_each(pool, range(4))
    pool.reset()
    put_each(pool, range(10, 14))
    pool.node.quotas.set(pool.namespace, 4 * SLOT)
    put_each(pool, range(20, 24))
    assert pool.here(range(10, 24)) == [20, 21, 22, 23]
    pool.node.quotas.tend(100)
    pool.node.ended_epochs.reclaim(100)
    assert pool.bytes_used == 4 * SLOT


@policies
def test_puts_go_on_while_much_is_left_of_an_epoch(make_pool, policy: str) -> None:
    """It comes up before the living, and is in no quota."""
    pool = make_pool(slabs=8000, policy=policy)
    quota = 4000
    for epoch in range(2):
        pool.node.quotas.set(pool.namespace, quota * SLOT)
        for first in range(0, quota, 100):
            numbers = range(epoch * quota + first, epoch * quota + first + 100)
            assert pool.put([*numbers]) == 100
        if not epoch:
            pool.reset()
    for number in range(100_000, 100_100):
        assert pool.put([number]) == 1
    while pool.node.quotas.tend(500) or pool.node.ended_epochs.reclaim(500):
        pass
    assert held(pool) == quota * SLOT


def test_one_large_block_for_very_many_small_ones(make_pool) -> None:
    parts = (PartSpec(2048 * 1024), PartSpec(1024))
    pool = make_pool(slabs=4096, parts=parts)
    pool.node.quotas.set(pool.namespace, 4096 * SLOT)
    for first in range(0, 4096, 512):
        assert pool.put([*range(first, first + 512)], part=1) == 512
    assert pool.put([10_000], part=0) == 1
    assert held(pool) <= 4096 * SLOT


def test_what_goes_next_is_known_also_where_a_quota_decides(make_pool) -> None:
    pool = make_pool(slabs=8)
    other = other_space(pool)
    put_each(pool, range(100, 108), namespace=other)
    pool.node.quotas.set(pool.namespace, 8 * SLOT)
    put_each(pool, range(6))
    whole, own = pool.node.candidates.next_victims(pool.tenant, 3)
    assert (whole.place, whole.held) == ((SLOT, b""), 14)
    assert whole.free == pytest.approx(1 - 14 / 32)
    assert [block.key for block in whole.blocks] == [pool.keys([n]) for n in (100, 101, 102)]
    assert (own.place, own.held, own.free) == ((SLOT, pool.namespace.base), 6, 0.25)
    assert [block.key for block in own.blocks] == [pool.keys([n]) for n in (0, 1, 2)]


def test_usage_says_who_has_what(make_pool) -> None:
    pool = make_pool(slabs=8)
    other = other_space(pool)
    pool.node.quotas.set(other, 3 * SLOT)
    put_each(pool, range(2))
    put_each(pool, range(10, 15), namespace=other)
    assert pool.node.inventory.usage(pool.tenant) == PlaceUsage(
        where="",
        part_bytes=32 * SLOT,
        used_bytes=5 * SLOT,
        namespaces={
            pool.namespace.base.hex(): NamespaceUsage(held_bytes=2 * SLOT, quota_bytes=0),
            other.base.hex(): NamespaceUsage(held_bytes=3 * SLOT, quota_bytes=3 * SLOT),
        },
    )


# ---- settings --------------------------------------------------------------------------------------


def test_quotas_are_bytes_or_shares() -> None:
    assert quota_bytes(0, 1000) == 0
    assert quota_bytes(300, 1000) == 300
    assert quota_bytes(300, 1000, 0.5) == 150
    assert quota_bytes(0.25, 1000, 0.5) == 250
    assert quota_bytes(1.0, 1000) == 1000
    assert quota_bytes(1e-9, 1000) == 1, "0 would be none"


def test_quotas_that_cannot_be() -> None:
    for name, wrong in itertools.product(
        ("dram_quota", "ssd_quota"), (-1, -0.5, 1.5, float("nan"), float("inf"))
    ):
        with pytest.raises(InvalidRequest, match=name):
            SettingsChange(**{name: wrong}).checked()
        odd = SettingsChange(**{name: wrong}).apply(DEFAULT_SETTINGS)
        assert getattr(odd.known_here(1), name) == 0
    for right in (0, 1, 1 << 50, 0.001, 1.0):
        assert SettingsChange(dram_quota=right, ssd_quota=right).checked()


def test_a_wish_counts_where_there_is_no_quota() -> None:
    small = SettingsChange(dram_quota=0.1).apply(DEFAULT_SETTINGS)
    large = SettingsChange(dram_quota=0.5, ssd_quota=7).apply(DEFAULT_SETTINGS)
    assert small.filled(large) == SettingsChange(dram_quota=0.1, ssd_quota=7).apply(
        DEFAULT_SETTINGS
    )


@dataclass(eq=False)
class Held:
    """An entry of an eviction order."""

    ident: int
    base: bytes
    used: int = 0
    depth: int = 0
    freq: int = 0
    queue: int = 0
    older: Any = None
    newer: Any = None
    secondary: bool = False

    @property
    def row(self) -> int:
        return self.ident


class HeldRows:
    """Entries by their rows; counts those examined."""

    def __init__(self, entries: Sequence[Held]) -> None:
        self.entries = list(entries)
        self.examined = 0

    def between(self, first: int, end: int) -> list[Held]:
        self.examined += end - first
        return self.entries[first:end]

    def __len__(self) -> int:
        return len(self.entries)


def divided(policy: str, mine: int, others: int) -> tuple[QuotaEviction, HeldRows]:
    """Entries of two namespaces, mixed, used one after the other by row; the first has just got a policy."""
    owners = [b"mine"] * mine + [b"others"] * others
    random.Random(1).shuffle(owners)
    rows = HeldRows([Held(n, owner, used=n + 1) for n, owner in enumerate(owners)])
    order = QuotaEviction(make_policy(policy, len(owners)), partial(make_policy, policy), rows)
    for one in rows.entries:
        order.insert([one])
    order.divide(b"mine", 100_000, empty=False)
    return order, rows


def test_entries_of_several_orders_are_discarded_together() -> None:
    mine = [Held(n, b"mine") for n in range(6)]
    others = [Held(n, b"others") for n in range(6, 12)]
    order = QuotaEviction(Lru(1), Lru, HeldRows([*mine, *others]))
    order.insert(mine)
    order.insert(others)
    order.divide(b"mine", 100, empty=False)  # all of them have yet to move over
    order.move(b"mine", 12)
    order.move(b"mine", 2)
    order.discard([*mine[:4], *others[:4]])
    assert not any(one.queue for one in (*mine[:4], *others[:4]))
    assert len(order) == 4
    assert {one.ident for one in order.take(9)} == {4, 5, 10, 11}
    assert order.take_of(b"mine", 9) == []


@pytest.mark.parametrize("way", ["moved", "read", "expended again"])
def test_what_is_expendable_stays_so_where_it_moves_over(way: str) -> None:
    mine, others = [Held(n, b"mine") for n in range(6)], [Held(n, b"others") for n in range(6, 9)]
    make = expendable_first(partial(make_policy, "lru"))
    order = QuotaEviction(make(9), make, HeldRows([*mine, *others]))
    order.insert(mine)
    order.insert(others)
    assert order.expend(mine[3:5]) == 2
    order.divide(b"mine", 100, empty=False)
    if way == "read":
        order.touch([mine[0], mine[3]])  # which is an ordinary one then
    elif way == "expended again":
        assert order.expend(mine[3:6]) == 1
    while order.move(b"mine", 12):
        pass
    wanted = {"moved": {3, 4}, "read": {4}, "expended again": {3, 4, 5}}[way]
    assert {one.ident for one in mine if is_expendable(one)} == wanted
    assert order.expendable == len(wanted)
    assert {one.ident for one in order.take_of(b"mine", len(wanted))} == wanted


@policies
def test_no_step_of_a_division_grows_with_what_is_held(policy: str) -> None:
    order, rows = divided(policy, 20_000, 20_000)
    assert rows.examined == 0
    for step in (
        lambda: order.take_of(b"mine", 3),
        lambda: order.move(b"mine", 500),
        order.pop,
        lambda: order.touch(rows.entries[30_000:30_005]),
        lambda: order.insert([Held(40_000, b"mine")]),
    ):
        before = rows.examined
        step()
        assert rows.examined - before <= 2 * 1024


@policies
def test_what_has_moved_over_is_in_the_order_of_its_use(policy: str) -> None:
    order, rows = divided(policy, 3000, 1000)
    mine = [one for one in rows.entries if one.base == b"mine"]
    while order.move(b"mine", 700):
        pass
    went = [one for _ in range(300) for one in order.take_of(b"mine", 10)]
    assert went == mine
    assert all(one.queue for one in rows.entries if one.base == b"others")


@policies
def test_victims_while_entries_move_over_are_old_and_used_ones_stay(policy: str) -> None:
    order, rows = divided(policy, 10_000, 10_000)
    mine = [one for one in rows.entries if one.base == b"mine"]
    read = mine[:500]  # the coldest
    for one in read:
        order.touch([one])
    went: list[Held] = []
    for _ in range(100):
        order.move(b"mine", 100)
        victims = list(order.take_of(b"mine", 20))
        while len(victims) < 20:
            more = order.take_of(b"mine", 20 - len(victims))
            assert more
            victims += more
        went += victims
    assert len({one.ident for one in went}) == 2000 and not any(one.queue for one in went)
    assert all(one.base == b"mine" for one in went)
    assert not {one.ident for one in went} & {one.ident for one in read}
    while order.move(b"mine", 700):
        pass
    left = [one for one in mine if one.queue]
    assert len(left) == 8000
    assert len(order.part(b"mine")) == 8000


@given(st.data())
def test_a_divided_order_holds_each_entry_once(data: st.DataObject) -> None:
    """Whatever happens while entries move over: as a model of sets has it."""
    order, rows = divided("lru", 40, 40)
    held = {b"mine": set(range(80)), b"others": set()}
    for one in rows.entries:
        if one.base == b"others":
            held[b"mine"].discard(one.ident)
            held[b"others"].add(one.ident)
    out: list[Held] = []  # leased, or victims that could not go

    def gone(victims: Iterable[Any]) -> None:
        for one in victims:
            held[one.base].remove(one.ident)
            out.append(one)

    for _ in range(data.draw(st.integers(1, 40))):
        some = data.draw(st.lists(st.sampled_from(rows.entries), max_size=5, unique_by=id))
        of_one = [one for one in some if one.base == some[0].base]
        match data.draw(
            st.sampled_from(["take_of", "pop", "move", "touch", "discard", "insert", "back"])
        ):
            case "take_of":
                n = data.draw(st.integers(1, 50))
                victims = order.take_of(b"mine", n)
                assert bool(victims) == bool(held[b"mine"])
                gone(victims)
            case "pop":
                victim = order.pop()
                assert (victim is None) == (not held[b"mine"] and not held[b"others"])
                gone([victim] if victim else [])
            case "move":
                order.move(b"mine", data.draw(st.integers(1, 60)))
            case "touch":
                order.touch(of_one)
            case "discard":
                gone([one for one in some if one.queue])
                order.discard(some)
            case "insert" | "back" as how:
                back = [one for one in out if out and one.base == out[0].base]
                out = [one for one in out if one not in back]
                held_now = held[back[0].base] if back else set()
                held_now.update(one.ident for one in back)
                (order.insert if how == "insert" else order.put_back)(back)
        for one in rows.entries:
            assert bool(one.queue) == (one.ident in held[one.base])
        assert len(order) == sum(map(len, held.values()))
