"""More namespaces than a tenant may have: one more takes the place of one that nobody needs."""

from __future__ import annotations

import pytest

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.errors import InvalidRequest, LimitExceeded, StaleEpoch, UnknownNamespace
from kvpool.types import PartSpec, split_keys

PARTS = (PartSpec(1024),)


def base(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def pool(make_pool):
    """One with room for three namespaces, of which it has one."""
    return make_pool(namespaces_per_tenant=3)


def known(pool, namespace: NamespaceState) -> bool:
    return pool.node.namespaces.by_directory(namespace.directory_digest) is namespace


def test_of_those_that_nobody_needs_the_one_opened_longest_ago_goes(pool) -> None:
    first, second = pool.namespace, pool.open(base(1), PARTS)
    pool.open(base(2), PARTS)
    pool.open(first.base, PARTS)
    pool.open(base(3), PARTS)
    assert known(pool, first) and not known(pool, second)
    for number in range(4, 5000):
        pool.open(base(number), PARTS)
    assert len(pool.tenant.epochs) == len(pool.tenant.namespaces) == 3


def test_what_holds_something_stays(pool) -> None:
    others = [pool.open(base(number), PARTS) for number in (1, 2)]
    pool.put([1])
    pool.put([2], namespace=others[0])
    ticket, _ = pool.reserve([3], namespace=others[1])
    with pytest.raises(LimitExceeded, match="none is empty and unused"):
        pool.open(base(3), PARTS)
    assert all(map(known, [pool] * 3, [pool.namespace, *others]))
    pool.node.puts.abort(pool.holder, ticket)
    pool.open(base(3), PARTS)
    assert not known(pool, others[1])


def test_blocks_of_an_ended_epoch_hold_it_until_they_are_freed(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    pool.put(range(4))
    pool.reset()
    with pytest.raises(LimitExceeded):
        pool.open(base(1), PARTS)
    pool.node.ended_epochs.reclaim(10)
    pool.open(base(1), PARTS)


def test_what_a_living_client_has_open_stays(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    namespaces = pool.node.namespaces
    client = pool.node.holders.add("red", "client")
    namespaces.opened(client, pool.namespace)
    namespaces.opened(pool.holder, pool.namespace)
    pool.node.holders.died(pool.holder)
    with pytest.raises(LimitExceeded):
        pool.open(base(1), PARTS)
    pool.node.holders.died(client)
    pool.open(base(1), PARTS)


def test_what_its_client_has_closed_goes(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    namespaces = pool.node.namespaces
    other = pool.node.holders.add("red", "client")
    for client in (pool.holder, other):
        namespaces.opened(client, pool.namespace)
    namespaces.closed(pool.holder, pool.namespace)
    with pytest.raises(LimitExceeded):
        pool.open(base(1), PARTS)  # the other has it open still
    namespaces.closed(other, pool.namespace)
    namespaces.closed(other, pool.namespace)
    pool.open(base(1), PARTS)


def test_a_quota_and_whoever_else_needs_it_keep_it(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    with pytest.raises(LimitExceeded):
        pool.open(base(1), PARTS, lambda namespace: namespace is not pool.namespace)
    pool.node.quotas.set(pool.namespace, 4096)
    with pytest.raises(LimitExceeded):
        pool.open(base(1), PARTS)
    pool.node.quotas.set(pool.namespace, 0)
    with pytest.raises(LimitExceeded):
        pool.open(base(1), PARTS, None)
    with pytest.raises(InvalidRequest):  # too large for a slab: nothing is freed for it
        pool.open(base(1), (PartSpec(1 << 30),))
    assert known(pool, pool.namespace)
    pool.open(base(1), PARTS)


def test_a_number_is_never_another_namespaces(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    namespaces, numbers = pool.node.namespaces, []
    for number in range(10):
        numbers.append(pool.namespace.number)
        pool.reset(fence=pool.namespace.epoch + 1 if number % 2 else 0)
        numbers.append(pool.namespace.number)
        assert namespaces.by_number(pool.tenant, numbers[-1]) is pool.namespace
        pool.namespace = pool.open(base(number), PARTS)
    assert len({*numbers, pool.namespace.number}) == 21
    for number in numbers:
        with pytest.raises(UnknownNamespace):
            namespaces.by_number(pool.tenant, number)
    assert namespaces.by_number(pool.tenant, pool.namespace.number) is pool.namespace


def test_whoever_still_refers_to_it_meets_an_ended_epoch(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    old, namespaces = pool.namespace, pool.node.namespaces
    pool.open(base(1), PARTS)
    assert namespaces.living(old) is old
    assert namespaces.set_epoch(old, 5, 5, 1) is old
    with pytest.raises(StaleEpoch):
        pool.reserve([1], namespace=old)
    assert pool.node.leases.match(old, (), split_keys(pool.keys([1]))) == 0


def test_it_comes_back_as_after_a_restart_and_fences_stay(make_pool) -> None:
    pool = make_pool(namespaces_per_tenant=1)
    namespaces = pool.node.namespaces
    pool.reset(fence=1)
    former = pool.namespace
    pool.open(base(1), PARTS)
    again = pool.open(former.base, PARTS)
    assert (again.epoch, again.generation) == (0, 0)
    assert again.fenced, "until the cluster's epoch is known"
    living = namespaces.set_epoch(again, former.epoch, 1, former.generation)
    assert (living.epoch, living.generation, living.fenced) == (1, 1, False)
    assert namespaces.living(former) is living
    pool.put([1], namespace=living)
    out = namespaces.as_opened(living, 0)
    assert pool.node.leases.match(out, (), split_keys(pool.keys([1]))) == 0
