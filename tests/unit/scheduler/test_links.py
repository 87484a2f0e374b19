"""What pulls between nodes are taken to cost: by whose measurement, and against a plain search over all pairs."""

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.placement.distance import PRIORS, Distance, distance_between
from kvpool.placement.records import LinkRecord
from kvpool.scheduler.cluster import Traffic
from kvpool.scheduler.decode import DecodeRule, Handover
from kvpool.scheduler.estimates import LoadEstimate
from kvpool.scheduler.links import Links
from kvpool.scheduler.values import Request, Role
from tests.unit.scheduler.conftest import Rules

Make = Callable[..., Any]
P, D = Role.PREFILL, Role.DECODE
USUAL_S = 1e-9  # a byte


def usual() -> LoadEstimate:
    return LoadEstimate(0.001, 1 / USUAL_S)


def measured(bytes_s: float, distance: str = "unknown", node: str = "", **more: Any) -> LinkRecord:
    return LinkRecord(
        distance, 0.002, bytes_s, **{"age_s": 64.0, "measured_bytes": 1, **more}, node=node
    )


def test_until_anything_is_measured_it_is_assumed_by_distance() -> None:
    links = Links()
    link = links.between("a", "b", usual())
    assert (link.latency_s, link.byte_s, link.known) == (0.001, USUAL_S, "assumed")
    assert link.age_s is None
    assert not links.differ
    links.lie({"a": {"zone": "1"}, "b": {"zone": "1"}, "c": {"zone": "2"}})
    near, far = (links.between("a", other, usual()).byte_s for other in "bc")
    assert far / near == pytest.approx(PRIORS[Distance.ZONE].bytes_s / PRIORS[Distance.FAR].bytes_s)
    assert links.differ
    learned = usual()
    learned.observe(1e6, 0.0, 0.1)
    assert links.between("a", "b", learned).known == "learned by this router, of all pulls"


def test_whose_measurement_counts() -> None:
    links = Links()
    links.told(
        {
            "a": ("", [measured(10e9)]),
            "b": ("", [measured(11e9), measured(1e9, node="a")]),
            "c": ("", [measured(2e9)]),
            "d": ("", []),
        }
    )

    def seen(source: str, target: str) -> tuple[float, str]:
        link = links.between(source, target, usual())
        assert link.age_s == 64.0
        return 1e-9 / link.byte_s, link.known

    of_all = "measured by all of nodes without common labels"
    assert seen("a", "b") == (pytest.approx(1), "measured by b")
    assert seen("c", "b") == (pytest.approx(10), of_all), "11 is no exception"
    assert seen("b", "c") == (pytest.approx(2), "measured by c of nodes without common labels")
    assert seen("a", "d") == seen("x", "y") == (pytest.approx(10), of_all)
    assert links.differ
    # What is not told any more counts no more.
    links.told({"b": ("", [measured(11e9)])})
    assert seen("a", "b") == seen("b", "c") == (pytest.approx(11), of_all)
    assert not links.differ
    links.told({})
    assert links.between("a", "b", usual()).known == "assumed"


def test_a_distance_that_was_never_measured_is_as_much_faster_or_slower_as_others() -> None:
    links = Links()
    links.lie({"a": {"zone": "1"}, "b": {"zone": "1"}, "c": {"zone": "2"}})
    links.told({"a": ("", [measured(2 * PRIORS[Distance.ZONE].bytes_s, "zone")])})
    link = links.between("a", "c", usual())
    assert 1 / link.byte_s == pytest.approx(2 * PRIORS[Distance.FAR].bytes_s)
    assert (link.known, link.age_s) == ("as measured at other distances", None)


def test_nodes_on_one_machine_are_at_no_distance() -> None:
    links = Links()
    links.told(
        {"a": ("h", [measured(20e9, "host"), measured(1e9)]), "b": ("h", []), "c": ("i", [])}
    )
    speeds = [1 / links.between(s, t, usual()).byte_s for s, t in (("a", "b"), ("a", "c"))]
    assert speeds == pytest.approx([20e9, 1e9])


