"""A namespace is reset: what was stored before is found by nobody, and gives its space back."""

from __future__ import annotations

import gc
import sys
import time

import pytest

from kvpool.daemon.core import reclaimer
from kvpool.daemon.core.blocks import PIN_HARD, PIN_SOFT, NamespaceState
from kvpool.daemon.core.namespaces import EPOCHS_KEPT
from kvpool.errors import InvalidRequest, LimitExceeded, NamespaceMismatch, PoolFull, StaleEpoch
from kvpool.placement.records import NamespaceSettings
from kvpool.storage.eviction import POLICIES
from kvpool.types import PartKind, PartSpec, split_keys

TWO = (PartSpec(1024), PartSpec(1024))
WHOLE = (PartSpec(4096),)


# ---- what is found ----------------------------------------------------------------------------


def test_every_lookup_is_a_miss_at_once(make_pool) -> None:
    pool = make_pool(parts=TWO)
    for part in (0, 1):
        pool.put(range(4), part=part)
    old = pool.reset()
    keys = split_keys(pool.keys(range(4)))
    for namespace in (old, pool.namespace):
        assert pool.node.leases.match(namespace, (), keys) == 0
        assert pool.node.leases.contains(namespace, 1, keys) == bytes(4)
        assert pool.node.inventory.masks(
            namespace.directory_digest, pool.keys([1, 2])[:16].split()
        ) == (2, [0])
        assert pool.node.inventory.replicas_wanted(namespace, keys[:1]) == [0]
        for parts, scattered in (((), False), ((0,), True)):
            call = (pool.holder, namespace, parts, keys, 1.0, 0.0)
            assert pool.node.leases.acquire(*call, scattered=scattered) is None
    assert pool.node.inventory.walk(0, 100) == ([], None)
    assert pool.node.inventory.block_count() == 0
    assert pool.node.candidates.coldest(pool.tenant, 100) == []
    assert pool.node.inventory.tenant_stats(pool.node.tenants["red"]).blocks == 0
    assert pool.bytes_used == 8 * 1024, "nothing has been given back yet"


def test_what_is_on_its_way_into_the_books_is_of_the_old_epoch(make_pool) -> None:
    pool = make_pool()
    ticket, rows = pool.reserve(range(4))
    pool.node.puts.commit(pool.holder, ticket, bytes(16) * len(rows))
    pool.reset()  # without anything in between that settles
    assert pool.here(range(4)) == []
    assert pool.node.ended_epochs.reclaim(10) == 4


def test_a_key_of_the_old_epoch_is_stored_anew(make_pool) -> None:
    pool = make_pool()
    pool.put([1])
    pool.reset()
    ticket, _ = pool.reserve([1])
    assert pool.node.puts.commit(pool.holder, ticket, b"new bytes, sum 2") == 1
    pool.node.ended_epochs.reclaim(10)
    [block] = pool.lease([1]).parts[0][1]
    assert block.checksum == b"new bytes, sum 2"


def test_other_namespaces_and_tenants_stay(make_pool) -> None:
    pool = make_pool()
    other = pool.open(b"o" * 16, (PartSpec(1024),))
    blue = pool.node.add_tenant("blue", 1, 4096, 4096)
    same = pool.node.namespaces.open(blue, pool.namespace.base, b"{}", pool.namespace.parts)
    writer = pool.node.holders.add("blue", "engine")
    pool.put([1])
    pool.put([1], namespace=other)
    pool.put([1], namespace=same, holder=writer)
    pool.reset(fence=1)
    assert pool.here([1]) == []
    assert pool.here([1], other) == pool.here([1], same) == [1]
    assert (same.epoch, same.retired, same.fenced) == (0, False, False)
    assert pool.node.ended_epochs.reclaim(10) == 1


