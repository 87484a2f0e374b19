"""The plan of a seed: the same each time, and fit to be carried out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos import checker, faults, plan

NODES = ("a", "b", "c")
TARGETS: dict[plan.TargetKind, tuple[str, ...]] = {kind.on: NODES for kind in plan.KINDS}


@given(st.integers(0, 1 << 40), st.floats(20, 700))
def test_a_seed_has_one_plan_that_can_be_carried_out(seed, seconds):
    made = plan.make(seed, seconds, TARGETS)
    assert made == plan.make(seed, seconds, TARGETS)
    assert [one.number for one in made.faults] == list(range(len(made.faults)))
    assert list(made.faults) == sorted(made.faults, key=lambda one: one.at_s)
    for fault in made.faults:
        kind = plan.BY_NAME[fault.what]
        assert fault.target in TARGETS[kind.on]
        assert 0 <= fault.lasts_s <= kind.lasts_s[1]
        assert 0 <= fault.at_s < seconds
    for one, other in itertools.combinations(made.faults, 2):
        same = one.target == other.target
        if same and plan.BY_NAME[one.what].on == plan.BY_NAME[other.what].on:
            assert one.at_s + one.lasts_s <= other.at_s, "one at a time on a target"


@given(st.integers(0, 1 << 40), st.floats(40, 700))
def test_nodes_die_at_quiet_times_and_another_holds_what_is_read(seed, seconds):
    made = plan.make(seed, seconds, TARGETS)
    assert made.deaths
    for death in made.deaths:
        assert len({death.victim, death.holder, death.reader}) == 3
        for fault in made.faults:
            assert fault.at_s + fault.lasts_s <= death.at_s + 1e-6 or fault.at_s > death.at_s


def test_all_kinds_are_carried_out_and_happen():
    assert set(faults.FAULTS) == set(plan.BY_NAME)
    assert set(plan.DEATHS) <= set(plan.BY_NAME)
    happened = {fault.what for seed in range(5) for fault in plan.make(seed, 600, TARGETS).faults}
    assert happened == set(plan.BY_NAME)


def test_faults_overlap():
    made = plan.make(1, 600, TARGETS).faults
    pairs = itertools.pairwise(made)
    assert sum(other.at_s < one.at_s + one.lasts_s for one, other in pairs) > 20


def test_the_documents_name_each_kind(repo_root):
    page = (repo_root / "docs/chaos.md").read_text()
    for kind in plan.KINDS:
        assert f"| `{kind.name}` |" in page
        assert kind.what in page
    for rule in checker.RULES:
        assert f"| `{rule.__name__}` |" in page
