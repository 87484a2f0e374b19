"""Soft pins: many of them cost no step more than few."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.types import PartSpec
from tests.unit.daemon.conftest import Pool

QUARTER = (PartSpec(1024),)


def full_of_soft_pins(pool: Any, other: Any) -> None:
    """Two namespaces take turns; the first one's blocks are older."""
    for number in range(4):
        pool.put([number])
        pool.put([100 + number], namespace=other)
    pool.pin(range(4), "soft")
    pool.node.pins.pin(other, [bytes(15) + bytes([100 + n]) for n in range(4)], "soft")


def test_the_oldest_of_the_namespace_whose_oldest_was_used_longest_ago_goes_first() -> None:
    pool = Pool(slabs=2, hard_pin_share=1.0, soft_pin_share=1.0)
    other = pool.open(b"o" * 16, QUARTER)
    full_of_soft_pins(pool, other)
    for number in range(3):
        assert pool.put([10 + number]) == 1
        pool.pin([10 + number], "hard")
    assert pool.here(range(4)) == [2, 3]
    assert pool.here(range(100, 104), other) == [101, 102, 103]


def test_what_was_leased_at_its_turn_is_spared_and_is_the_first_afterwards() -> None:
    pool = Pool(slabs=1, soft_pin_share=1.0)
    pool.put(range(4))
    pool.pin(range(4), "soft")
    lease = pool.lease([0])
    assert pool.put([10]) == 1
    assert 0 in pool.here(range(4))
    pool.release(lease)
    left = pool.here(range(4))
    assert len(left) == 3 and pool.node.counters.evicted_soft_pins == 1
    assert pool.put(range(20, 23)) == 3
    assert pool.node.counters.evicted_soft_pins + pool.node.counters.evicted >= 3


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_slab_with_a_pin_is_not_taken_for_another_size(kind: str) -> None:
    """Also when most pins are gone, and whichever way they went."""
    pool = Pool(
        slabs=4, parts=(PartSpec(1024), PartSpec(4096)), hard_pin_share=1.0, soft_pin_share=1.0
    )
    pool.put(range(16))
    pool.pin(range(16), kind)
    pool.pin(range(4, 8), "none")
    pool.pin(range(8, 12), "none")
    pool.pin([8], kind)
    assert pool.put([50], part=1) == 1, "the slab that has no pin"
    assert pool.here(range(4, 8)) == []
    pool.node.pins.pin(pool.namespace, [bytes(15) + bytes([50])], "hard")
    pool.node.removal.remove(pool.namespace, [bytes(15) + bytes([8])])
    assert pool.put([51], part=1) == 1, "the one whose last pin has gone"
    assert pool.here(range(8, 12)) == []
    assert pool.here([*range(4), *range(12, 16)]) == [*range(4), *range(12, 16)]
