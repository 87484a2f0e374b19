"""Which pair of network cards: against a plain model of what is near what, and examples."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from kvpool.placement.nic_pairs import WAYS_MAX, Card, Way, route
from kvpool.placement.records import NodeRecord, TransportRecord

NETS = ["", "10.0.0.0/24", "10.0.1.0/24"]
numas = st.sampled_from([-1, 0, 1])
rails = st.sampled_from(["", "r0", "r1"])
cards = st.lists(
    st.builds(
        Card, st.sampled_from(["", "10.0.0.1", "10.0.1.1"]), numas, rails, st.sampled_from(NETS)
    ),
    max_size=4,
)
transports = st.lists(
    st.builds(
        TransportRecord,
        st.sampled_from([f"tcp://b:{port}" for port in range(6)] + ["nixl://b:9"]),
        numa=numas,
        rail=rails,
        net=st.sampled_from(NETS),
    ),
    max_size=5,
    unique_by=lambda one: one.url,
)


def record(transports: list[TransportRecord], numa: int = -1) -> NodeRecord:
    return NodeRecord("b", "ab" * 8, transports=tuple(transports), numa=numa)


def cost(card: Card, numa: int, other: TransportRecord, other_numa: int) -> int:
    """A card's distance in words: another switch is worse than anything at either end."""
    if card.rail and other.rail:
        apart = 6 if card.rail != other.rail else 0
    elif card.net and other.net:
        apart = 6 if card.net != other.net else 0
    else:
        apart = 3
    here = -1 not in (card.numa, numa) and card.numa != numa
    there = -1 not in (other.numa, other_numa) and other.numa != other_numa
    return apart + here + there


@given(cards, transports, numas, numas)
def test_the_best_end_comes_first(
    ours: list[Card], theirs: list[TransportRecord], numa: int, other_numa: int
) -> None:
    found = route(ours, numa, record(theirs, other_numa))
    assert found.incarnation == "ab" * 8
    nixl = [one.url for one in theirs if one.url.startswith("nixl")]
    assert [way.url for way in found.ways[: len(nixl)]] == nixl
    tcp = found.ways[len(nixl) :]
    assert {way.url for way in tcp} == {one.url for one in theirs} - set(nixl), "each once"
    by_url = {one.url: one for one in theirs}
    costs = [
        min(
            (cost(card, numa, by_url[way.url], other_numa) for card in ours),
            default=cost(Card(""), -1, by_url[way.url], other_numa),
        )
        for way in tcp
    ]
    assert [way.rank for way in tcp] == costs == sorted(costs)
    order = [one.url for one in theirs]
    for before, after in pairwise(tcp):
        if before.rank == after.rank:
            assert order.index(before.url) < order.index(after.url), "as its node lists them"


@given(cards, transports, numas, numas)
def test_bound_to_an_address_the_best_pair_comes_first(
    ours: list[Card], theirs: list[TransportRecord], numa: int, other_numa: int
) -> None:
    found = route(ours, numa, record(theirs, other_numa), bind_source=True)
    tcp = [way for way in found.ways if not way.url.startswith("nixl")]
    bound = [card for card in ours if card.address]
    pairs = {}
    for other in theirs:
        if other.url.startswith("nixl"):
            continue
        for card in bound:
            name = f"{other.url}?source={card.address}"
            pairs.setdefault(name, []).append(cost(card, numa, other, other_numa))
    if not bound:
        assert tcp == [w for w in route(ours, numa, record(theirs, other_numa)).ways if w in tcp]
        return
    seen: dict[str, int] = {}
    for way in tcp:
        seen.setdefault(way.url, way.rank)
    assert seen.keys() <= pairs.keys()
    assert all(seen[url] == min(pairs[url]) for url in seen)
    assert [way.rank for way in tcp] == sorted(way.rank for way in tcp)
    if len(found.ways) < WAYS_MAX:
        assert seen.keys() == pairs.keys()
        assert len(seen) == len(tcp), "no way twice"