def test_what_is_no_speed_is_ignored() -> None:
    links = Links()
    nan, inf = float("nan"), float("inf")
    wrong = [measured(speed) for speed in (0.0, -1.0, 5e-324, 999.0, 1.1e13, inf, nan)]
    wrong += [LinkRecord("unknown", late, 1e9, 64.0, 1) for late in (-1.0, 601.0, inf, nan)]
    wrong += [measured(1e9, age_s=age) for age in (-1.0, inf, nan)]
    wrong += [measured(1e9, "planet"), measured(1e9, "planet", node="b")]
    links.told({"a": ("", wrong)})
    assert links.between("b", "a", usual()).known == "assumed"
    assert not links.differ


anything = st.builds(
    LinkRecord,
    *(st.sampled_from(["rack", "zone", "host", "unknown", "far", "planet", ""]), st.floats()),
    *(st.floats() | st.floats(1e3, 1e13), st.floats(), st.integers(), st.sampled_from(["", "b"])),
)


@given(st.lists(anything, max_size=4), st.lists(anything, max_size=4))
def test_whatever_is_told_costs_are_finite(a: list[LinkRecord], b: list[LinkRecord]) -> None:
    links = Links()
    links.lie({"a": {"zone": "1"}, "b": {"zone": "2"}})
    links.told({"a": ("h", a), "b": ("h", b)})
    for source, target in product("abc", repeat=2):
        for link in (links.between(source, target, usual()), links.fastest(target, usual())):
            assert 0 <= link.seconds(1 << 50) < float("inf")
            assert link.age_s is None or 0 <= link.age_s < float("inf")
    assert links.bytes_s is None or 0 < links.bytes_s < float("inf")


speeds = st.sampled_from([1e6, 3e6, 1e7, 1e8])
records = st.lists(
    st.builds(
        measured,
        speeds,
        st.sampled_from(["rack", "zone", "far", "unknown"]),
        node=st.sampled_from(["", *"pqrst"]),
    ),
    max_size=6,
)
places = st.fixed_dictionaries(
    {}, optional={"zone": st.sampled_from("12"), "rack": st.sampled_from("ab")}
)


@settings(max_examples=300, deadline=None)
@given(
    told=st.dictionaries(st.sampled_from("pqrst"), records),
    labels=st.fixed_dictionaries(dict.fromkeys("pqrst", places)),
    busy=st.dictionaries(st.sampled_from("rst"), st.floats(0.0, 2.0)),
    decodes=st.dictionaries(st.sampled_from("rst"), st.integers(0, 200)),
    held=st.integers(0, 10),
    prefill_s=st.sampled_from([0.0, 0.5, 9.0]),
    follows_max=st.integers(0, 1),
)
def test_the_cheapest_pair_is_found_whatever_was_measured(
    told: Any, labels: Any, busy: Any, decodes: Any, held: int, prefill_s: float, follows_max: int
) -> None:
    """The search stops early: it must not miss one."""
    roles = {"p": P, "q": P, "r": D, "s": D, "t": D}
    rules = Rules(roles, pull_s=0.1, places=labels, follows_max=follows_max)
    rules.cluster.links.told({name: ("", each) for name, each in told.items()})
    for node, seconds in busy.items():
        rules.cluster.traffic.add("x", node, seconds, 0.0)
    for name, count in decodes.items():
        rules.engines[name].decodes = count
    request = rules.request(160)
    rules.index.add("dram:s", request.keys[:held])
    match = rules.index.match(request.keys, 0.0)
    decoders = [rules.engines[name] for name in "rst"]
    handover = Handover(request, match, decoders, rules.cluster, DecodeRule(), 0.0)
    for name in "pq":
        found = handover.estimates(rules.engines[name], prefill_s, Random(0))
        assert handover.cost_s(rules.engines[name], prefill_s) == pytest.approx(found[0].cost)
        assert found[0].cost <= min(estimate.cost for estimate in found) * (1 + 1e-9)
        for estimate in found:
            to = estimate.engine.node
            lacks = 10 - (held if to == "s" else 0)
            assert estimate.lacks == lacks
            if not lacks:
                assert estimate.link is None
                continue
            link = rules.cluster.links.between(name, to, rules.cluster.kinds["k"].loads["peer"])
            assert estimate.link == link
            tail = min(lacks, 4)
            bring_s = busy.get(to, 0.0) + link.latency_s + lacks * 1000 * link.byte_s
            if follows_max:
                bring_s = max(bring_s - prefill_s, link.latency_s + tail * 1000 * link.byte_s)
            assert estimate.handover_s == pytest.approx(bring_s, abs=1e-6)


