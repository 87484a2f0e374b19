"""Blocks that are kept for a time, and how pins are clipped, against plain models of both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.core.blocks import PIN_HARD, PIN_NONE, PIN_SOFT
from kvpool.daemon.core.keeps import SLACK
from kvpool.daemon.core.pins import Fit, Taken
from kvpool.errors import PoolFull
from kvpool.storage.eviction import POLICIES
from kvpool.types import PartSpec, split_keys
from tests.unit.daemon.conftest import QUARTER, SLAB, Pool

BLOCKS = 16  # here, numbered from 0; as many more are not
STRIDE = 1024
numbers = st.lists(st.integers(0, 2 * BLOCKS - 1), min_size=1, unique=True)


def keys(some: Sequence[int]) -> Sequence[bytes]:
    return split_keys(Pool.keys(some))


def filled(**limits: float) -> Pool:
    pool = Pool(slabs=8, **limits)
    pool.put(range(BLOCKS))
    pool.node.settle()
    return pool


def levels(pool: Pool) -> list[int]:
    return [block.pin for block in pool.blocks(range(BLOCKS))]


@given(numbers, numbers, st.sampled_from(["soft", "hard"]), st.integers(0, 24))
def test_pins_are_clipped_where_the_quota_ends(
    before: list[int], wanted: list[int], kind: str, quota: int
) -> None:
    """As many as can be pinned one after the other, which is the oracle here."""
    share = quota / 32
    pool = filled(soft_pin_share=share, hard_pin_share=share)
    already = [number for number in before if number < BLOCKS][:quota]
    pool.pin(already, kind)
    fit = pool.node.pins.fit(pool.namespace, keys(wanted), kind)
    held, count = set(already), 0
    for number in wanted:
        if number < BLOCKS and number not in held:
            if len(held) == quota:
                break
            held.add(number)
        count += 1
    assert fit.blocks == count
    assert fit.nbytes == STRIDE * (len(held) - len(already))
    assert fit.room == (None if count == len(wanted) else STRIDE * (quota - len(already)))
    pool.pin(wanted[:count], kind)  # and that is not refused
    assert sum(level != PIN_NONE for level in levels(pool)) == len(held)


def test_a_block_is_clipped_with_all_its_parts() -> None:
    pool = Pool(slabs=8, parts=(QUARTER, QUARTER), hard_pin_share=5 / 32)
    pool.put(range(4), part=0)
    pool.put(range(4), part=1)
    fit = pool.node.pins.fit(pool.namespace, keys(range(4)), "hard")
    assert fit == Fit(2, 4 * STRIDE, 5 * STRIDE)


def test_what_was_taken_by_a_dry_run_counts() -> None:
    pool = filled(hard_pin_share=8 / 32)
    first = pool.node.pins.fit(pool.namespace, keys(range(6)), "hard")
    then = pool.node.pins.fit(pool.namespace, keys(range(6, 12)), "hard", Taken(first.nbytes))
    assert (first.blocks, then.blocks, then.room) == (6, 2, 2 * STRIDE)


def test_what_was_taken_elsewhere_counts_for_the_tenant_and_not_for_a_namespace_with_a_quota() -> (
    None
):
    pool = filled(hard_pin_share=0.5)  # 16 for the tenant, 8 for the namespace
    pool.node.quotas.set(pool.namespace, 16 * STRIDE)
    wanted = keys(range(BLOCKS))
    for elsewhere, fit in ((0, 8), (8, 8), (10, 6), (20, 0)):
        taken = Taken(0, elsewhere * STRIDE)
        assert pool.node.pins.fit(pool.namespace, wanted, "hard", taken).blocks == fit


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), numbers, st.integers(1, 20)),
            st.tuples(st.sampled_from(["soft", "hard", "none"]), numbers, st.just(0)),
            st.tuples(st.just("later"), st.just([0]), st.integers(1, 10)),
        ),
        max_size=12,
    )
)
def test_a_keep_ends_when_its_time_is_over_and_pins_take_its_place(
    steps: list[tuple[str, list[int], int]],
) -> None:
    pool = filled(soft_pin_share=1.0, hard_pin_share=1.0, keep_share=1.0)
    keeps, namespace = pool.node.keeps, pool.namespace
    now = 0.0
    pinned, until = dict.fromkeys(range(BLOCKS), PIN_NONE), dict[int, float]()
    for what, some, seconds in steps:
        here = [number for number in some if number < BLOCKS]
        if what == "keep":
            keeps.keep(namespace, keys(some), now + seconds)
            for number in here:
                if pinned[number] == PIN_NONE:
                    until[number] = max(until.get(number, 0.0), now + seconds)
        elif what == "later":
            now += seconds
            while keeps.end_some(now):
                pass
        else:
            pool.pin(some, what)
            keeps.forget(namespace, keys(some))
            for number in here:
                pinned[number] = {"soft": PIN_SOFT, "hard": PIN_HARD, "none": PIN_NONE}[what]
                until.pop(number, None)
        until = {number: end for number, end in until.items() if end > now or what != "later"}
        wanted = {n: PIN_SOFT if n in until else level for n, level in pinned.items()}
        assert dict(enumerate(levels(pool))) == wanted
    assert (keeps.next_end is None) <= (not until)


def test_keeping_is_bounded_by_its_share_and_by_the_quota_of_pins() -> None:
    pool = filled(soft_pin_share=10 / 32, keep_share=8 / 32)
    keeps, namespace = pool.node.keeps, pool.namespace
    assert keeps.fit(namespace, keys(range(BLOCKS))) == Fit(8, 8 * STRIDE, 8 * STRIDE)
    keeps.keep(namespace, keys(range(6)), 10.0)
    assert keeps.fit(namespace, keys(range(BLOCKS))) == Fit(8, 2 * STRIDE, 2 * STRIDE)
    pool.pin(range(10, 13), "soft")
    assert keeps.fit(namespace, keys(range(6, 8))) == Fit(1, STRIDE, STRIDE)


def test_blocks_that_are_pinned_and_unpinned_all_the_time_do_not_fill_the_list() -> None:
    pool = filled(keep_share=1.0, soft_pin_share=1.0)
    keeps, namespace = pool.node.keeps, pool.namespace

    def listed() -> int:
        return sum(len(some) for _, _, _, some in keeps._ends)

    for _ in range(1000):
        keeps.keep(namespace, keys(range(BLOCKS)), 1000.0)
        pool.pin(range(8), "none")
        keeps.forget(namespace, keys(range(8)))
    assert listed() <= 2 * BLOCKS + SLACK
    while keeps.end_some(1000.0):
        pass
    assert levels(pool) == [PIN_NONE] * BLOCKS
    assert listed() == 0 and not namespace.kept


# ---- room for what nobody waits for ------------------------------------------------------------------


@given(
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 40),
    st.sampled_from(sorted(POLICIES)),
    st.booleans(),
)
def test_what_takes_spare_places_only_evicts_no_ordinary_block(
    ordinary: int, expendable: int, wanted: int, policy: str, quota: bool
) -> None:
    pool = Pool(slabs=8, policy=policy)
    other = pool.open(b"o" * 16, (PartSpec(STRIDE),))
    if quota:
        pool.node.quotas.set(pool.namespace, 24 * STRIDE)
    pool.put(range(100, 100 + ordinary))
    pool.put(range(200, 200 + ordinary), namespace=other)
    pool.put(range(expendable))
    pool.node.settle()
    held = pool.here(range(200, 200 + ordinary), other), pool.here(range(100, 100 + ordinary))
    last = pool.here(range(expendable))
    pool.node.candidates.expend(pool.namespace, keys(last))
    free = 8 * SLAB // STRIDE - pool.bytes_used // STRIDE
    room = free + len(last)
    if quota:
        room = min(room, 24 - len(held[1]) - len(last))
    assert pool.node.candidates.room_bytes(pool.namespace) == max(0, room) * STRIDE
    packed = keys(range(1000, 1000 + wanted))
    pool.tickets += 1
    got = 0
    with suppress(PoolFull):
        pool.node.puts.reserve(
            pool.holder, pool.namespace, 0, pool.tickets, packed, only_spare=True
        )
        got = len(pool.holder.reservations[pool.tickets].keys)
    assert got == min(wanted, max(0, room))
    assert pool.here(range(200, 200 + ordinary), other) == held[0]
    assert pool.here(range(100, 100 + ordinary)) == held[1]
