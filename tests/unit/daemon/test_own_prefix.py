"""A put makes room for its prefix without evicting other blocks of that prefix."""

from __future__ import annotations

import pytest

from kvpool.daemon.core.blocks import OWN
from kvpool.errors import PoolFull
from kvpool.storage.eviction import POLICIES
from kvpool.types import PartSpec, split_keys

SECOND = OWN._replace(secondary=True)
policies = pytest.mark.parametrize("policy", sorted(POLICIES))


@policies
def test_a_secondary_copy_stays_while_its_prefix_is_put(make_pool, policy: str) -> None:
    """It would be the first to go, though the put has just been told that it is here."""
    pool = make_pool(slabs=2, policy=policy)
    pool.put([0], origin=SECOND)
    pool.put(range(10, 17))
    pool.put([0, 1])
    assert pool.here([0, 1]) == [0, 1]
    pool.put([20])
    assert pool.here([0, 1, 20]) == [1, 20], "it is the first to go again"


@policies
def test_a_slab_with_another_part_of_the_prefix_stays(make_pool, policy: str) -> None:
    """Part 0 has just been put into the slab that has the coldest blocks of its size."""
    pool = make_pool(slabs=4, policy=policy, parts=(PartSpec(1024), PartSpec(2048)))
    pool.put(range(8))
    for _ in range(20):
        pool.read(range(4, 8))
    pool.put(range(100, 104), part=1)
    for n in (200, 201):
        pool.put([n], part=0)
        pool.put([n], part=1)
        assert pool.node.leases.match(pool.namespace, (), split_keys(pool.keys([n]))) == 1


@policies
def test_a_slab_with_blocks_between_those_of_a_sparse_part_stays(make_pool, policy: str) -> None:
    """A put of the sparse part names every other block only."""
    pool = make_pool(slabs=4, policy=policy, parts=(PartSpec(1024), PartSpec(2048, stride=2)))
    pool.put(range(8))
    for _ in range(20):
        pool.read(range(4, 8))
    pool.put(range(100, 104), part=1)
    pool.put([200])
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([7])))
    pool.put([201], parent=pool.keys([200]))  # in another slab
    pool.put([201], part=1)
    assert pool.here([200, 201]) == [200, 201]


@policies
def test_a_quota_makes_room_from_other_prefixes(make_pool, policy: str) -> None:
    pool = make_pool(slabs=4, policy=policy)
    pool.node.quotas.set(pool.namespace, 4 * 1024)
    pool.put([0], origin=SECOND)
    pool.put(range(10, 13))
    pool.put([0, 1])
    assert pool.here([0, 1]) == [0, 1]


def test_its_own_prefix_goes_rather_than_nothing(make_pool) -> None:
    pool = make_pool(slabs=1)
    pool.put(range(4))
    assert pool.put([0, 1, 2, 3, 4]) == 1
    assert len(pool.here(range(5))) == 4
    lease = pool.lease(pool.here(range(5)))
    with pytest.raises(PoolFull):
        pool.put([9])
    pool.release(lease)


def test_a_slab_of_its_own_pinned_prefix_goes_rather_than_nothing(make_pool) -> None:
    """The search among other slabs finds nothing, which says nothing about the put's own."""
    pool = make_pool(slabs=2, parts=(PartSpec(1024), PartSpec(2048)))
    pool.put(range(4))
    held = pool.lease(range(4))
    pool.put([20, 21])
    pool.pin([20, 21], "soft")
    assert pool.put([20, 21], part=1) >= 1
    pool.release(held)
