"""Copies that other nodes keep too: they go first, and may become last copies again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.daemon.core.blocks import OWN, Origin
from kvpool.errors import PoolFull
from kvpool.placement.records import NamespaceSettings
from kvpool.storage.eviction import POLICIES
from kvpool.types import PartSpec, split_keys

SECOND = Origin(secondary=True)
WHOLE = (PartSpec(4096),)
policies = pytest.mark.parametrize("policy", sorted(POLICIES))


# ---- who goes first ---------------------------------------------------------------------------


@policies
def test_secondary_copies_go_before_all_others(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(4))
    pool.put(range(10, 14), origin=SECOND)
    pool.read(range(10, 14))  # younger, and read
    pool.put(range(20, 24))
    assert pool.here([*range(4), *range(10, 14)]) == [0, 1, 2, 3]
    assert pool.node.counters.evicted_secondary == pool.node.counters.evicted == 4
    pool.put([30])
    assert pool.node.counters.evicted_secondary == 4
    assert pool.node.counters.evicted == 5


@policies
def test_a_put_takes_both_when_the_secondary_ones_are_too_few(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(6))
    pool.put([10, 11], origin=SECOND)
    assert pool.put(range(20, 25)) == 5
    assert pool.here([10, 11]) == []
    assert pool.here(range(6)) == [0, 1, 2], "tails first"
    assert pool.node.counters.evicted_secondary == 2


@policies
def test_the_least_recently_used_secondary_copy_goes_first(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(4), origin=SECOND)
    pool.put(range(10, 14))
    pool.demote([13, 12, 11, 10])
    pool.read([1, 3])
    pool.put([20, 21])
    assert pool.here(range(4)) == [1, 3]
    pool.put([22, 23, 24])
    assert pool.here([*range(4), *range(10, 14)]) == [1, 3, 10], "in the order given"


@policies
def test_heads_of_secondary_chains_stay_longest_too(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put([0, 1], origin=SECOND)
    pool.put([10, 11], origin=SECOND)
    pool.put([2, 3], origin=SECOND, parent=pool.keys([1]))
    pool.put([20, 21])
    pool.put(range(30, 34))
    assert pool.here([0, 1, 2, 3, 10, 11]) == [0, 1]


@policies
def test_a_chain_of_both_kinds_keeps_its_order(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put([0, 1])
    pool.put([2, 3], origin=SECOND, parent=pool.keys([1]))
    pool.put([10, 11, 12, 13])
    pool.put([4], parent=pool.keys([3]))
    assert pool.here(range(5)) == [0, 1, 2, 4]
    pool.demote([0])
    pool.put([5], parent=pool.keys([4]))
    assert pool.here(range(6)) == [0, 1, 4, 5]


@policies
def test_a_leased_secondary_copy_is_passed_over_and_goes_first_again(
    make_pool, policy: str
) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(4))
    pool.put(range(10, 14), origin=SECOND)
    lease = pool.lease([10, 11, 12])
    pool.put([20, 21])
    assert pool.here(range(10, 14)) == [10, 11, 12]
    assert pool.here(range(4)) == [0, 1, 2]
    assert pool.node.candidates.secondary_bytes(pool.tenant) == 0, "set aside"
    pool.release(lease)
    assert pool.node.candidates.secondary_bytes(pool.tenant) == 3 * 1024
    pool.put([22, 23, 24])
    assert pool.here(range(10, 14)) == []
    assert pool.here(range(4)) == [0, 1, 2]


@policies
def test_another_class_gives_up_a_slab_of_secondary_copies_first(make_pool, policy: str) -> None:
    pool = make_pool(slabs=3, policy=policy)
    for n in (0, 4, 8):
        pool.put(range(n, n + 4))
    pool.demote(range(4, 8))
    whole = pool.open(b"w" * 16, WHOLE)
    pool.put([1], namespace=whole)
    assert pool.here(range(12)) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert pool.node.counters.evicted_secondary == 4
    assert pool.node.counters.slabs_reclaimed == 1
    assert pool.node.candidates.secondary_bytes(pool.tenant) == 0


@policies
def test_its_own_secondary_copies_go_before_a_slab_of_another_class(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(4))
    whole = pool.open(b"w" * 16, WHOLE)
    pool.put([1], namespace=whole, origin=SECOND)
    for _ in range(20):
        pool.read([3])
    pool.put([2], namespace=whole)
    assert pool.here([1, 2], whole) == [2]
    assert pool.here(range(4)) == [0, 1, 2, 3]


@policies
def test_cold_secondary_copies_of_another_class_go_before_hot_ones_of_its_own(
    make_pool, policy: str
) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(4), origin=SECOND)
    whole = pool.open(b"w" * 16, WHOLE)
    pool.put([1], namespace=whole)
    for _ in range(20):
        pool.release(pool.lease([1], whole))
    pool.put([2], namespace=whole)
    assert pool.here([1, 2], whole) == [1, 2]
    assert pool.here(range(4)) == []


@policies
def test_slabs_that_cannot_go_do_not_save_the_others(make_pool, policy: str) -> None:
    """The secondary copies lie beside leased ones: a slab without any of them goes."""
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(4))
    pool.put(range(4, 8))
    pool.demote([0, 1])
    pool.lease([2])
    whole = pool.open(b"w" * 16, WHOLE)
    assert pool.put([1], namespace=whole) == 1
    assert pool.here(range(8)) == [0, 1, 2, 3]


def test_secondary_copies_are_counted_however_they_are_evicted(make_pool) -> None:
    pool = make_pool(slabs=1, soft_pin_share=1.0)
    pool.put(range(4), origin=SECOND)
    pool.pin(range(4), "soft")
    pool.put([10])
    assert pool.node.counters.evicted_secondary == pool.node.counters.evicted_soft_pins == 1
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([10])))
    assert pool.put([1], namespace=pool.open(b"w" * 16, WHOLE)) == 1
    assert pool.node.counters.evicted_secondary == pool.node.counters.evicted_soft_pins == 4


# ---- demote and promote ---------------------------------------------------------------------------


def test_demoting_counts_the_parts_that_were_not_secondary_yet(make_pool) -> None:
    pool = make_pool(parts=(PartSpec(1024), PartSpec(64)))
    pool.put([1, 2, 3])
    pool.put([2, 3], part=1)
    assert pool.demote([2, 9]) == 2
    assert pool.demote([1, 2, 3, 3]) == 3
    assert pool.demote([1, 2, 3]) == 0
    assert pool.node.candidates.secondary_bytes(pool.tenant) == 3 * 1024 + 2 * 64
    assert len(pool.node.candidates.coldest_secondary(pool.tenant, 10)) == 5
    assert pool.node.candidates.coldest(pool.tenant, 10) == []


def _nothing(pool) -> Callable[[], None]:
    return lambda: None


def _leased(pool) -> Callable[[], None]:
    lease = pool.lease([1, 2])
    return lambda: pool.release(lease)


def _parked(pool) -> Callable[[], None]:
    """All that there is came up as a victim while it was leased, and was set aside."""
    pool.put(range(20, 24))
    everything = [*range(4), *range(10, 14), *range(20, 24)]
    lease = pool.lease(everything)
    with pytest.raises(PoolFull):
        pool.put([30])
    assert all(not block.queue for block in pool.blocks(everything))
    return lambda: pool.release(lease)


def _pinned(kind: str) -> Callable[..., Callable[[], None]]:
    def pin(pool) -> Callable[[], None]:
        pool.pin([1, 2], kind)
        return lambda: pool.pin([1, 2], "none")

    return pin


STATES = {
    "plain": _nothing,
    "leased": _leased,
    "parked": _parked,
    "soft": _pinned("soft"),
    "hard": _pinned("hard"),
    "soft and leased": lambda pool: (_pinned("soft")(pool), _leased(pool))[1],
    "soft and parked": lambda pool: (_pinned("soft")(pool), _parked(pool))[1],
    "hard and leased": lambda pool: (_pinned("hard")(pool), _leased(pool))[1],
}


@policies
@pytest.mark.parametrize("state", sorted(STATES))
@pytest.mark.parametrize("when", ["both meanwhile", "demoted before", "promoted after"])
def test_whatever_state_a_block_is_in_it_is_neither_lost_nor_booked_twice(
    make_pool, policy: str, state: str, when: str
) -> None:
    pool = make_pool(slabs=3, policy=policy, hard_pin_share=1.0, soft_pin_share=1.0)
    pool.put(range(4))
    pool.put(range(10, 14))
    blocks = pool.blocks([1, 2])
    if when == "demoted before":
        assert pool.demote([1, 2]) == 2
    undo = STATES[state](pool)
    if when != "demoted before":
        assert pool.demote([1, 2]) == 2
    if when != "promoted after":
        pool.node.candidates.promote(blocks)
    undo()
    if when == "promoted after":
        pool.node.candidates.promote(blocks)
    pool.pin([1, 2], "none")
    everything = pool.blocks(pool.here(range(30)))
    slot_class = pool.tenant.classes[1024]
    assert {*pool.blocks([1, 2])} == {*blocks} < {*everything}
    for block in everything:
        assert not block.secondary
        assert block.queue
    assert len(slot_class.policy) == len(everything)
    assert len(slot_class.secondary) == 0
    assert pool.node.candidates.secondary_bytes(pool.tenant) == pool.tenant.soft_bytes == 0
    for n in range(100, 136):
        assert pool.put([n]) == 1
    assert pool.bytes_used == 12 * 1024


@policies
@pytest.mark.parametrize("how", ["removed", "removed under a lease", "evicted", "put again"])
def test_promoting_what_has_gone_meanwhile_changes_nothing(
    make_pool, policy: str, how: str
) -> None:
    """Whoever promotes has asked the directory first, which takes its time."""
    pool = make_pool(slabs=1, policy=policy)
    pool.put(range(4), origin=SECOND)
    old = pool.blocks([1])
    lease = pool.lease([1]) if "lease" in how else None
    if how == "evicted":
        pool.put(range(10, 14))
    else:
        pool.node.removal.remove(pool.namespace, split_keys(pool.keys([1])))
    if how == "put again":
        pool.put([1], origin=SECOND)
    pool.node.candidates.promote(old)
    if lease is not None:
        pool.release(lease)
    here = pool.blocks(pool.here(range(20)))
    assert set(pool.node.candidates.coldest(pool.tenant, 10)) == {
        b for b in here if not b.secondary
    }
    assert set(pool.node.candidates.coldest_secondary(pool.tenant, 10)) == {
        b for b in here if b.secondary
    }
    for n in range(100, 112):
        assert pool.put([n]) == 1
    assert pool.here(range(100, 112)) == [108, 109, 110, 111]
    assert pool.bytes_used == 4 * 1024


@policies
def test_a_promoted_copy_is_one_like_the_others(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    pool.put(range(4), origin=SECOND)
    pool.put(range(10, 14), origin=SECOND)
    pool.node.candidates.promote(pool.blocks(range(4)))
    pool.put(range(20, 24))
    assert pool.here(range(4)) == [0, 1, 2, 3]
    assert pool.here(range(10, 14)) == []
    pool.put(range(30, 36))
    assert pool.here(range(4)) in ([], [0], [0, 1]), "it goes in its turn, tails first"


@policies
def test_a_second_put_leaves_a_copy_what_it_is(make_pool, policy: str) -> None:
    pool = make_pool(policy=policy)
    pool.put([1], origin=SECOND)
    pool.put([2])
    pool.put([1, 2], origin=OWN)
    pool.put([1, 2], origin=SECOND)
    assert [block.secondary for block in pool.blocks([1, 2])] == [True, False]


# ---- what would go next --------------------------------------------------------------------------


@policies
def test_the_coldest_are_such_as_can_be_evicted(make_pool, policy: str) -> None:
    pool = make_pool(slabs=4, policy=policy, hard_pin_share=1.0, soft_pin_share=1.0)
    pool.put(range(10))
    pool.pin([0], "soft")
    pool.pin([1], "hard")
    pool.lease([2])
    pool.demote([3, 4])
    pool.lease([4])
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([5])))
    gone = pool.open(b"o" * 16, (PartSpec(1024),))
    pool.put([6], namespace=gone)
    pool.put([7], namespace=gone, origin=SECOND)
    pool.node.namespaces.set_epoch(gone, 1, 0)
    assert (
        pool.node.candidates.coldest(pool.tenant, 100) == pool.blocks([9, 8, 7, 6])
        or policy != "lru"
    )
    assert set(pool.node.candidates.coldest(pool.tenant, 100)) == set(pool.blocks([6, 7, 8, 9]))
    assert pool.node.candidates.coldest_secondary(pool.tenant, 100) == pool.blocks([3])


@policies
def test_the_coldest_of_all_classes_come_first(make_pool, policy: str) -> None:
    pool = make_pool(slabs=4, policy=policy)
    whole = pool.open(b"w" * 16, WHOLE)
    for ask, origin in (
        (pool.node.candidates.coldest, OWN),
        (pool.node.candidates.coldest_secondary, SECOND),
    ):
        base = 100 * origin.secondary
        pool.put([base + 1], origin=origin)
        pool.put([base + 2], namespace=whole, origin=origin)
        pool.put([base + 3], origin=origin)
        found = ask(pool.tenant, 2)
        assert [int.from_bytes(block.key, "big") - base for block in found] == [1, 2]
        assert len(ask(pool.tenant, 100)) == 3


def test_tenants_have_their_own(make_pool) -> None:
    pool = make_pool()
    blue = pool.node.add_tenant("blue", 1, 4096, 4096)
    pool.put([1, 2])
    pool.demote([1])
    assert (
        pool.node.candidates.coldest(blue, 10)
        == pool.node.candidates.coldest_secondary(blue, 10)
        == []
    )
    assert pool.node.candidates.secondary_bytes(blue) == 0


def test_what_can_go_without_a_loss(make_pool) -> None:
    pool = make_pool(slabs=2, hard_pin_share=1.0, soft_pin_share=1.0)
    pool.put(range(4), origin=SECOND)
    secondary = [pool.node.candidates.secondary_bytes(pool.tenant) // 1024]
    pool.put([10])
    pool.pin([0], "hard")
    pool.pin([1], "soft")
    secondary.append(pool.node.candidates.secondary_bytes(pool.tenant) // 1024)
    pool.pin([0, 1], "none")
    secondary.append(pool.node.candidates.secondary_bytes(pool.tenant) // 1024)
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([0])))
    secondary.append(pool.node.candidates.secondary_bytes(pool.tenant) // 1024)
    pool.put(range(20, 25))
    secondary.append(pool.node.candidates.secondary_bytes(pool.tenant) // 1024)
    assert secondary == [4, 2, 4, 3, 2]
    assert pool.node.inventory.tenant_stats(pool.node.tenants["red"]).secondary_bytes == 2 * 1024


# ---- what is known of a copy ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["commit", "store"])
def test_where_a_block_came_from_stays_with_it(make_pool, how: str) -> None:
    pool = make_pool()
    origin = Origin(secondary=True, hops=2, replicas=3)
    if how == "commit":
        pool.put([1, 2], origin=origin)
    else:
        rows = pool.node.grants.grant(pool.holder, pool.namespace, 0, 2)
        packed = pool.keys([1, 2])
        pool.node.grants.store(
            pool.holder, pool.namespace, 0, rows, split_keys(packed), bytes(32), origin=origin
        )
    pool.put([3])
    assert [(b.secondary, b.hops, b.replicas) for b in pool.blocks([1, 2, 3])] == [
        (True, 2, 3),
        (True, 2, 3),
        (False, 0, 0),
    ]


def test_how_many_copies_are_wanted(make_pool) -> None:
    pool = make_pool(parts=(PartSpec(1024), PartSpec(64)))
    pool.put([1])
    pool.put([2], origin=Origin(replicas=3))
    pool.put([4], part=1, origin=Origin(replicas=4))
    wanted = [n.to_bytes(16, "big") for n in (1, 2, 3, 4)]
    # Nothing has settled since the puts.
    assert pool.node.inventory.replicas_wanted(pool.namespace, wanted) == [1, 3, 0, 4]
    pool.namespace.settings = NamespaceSettings(replicas=2)
    assert pool.node.inventory.replicas_wanted(pool.namespace, wanted) == [2, 3, 0, 4]


@policies
def test_what_was_read_since_it_was_put_is_worth_more(make_pool, policy: str) -> None:
    pool = make_pool(policy=policy, parts=(PartSpec(1024), PartSpec(64)))
    for n in range(4):
        pool.put([n])
    pool.put([2, 3], part=1)
    pool.put([5], part=1)
    pool.put([6], origin=SECOND)
    pool.put([7], origin=SECOND)
    pool.read([1, 7])
    pool.node.leases.acquire(
        pool.holder, pool.namespace, (1,), split_keys(pool.keys([3])), 1.0, 0.0
    )
    keys = [n.to_bytes(16, "big") for n in range(9)]
    assert pool.node.inventory.select_by_value(pool.namespace, keys, True) == [
        keys[n] for n in (1, 3, 7)
    ]
    assert pool.node.inventory.select_by_value(pool.namespace, keys, False) == [
        keys[n] for n in (0, 2, 5, 6)
    ]