def test_each_rail_of_a_host_reaches_its_own() -> None:
    """Two cards at two NUMA nodes on two rails, memory at node 1 here and at node 0 there."""
    ours = [Card("10.0.0.1", 0, "r0", NETS[1]), Card("10.0.1.1", 1, "r1", NETS[2])]
    theirs = [
        TransportRecord("tcp://10.0.0.2:1", numa=0, rail="r0", net=NETS[1]),
        TransportRecord("tcp://10.0.1.2:1", numa=1, rail="r1", net=NETS[2]),
    ]
    near_one_end = [Way("tcp://10.0.0.2:1", 1), Way("tcp://10.0.1.2:1", 1)]
    assert route(ours, 1, record(theirs, 0)).ways == tuple(near_one_end)
    near_both = [Way("tcp://10.0.1.2:1", 0), Way("tcp://10.0.0.2:1", 2)]
    assert route(ours, 1, record(theirs, 1)).ways == tuple(near_both)
    bound = [way.url for way in route(ours, 1, record(theirs, 1), bind_source=True).ways]
    assert bound == [
        "tcp://10.0.1.2:1?source=10.0.1.1",
        "tcp://10.0.0.2:1?source=10.0.0.1",
        "tcp://10.0.0.2:1?source=10.0.1.1",
        "tcp://10.0.1.2:1?source=10.0.0.1",
    ]


def test_each_card_comes_once_before_any_comes_twice() -> None:
    for here, there in ((2, 2), (2, 3), (3, 2), (4, 3)):
        ours = [Card(f"10.0.0.{n}") for n in range(here)]
        theirs = [TransportRecord(f"tcp://b:{n}") for n in range(there)]
        ways = route(ours, -1, record(theirs), bind_source=True).ways
        assert len(set(ways)) == here * there
        for at, count in ((0, there), (1, here)):
            cards = [way.url.split("?")[at] for way in ways]
            seen: list[int] = []
            for number, card in enumerate(cards):
                seen.append(cards[:number].count(card))
            first_again = next((n for n, before in enumerate(seen) if before), len(seen))
            both = max(here, there)
            assert len(set(cards[:both])) == count, "all of them, as soon as that can be"
            assert first_again >= min(count, first_again)


def test_what_another_machine_calls_loopback_is_not_that_machine() -> None:
    loopback = [TransportRecord(f"tcp://{host}:1") for host in ("127.0.0.1", "127.8.0.1", "[::1]")]
    reached = TransportRecord("tcp://10.0.0.2:1")
    rdma = TransportRecord("nixl://localhost:2")
    node = NodeRecord("b", "ab" * 8, transports=(*loopback, reached, rdma), host="h1")

    def urls(host: str, node: NodeRecord = node) -> set[str]:
        return {way.url for way in route([], -1, node, host=host).ways}

    assert urls("h2") == {reached.url}
    assert len(urls("h1")) == len(urls("")) == 5
    alone = NodeRecord("b", "ab" * 8, transports=tuple(loopback), host="h1")
    assert len(urls("h2", alone)) == 3, "as good as none, but there is always one"


def test_ways_are_bounded() -> None:
    ours = [Card(f"10.0.0.{n}") for n in range(40)]
    theirs = [TransportRecord(f"tcp://b:{n}") for n in range(40)]
    assert len(route(ours, -1, record(theirs), bind_source=True).ways) == WAYS_MAX
    assert len(route(ours, -1, record(theirs)).ways) == WAYS_MAX


def test_many_ways_of_nixl_leave_one_to_ask_by() -> None:
    """A node is asked over its first address that is not NIXL's: it has to be among its ways."""
    theirs = [TransportRecord(f"nixl://b:{n}") for n in range(40)] + [TransportRecord("tcp://b:1")]
    node = record(theirs)
    ways = route([], -1, node).ways
    assert len(ways) == WAYS_MAX
    assert node.url in {way.url for way in ways}
