"""What the directory is told: changes, what is here now, and a walk through all that is held."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random

import pytest

from kvpool.daemon.core.blocks import Origin
from kvpool.errors import PoolFull
from kvpool.storage.eviction import POLICIES
from kvpool.types import PartKind, PartSpec, split_keys

TWO = (PartSpec(1024), PartSpec(1024))
WHOLE = (PartSpec(4096),)
Block = tuple[bytes, int]  # directory digest, number


def number(key: bytes) -> int:
    return int.from_bytes(key, "big")


def told(pool) -> set[Block]:
    return {
        (namespace.directory_digest, number(key))
        for namespace, keys in pool.node.inventory.take_changes()
        for key in keys
    }


def masks(pool, numbers, namespace=None) -> list[int]:
    digest = (namespace or pool.namespace).directory_digest
    return pool.node.inventory.masks(digest, [n.to_bytes(16, "big") for n in numbers])[1]


def walk(pool, count: int) -> list[Block]:
    met = []
    cursor: int | None = 0
    while cursor is not None:
        groups, cursor = pool.node.inventory.walk(cursor, count)
        found = [(digest, number(key)) for digest, keys in groups for key in keys]
        assert len(found) <= count
        met += found
    return met


# ---- changes ------------------------------------------------------------------------------------


def test_nothing_is_noted_before_somebody_follows(make_pool) -> None:
    pool = make_pool()
    pool.put([1])
    assert pool.node.inventory.take_changes() == []
    pool.node.inventory.follow_changes()
    assert pool.node.inventory.take_changes() == []
    pool.put([2])
    pool.node.settle()
    pool.node.inventory.follow_changes()
    assert told(pool) == {(pool.namespace.directory_digest, 2)}
    assert pool.node.inventory.take_changes() == []


def test_a_put_is_told_though_the_books_are_behind(make_pool) -> None:
    pool = make_pool()
    pool.node.inventory.follow_changes()
    pool.put([1, 2])
    assert told(pool) == {(pool.namespace.directory_digest, n) for n in (1, 2)}


def test_what_was_not_stored_is_not_told(make_pool) -> None:
    pool = make_pool()
    pool.put([1])
    pool.node.settle()
    pool.node.inventory.follow_changes()
    ticket, _ = pool.reserve([1, 2])
    pool.node.puts.abort(pool.holder, ticket)
    pool.node.grants.grant(pool.holder, pool.namespace, 0, 2)
    ticket, _ = pool.reserve([3])
    pool.reset()
    pool.node.puts.commit(pool.holder, ticket, bytes(16))
    assert pool.node.inventory.take_changes() == []


def _evict(pool) -> None:
    pool.put([10])


def _evict_pinned(pool) -> None:
    pool.pin([0, 1, 2, 3], "soft")
    pool.put([10])


def _evict_secondary(pool) -> None:
    pool.demote([3])
    pool.put([10])


def _move_slab(pool) -> None:
    pool.put([10], namespace=pool.open(b"w" * 16, WHOLE))


def _remove(pool) -> None:
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([3])))


def _corrupt(pool) -> None:
    pool.node.removal.drop_corrupt(pool.namespace, 0, pool.keys([3]))


def _reclaim(pool) -> None:
    pool.reset()
    pool.node.ended_epochs.reclaim(100)


def _reclaim_in_a_put(pool) -> None:
    pool.reset()
    for n in range(4):
        pool.put([n])


WAYS = [
    _evict,
    _evict_pinned,
    _evict_secondary,
    _move_slab,
    _remove,
    _corrupt,
    _reclaim,
    _reclaim_in_a_put,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leased", [False, True])
def test_whatever_way_a_block_goes_it_is_told(
    make_pool, way: Callable[..., None], leased: bool
) -> None:
    pool = make_pool(slabs=1, soft_pin_share=1.0)
    old = pool.namespace
    pool.put(range(4))
    pool.node.settle()
    pool.node.inventory.follow_changes()
    if leased:
        pool.lease([3])
    try:
        way(pool)
    except PoolFull:
        assert leased
    gone = {n for n, mask in enumerate(masks(pool, range(4), old)) if not mask}
    assert gone or leased
    assert {(old.directory_digest, n) for n in gone} <= told(pool)


# ---- what is here now ------------------------------------------------------------------------------


def test_masks_have_a_bit_for_each_part(make_pool) -> None:
    window = PartSpec(64, PartKind.WINDOW, window_blocks=2)
    pool = make_pool(parts=(PartSpec(1024), PartSpec(64, stride=2), window))
    pool.put([1, 2, 3])
    pool.put([2, 4], part=1)
    pool.put([3, 4, 5], part=2)
    digest = pool.namespace.directory_digest
    keys = [n.to_bytes(16, "big") for n in (5, 1, 2, 3, 4, 9, 1)]
    assert pool.node.inventory.masks(digest, keys) == (3, [4, 1, 3, 5, 6, 0, 1])
    assert pool.node.inventory.masks(digest, []) == (3, [])
    assert pool.node.inventory.masks(pool.namespace.digest, keys) == (0, []), (
        "that is how peers call it"
    )


def test_tenants_and_epochs_have_names_of_their_own(make_pool) -> None:
    pool = make_pool()
    blue = pool.node.add_tenant("blue", 1, 4096, 4096)
    same = pool.node.namespaces.open(blue, pool.namespace.base, b"{}", pool.namespace.parts)
    pool.put([1])
    first = pool.reset()
    pool.put([2])
    base = pool.namespace.base
    later = hashlib.sha256(base + (1).to_bytes(8, "big")).digest()[:16]
    for state, tenant, digest, expected in (
        (first, b"red", base, [0, 0]),
        (pool.namespace, b"red", later, [0, 1]),
        (same, b"blue", base, [0, 0]),
    ):
        assert state.digest == digest
        assert state.directory_digest == hashlib.sha256(tenant + b"\0" + digest).digest()[:16]
        assert pool.node.namespaces.by_directory(state.directory_digest) is state
        assert masks(pool, [1, 2], state) == expected
    assert pool.node.namespaces.by_directory(bytes(16)) is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_whoever_asks_about_all_changes_knows_what_is_here(
    make_pool, policy: str, seed: int
) -> None:
    """Replayed at random times; the oracle asks for every key there is, one part at a time."""
    random = Random(seed)
    pool = make_pool(slabs=4, policy=policy, parts=TWO, soft_pin_share=1.0)
    whole = pool.open(b"w" * 16, WHOLE)
    pool.node.inventory.follow_changes()
    directory: dict[Block, int] = {}
    namespaces = [pool.namespace, whole]

    def replay() -> None:
        for digest, n in told(pool):
            parts, [mask] = pool.node.inventory.masks(digest, [n.to_bytes(16, "big")])
            assert parts
            directory[digest, n] = mask

    for _ in range(300):
        numbers = random.sample(range(30), random.randint(1, 4))
        match random.randrange(8):
            case 0 | 1 | 2:
                origin = Origin(secondary=random.random() < 0.3)
                pool.put(numbers, part=random.randrange(2), origin=origin)
            case 3:
                pool.put(numbers[:1], namespace=whole)
            case 4:
                pool.node.removal.remove(pool.namespace, split_keys(pool.keys(numbers)))
            case 5:
                pool.demote(numbers)
            case 6:
                pool.pin(numbers, random.choice(["soft", "none"]))
            case 7 if random.random() < 0.2:
                pool.reset(fence=random.randrange(2) * (pool.namespace.epoch + 1))
                namespaces.append(pool.namespace)
        if random.random() < 0.3:
            replay()
    pool.node.ended_epochs.reclaim(1000)
    replay()
    here = {}
    for namespace in (pool.namespace, whole):
        for table in namespace.tables:
            flags = pool.node.leases.contains(
                namespace, table.part, split_keys(pool.keys(range(30)))
            )
            for n in range(30):
                if flags[n]:
                    block = (namespace.directory_digest, n)
                    here[block] = here.get(block, 0) | 1 << table.part
    assert len(namespaces) > 2
    assert {block: mask for block, mask in directory.items() if mask} == here


# ---- walks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_a_walk_meets_each_block_once(make_pool, count: int) -> None:
    pool = make_pool(slabs=8, parts=(PartSpec(1024), PartSpec(64), PartSpec(1024)))
    blue = pool.node.add_tenant("blue", 1, 4096, 4096)
    other = pool.node.namespaces.open(blue, b"o" * 16, b"{}", WHOLE)
    pool.put(range(6))
    pool.put([1, 2, 8], part=1)
    pool.put([2, 8, 9], part=2)
    pool.put([1], namespace=other, holder=pool.node.holders.add("blue", "engine"))
    met = walk(pool, count)
    mine = pool.namespace.directory_digest
    expected = {(mine, n) for n in (0, 1, 2, 3, 4, 5, 8, 9)} | {(other.directory_digest, 1)}
    assert set(met) == expected
    assert len(met) == len(expected)


def test_a_walk_meets_only_what_is_found(make_pool) -> None:
    pool = make_pool(slabs=4)
    assert walk(pool, 10) == []
    pool.put(range(4))
    pool.lease([0, 1])
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([0])))
    pool.reserve([7])
    pool.node.grants.grant(pool.holder, pool.namespace, 0, 1)
    met = walk(pool, 3)
    assert sorted(n for _, n in met) == [1, 2, 3]
    pool.reset()
    pool.put([9])
    assert walk(pool, 3) == [(pool.namespace.directory_digest, 9)]


def test_a_step_of_a_walk_looks_at_no_more_than_asked_for(make_pool) -> None:
    """However empty the slots are: a node with a hundred million of them walks in small steps."""
    pool = make_pool(slabs=16)
    pool.put(range(64))
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys(range(63))))
    steps = 0
    cursor: int | None = 0
    while cursor is not None:
        _, cursor = pool.node.inventory.walk(cursor, 8)
        steps += 1
    assert 64 // 8 <= steps <= 64 // 8 + 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_meets_what_is_held_throughout_whatever_happens_meanwhile(
    make_pool, policy: str, seed: int
) -> None:
    random = Random(seed)
    pool = make_pool(slabs=6, policy=policy)
    whole = pool.open(b"w" * 16, WHOLE)
    half = pool.open(b"h" * 16, (PartSpec(2048),))
    pool.put(range(12))
    pool.put([0], namespace=whole)
    pool.put([0, 1], namespace=half)
    kept = 0

    def held() -> dict[Block, object]:
        pool.node.settle()
        return {
            (namespace.directory_digest, number(block.key)): block
            for namespace in (pool.namespace, whole, half)
            for block in namespace.tables[0].blocks.values()
        }

    for _ in range(30):
        throughout = held()
        met: set[Block] = set()
        cursor: int | None = 0
        while cursor is not None:
            groups, cursor = pool.node.inventory.walk(cursor, random.randint(1, 4))
            met |= {(digest, number(key)) for digest, keys in groups for key in keys}
            fresh = random.randrange(1000)
            some = [n for digest, n in held() if digest == pool.namespace.directory_digest][:3]
            match random.randrange(6):
                case 0:
                    pool.put([fresh, fresh + 1])
                case 1:
                    pool.put([fresh], namespace=whole)
                case 2:
                    pool.put([fresh], namespace=half)
                case 3:
                    pool.node.removal.remove(pool.namespace, split_keys(pool.keys(some[:1])))
                    pool.put([fresh, *some])
                case 4:
                    pool.demote(some)
            now = held()
            throughout = {b: was for b, was in throughout.items() if now.get(b) is was}
        assert throughout.keys() <= met
        kept += len(throughout)
    assert kept > 30, "or this has shown nothing"
    assert pool.node.counters.slabs_reclaimed > 0


@pytest.mark.parametrize("first_comes", [True, False])
def test_a_block_whose_first_part_comes_or_goes_is_met_or_told(
    make_pool, first_comes: bool
) -> None:
    """It is met where its first part is: which may be behind the walk, or ahead and gone then."""
    pool = make_pool(parts=(PartSpec(1024), PartSpec(64)))
    pool.node.inventory.follow_changes()
    early, late = (0, 1) if first_comes else (1, 0)  # the class made first is walked first
    pool.put([7], part=early)
    pool.put([8], part=late)
    pool.put([1], part=1)
    if not first_comes:
        pool.put([1], part=0)
    told(pool)
    block = (pool.namespace.directory_digest, 1)
    groups, cursor = pool.node.inventory.walk(0, 2)
    met = {(digest, number(key)) for digest, keys in groups for key in keys}
    assert block not in met
    if first_comes:
        pool.put([1], part=0)
    else:
        pool.node.removal.drop_corrupt(pool.namespace, 0, pool.keys([1]))
    while cursor is not None:
        groups, cursor = pool.node.inventory.walk(cursor, 2)
        met |= {(digest, number(key)) for digest, keys in groups for key in keys}
    assert block in met | told(pool)


def test_the_blocks_that_are_here_are_counted_by_parts(make_pool) -> None:
    pool = make_pool(parts=TWO)
    pool.put([1, 2])
    pool.put([2, 3], part=1)
    assert pool.node.inventory.block_count() == 4, "although the books are behind"
    pool.lease([1])
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([1])))
    assert pool.node.inventory.block_count() == 3
    pool.reset()
    assert pool.node.inventory.block_count() == 0


def test_changes_are_told_of_once_until_they_are_taken(make_pool) -> None:
    pool = make_pool(slabs=1)
    told: list[int] = []
    pool.node.inventory.follow_changes(lambda: told.append(1))
    pool.put(range(4))
    pool.node.settle()
    pool.put(range(4, 6))  # evicts
    pool.node.settle()
    assert len(told) == 1
    assert pool.node.inventory.take_changes()
    pool.read(range(4, 6))
    assert len(told) == 1
    pool.put(range(6, 8))  # evicts first
    assert len(told) == 2
    assert pool.node.inventory.take_changes()
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([7])))
    assert len(told) == 3
