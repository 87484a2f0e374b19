"""Whatever leaves memory is told with its cause."""

import random

import pytest

from kvpool.daemon.core.blocks import Origin
from kvpool.daemon.features.departures import Cause
from kvpool.telemetry.misses import Reason
from kvpool.types import PartSpec, split_keys
from tests.unit.daemon.conftest import Pool

OTHER = bytes([7]) * 16
LARGE = PartSpec(4096)


def cause(pool: Pool, number: int) -> Cause | None:
    (key,) = split_keys(pool.keys([number]))
    found = pool.departures.find(pool.namespace.space, key)
    return None if found is None else found.cause


def test_evicted_for_a_put_of_the_same_and_of_another_namespace(make_pool) -> None:
    pool = make_pool(slabs=2)
    other = pool.open(OTHER, pool.namespace.parts)
    pool.put(range(8))
    pool.put([20, 21])
    assert cause(pool, 7) == Cause(Reason.FULL, "dram", pool.namespace.base_hex), "the end first"
    pool.put([30, 31], namespace=other)
    assert cause(pool, 5) == Cause(Reason.FULL, "dram", OTHER.hex())
    assert cause(pool, 3) is None


def test_evicted_with_a_slab_for_blocks_of_another_size(make_pool) -> None:
    pool = make_pool(slabs=1)
    other = pool.open(OTHER, (LARGE,))
    pool.put(range(4))
    pool.put([20], namespace=other)
    assert pool.here(range(4)) == []
    assert {cause(pool, n) for n in range(4)} == {Cause(Reason.FULL, "dram", OTHER.hex())}


def test_evicted_as_secondary_replicas_and_soft_pins(make_pool) -> None:
    pool = make_pool(slabs=1)
    pool.put([0, 1], origin=Origin(secondary=True))
    pool.put([2, 3])
    pool.node.pins.pin(pool.namespace, split_keys(pool.keys([2, 3])), "soft")
    pool.put([4, 5])
    assert pool.here(range(6)) == [2, 3, 4, 5]
    pool.put([6, 7, 8, 9])
    for number in range(6):
        assert cause(pool, number) == Cause(Reason.FULL, "dram", pool.namespace.base_hex), number


def test_evicted_at_a_quota(make_pool) -> None:
    pool = make_pool(slabs=4)
    pool.node.quotas.set(pool.namespace, 4 * 1024)
    pool.put(range(4))
    pool.put([10, 11])
    assert cause(pool, 3) == Cause(Reason.QUOTA, "dram", pool.namespace.base_hex)


def test_left_behind_by_a_session(make_pool) -> None:
    pool = make_pool(slabs=2)

    def turn(numbers: list[int]) -> None:
        pool.put(numbers)
        keys = pool.keys(numbers)
        pool.node.settle()
        pool.sessions.turn(pool.tenant, pool.namespace, "s", "", keys, 0.0)
        while pool.sessions.work(10):
            pass

    turn([0, 1, 2, 3])
    turn([0, 10, 11])
    pool.put([20, 21, 22, 23])
    assert cause(pool, 3) == Cause(Reason.SUPERSEDED, "dram", pool.namespace.base_hex)


def test_taken_out_by_somebody(make_pool) -> None:
    pool = make_pool(slabs=4)
    pool.put(range(8))
    node, namespace = pool.node, pool.namespace

    def keys(*numbers: int):
        return split_keys(pool.keys(numbers))

    node.removal.remove(namespace, keys(0))
    node.removal.give_up(namespace, keys(1))
    node.removal.drop_corrupt(namespace, 0, keys(2)[0])
    node.removal.drop_unused(namespace, keys(3), node.ledger.tick)
    node.eviction.evict_least(pool.tenant, 1)
    pool.reset()
    assert cause(pool, 5) is None, "its slot is not free yet"
    node.ended_epochs.reclaim(100)
    found = [cause(pool, number) for number in range(8)]
    reasons = [each.reason for each in found if each is not None]
    gone = [Reason.REMOVED, Reason.OPERATOR, Reason.CORRUPT, Reason.TTL]
    assert reasons[:4] == gone
    assert sorted(reasons[4:]) == sorted([Reason.OPERATOR, *[Reason.EPOCH] * 3])
    assert {each.by for each in found if each is not None} == {""}, "no put has needed their room"


@pytest.mark.parametrize("seed", range(20))
def test_nothing_leaves_without_a_cause(make_pool, seed: int) -> None:
    """Whatever is done: of what was put and is not here, it is known why."""
    rng = random.Random(seed)
    pool = make_pool(slabs=4, policy=rng.choice(["lru", "aged"]))
    other = pool.open(OTHER, (LARGE,))
    put: set[int] = set()
    held: list = []
    for _ in range(120):
        some = rng.sample(range(60), rng.randint(1, 5))
        keys = split_keys(pool.keys(some))
        match rng.randrange(9):
            case 0 | 1 | 2 | 3:
                if pool.put(some):
                    put |= {n for n in some if pool.here([n])}
            case 4:
                pool.node.removal.remove(pool.namespace, keys)
            case 5:
                pool.node.removal.give_up(pool.namespace, keys)
            case 6:
                pool.put(rng.sample(range(100, 110), 1), namespace=other)
            case 7:
                if here := pool.here(some[:1]):
                    held.append(pool.lease(here))
            case 8:
                if held:
                    pool.release(held.pop(rng.randrange(len(held))))
        for number in put:
            if not pool.here([number]):
                assert cause(pool, number) is not None, number
