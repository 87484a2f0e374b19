"""Where copies go, who makes them, how fast: each rule against what it says."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.placement.records import NodeRecord, NodeState, TierRecord
from kvpool.placement.replica_targets import accept_forward, choose_targets, responsible

GIB = 1 << 30


def node(
    number: int,
    zone: str = "",
    rack: str = "",
    *,
    state: NodeState = NodeState.SERVING,
    capacity: int = 64 * GIB,
    used: int = 0,
) -> NodeRecord:
    labels = {name: value for name, value in (("zone", zone), ("rack", rack)) if value}
    return NodeRecord(
        node=f"n{number}",
        incarnation=f"{number:016x}",
        state=state,
        labels=labels,
        tiers=(TierRecord("dram", capacity, used), TierRecord("ssd", 1 << 50, 0)),
    )


nodes_of = st.lists(
    st.builds(
        lambda zone, rack, state, capacity, used: (zone, rack, state, capacity, used),
        st.sampled_from(["a", "b", "c", ""]),
        st.sampled_from(["1", "2", ""]),
        st.sampled_from([*[NodeState.SERVING] * 3, *NodeState]),
        st.sampled_from([0, 10, 100]),
        st.integers(0, 100),
    ),
    max_size=10,
).map(
    lambda rows: [
        node(i, zone, rack, state=state, capacity=capacity, used=used)
        for i, (zone, rack, state, capacity, used) in enumerate(rows)
    ]
)


def newness(candidate: NodeRecord, taken: list[NodeRecord]) -> int:
    """2: certainly in another zone than all of them; 1: in another rack; 0: another node."""
    if not taken:
        return 2
    zone, rack = candidate.labels.get("zone"), candidate.labels.get("rack")
    zones = [other.labels.get("zone") for other in taken]
    if zone and all(other and other != zone for other in zones):
        return 2
    racks = [(other.labels.get("zone"), other.labels.get("rack")) for other in taken]
    return int(bool(rack) and all(other[1] and other != (zone, rack) for other in racks))


@settings(max_examples=500)
@given(nodes_of, st.integers(0, 9), st.sets(st.integers(0, 12)), st.integers(0, 6), st.randoms())
def test_copies_go_to_able_nodes_in_as_many_failure_domains_as_there_are(
    nodes: list[NodeRecord], own_number: int, holding: set[int], n: int, rng: random.Random
) -> None:
    own = nodes[own_number] if own_number < len(nodes) else node(own_number, "a", "1")
    holders = {i.to_bytes(8, "big") for i in holding}
    chosen = choose_targets(nodes, own, holders, n, 50, rng)
    able = [
        other
        for other in nodes
        if other.state is NodeState.SERVING
        and other.node != own.node
        and other.incarnation_bytes not in holders
        and other.tiers[0].capacity_bytes >= 50
    ]
    assert len(chosen) == min(n, len(able))
    assert len({one.node for one in chosen}) == len(chosen)
    taken = [other for other in nodes if other.incarnation_bytes in holders]
    if own.incarnation_bytes in holders and own not in taken:
        taken.append(own)
    for one in chosen:
        assert one in able
        left = [other for other in able if other not in taken]
        assert newness(one, taken) == max(newness(other, taken) for other in left)
        taken.append(one)


def choice(nodes: list[NodeRecord], holders: list[NodeRecord], n: int = 1) -> list[set[str]]:
    """Every choice that 40 seeds make: for each place the names."""
    taken = [holder.incarnation_bytes for holder in holders]
    own = holders[0] if holders else node(99)
    rows = [choose_targets(nodes, own, taken, n, 1, random.Random(seed)) for seed in range(40)]
    return [{row[place].node for row in rows} for place in range(n)]


def test_a_label_that_is_missing_is_neither_another_domain_nor_a_fault() -> None:
    a, bare = node(1, "a", "1"), node(2)
    assert choice([a, bare], []) == [{"n1", "n2"}], "the first copy may be anywhere"
    assert choice([a, node(3, "a", "2"), bare], [node(4)]) == [{"n1", "n3", "n2"}]
    assert choice([node(5, "b"), bare], [a]) == [{"n5"}]
    # In an unnamed zone, which may be zone a: only racks of unnamed zones are told apart.
    assert choice([node(6, "a"), node(7, "", "2")], [node(8, "", "1")]) == [{"n7"}]


def test_each_further_copy_counts_those_before_it() -> None:
    nodes = [node(1, "a", "1"), node(2, "a", "2"), node(3, "a", "2"), node(4, "b", "1")]
    assert choice(nodes, [node(5, "a", "1")], 3) == [{"n4"}, {"n2", "n3"}, {"n1", "n2", "n3"}]
    racks = [node(1, "a", "2"), node(2, "a", "2"), node(3, "a", "3")]
    for seed in range(40):
        own = node(5, "a", "1")
        first = choose_targets(racks, own, [own.incarnation_bytes], 2, 1, random.Random(seed))
        assert first[0].labels["rack"] != first[1].labels["rack"]


def test_our_own_domain_counts_when_we_have_a_copy_though_the_view_lacks_us() -> None:
    own, near, far = node(1, "a"), node(2, "a"), node(3, "b")
    for seed in range(20):
        rng = random.Random(seed)
        assert choose_targets([near, far], own, [own.incarnation_bytes], 1, 1, rng) == [far]
    assert choice([near, far], []) == [{"n2", "n3"}]


def test_among_equals_the_emptier_of_two_drawn_ones_so_that_all_take_part() -> None:
    own = node(99)
    nodes = [node(i, used=(i + 1) * GIB) for i in range(10)]
    times = Counter(
        choose_targets(nodes, own, [], 1, 1, random.Random(seed))[0].node for seed in range(2000)
    )
    counts = [times[f"n{i}"] for i in range(10)]
    assert counts[9] == 0, "the fullest is never the emptier one"
    for i, count in enumerate(counts[:9]):
        expected = 2000 * (9 - i) / 45  # pairs of ten in which it is the emptier
        assert abs(count - expected) < 0.3 * expected + 25


def test_full_nodes_take_copies_when_there_are_no_others() -> None:
    full = node(1, used=64 * GIB)
    assert choose_targets([full], node(0), [], 2, GIB, random.Random(1)) == [full]
    assert choose_targets([full], node(0), [], 2, 65 * GIB, random.Random(1)) == []


# ---- who repairs -------------------------------------------------------------------------------------

HOLDERS = [bytes([i]) * 8 for i in range(5)]


@given(st.permutations(HOLDERS), st.binary(min_size=16, max_size=16))
def test_all_holders_agree_and_a_loss_moves_only_what_was_lost(
    holders: list[bytes], key: bytes
) -> None:
    chosen = responsible(holders, key)
    assert chosen == responsible(HOLDERS, key)
    for lost in holders:
        rest = [holder for holder in holders if holder != lost]
        assert lost == chosen or responsible(rest, key) == chosen


def test_blocks_are_spread_over_their_holders() -> None:
    rng = random.Random(1)
    times = Counter(responsible(HOLDERS, rng.randbytes(16)) for _ in range(5000))
    assert set(times) == set(HOLDERS)
    assert max(times.values()) < 1200


# ---- forwarding --------------------------------------------------------------------------------------


def test_a_victim_is_taken_where_there_is_room_or_something_much_older() -> None:
    assert accept_forward(100, 100, 10.0, 0.0, 1, 2)
    assert not accept_forward(99, 100, 10.0, 20.0, 1, 2)
    assert accept_forward(0, 100, 10.0, 20.1, 1, 2)


def test_a_victim_does_not_travel_for_ever() -> None:
    assert accept_forward(100, 100, 1.0, 0.0, 2, 2)
    assert not accept_forward(100, 100, 1.0, 99.0, 3, 2)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_two_full_nodes_never_exchange_their_coldest(ours: float, theirs: float) -> None:
    assert not (
        accept_forward(0, 1, ours, theirs, 1, 9) and accept_forward(0, 1, theirs, ours, 1, 9)
    )


# ---- pace --------------------------------------------------------------------------------------------