def test_it_goes_on_under_another_name_with_the_same_properties(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    pool.namespace.settings = NamespaceSettings(3, "through", 60.0, "blosc2")
    old = pool.reset()
    new = pool.namespace
    assert pool.node.namespaces.living(old) is pool.node.namespaces.living(new) is new
    assert pool.open(old.base, old.parts) is new
    assert (new.base, new.fields, new.parts) == (old.base, old.fields, old.parts)
    assert new.settings == NamespaceSettings(3, "through", 60.0, "blosc2")
    assert (old.epoch, new.epoch) == (0, 1)
    assert new.number != old.number
    assert new.digest != old.digest
    assert pool.tenant.namespaces == {new.digest: new}, "peers find the living one only"
    with pytest.raises(NamespaceMismatch):
        pool.open(old.base, TWO)
    pool.put([1])
    with pytest.raises(LimitExceeded, match="1 namespaces"):
        pool.open(b"x" * 16, WHOLE)


def test_epochs_do_not_go_back(make_pool) -> None:
    pool = make_pool()
    third = pool.node.namespaces.set_epoch(pool.namespace, 3, 0)
    pool.put([1], namespace=third)
    for epoch in (0, 1, 3):
        assert pool.node.namespaces.set_epoch(pool.namespace, epoch, 0) is third
        assert pool.node.namespaces.set_epoch(third, epoch, 0) is third
    assert pool.here([1], third) == [1]
    assert pool.node.counters.epochs_ended == 1
    fourth = pool.node.namespaces.set_epoch(pool.namespace, 4, 0)
    assert (fourth.epoch, pool.here([1], fourth)) == (4, [])


# ---- clients of ended epochs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "fenced"),
    [
        ([(1, 0)], [False]),
        ([(1, 1)], [True]),
        ([(1, 0), (2, 0), (3, 0)], [False, False, False]),
        ([(1, 0), (2, 0), (3, 3)], [True, True, True]),
        ([(1, 0), (2, 2), (3, 2)], [True, True, False]),
        ([(1, 1), (2, 1), (3, 1)], [True, False, False]),
        ([(1, 1), (2, 0)], [True, False]),
        ([(1, 0), (1, 1)], [True]),  # the fence becomes known later
        ([(2, 1)], [True]),
    ],
)
def test_who_was_fenced_off_and_who_goes_on(
    make_pool, steps: list[tuple[int, int]], fenced: list[bool]
) -> None:
    pool = make_pool()
    states = [pool.namespace]
    for epoch, fence in steps:
        living = pool.node.namespaces.set_epoch(states[-1], epoch, fence)
        if living is not states[-1]:
            states.append(living)
    *ended, living = states
    assert pool.node.namespaces.by_number(pool.tenant, living.number) is living
    assert not living.fenced
    for state, out in zip(ended, fenced, strict=True):
        found = pool.node.namespaces.by_number(pool.tenant, state.number)
        assert found is (state if out else living)
        assert state.fenced == out
        assert state.retired


def test_a_client_that_was_fenced_off_reads_nothing_and_stores_nothing(make_pool) -> None:
    pool = make_pool()
    pool.put([1])
    rows = pool.node.grants.grant(pool.holder, pool.namespace, 0, 2)
    number = pool.namespace.number
    pool.reset(fence=1)
    pool.put([1])
    found = pool.node.namespaces.by_number(pool.tenant, number)
    assert pool.node.leases.match(found, (), split_keys(pool.keys([1]))) == 0
    for write in (
        lambda: pool.reserve([2], namespace=found),
        lambda: pool.node.grants.grant(pool.holder, found, 0, 1),
        lambda: pool.node.grants.store(
            pool.holder, found, 0, rows[:1], split_keys(pool.keys([2])), bytes(16)
        ),
    ):
        with pytest.raises(StaleEpoch, match="opened it in epoch 0: open it again"):
            write()
    assert not pool.node.removal.remove(found, split_keys(pool.keys([1])))
    assert not pool.node.pins.pin(found, split_keys(pool.keys([1])), "hard")
    assert pool.here([1, 2]) == [1]
    assert pool.holder.granted_bytes == 2 * 1024
    again = pool.open(found.base, found.parts)
    stored = pool.node.grants.store(
        pool.holder, again, 0, rows, split_keys(pool.keys([2, 3])), bytes(32)
    )
    assert stored == (2, []), "its slots are still its own"
    assert pool.here([1, 2, 3]) == [1, 2, 3]


def test_a_fence_reaches_whoever_is_forgotten_by_name(make_pool) -> None:
    """A client opened it long ago; its epoch is not remembered any more when the weights change."""
    pool = make_pool()
    number = pool.namespace.number
    for _ in range(EPOCHS_KEPT + 5):
        pool.reset()
    assert pool.node.namespaces.by_number(pool.tenant, number) is pool.namespace
    pool.reset(fence=pool.namespace.epoch + 1)
    found = pool.node.namespaces.by_number(pool.tenant, number)
    assert found is not pool.namespace
    with pytest.raises(StaleEpoch):
        pool.reserve([1], namespace=found)


