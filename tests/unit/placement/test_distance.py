"""What is assumed of nodes by how far they are, what is learnt, and what outlives a restart: against plain models."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.placement.directory.base import TIERS
from kvpool.placement.distance import PRIORS, Distance, distance_between
from kvpool.placement.peer_estimates import BACKOFF_S, STALE_S, Link
from kvpool.placement.peer_selection import JITTER, Candidate, forecast, plan
from kvpool.placement.peers import APART_MAX, HEDGE_S_MAX, Peers
from kvpool.placement.records import LinkRecord

MIB = 1 << 20
DRAM, SSD = TIERS["dram"], TIERS["ssd"]
P, Q, R, S = NODES = [bytes([letter]) * 8 for letter in b"PQRS"]
OURS = {"zone": "a", "rack": "1"}
LABELS: dict[Distance, dict[str, str]] = {
    Distance.RACK: OURS,
    Distance.ZONE: {"zone": "a", "rack": "2"},
    Distance.UNKNOWN: {"shelf": "1"},
    Distance.FAR: {"zone": "b", "rack": "1"},
}
NEAREST_FIRST = [
    Distance.HOST,
    Distance.RACK,
    Distance.ZONE,
    Distance.UNKNOWN,
    Distance.FAR,
]
distances = st.sampled_from(NEAREST_FIRST)


def meet(peers: Peers, incarnation: bytes, distance: Distance, **more: Any) -> None:
    same_host = distance is Distance.HOST
    peers.met(incarnation, LABELS.get(distance, {}), same_host=same_host, **more)


def peers_at(*where: Distance) -> Peers:
    peers = Peers(OURS, random.Random(3))
    for incarnation, distance in zip(NODES, where, strict=False):
        meet(peers, incarnation, distance)
    return peers


def measure(
    peers: Peers, incarnation: bytes, latency_s: float, bytes_s: float, now: float, times: int = 30
) -> None:
    for _ in range(times):
        for nbytes in (1000, 64 * MIB):
            peers.started(incarnation, nbytes, now)
            seconds = latency_s + (nbytes / bytes_s if nbytes > 1000 else 0)
            peers.finished(incarnation, nbytes, seconds, now)


def test_one_late_answer_does_not_speak_for_all_distances() -> None:
    peers = peers_at(Distance.RACK, Distance.FAR)
    peers.probed(P, 100 * PRIORS[Distance.RACK].latency_s, 0.0)
    assumed = peers.link(Q, "n", 0.0).latency_s
    assert PRIORS[Distance.FAR].latency_s < assumed < 30 * PRIORS[Distance.FAR].latency_s


def chosen(peers: Peers, incarnations: list[bytes], nbytes: int, now: float) -> bytes:
    (one,) = plan([[Candidate(inc, DRAM) for inc in incarnations]], nbytes, peers, now)
    return one.incarnation


def expected(peers: Peers, incarnation: bytes, now: float) -> tuple[float, float]:
    """Latency and bandwidth."""
    link = peers.link(incarnation, "n", now)
    return link.latency_s, link.bytes_s


# ---- priors ------------------------------------------------------------------------------------------


def test_the_nearer_the_sooner_and_none_is_wanted_for_being_far() -> None:
    for near, far in pairwise(NEAREST_FIRST):
        assert PRIORS[near].latency_s < PRIORS[far].latency_s
        assert PRIORS[near].bytes_s > PRIORS[far].bytes_s
        assert 1 <= PRIORS[near].reluctance <= PRIORS[far].reluctance


@settings(deadline=None, max_examples=50)
@given(distances, st.sampled_from([4096, MIB]), st.integers(0, 1000))
def test_of_nodes_that_were_never_asked_the_nearest_is(
    farthest: Distance, nbytes: int, seed: int
) -> None:
    where = random.Random(seed).sample(NEAREST_FIRST[: NEAREST_FIRST.index(farthest) + 1][:4], k=1)
    where += [farthest]
    peers = peers_at(*where)
    best = min(where, key=NEAREST_FIRST.index)
    assert peers.distance(chosen(peers, [P, Q], nbytes, 0.0)) is best


@pytest.mark.parametrize("distance", NEAREST_FIRST)
def test_what_is_assumed_at_first_is_the_prior(distance: Distance) -> None:
    prior = PRIORS[distance]
    assert expected(peers_at(distance), P, 5.0) == pytest.approx((prior.latency_s, prior.bytes_s))


latencies, bandwidths = st.floats(1e-4, 0.02), st.floats(1e7, 1e10)


@settings(deadline=None, max_examples=50)
@given(distances, distances, latencies, bandwidths)
def test_what_one_node_showed_is_assumed_of_others(
    asked: Distance, other: Distance, latency_s: float, bytes_s: float
) -> None:
    """Of those as far away, as it is; of others in the proportion of their priors."""
    peers = peers_at(asked, other)
    measure(peers, P, latency_s, bytes_s, 1.0)
    scale = PRIORS[other].latency_s / PRIORS[asked].latency_s
    model = latency_s * scale, bytes_s * PRIORS[other].bytes_s / PRIORS[asked].bytes_s
    model = model[0], max(model[1], 1e6)
    assert expected(peers, Q, 1.0) == pytest.approx(model, rel=0.05)


@settings(deadline=None, max_examples=50)
@given(distances, distances, st.tuples(latencies, bandwidths), st.tuples(latencies, bandwidths))
def test_each_distance_is_judged_by_its_own_nodes(
    first: Distance,
    second: Distance,
    one: tuple[float, float],
    other: tuple[float, float],
) -> None:
    peers = peers_at(first, second, first, second)
    measure(peers, P, *one, 1.0)
    if first is not second:
        measure(peers, Q, *other, 1.0)
    assert expected(peers, R, 1.0) == pytest.approx(one, rel=0.05)
    if first is not second:
        assert expected(peers, S, 1.0) == pytest.approx(other, rel=0.05)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(distances, latencies, bandwidths), min_size=2, max_size=4),
    st.sampled_from([4096, MIB, 8 * MIB]),
)
def test_measured_values_decide_but_for_jitter_and_reluctance(
    where: list[tuple[Distance, float, float]], nbytes: int
) -> None:
    peers = peers_at(*(distance for distance, _, _ in where))
    costs = {}
    for incarnation, (distance, latency_s, bytes_s) in zip(NODES, where, strict=False):
        measure(peers, incarnation, latency_s, bytes_s, 1.0)
        costs[incarnation] = (latency_s + 8 * MIB / bytes_s) * PRIORS[distance].reluctance
    best = chosen(peers, list(costs), nbytes, 1.0)
    assert costs[best] <= min(costs.values()) * (1 + JITTER) * 1.1


def test_labels_that_change_change_what_is_assumed() -> None:
    peers = peers_at(Distance.FAR)
    meet(peers, P, Distance.HOST)
    assert expected(peers, P, 0.0)[1] == pytest.approx(PRIORS[Distance.HOST].bytes_s)


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from(["zone", "rack", "x"]), st.sampled_from("ab")),
    st.dictionaries(st.sampled_from(["zone", "rack", "x"]), st.sampled_from("ab")),
)
def test_it_is_as_far_there_as_back(ours: dict[str, str], theirs: dict[str, str]) -> None:
    assert distance_between(ours, theirs) is distance_between(theirs, ours)
    assert distance_between(ours, theirs, same_host=True) is Distance.HOST


# ---- another life ------------------------------------------------------------------------------------

PLACE = ("n", "tcp://n:1")


def test_a_restarted_node_is_half_believed_to_be_as_it_was() -> None:
    peers = peers_at()
    meet(peers, P, Distance.RACK, place=PLACE)
    measure(peers, P, 0.01, 1e8, 100.0)
    peers.failed(P, 100.0, error="it ends")
    peers.gone(P)
    # Another one at the same distance, so that it is known what would be assumed without its past.
    meet(peers, Q, Distance.RACK)
    measure(peers, Q, 0.001, 1e9, 100.0, times=300)
    meet(peers, R, Distance.RACK, place=PLACE)
    new = peers.get(R)
    assert new is not None
    assert not new.suspended(100.0)
    assert (new.backoff.failures, new.failed, new.asked) == (0, 0, 0), "its health is its own"
    latency_s, bytes_s = expected(peers, R, 100.0)
    assert latency_s == pytest.approx((0.01 + 0.001) / 2, rel=0.05)
    assert bytes_s == pytest.approx(1 / ((1e-8 + 1e-9) / 2), rel=0.1)
    # As time passes, less and less; once measured, no more.
    assert expected(peers, R, 100.0 + 1e6) == pytest.approx((0.001, 1e9), rel=0.05)
    measure(peers, R, 0.002, 2e9, 101.0, times=24)
    assert expected(peers, R, 101.0) == pytest.approx((0.002, 2e9), rel=0.1)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ((PLACE, Distance.RACK), (("n", "tcp://n:2"), Distance.RACK)),
        ((PLACE, Distance.RACK), (("m", "tcp://n:1"), Distance.RACK)),
        ((PLACE, Distance.RACK), (PLACE, Distance.FAR)),
        ((("", ""), Distance.RACK), (("", ""), Distance.RACK)),
    ],
)
def test_another_node_or_one_elsewhere_has_no_past(then: Any, now: Any) -> None:
    peers = peers_at()
    meet(peers, P, then[1], place=then[0])
    measure(peers, P, 0.01, 1e8, 1.0)
    peers.gone(P)
    meet(peers, Q, now[1], place=now[0])
    known = peers.get(Q)
    assert known is not None
    assert not known.measured


def test_the_past_is_bounded_and_used_once() -> None:
    peers = Peers(OURS, random.Random(1), capacity=3)
    for number in range(5):
        name = bytes([number]) * 8
        meet(peers, name, Distance.RACK, place=(f"n{number}", "u"))
        measure(peers, name, 0.01, 1e8, 1.0, times=1)
        peers.gone(name)
        peers.gone(name)
    measured = []
    for number in range(5):
        name = bytes([number + 100]) * 8
        meet(peers, name, Distance.RACK, place=(f"n{number}", "u"))
        known = peers.get(name)
        assert known is not None
        measured.append(known.measured)
        peers.gone(name)
    assert measured == [False, False, True, True, True]
    meet(peers, P, Distance.RACK, place=("n4", "u"))
    again = peers.get(P)
    assert again is not None
    assert again.measured, "a life in which nothing was asked leaves what was known before"


def test_what_a_node_showed_before_it_was_introduced_goes_before_its_past() -> None:
    peers = peers_at()
    meet(peers, P, Distance.RACK, place=PLACE)
    measure(peers, P, 0.01, 1e8, 1.0)
    peers.gone(P)
    measure(peers, Q, 0.001, 1e9, 1.0)
    meet(peers, Q, Distance.RACK, place=PLACE)
    assert expected(peers, Q, 1.0) == pytest.approx((0.001, 1e9), rel=0.05)


# ---- probes ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["probe", "pull", "fail", "start", "wait"]), st.sampled_from(NODES)
        ),
        max_size=30,
    ),
    st.integers(1, 3),
)
def test_who_is_probed_is_whom_nothing_was_heard_of_for_longest(
    steps: list[tuple[str, bytes]], count: int
) -> None:
    peers, now, after_s = peers_at(), 100.0, 10.0
    last = dict.fromkeys(NODES, -math.inf)
    running = dict.fromkeys(NODES, 0)
    for what, who in steps:
        now += 0.5
        if what == "wait":
            now += 7.0
        elif what == "pull":
            peers.started(who, 1000, now)
            peers.finished(who, 1000, 0.001, now)
            last[who] = now
        elif what == "fail":
            peers.failed(who, now, error="x")
            running[who] = max(0, running[who] - 1)
        elif what == "start":
            peers.started(who, 1000, now)
            running[who] += 1
        else:
            known = {inc: peers.get(inc) for inc in NODES}
            due = [
                inc
                for inc, peer in known.items()
                if now - last[inc] >= after_s
                and not running[inc]
                and not (peer is not None and peer.suspended(now))
            ]
            found = peers.to_probe(NODES, now, after_s, count)
            assert len(found) == len(set(found)) == min(count, len(due))
            assert set(found) <= set(due)
            left = [last[inc] for inc in due if inc not in found]
            assert max((last[inc] for inc in found), default=-math.inf) <= min(left, default=now)
            last.update(dict.fromkeys(found, now))


def test_who_is_in_backoff_is_not_probed() -> None:
    peers = peers_at(Distance.RACK, Distance.RACK)
    peers.failed(P, 1.0, error="x")
    assert peers.to_probe([P, Q], 1.0, 10.0, 5) == [Q]
    assert peers.to_probe([P, Q], 1.0 + BACKOFF_S, 10.0, 5) == [P]


def test_a_probe_tells_of_latency_and_of_nothing_else() -> None:
    peers = peers_at(Distance.RACK)
    bandwidth = expected(peers, P, 1.0)[1]
    for _ in range(30):
        peers.probed(P, 0.004, 1.0)
    assert expected(peers, P, 1.0) == pytest.approx((0.004, bandwidth), rel=0.01)
    assert peers.link(P, "n", 3.0).latency_age_s == 2.0
    assert peers.link(P, "n", 3.0).bytes_age_s is None
    said = peers.stats(1.0)[0]
    assert (said.asked, said.failed, said.probes) == (0, 0, 30)


def test_a_probe_makes_no_old_bandwidth_young() -> None:
    peers = peers_at(Distance.RACK, Distance.RACK)
    measure(peers, P, 0.001, 1e8, 1.0)
    measure(peers, Q, 0.001, 1e9, 1.0, times=300)
    for minute in range(1, 100):
        peers.probed(P, 0.001, 1.0 + 60 * minute)
    assert expected(peers, P, 6000.0)[1] > 9e8, "by now it may be like the others"


def test_a_probe_that_fails_changes_nothing_but_its_counter() -> None:
    peers = peers_at(Distance.RACK, Distance.RACK)
    measure(peers, P, 0.001, 1e9, 1.0)
    (before,) = (one for one in peers.stats(1.0) if one.incarnation == P.hex())
    for _ in range(50):
        peers.probe_failed(P)
    (after,) = (one for one in peers.stats(1.0) if one.incarnation == P.hex())
    assert after.probe_failures == 50
    assert after == msgspec.structs.replace(before, probe_failures=50)
    assert {chosen(peers, [P, Q], MIB, 1.0) for _ in range(50)} == {P, Q}


def test_a_probe_does_not_absolve_who_fails_or_hangs() -> None:
    peers = peers_at(Distance.RACK)
    peers.failed(P, 1.0, error="x")
    peers.probed(P, 0.001, 1.0)
    assert not plan([[Candidate(P, DRAM)]], MIB, peers, 1.0)


# ---- what others read --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(distances, latencies, bandwidths, st.integers(0, 64 * MIB), st.integers(1, 64))
def test_a_link_says_what_a_forecast_says(
    distance: Distance, latency_s: float, bytes_s: float, waiting: int, blocks: int
) -> None:
    peers = peers_at(distance)
    measure(peers, P, latency_s, bytes_s, 1.0)
    peers.started(P, waiting, 1.0)
    wire = msgspec.json.encode(peers.link(P, "n", 1.0, "tcp://n:1"))
    link = msgspec.json.decode(wire, type=Link)
    assert (link.node, link.incarnation, link.distance) == ("n", P.hex(), distance)
    for tier in (DRAM, SSD):
        model = forecast([(MIB, [[Candidate(P, tier)]] * blocks)], (), peers, 1.0)
        assert link.load_s(blocks * MIB, tier) == pytest.approx(model.seconds)


def test_a_hedge_trusts_what_was_measured_however_long_ago() -> None:
    peers = peers_at(Distance.RACK)
    measure(peers, P, 0.001, 1e8, 1.0)
    meet(peers, Q, Distance.RACK)
    after = peers.hedge_after_s(P, 10 * MIB)
    assert after == pytest.approx(4 * (0.001 + 10 * MIB / 1e8), rel=0.1) or after == pytest.approx(
        HEDGE_S_MAX + 10 * MIB / 1e8, rel=0.1
    )
    assert STALE_S > 0


def told(peers: Peers, now: float) -> dict[tuple[str, str], float]:
    return {(link.distance, link.node): link.bytes_s for link in peers.links(now)}


def test_what_others_are_told_is_each_distance_and_the_nodes_that_differ() -> None:
    peers = peers_at(Distance.RACK, Distance.RACK, Distance.RACK, Distance.FAR)
    for name, incarnation in zip("pqrs", NODES, strict=True):
        distance = Distance.FAR if name == "s" else Distance.RACK
        meet(peers, incarnation, distance, place=(name, f"tcp://{name}"))
    assert told(peers, 0.0) == {}, "nothing was measured"
    for _ in range(30):
        for incarnation, speed in ((P, 2e9), (Q, 2.2e9), (S, 0.4e9)):
            measure(peers, incarnation, 1e-3, speed, 0.0, times=1)
    found = told(peers, 0.0)
    assert found.keys() == {("rack", ""), ("far", "")}
    assert found["rack", ""] == pytest.approx(2.1e9, rel=0.1)
    assert found["far", ""] == pytest.approx(0.4e9, rel=0.1)
    measure(peers, R, 1e-3, 0.2e9, 0.0, times=3)
    for _ in range(30):
        measure(peers, P, 1e-3, 2e9, 0.0, times=1)
    found = told(peers, 1.0)
    assert found["rack", "r"] == pytest.approx(0.2e9, rel=0.2)
    assert ("far", "s") not in found
    (slow,) = [link for link in peers.links(200.0) if link.node == "r"]
    assert (slow.age_s, slow.latency_s) == (256.0, 1e-3)
    assert slow.bytes_s > 2 * found["rack", "r"], "it is half forgotten"
    assert ("rack", "r") not in told(peers, 3000.0)
    peers.gone(R)
    assert ("rack", "r") not in told(peers, 1.0)


@pytest.mark.parametrize(("slow", "slower"), [(4, 1.25), (2 * APART_MAX, 2.5)])
def test_who_is_told_apart_does_not_come_and_go(slow: int, slower: float) -> None:
    """Neither those that are as different as just matters, nor the least different ones of too many."""
    rng = random.Random(2)
    peers = Peers(OURS, rng)
    speeds = [1e9 / slower] * slow + [1e9] * 20
    for number in range(len(speeds)):
        meet(peers, number.to_bytes(8), Distance.RACK, place=(f"n{number}", ""))
    links: Sequence[LinkRecord] = ()
    seen = []
    for look in range(200):
        for number, speed in enumerate(speeds):
            of_now = speed * rng.uniform(0.96, 1.04)
            measure(peers, number.to_bytes(8), 1e-3, of_now, 5.0 * look, times=1)
        links = peers.links(5.0 * look, links)
        seen.append({link.node for link in links if link.node})
    assert seen[-1]
    assert all(before <= now for before, now in pairwise(seen[1:]))
    other = (slow + 1).to_bytes(8)
    measure(peers, other, 1e-3, 1e8, 1000.0, times=3)
    measure(peers, (slow + 2).to_bytes(8), 1e-3, 1e9, 1000.0)
    links = peers.links(1000.0, links)
    assert f"n{slow + 1}" in {link.node for link in links}, "it differs by much more"
    assert len(links) <= 1 + APART_MAX


def test_who_was_told_apart_is_until_it_is_nearly_like_others() -> None:
    peers = peers_at(Distance.RACK, Distance.RACK)
    for name, incarnation in zip("pq", NODES, strict=False):
        meet(peers, incarnation, Distance.RACK, place=(name, ""))
    links: Sequence[LinkRecord] = ()
    seen = []
    for slower in (1.0, 1.5, 1.2, 1.05, 1.2):
        for _ in range(60):
            measure(peers, P, 1e-3, 1e9 / slower, 0.0, times=1)
            measure(peers, Q, 1e-3, 1e9, 0.0, times=5)
        links = peers.links(0.0, links)
        seen.append([link.node for link in links if link.node])
    assert seen == [[], ["p"], ["p"], [], []]


@given(st.lists(st.floats(1e7, 1e10), min_size=1, max_size=60), st.floats(0.0, 1e5))
def test_few_are_told_however_many_differ(speeds: list[float], later_s: float) -> None:
    peers = Peers(OURS, random.Random(1))
    for number, speed in enumerate(speeds):
        incarnation = number.to_bytes(8)
        meet(peers, incarnation, Distance.RACK, place=(f"n{number}", ""))
        measure(peers, incarnation, 1e-3, speed, 0.0, times=2)
    links = peers.links(later_s)
    assert sum(not link.node for link in links) == 1
    assert len(links) <= 1 + APART_MAX
    whole = links[0].bytes_s
    assert all(not 1 / 1.2 < link.bytes_s / whole < 1.2 for link in links if link.node)
    assert peers.links(later_s) == links, "the same when nothing has changed"
    assert all(link.age_s >= later_s and link.measured_bytes > 0 for link in links)