@settings(max_examples=300)
@given(
    told=st.dictionaries(st.sampled_from("abcd"), records),
    labels=st.dictionaries(st.sampled_from("abcd"), places),
)
def test_no_link_is_faster_than_the_fastest_and_equal_ones_do_not_differ(
    told: Any, labels: Any
) -> None:
    links = Links()
    links.lie(labels)
    links.told({name: ("", each) for name, each in told.items()})
    found = set()
    for source, target in product("abcdpqrst", "abcd"):
        if source == target:
            continue
        link, fastest = links.between(source, target, usual()), links.fastest(target, usual())
        assert fastest.seconds(1e6) <= link.seconds(1e6)
        found.add(link[:2])
        # The nearest statement counts: of this pair, then of the target, then of all.
        apart = [r for r in told.get(target, ()) if r.node == source]
        if apart:
            assert link.byte_s == pytest.approx(1 / apart[-1].bytes_s)
    if not links.differ:
        assert len(found) == 1
        assert not any(
            distance_between(labels.get(one, {}), labels.get(other, {})) is not Distance.UNKNOWN
            for one, other in product(labels, labels)
            if one != other
        )


def test_a_prompt_is_computed_where_its_prefix_comes_soonest(make: Make) -> None:
    rules = make({"a": P, "b": P, "c": P, "s": D}, pull_s=0.01)
    slow = measured(1e4, node="s")  # 0.1 s a block
    usual_ones = measured(1e5)
    rules.cluster.links.told(
        {"a": ("", [usual_ones, slow]), "b": ("", [usual_ones]), "c": ("", [usual_ones, slow])}
    )
    for _ in range(5):
        request = rules.request(160)
        rules.index.add("dram:s", request.keys[:9])
        assert rules.scheduler.submit(request, 0.0) is None
        (order,) = rules.scheduler.poll(0.0)
        assert order.estimate.engine.name == "b", "whichever of three free ones it would have been"
        assert (order.estimate.source, order.estimate.link.known[:13]) == ("s", "measured by a")
        rules.computed("b", request.ident, 0.0)
        rules.scheduler.finished(request.ident)
        rules.cluster.traffic = Traffic()


def decide(rules: Rules, request: Request) -> Any:
    """What is considered for a request at engine a."""
    return rules.scheduler._state.decision_context(request, 0.0, [rules.engines["a"]])


def test_the_source_is_the_one_from_which_blocks_come_first(make: Make) -> None:
    rules = make({"a": P, "s": D, "t": D}, pull_s=0.01)
    rules.cluster.links.told({"a": ("", [measured(1e5), measured(1e4, node="s")])})
    request = rules.request(160)
    for holder in ("dram:s", "dram:t"):
        rules.index.add(holder, request.keys[:8])
    context = decide(rules, request)
    assert context.source_for(rules.engines["a"], 8)[0] == "t"
    rules.cluster.traffic.add("t", "x", 60.0, 0.0)
    context = decide(rules, request)
    node, link, seconds = context.source_for(rules.engines["a"], 8)
    assert (node, link.known) == ("s", "measured by a")
    assert seconds == pytest.approx(0.002 + 8 * 0.1)