@pytest.mark.parametrize("fenced", [False, True], ids=["cleared", "reset"])
def test_an_epoch_that_is_forgotten_by_name_leaves_no_state_behind(make_pool, fenced: bool) -> None:
    """However often the weights change; who opened it then is treated as before."""
    pool = make_pool()
    numbers = [pool.namespace.number]
    for _ in range(3 * EPOCHS_KEPT):
        pool.put([1])
        pool.reset(fence=pool.namespace.epoch + 1 if fenced else 0)
        pool.node.ended_epochs.reclaim(10)
        numbers.append(pool.namespace.number)
    gc.collect()
    states = [one for one in gc.get_objects() if isinstance(one, NamespaceState)]
    kept = sum(one.tenant is pool.tenant for one in states)
    assert kept == EPOCHS_KEPT + 1 + fenced, "one for all that are fenced out"
    for number in numbers[:-1]:
        found = pool.node.namespaces.by_number(pool.tenant, number)
        assert (found is pool.namespace) is not fenced
        if fenced:
            assert found.retired
            with pytest.raises(StaleEpoch):
                pool.reserve([2], namespace=found)
    with pytest.raises(InvalidRequest):
        pool.node.namespaces.by_number(pool.node.add_tenant("blue", 1, 1 << 20), numbers[0])


def test_ended_epochs_are_remembered_by_name_for_a_while(make_pool) -> None:
    pool = make_pool()
    states = [pool.namespace]
    for _ in range(EPOCHS_KEPT + 3):
        pool.put([1])
        pool.reset()
        states.append(pool.namespace)
    known = [pool.node.namespaces.by_directory(state.directory_digest) for state in states]
    assert known == [None] * 3 + states[3:]
    key = pool.keys([1])
    assert pool.node.inventory.masks(states[2].directory_digest, [key]) == (0, [])
    assert pool.node.inventory.masks(states[3].directory_digest, [key]) == (1, [0])
    assert len(pool.tenant.epochs[pool.namespace.base]) == EPOCHS_KEPT + 1
    pool.node.ended_epochs.reclaim(1000)
    assert pool.bytes_used == 0, "what they left is not forgotten"


# ---- what was open when it ended -------------------------------------------------------------------


def test_old_leases_stay_readable_and_their_slots_come_back_only_then(make_pool) -> None:
    pool = make_pool(slabs=1)
    pool.put(range(4))
    lease = pool.lease(range(4))
    held = {(block.row, block.checksum) for block in lease.parts[0][1]}
    pool.reset(fence=1)
    with pytest.raises(PoolFull):
        pool.put([10])
    assert not pool.node.ended_epochs, "all was tried"
    assert pool.node.leases.join(pool.holder, lease.token, 0.0) is lease
    assert {(block.row, block.checksum) for block in lease.parts[0][1]} == held
    pool.release(lease)
    assert pool.bytes_used == 4 * 1024
    pool.release(lease)
    assert pool.bytes_used == 0
    assert pool.put(range(10, 14)) == 4


def test_a_lease_may_end_before_the_slots_are_reclaimed(make_pool) -> None:
    pool = make_pool(slabs=1)
    pool.put(range(4))
    lease = pool.lease(range(4))
    with pytest.raises(PoolFull):
        pool.put([10])  # it came up as a victim, and was set aside
    pool.reset()
    pool.release(lease)
    assert pool.bytes_used == 4 * 1024
    assert pool.node.ended_epochs.reclaim(10) == 4
    assert pool.bytes_used == 0
    assert pool.put(range(10, 14)) == 4


@pytest.mark.parametrize("end", ["deadline", "death"])
def test_leases_of_ended_epochs_end_like_others(make_pool, end: str) -> None:
    pool = make_pool(slabs=1)
    pool.put(range(4))
    pool.lease(range(4))
    pool.reset()
    pool.node.ended_epochs.reclaim(2)
    if end == "deadline":
        pool.node.leases.expire(10.0)
    else:
        pool.node.holders.died(pool.holder)
    assert pool.bytes_used == 2 * 1024
    pool.node.ended_epochs.reclaim(2)
    assert pool.bytes_used == 0


