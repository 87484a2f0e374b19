"""Slots granted without keys: who may use them, how many there are, and when they come back."""

import pytest

from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.errors import InvalidRequest, UnknownReservation
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec, split_keys

SLOT = 4096
SLOTS = 256


def keys(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(16, "big") for n in numbers)


def make(**limits: float):
    node = Node(
        make_policy=policy_maker("lru"),
        limits=Limits(**{"grant_share": 0.5, **limits}),
    )
    tenant = node.add_tenant("t", 0, SLOTS * SLOT, slab_bytes=16 * SLOT)
    namespace = node.namespaces.open(tenant, b"n" * 16, b"{}", [PartSpec(SLOT)])
    return node, tenant, namespace, node.holders.add("t", "engine")


def test_a_put_in_one_exchange_is_found_and_says_what_was_there():
    node, tenant, namespace, holder = make()
    rows = node.grants.grant(holder, namespace, 0, 4)
    assert len(set(rows)) == 4
    assert node.grants.store(
        holder, namespace, 0, rows[:3], split_keys(keys(1, 2, 3)), keys(7, 8, 9)
    ) == (
        3,
        [],
    )
    assert node.leases.match(namespace, [], split_keys(keys(1, 2, 3))) == 3
    more = node.grants.grant(holder, namespace, 0, 2)
    new, unused = node.grants.store(
        holder, namespace, 0, [rows[3], *more], split_keys(keys(3, 4, 4)), keys(9, 5, 5)
    )
    assert (new, unused) == (1, [rows[3], more[1]]), "3 was there, and 4 was named twice"
    assert holder.granted_bytes == tenant.granted_bytes == 2 * SLOT
    lease = node.leases.acquire(holder, namespace, [0], split_keys(keys(1, 2, 3, 4)), 10, 0.0)
    assert lease is not None
    assert [block.row for block in lease.parts[0][1]] == [*rows[:3], more[0]]
    assert [block.checksum for block in lease.parts[0][1]] == [
        n.to_bytes(16, "big") for n in (7, 8, 9, 5)
    ]


def test_only_who_was_granted_a_slot_may_store_it_and_only_once():
    node, _, namespace, holder = make()
    other = node.holders.add("t", "engine")
    rows = node.grants.grant(holder, namespace, 0, 2)
    for who, what in ((other, rows), (holder, [SLOTS - 1]), (holder, [rows[0], rows[0]])):
        with pytest.raises(UnknownReservation):
            node.grants.store(
                who,
                namespace,
                0,
                what,
                split_keys(keys(*range(len(what)))),
                keys(*range(len(what))),
            )
    node.grants.store(holder, namespace, 0, rows, split_keys(keys(1, 2)), keys(1, 2))
    with pytest.raises(UnknownReservation):
        node.grants.store(holder, namespace, 0, rows, split_keys(keys(3, 4)), keys(3, 4))
    with pytest.raises(InvalidRequest):
        node.grants.store(holder, namespace, 0, [], split_keys(keys(3)), keys(3))


def test_granted_slots_are_nobody_elses_until_they_come_back():
    node, tenant, namespace, holder = make()
    mine = set(node.grants.grant(holder, namespace, 0, 8))
    other = node.holders.add("t", "engine")
    for ticket in range(4):  # a pool's worth of puts by somebody else, evicting as they go
        numbers = range(1000 * ticket, 1000 * ticket + 100)
        node.puts.reserve(other, namespace, 0, ticket, split_keys(keys(*numbers)))
        assert mine.isdisjoint(other.reservations[ticket].rows)
        rows = other.reservations[ticket].rows
        node.puts.commit(other, ticket, keys(*range(len(rows))))
    used = tenant.allocator.bytes_used
    node.grants.give_back(holder, SLOT, [*mine][:3])
    node.grants.give_back(holder, SLOT, [*mine][:3])
    assert tenant.allocator.bytes_used == used - 3 * SLOT, "twice is once"
    node.holders.died(holder)
    assert tenant.allocator.bytes_used == used - 8 * SLOT
    assert tenant.granted_bytes == 0


def test_a_late_give_back_does_not_touch_what_was_stored():
    node, tenant, namespace, holder = make()
    rows = node.grants.grant(holder, namespace, 0, 2)
    node.grants.store(holder, namespace, 0, rows, split_keys(keys(1, 2)), keys(1, 2))
    used = tenant.allocator.bytes_used
    node.grants.give_back(holder, SLOT, rows)
    assert tenant.allocator.bytes_used == used
    assert node.leases.match(namespace, [], split_keys(keys(1, 2))) == 2


def test_grants_are_bounded_per_holder_and_per_tenant():
    node, tenant, namespace, holder = make(grant_share=0.25, grant_bytes_per_holder=40 * SLOT)
    assert len(node.grants.grant(holder, namespace, 0, 1000)) == 40
    assert node.grants.grant(holder, namespace, 0, 1) == []
    other = node.holders.add("t", "engine")
    assert len(node.grants.grant(other, namespace, 0, 1000)) == SLOTS // 4 - 40
    assert tenant.granted_bytes == SLOTS // 4 * SLOT
    assert not holder.idle
