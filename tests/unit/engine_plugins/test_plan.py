"""Which blocks are loaded and saved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm.plan import (
    GroupLoad,
    GroupRule,
    GroupSave,
    Offered,
    RankReport,
    SaveTimes,
    StepDone,
    block_key,
    common_life,
    pack,
    plan_load,
    plan_save,
    plan_states,
    runs,
    state_name,
)
from kvpool.types import PartKind

FULL = GroupRule(0)
WINDOW = GroupRule(1, kind=PartKind.WINDOW, window_blocks=2)
COARSE = GroupRule(0, stride=2)
STATES = GroupRule(2, kind=PartKind.WINDOW, window_blocks=1, state=True)
HASHES = [bytes([i]) * 32 for i in range(16)]


def test_the_key_is_the_end_of_the_hash() -> None:
    digest = bytes(range(32))
    assert block_key(digest) == digest[16:]
    assert pack([digest, digest]) == digest[16:] * 2


@pytest.mark.parametrize(
    ("lives", "common"),
    [([7], 7), ([0], 0), ([7, 7, 7], 7), ([7, 0], 0), ([7, 8], 0), ([0, 0], 0), ([], 0)],
)
def test_device_memory_is_used_when_all_ranks_have_the_same(lives: list[int], common: int) -> None:
    reports = [RankReport(rank, "cpu", "L", "", [], {}, life) for rank, life in enumerate(lives)]
    assert common_life(reports) == common


def test_a_load_fills_the_blocks_behind_the_engines_own() -> None:
    tables = [[7, 8, 9, 10, 11]]
    assert plan_load([FULL], tables, base=2, start=2, end=5) == [GroupLoad(1, 0, [9, 10, 11])]


def test_a_load_skips_what_the_engine_computed_since_the_lookup() -> None:
    tables = [[7, 8, 9, 10, 11]]
    assert plan_load([FULL], tables, base=1, start=3, end=5) == [GroupLoad(1, 2, [10, 11])]


def test_a_window_loads_only_what_is_in_it() -> None:
    tables = [[1, 2, 3, 4], [0, 0, 5, 6]]
    assert plan_load([FULL, WINDOW], tables, base=0, start=0, end=4) == [
        GroupLoad(1, 0, [1, 2, 3, 4]),
        GroupLoad(1, 2, [5, 6]),
    ]


def test_a_coarser_group_counts_its_own_blocks() -> None:
    assert plan_load([COARSE], [[4, 5, 6]], base=2, start=2, end=6) == [GroupLoad(2, 0, [5, 6])]


def test_a_hole_inside_a_window_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError):
        plan_load([FULL], [[1, 0, 3]], base=0, start=0, end=3)


def test_a_save_names_keys_and_the_parent() -> None:
    (save,) = plan_save([FULL], [[7, 8, 9]], HASHES, [1, 2])
    assert save.keys == pack(HASHES[1:3])
    assert save.block_ids == [8, 9]
    assert save.parent == block_key(HASHES[0])


def test_a_save_of_the_chains_head_has_no_parent() -> None:
    (save,) = plan_save([FULL], [[7, 8, 9]], HASHES, [0])
    assert save.parent is None


def test_gaps_make_several_saves_each_with_its_true_parent() -> None:
    saves = plan_save([FULL], [[7, 8, 9, 10]], HASHES, [0, 2, 3])
    assert [(save.block_ids, save.parent) for save in saves] == [
        ([7], None),
        ([9, 10], block_key(HASHES[1])),
    ]


def test_blocks_out_of_the_window_are_not_saved() -> None:
    saves = plan_save([FULL, WINDOW], [[7, 8, 9], [0, 5, 6]], HASHES, [0, 1, 2])
    assert [(save.rule, save.block_ids) for save in saves] == [(0, [7, 8, 9]), (1, [5, 6])]
    assert saves[1].keys == pack(HASHES[1:3])


def test_a_coarser_group_saves_under_the_key_of_its_last_block() -> None:
    (save,) = plan_save([COARSE], [[7, 8]], HASHES, [1, 2, 3])
    assert save.keys == pack([HASHES[1], HASHES[3]])
    assert save.block_ids == [7, 8]
    (later,) = plan_save([COARSE], [[7, 8]], HASHES, [2, 3])
    assert later.parent == block_key(HASHES[1])


def test_states_are_not_saved_by_their_place_in_the_table() -> None:
    (save,) = plan_save([FULL, STATES], [[7, 8, 9], [], [4, 5, 6]], HASHES, [0, 1, 2])
    assert save.rule == 0


def test_a_state_is_saved_under_the_key_of_the_block_that_it_ends_with() -> None:
    coarse = GroupRule(3, 2, PartKind.WINDOW, 1, state=True)
    handed = [(2, 40, 32), (3, 41, 32), (2, 42, 8)]  # of 8 tokens a hash
    assert plan_states([FULL, STATES, coarse], handed, HASHES, 8, 16) == {
        0: [GroupSave(1, pack(HASHES[:1]), [42], None)],
        3: [
            GroupSave(1, pack(HASHES[3:4]), [40], block_key(HASHES[2])),
            GroupSave(2, pack(HASHES[3:4]), [41], block_key(HASHES[1])),
        ],
    }


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 150)),
        max_size=8,
        unique_by=lambda each: (each[0], each[2]),
    ),
    st.integers(0, 20),
    st.integers(1, 3),
)
def test_of_the_states_handed_over_those_with_a_key_are_saved(
    handed: list[tuple[int, int, int]], end: int, stride: int
) -> None:
    rules = [FULL, GroupRule(1, stride, PartKind.WINDOW, 1, state=True), STATES]
    strides = {1: stride, 2: 1}
    expected = set()
    for blocks in range(1, min(end, len(HASHES)) + 1):
        for group, block_id, tokens in handed:
            whole = group in strides and blocks % strides[group] == 0
            if tokens == 8 * blocks and whole and block_id:
                expected.add((blocks - 1, group, block_id))
    found = plan_states(rules, handed, HASHES, 8, end)
    assert list(found) == sorted(found)
    for at, saves in found.items():
        for save in saves:
            assert save.keys == block_key(HASHES[at])
            before = at - strides[save.rule]
            assert save.parent == (block_key(HASHES[before]) if before >= 0 else None)
    taken = {(at, save.rule, *save.block_ids) for at, saves in found.items() for save in saves}
    assert taken == expected


def test_a_state_has_a_name_of_its_own() -> None:
    key = block_key(HASHES[1])
    names = [state_name(key, rule) for rule in (0, 1, 300)]
    assert len({key, *names}) == 4
    assert pack(names) == 3 * key


def test_runs() -> None:
    assert list(runs([])) == []
    assert list(runs([1, 2, 5, 6, 9])) == [[1, 2], [5, 6], [9]]


def test_offered_keys_are_forgotten_by_time_and_number() -> None:
    offered = Offered(limit=2, keep_s=10)
    offered.add([b"a", b"b"], now=0)
    assert offered.holds(b"a", 9.9)
    assert not offered.holds(b"a", 10)
    offered.add([b"a", b"c"], now=5)
    assert not offered.holds(b"b", 5)
    assert offered.holds(b"a", 14)
    offered.forget([b"a"])
    assert not offered.holds(b"a", 5)


def test_ranks_reports_are_summed() -> None:
    report = RankReport(0, "cpu", "LBHNC", "", [], {})
    one = StepDone(loads={1: 1}, saves={5: 1}, failed_saves={5}, reports=[report])
    one.merge(StepDone(loads={1: 1, 2: 1}, saves={5: 1}, failed_loads={2}, outdated={7}))
    assert one == StepDone({1: 2, 2: 1}, {5: 2}, {2}, {5}, {7}, [report])
    assert one
    assert not StepDone()
    one.merge(StepDone(save_seconds={5: 0.2, 6: 0.1}))
    one.merge(StepDone(save_seconds={5: 0.1, 6: 0.3}))
    assert one.save_seconds == {5: 0.2, 6: 0.3}


def test_saves_take_as_long_as_others_of_their_size() -> None:
    times = SaveTimes()
    assert times.expect([1]) is None
    for _ in range(3):
        times.learn(1, 0.002)
    for seconds in (0.010, 0.020):
        times.learn(100, seconds)
    assert times.expect([]) == 0.0
    assert times.expect([1, 1, 1]) == pytest.approx(0.006)
    assert times.expect([100]) == times.expect([127]) == pytest.approx(0.012)
    assert times.expect([128]) == pytest.approx(0.024)  # nothing so large was seen
    assert times.expect([50]) == pytest.approx(0.012)
    assert times.expect([2]) == pytest.approx(0.004)