def test_open_reservations_are_dropped_at_their_commit(make_pool) -> None:
    pool = make_pool()
    ticket, _ = pool.reserve(range(4))
    assert pool.node.puts.commit(pool.holder, ticket, bytes(16), [3]) == 1
    pool.reset()
    pool.put([0])
    assert pool.node.puts.commit(pool.holder, ticket, bytes(32), [0, 1]) == 0
    assert pool.holder.reserved_bytes == 1024
    assert pool.node.puts.commit(pool.holder, ticket, bytes(16)) == 0
    assert pool.holder.idle
    assert pool.node.counters.aborted == 3
    assert pool.node.counters.duplicates == 0
    assert pool.here(range(4)) == [0]
    pool.node.ended_epochs.reclaim(10)
    assert pool.bytes_used == 1024


def test_a_dropped_commit_lets_a_slab_go(make_pool) -> None:
    """A put that found no slab does not look again before something was released."""
    pool = make_pool(slabs=1, steal_tries=0)
    other = pool.open(b"o" * 16, (PartSpec(1024),))
    whole = pool.open(b"w" * 16, WHOLE)
    writer = pool.node.holders.add("red", "engine")
    pool.put(range(3), namespace=other)
    ticket, _ = pool.reserve([1])
    pool.reset()
    with pytest.raises(PoolFull):
        pool.put([1], namespace=whole, holder=writer)
    assert pool.node.puts.commit(pool.holder, ticket, bytes(16)) == 0
    assert pool.put([1], namespace=whole, holder=writer) == 1


@pytest.mark.parametrize("end", ["abort", "death"])
def test_open_reservations_end_like_others(make_pool, end: str) -> None:
    pool = make_pool()
    ticket, _ = pool.reserve(range(4))
    pool.reset(fence=1)
    pool.node.ended_epochs.reclaim(10)
    assert pool.bytes_used == 4 * 1024, "its writer may still write"
    if end == "abort":
        pool.node.puts.abort(pool.holder, ticket)
    else:
        pool.node.holders.died(pool.holder)
    assert pool.bytes_used == 0


def test_grants_survive(make_pool) -> None:
    pool = make_pool()
    rows = pool.node.grants.grant(pool.holder, pool.namespace, 0, 4)
    number = pool.namespace.number
    pool.reset()
    pool.node.ended_epochs.reclaim(10)
    namespace = pool.node.namespaces.by_number(pool.tenant, number)
    stored = pool.node.grants.store(
        pool.holder, namespace, 0, rows[:3], split_keys(pool.keys([1, 2, 3])), bytes(48)
    )
    assert stored == (3, [])
    assert pool.here([1, 2, 3]) == [1, 2, 3]
    pool.node.grants.give_back(pool.holder, 1024, rows)
    assert pool.bytes_used == 3 * 1024


# ---- space ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_slots_of_ended_epochs_go_before_anybody_living(make_pool, policy: str) -> None:
    pool = make_pool(slabs=2, policy=policy)
    other = pool.open(b"o" * 16, (PartSpec(1024),))
    pool.put(range(10, 14), namespace=other)  # older, and never read
    pool.put(range(4))
    pool.read(range(4))
    pool.reset()
    assert pool.put(range(3)) == 3
    assert pool.here(range(10, 14), other) == [10, 11, 12, 13]
    assert pool.node.counters.evicted == 0
    assert pool.node.counters.reclaimed_blocks == 3, "no more than was needed"
    assert pool.put([3, 4]) == 2
    assert pool.node.counters.evicted == 1


@pytest.mark.parametrize("leased", [False, True])
def test_slots_of_ended_epochs_of_another_size_go_too(make_pool, leased: bool) -> None:
    pool = make_pool(slabs=3)
    whole = pool.open(b"w" * 16, WHOLE)
    pool.put(range(4))
    pool.put(range(4, 8))
    pool.put([1], namespace=whole)
    lease = pool.lease([7]) if leased else None
    pool.reset()
    assert pool.put([2], namespace=whole) == 1
    assert pool.here([1, 2], whole) == [1, 2]
    if lease is not None:
        with pytest.raises(PoolFull):
            pool.put([9], namespace=pool.open(b"2" * 16, (PartSpec(12 << 10),)))
        pool.release(lease)
    assert pool.put([3], namespace=whole) == 1


def test_slots_of_the_size_that_is_needed_are_reclaimed_first(make_pool) -> None:
    """Or one put might have to give back all the others, to find none that it can use."""
    pool = make_pool(slabs=4, parts=(PartSpec(1024), PartSpec(2048), PartSpec(4096)))
    pool.put(range(4))
    pool.put(range(2), part=1)
    pool.put(range(2), part=2)
    pool.reset()
    assert pool.put([9], part=1) == 1
    assert pool.node.counters.reclaimed_blocks == 1


def test_pins_of_ended_epochs_are_in_no_quota(make_pool) -> None:
    pool = make_pool(slabs=2, hard_pin_share=0.25, soft_pin_share=0.25)
    for numbers, kind in (([0, 1], "hard"), ([2, 3], "soft")):
        pool.put(numbers)
        pool.pin(numbers, kind)
        pool.put([9])
        with pytest.raises(LimitExceeded):
            pool.pin([9], kind)
    pool.reset()
    assert (pool.tenant.hard_bytes, pool.tenant.soft_bytes) == (0, 0)
    pool.put(range(3))
    assert len(pool.pin([0, 1], "hard")) == 2
    with pytest.raises(LimitExceeded):
        pool.pin([2], "hard")
    assert len(pool.pin([2], "soft")) == 1
    pool.node.ended_epochs.reclaim(100)
    assert (pool.tenant.hard_bytes, pool.tenant.soft_bytes) == (2 * 1024, 1024)
    assert pool.bytes_used == 3 * 1024, "their slots came back like others"
    assert [pool.tenant.pinned[kind].total() for kind in (PIN_HARD, PIN_SOFT)] == [2, 1]
    assert pool.put(range(20, 25)) == 5


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("n", [1, 3, 100])
def test_all_slots_of_ended_epochs_come_back_and_never_more_than_asked_for(
    make_pool, policy: str, n: int
) -> None:
    window = PartSpec(2000, PartKind.WINDOW, window_blocks=2)
    pool = make_pool(slabs=8, policy=policy, parts=(PartSpec(1024), window))
    blue = pool.node.add_tenant("blue", 1, 4 * 4096, 4096)
    namespaces = [pool.node.namespaces.open(blue, b"n" * 16, b"{}", pool.namespace.parts)]
    writer = pool.node.holders.add("blue", "engine")
    for _ in range(3):
        pool.put(range(4))
        pool.put(range(2, 4), part=1)
        pool.put(range(3), namespace=namespaces[-1], holder=writer)
        pool.reset()
        namespaces.append(pool.node.namespaces.set_epoch(namespaces[-1], len(namespaces), 0))
    pool.put([50])
    total = 3 * (4 + 2 + 3)
    went = []
    while pool.node.ended_epochs:
        went.append(pool.node.ended_epochs.reclaim(n))
        assert 0 < went[-1] <= n
    assert sum(went) == total
    assert pool.node.ended_epochs.reclaim(n) == 0
    assert pool.node.counters.reclaimed_blocks == total
    assert (pool.bytes_used, blue.allocator.bytes_used) == (1024, 0)
    assert pool.here([50]) == [50]
    assert pool.put(range(60, 90)) == 30


def test_a_put_reclaims_what_its_own_tenant_left(make_pool) -> None:
    pool = make_pool(slabs=1)
    blue = pool.node.add_tenant("blue", 1, 4096, 4096)
    same = pool.node.namespaces.open(blue, pool.namespace.base, b"{}", pool.namespace.parts)
    writer = pool.node.holders.add("blue", "engine")
    pool.put(range(4), namespace=same, holder=writer)
    pool.node.namespaces.set_epoch(same, 1, 0)
    pool.put(range(4))
    pool.put(range(4, 8))
    assert blue.allocator.bytes_used == 4096
    assert pool.node.counters.reclaimed_blocks == 0


def test_the_time_of_reclaiming_does_not_grow_with_what_has_gone_before(make_pool) -> None:
    def seconds(count: int) -> float:
        pool = make_pool(slabs=count * 64 // 4096, parts=(PartSpec(64),))
        for n in range(0, count, 512):
            pool.put(range(n, n + 512))
        pool.reset()
        pool.node.ended_epochs.reclaim(count - 400)
        best = 1.0
        for _ in range(40):
            begin = time.thread_time()
            assert pool.node.ended_epochs.reclaim(8) == 8
            best = min(best, time.thread_time() - begin)
        return best

    assert seconds(1 << 16) < 5 * seconds(1 << 10)


def test_an_emptied_table_keeps_no_memory(make_pool) -> None:
    pool = make_pool(slabs=64, parts=(PartSpec(64),))
    pool.put(range(4096))
    old = pool.reset()
    pool.node.ended_epochs.reclaim(5000)
    emptied = old.tables[0].garbage
    assert len(emptied) == 0
    parts = [each for each in gc.get_referents(emptied) if not isinstance(each, type)]
    assert sum(map(sys.getsizeof, parts)) < 1000


# ---- what else may happen to its blocks ---------------------------------------------------------------


def test_removed_and_corrupt_and_expired_around_the_end(make_pool) -> None:
    pool = make_pool(slabs=2)
    pool.put(range(6))
    lease = pool.lease(range(6))
    assert pool.node.removal.remove(pool.namespace, split_keys(pool.keys([0]))) == {pool.keys([0])}
    old = pool.reset()
    assert not pool.node.removal.remove(old, split_keys(pool.keys([1])))
    pool.node.removal.drop_corrupt(old, 0, pool.keys([2]))
    assert pool.node.counters.checksum_mismatches == 1
    assert pool.node.ended_epochs.reclaim(3) == 3
    pool.node.leases.expire(10.0)
    assert pool.bytes_used == 2 * 1024
    assert pool.node.ended_epochs.reclaim(100) == 2
    assert pool.bytes_used == 0
    pool.release(lease)
    assert pool.put(range(8)) == 8


def test_promoting_what_an_epoch_left_changes_nothing(make_pool) -> None:
    pool = make_pool(slabs=1)
    pool.put(range(4))
    pool.demote(range(4))
    blocks = pool.blocks(range(4))
    pool.reset()
    pool.node.candidates.promote(blocks)
    assert pool.node.candidates.coldest(pool.tenant, 10) == []
    assert pool.node.candidates.coldest_secondary(pool.tenant, 10) == []
    assert pool.put(range(4)) == 4
    pool.node.candidates.promote(blocks)
    assert pool.put(range(10, 14)) == 4
    assert pool.here(range(10, 14)) == [10, 11, 12, 13]


def test_a_number_is_for_its_own_tenant_in_every_epoch(make_pool) -> None:
    pool = make_pool()
    blue = pool.node.add_tenant("blue", 1, 4096, 4096)
    old = pool.reset()
    for state in (old, pool.namespace):
        with pytest.raises(InvalidRequest, match="not open here"):
            pool.node.namespaces.by_number(blue, state.number)


@pytest.mark.parametrize("policy", ["lru", "aged"])
def test_a_put_that_cannot_afford_the_rest_of_an_epoch_takes_what_goes_next(
    make_pool, monkeypatch, policy: str
) -> None:
    monkeypatch.setattr(reclaimer, "RECLAIMED_PER_PUT", -1 << 20)
    pool = make_pool(slabs=6, policy=policy)
    whole = pool.open(b"w" * 16, WHOLE)
    pool.put([1, 2], namespace=whole)
    for first in range(0, 16, 4):
        pool.put(range(first, first + 4))
    pool.reset()
    pool.put(range(100, 103))  # slots of the old ones, as the policy gives them
    assert pool.put([3, 4, 5], namespace=whole) == 3
    assert set(pool.here(range(1, 6), whole)) >= {3, 4, 5}
    while pool.node.ended_epochs.reclaim(2):
        pass
    assert not pool.node.ended_epochs
    held = len(pool.here(range(1, 6), whole)) * 4096 + len(pool.here(range(100, 103))) * 1024
    assert pool.tenant.allocator.bytes_used == held


def test_a_put_does_not_fail_while_there_is_something_of_an_ended_epoch(
    make_pool, monkeypatch
) -> None:
    monkeypatch.setattr(reclaimer, "RECLAIMED_PER_PUT", -1 << 20)
    pool = make_pool(slabs=2)
    whole = pool.open(b"w" * 16, WHOLE)
    for kind in ("hard", "soft"):
        pool.put(range(8))
        pool.pin(range(2), kind)
        pool.reset()
        assert pool.put([1], namespace=whole) == 1
        pool.put([2], namespace=whole)
