"""The choice of sources, and what is remembered about peers: against plain models and definitions."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.directory_memory import DeadIncarnations, NegativeMemory, Remembered
from kvpool.placement.peer_estimates import BACKOFF_S, BACKOFF_S_MAX, faster
from kvpool.placement.peer_selection import JITTER, Candidate, forecast, plan
from kvpool.placement.peers import PROBE_S, SUSPECT_S, TRIAL_S, Peers

MIB = 1 << 20
DRAM, SSD, OBJECT = TIERS["dram"], TIERS["ssd"], TIERS["object"]
P, Q, R, S = (bytes([letter]) * 8 for letter in b"PQRS")
NODES = [P, Q, R, S]
D = b"D" * 16
KEYS = [bytes([i]) * 16 for i in range(8)]


def peers_of(**settings: Any) -> Peers:
    return Peers({"zone": "a", "rack": "1"}, random.Random(7), **settings)


def teach(
    peers: Peers, incarnation: bytes, *, latency_s: float, bytes_s: float, now: float
) -> None:
    """Let a peer have been measured thoroughly."""
    for _ in range(60):
        for nbytes in (1000, 64 * MIB):
            peers.started(incarnation, nbytes, now)
            seconds = latency_s + (nbytes / bytes_s if nbytes > 1000 else 0)
            peers.finished(incarnation, nbytes, seconds, now)


def dram(*incarnations: bytes) -> list[Candidate]:
    return [Candidate(incarnation, DRAM) for incarnation in incarnations]


def shares(
    wanted: list[list[Candidate]], nbytes: int, peers: Peers, now: float, **settings: int
) -> dict[bytes, list[int]]:
    return {one.incarnation: one.indices for one in plan(wanted, nbytes, peers, now, **settings)}


# ---- the plan ----------------------------------------------------------------------------------------

# What may have happened to a peer by the time of the plan.
histories = st.lists(
    st.tuples(
        st.sampled_from(NODES),
        st.sampled_from(["finished", "failed", "slow", "started"]),
        st.sampled_from([0.0, 0.1, 2.0, 6.0]),
    ),
    max_size=12,
)
wants = st.lists(
    st.lists(
        st.builds(Candidate, st.sampled_from(NODES), st.sampled_from([DRAM, SSD, OBJECT, 77])),
        max_size=4,
    ),
    max_size=20,
)


@given(histories, wants, st.integers(1, 8), st.sampled_from([1, 4096, 65536]))
def test_each_block_is_asked_of_one_who_has_it_and_of_no_doubtful_one_without_need(
    history: list[tuple[bytes, str, float]],
    wanted: list[list[Candidate]],
    slice_blocks: int,
    nbytes: int,
) -> None:
    peers, now = peers_of(), 100.0
    for incarnation, what, pause in history:
        now += pause
        if what == "failed":
            peers.failed(incarnation, now, error="x")
        elif what == "slow":
            peers.slow(incarnation, now)
        else:
            peers.started(incarnation, nbytes, now)
            if what == "finished":
                peers.finished(incarnation, nbytes, 0.01, now)
    before = peers.stats(now)
    planned = plan(wanted, nbytes, peers, now, slice_bytes=slice_blocks * nbytes)
    assert peers.stats(now) == before, "a plan changes nothing"

    owner = {index: one.incarnation for one in planned for index in one.indices}
    assert sum(len(one.indices) for one in planned) == len(owner), "each block once"
    assert len({one.incarnation for one in planned}) == len(planned)
    assert all(one.indices == sorted(one.indices) and one.indices for one in planned)
    assert [one.indices[0] for one in planned] == sorted(one.indices[0] for one in planned)

    known = {incarnation: peers.get(incarnation) for incarnation in NODES}
    suspended = {i for i, peer in known.items() if peer and peer.suspended(now)}
    suspected = {i for i, peer in known.items() if peer and peer.suspected(now)} - suspended
    probation = {i for i, peer in known.items() if peer and peer.on_probation} - suspected
    by_need: Counter[bytes] = Counter()
    for index, candidates in enumerate(wanted):
        who = {candidate.incarnation for candidate in candidates}
        if who <= suspended:
            assert index not in owner
            continue
        chosen = owner[index]
        assert chosen in who - suspended
        if chosen in suspected:
            assert not who - suspended - suspected - probation
        if chosen in probation and who - suspended - suspected - probation:
            by_need[chosen] += 1
    assert all(count <= slice_blocks for count in by_need.values()), "one slice to try it"


def makespan(
    planned: dict[bytes, list[int]], nbytes: int, speeds: dict[bytes, tuple[float, float]]
) -> float:
    return max(speeds[i][0] + len(blocks) * nbytes / speeds[i][1] for i, blocks in planned.items())


@given(
    st.lists(
        st.tuples(st.floats(0.0005, 0.02), st.floats(5e7, 5e9)), min_size=1, max_size=len(NODES)
    ),
    st.integers(1, 256),
    st.sampled_from([4096, 65536, MIB]),
)
def test_several_peers_are_as_fast_as_they_could_be_but_for_a_slice(
    speeds: list[tuple[float, float]], blocks: int, nbytes: int
) -> None:
    """Against the fluid bound: all of them pour at once, each from its latency on."""
    peers = peers_of()
    speed = dict(zip(NODES, speeds, strict=False))
    for incarnation, (latency_s, bytes_s) in speed.items():
        peers.met(incarnation, {"zone": "a", "rack": "1"})
        teach(peers, incarnation, latency_s=latency_s, bytes_s=bytes_s, now=1.0)
    planned = shares([dram(*speed)] * blocks, nbytes, peers, 1.0, slice_bytes=MIB)
    total = blocks * nbytes
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        poured = sum(max(0.0, middle - latency) * rate for latency, rate in speeds)
        low, high = (low, middle) if poured >= total else (middle, high)
    # One slice more than the bound, on the fastest who could take it, and what jitter blurs.
    allowed = high + min(latency + max(MIB, nbytes) / rate for latency, rate in speeds)
    assert makespan(planned, nbytes, speed) <= allowed * (1 + JITTER) * 1.1


def test_few_blocks_are_not_scattered_and_many_are_shared() -> None:
    peers = peers_of()
    assert len(shares([dram(P, Q, R)] * 16, 4096, peers, 0.0)) == 1
    many = shares([dram(P, Q, R)] * 256, MIB, peers, 0.0)
    assert sorted(map(len, many.values())) == [80, 88, 88]
    assert all(
        block + 1 in blocks or (block + 1) % 8 == 0 for blocks in many.values() for block in blocks
    ), "slices of 8 MiB in one piece"


def test_a_slice_that_ends_early_is_not_held_against_its_peer() -> None:
    peers = peers_of()
    wanted = [dram(P), dram(R)] * 4 + [dram(P, Q)] * 64
    got = shares(wanted, MIB, peers, 0.0)
    assert len(got[P]) == pytest.approx(len(got[Q]), abs=8)


def test_the_last_resort_is_left_as_soon_as_there_is_somebody_else() -> None:
    peers = peers_of()
    peers.slow(P, 0.0)
    assert shares([dram(P), *[dram(P, Q)] * 6], MIB, peers, 0.0) == {P: [0], Q: list(range(1, 7))}


def test_what_is_in_flight_already_counts() -> None:
    peers = peers_of()
    peers.started(P, 512 * MIB, 0.0)
    assert set(shares([dram(P, Q)] * 32, MIB, peers, 0.0)) == {Q}
    peers.stopped(P, 512 * MIB)
    assert set(shares([dram(P, Q)] * 32, MIB, peers, 0.0)) == {P, Q}


def test_the_near_and_the_fast_tier_are_preferred() -> None:
    for _ in range(20):
        peers = Peers({"zone": "a", "rack": "1"}, random.Random(_))
        peers.met(P, {"zone": "b", "rack": "1"})
        peers.met(Q, {"zone": "a", "rack": "2"})
        peers.met(R, {"zone": "a", "rack": "1"})
        assert set(shares([dram(P, Q, R)], 4096, peers, 0.0)) == {R}
        assert set(shares([dram(P, Q)], 4096, peers, 0.0)) == {Q}
        assert set(shares([[Candidate(R, SSD), Candidate(S, OBJECT)]], MIB, peers, 0.0)) == {R}
        near = [Candidate(Q, OBJECT), Candidate(P, DRAM)]
        assert set(shares([near], MIB, peers, 0.0)) == {P}


def test_readers_of_one_block_do_not_all_choose_the_same_peer() -> None:
    chosen: Counter[bytes] = Counter()
    for seed in range(300):
        chosen.update(list(shares([dram(P, Q, R)], MIB, Peers({}, random.Random(seed)), 0.0)))
    assert set(chosen) == {P, Q, R} and min(chosen.values()) > 50
    again = [shares([dram(P, Q, R)], MIB, Peers({}, random.Random(5)), 0.0) for _ in range(5)]
    assert all(one == again[0] for one in again), "the same seed, the same plan"


def test_an_old_estimate_is_given_another_chance() -> None:
    peers = peers_of()
    teach(peers, P, latency_s=0.05, bytes_s=1e8, now=0.0)
    teach(peers, Q, latency_s=0.001, bytes_s=9e8, now=0.0)
    assert set(shares([dram(P, Q)], MIB, peers, 1.0)) == {Q}
    teach(peers, Q, latency_s=0.001, bytes_s=9e8, now=100_000.0)
    asked = [next(iter(shares([dram(P, Q)], MIB, peers, 100_000.0))) for _ in range(60)]
    assert 10 < asked.count(P) < 50, "it may be like the others by now"


def test_a_peer_that_was_never_asked_is_taken_for_one_like_the_others() -> None:
    """However fast they are: else whoever was asked first would be asked for ever."""
    for latency_s, bytes_s in ((0.0002, 20e9), (0.05, 1e7)):
        peers = peers_of()
        teach(peers, P, latency_s=latency_s, bytes_s=bytes_s, now=0.0)
        large = shares([dram(P, Q)] * 64, MIB, peers, 0.0)
        assert len(large[P]) >= 16
        assert len(large[Q]) >= 16


# ---- forecasts ---------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(NODES), min_size=1, max_size=60),
    st.dictionaries(st.sampled_from(NODES), st.floats(1e6, 1e9)),
    st.dictionaries(st.sampled_from(NODES), st.integers(1, 64 * MIB)),
    st.sets(st.sampled_from(NODES)),
    st.sampled_from([4096, MIB]),
)
def test_where_there_is_no_choice_the_slowest_source_says_how_long_it_takes(
    owners: list[bytes],
    bytes_s: dict[bytes, float],
    busy: dict[bytes, int],
    awaited: set[bytes],
    nbytes: int,
) -> None:
    peers, now = peers_of(), 100.0
    for incarnation, speed in bytes_s.items():
        teach(peers, incarnation, latency_s=0.01, bytes_s=speed, now=now)
    for incarnation, waiting in busy.items():
        peers.started(incarnation, waiting, now)
    found = forecast([(nbytes, [dram(owner) for owner in owners])], awaited, peers, now)

    expected = 0.0
    for incarnation in awaited | set(owners):
        latency_s, per_byte = (peers.get(incarnation) or peers.stranger(incarnation)).expected(now)
        if incarnation in bytes_s:
            assert 1 / per_byte == pytest.approx(bytes_s[incarnation], rel=0.01)
        total = busy.get(incarnation, 0) + nbytes * owners.count(incarnation)
        expected = max(expected, latency_s + total * per_byte)
    assert found.seconds == pytest.approx(expected)
    for incarnation in NODES:
        its = [(0, index) for index, owner in enumerate(owners) if owner == incarnation]
        assert found.shares.get(incarnation, []) == its


@given(
    st.lists(st.sampled_from(NODES), max_size=30),
    st.lists(st.sampled_from(NODES), max_size=30),
    st.integers(0, 30),
)
def test_less_never_takes_longer(first: list[bytes], second: list[bytes], cut: int) -> None:
    peers, now = peers_of(), 100.0
    for incarnation, speed in zip(NODES, (1e6, 1e7, 1e8, 1e9), strict=True):
        teach(peers, incarnation, latency_s=0.001, bytes_s=speed, now=now)

    def seconds(*parts: list[bytes]) -> float:
        sought = [(65536, [dram(owner) for owner in part]) for part in parts]
        return forecast(sought, (), peers, now).seconds

    assert seconds(first[:cut], second) <= seconds(first, second)
    assert max(seconds(first), seconds(second)) <= seconds(first, second)


def test_sources_work_at_the_same_time_and_parts_one_after_the_other() -> None:
    peers, now = peers_of(), 100.0
    for incarnation in (P, Q):
        teach(peers, incarnation, latency_s=0.001, bytes_s=100 * MIB, now=now)
    one = forecast([(MIB, [dram(P)] * 64)], (), peers, now)
    two = forecast([(MIB, [dram(P, Q)] * 64)], (), peers, now)
    both = forecast([(MIB, [dram(P)] * 64), (MIB, [dram(P)] * 64)], (), peers, now)
    assert one.seconds == pytest.approx(0.64, rel=0.05)
    assert two.seconds == pytest.approx(0.32, rel=0.1)
    assert both.seconds == pytest.approx(1.28, rel=0.05)
    assert both.shares == {P: [(part, index) for part in (0, 1) for index in range(64)]}


def test_what_was_measured_of_object_storage_is_not_added_to_what_is_assumed_of_it() -> None:
    peers, now = peers_of(), 100.0
    wanted = [(MIB, [[Candidate(P, OBJECT)]] * 64)]
    assert forecast(wanted, (), peers, now).seconds > 0.5
    teach(peers, P, latency_s=0.02, bytes_s=1000 * MIB, now=now)
    assert forecast(wanted, (), peers, now).seconds == pytest.approx(0.084, rel=0.05)


def test_sources_that_are_no_nodes_say_nothing_of_nodes_nor_the_reverse() -> None:
    peers = peers_of(apart=[S])
    before = peers.stranger(Q).expected(0.0)
    teach(peers, S, latency_s=0.2, bytes_s=1e7, now=0.0)
    assert peers.stranger(Q).expected(0.0) == before
    slow = peers.stranger(S).expected(0.0)
    teach(peers, P, latency_s=1e-4, bytes_s=5e9, now=0.0)
    assert peers.stranger(S).expected(0.0) == slow
    idle = peers.get(S)
    assert idle is not None
    assert idle.expected(1e6) == pytest.approx(idle.expected(0.0), rel=0.2), "it stays what it was"


def test_a_node_that_stops_answering_makes_no_other_one_look_slow() -> None:
    peers = peers_of()
    teach(peers, P, latency_s=1e-4, bytes_s=5e9, now=0.0)
    before = peers.stranger(Q).expected(1.0)
    peers.started(R, 8 * MIB, 1.0)
    peers.failed(R, 6.0, error="late", asked=8 * MIB, at_most=2 * MIB, seconds=5.0)
    assert peers.stranger(Q).expected(1.0) == before
    stopped = peers.get(R)
    assert stopped is not None and stopped.expected(6.0)[1] > 10 * before[1]


def test_an_answer_that_moved_nothing_says_nothing() -> None:
    peers = peers_of()
    before = peers.stranger(P).expected(0.0)
    for _ in range(50):
        peers.started(P, MIB, 0.0)
        peers.finished(P, 0, 0.0, 0.0, asked=MIB)
    known = peers.get(P)
    assert known is not None and not known.measured
    assert peers.stranger(Q).expected(0.0) == before


def test_the_faster_of_two_tiers_whatever_their_numbers() -> None:
    order = [DRAM, TIERS["device"], SSD, OBJECT]
    for index, tier in enumerate(order):
        for slower in order[index:]:
            assert faster(tier, slower) == faster(slower, tier) == tier


def test_what_nobody_can_be_asked_for_never_comes() -> None:
    peers, now = peers_of(), 100.0
    peers.failed(P, now, error="it hangs")
    found = forecast([(MIB, [dram(P), dram(Q), []])], (), peers, now)
    assert found.seconds == math.inf
    assert found.shares == {Q: [(0, 1)]}
    assert forecast([], (), peers, now) == (0.0, {})


def test_a_source_is_tried_again_once_nothing_was_heard_of_it_for_long() -> None:
    peers, now = peers_of(), 100.0
    assert peers.begin_trial(P, now), "nothing is known of it"
    assert not peers.begin_trial(P, now), "one is under way"
    assert peers.begin_trial(P, now + TRIAL_S)
    teach(peers, P, latency_s=0.001, bytes_s=1e7, now=now + 1.5 * TRIAL_S)
    assert not peers.begin_trial(P, now + 2.4 * TRIAL_S)
    for step in range(25, 40):  # questions tell nothing of that
        peers.started(Q, 0, now + step)
        peers.finished(Q, 0, 0.001, now + step)
    assert peers.begin_trial(Q, now + 40)
    peers.started(P, MIB, now + 3 * TRIAL_S)
    assert not peers.begin_trial(P, now + 3 * TRIAL_S), "it is about to be known"
    peers.failed(P, now + 3 * TRIAL_S, error="x")
    assert not peers.begin_trial(P, now + 3 * TRIAL_S), "it is in back-off"
    assert peers.begin_trial(P, now + 4 * TRIAL_S)


def test_what_was_measured_long_ago_weighs_no_more_than_a_small_new_one() -> None:
    peers, now = peers_of(), 100.0
    teach(peers, P, latency_s=0.001, bytes_s=1e7, now=now)
    for nth in range(5):
        now += TRIAL_S
        peers.started(P, MIB, now)
        peers.finished(P, MIB, 0.001 + MIB / 1e9, now)
        if not nth:
            assert speed_of(peers, P, now) < 3e7
    assert speed_of(peers, P, now) > 1e8


def test_many_small_transfers_in_a_row_do_not_wipe_out_a_large_one() -> None:
    peers, now = peers_of(), 100.0
    teach(peers, P, latency_s=0.001, bytes_s=1e7, now=now)
    for _ in range(5):
        peers.started(P, MIB, now)
        peers.finished(P, MIB, 0.001 + MIB / 1e9, now)
    assert speed_of(peers, P, now) < 1.2e7


@pytest.mark.parametrize(("arrived", "seconds", "slower"), [(MIB, 10.0, True), (MIB, 1e-4, False)])
def test_a_transfer_that_was_cut_off_can_only_make_its_source_slower(
    arrived: int, seconds: float, slower: bool
) -> None:
    peers, now = peers_of(), 100.0
    teach(peers, P, latency_s=0.001, bytes_s=1e8, now=now)
    before = speed_of(peers, P, now)
    for _ in range(40):
        peers.started(P, 64 * MIB, now)
        peers.failed(P, now, error="late", asked=64 * MIB, at_most=arrived, seconds=seconds)
    expected = max(arrived / seconds, 1e6) if slower else before
    assert speed_of(peers, P, now) == pytest.approx(expected, rel=0.05)


def speed_of(peers: Peers, incarnation: bytes, now: float) -> float:
    peer = peers.get(incarnation)
    assert peer is not None
    return 1 / peer.expected(now)[1]


# ---- health ------------------------------------------------------------------------------------------


def usable(peers: Peers, now: float) -> str:
    """How P stands: alone, and beside Q."""
    if not plan([dram(P)], MIB, peers, now):
        return "suspended"
    both = shares([dram(P, Q)] * 64, MIB, peers, now)
    return {0: "suspected", 8: "probation"}.get(len(both.get(P, [])), "trusted")


def test_a_failing_peer_is_left_alone_for_longer_and_longer_and_tried_one_at_a_time() -> None:
    peers, now = peers_of(), 50.0
    assert usable(peers, now) == "trusted"
    for backoff in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0):
        peers.started(P, MIB, now)
        peers.failed(P, now, error="broken", asked=MIB)
        assert usable(peers, now) == "suspended"
        assert usable(peers, now + 0.99 * backoff) == "suspended"
        now += backoff
        assert usable(peers, now) == "probation"
        peers.started(P, MIB, now)
        assert usable(peers, now) == "suspended", "one is on its way"
    peers.finished(P, MIB, 0.004, now)
    assert usable(peers, now) == "trusted"
    peers.failed(P, now, error="broken")
    assert usable(peers, now + 0.21) == "probation", "the count began anew"


def test_many_requests_that_break_at_once_are_one_failure() -> None:
    peers = peers_of()
    for _ in range(100):
        peers.started(P, MIB, 0.0)
    for _ in range(100):
        peers.failed(P, 1.0, error="connection reset", asked=MIB)
    assert usable(peers, 1.0 + BACKOFF_S) == "probation"
    assert peers.stats(1.0)[0].inflight_bytes == 0
    assert peers.stats(1.0)[0].last_error == "connection reset"


def test_a_probe_that_never_ends_is_not_waited_for_for_ever() -> None:
    peers = peers_of()
    peers.failed(P, 0.0, error="x")
    peers.started(P, MIB, 1.0)
    assert usable(peers, 1.0 + 0.99 * PROBE_S) == "suspended"
    assert usable(peers, 1.0 + PROBE_S) == "probation"


def test_a_slow_peer_is_avoided_where_there_are_others_until_it_answers() -> None:
    peers = peers_of()
    peers.slow(P, 0.0)
    assert usable(peers, 0.0) == usable(peers, 0.99 * SUSPECT_S) == "suspected"
    assert usable(peers, SUSPECT_S) == "probation"
    peers.started(P, MIB, SUSPECT_S)
    assert usable(peers, SUSPECT_S) == "suspected", "the next ones wait for how that ends"
    peers.slow(P, SUSPECT_S + 0.1)
    assert usable(peers, 2 * SUSPECT_S) == "suspected"
    peers.finished(P, 0, 0.01, 2 * SUSPECT_S, asked=MIB)
    assert usable(peers, 2 * SUSPECT_S) == "trusted"
    peers.slow(P, 100.0)
    peers.slow(P, 102.0)
    assert usable(peers, 100.0 + SUSPECT_S) == "probation", "those under way tell nothing new"


def test_backoff_never_exceeds_its_limit_however_long_it_fails() -> None:
    peers, now = peers_of(), 0.0
    for _ in range(2000):
        peers.failed(P, now, error="x")
        now += BACKOFF_S_MAX
        assert usable(peers, now) == "probation"


def test_the_second_try_comes_after_a_multiple_of_what_is_expected() -> None:
    peers = peers_of()
    teach(peers, P, latency_s=0.0005, bytes_s=1e9, now=0.0)
    assert peers.hedge_after_s(P, 4096) == 0.05
    assert peers.hedge_after_s(P, 30_000_000) == pytest.approx(4 * 0.0305, rel=0.1)
    assert peers.hedge_after_s(P, 1_000_000_000) == pytest.approx(1.3, rel=0.05)
    teach(peers, Q, latency_s=0.2, bytes_s=1e9, now=0.0)
    assert peers.hedge_after_s(Q, 4096) == pytest.approx(0.3, rel=0.01)
    alone = peers.hedge_after_s(P, 100_000_000)
    peers.started(P, 1_000_000_000, 0.0)
    assert peers.hedge_after_s(P, 100_000_000) > alone + 0.8, "a queue is not a stop"
    assert 0.05 <= peers.hedge_after_s(S, 4096) <= 0.301, "of one that nothing is known about"


def test_estimates_follow_what_is_measured() -> None:
    peers = peers_of()
    for latency_s, bytes_s in ((0.002, 2e9), (0.02, 1e8), (0.001, 5e9)):
        teach(peers, P, latency_s=latency_s, bytes_s=bytes_s, now=0.0)
        said = peers.stats(0.0)[0]
        assert said.latency_ms == pytest.approx(1000 * latency_s, rel=0.05)
        assert said.bytes_s == pytest.approx(bytes_s, rel=0.1)


def test_a_large_transfer_that_is_quick_tells_of_latency_too() -> None:
    peers = peers_of()
    peers.finished(P, 1000, 0.3, 0.0)
    for _ in range(30):
        peers.finished(P, 64 * MIB, 0.07, 0.0)
    assert peers.stats(0.0)[0].latency_ms < 80


@pytest.mark.parametrize(
    ("ours", "theirs", "distance"),
    [
        ({"zone": "a", "rack": "1"}, {"zone": "a", "rack": "1"}, "rack"),
        ({"zone": "a", "rack": "1"}, {"zone": "a", "rack": "2"}, "zone"),
        ({"zone": "a", "rack": "1"}, {"zone": "a"}, "zone"),
        ({"zone": "a", "rack": "1"}, {"zone": "b", "rack": "1"}, "far"),
        ({"zone": "a", "rack": "1"}, {"rack": "1"}, "unknown"),
        ({"rack": "1"}, {"rack": "1"}, "rack"),
        ({"rack": "1"}, {"rack": "2"}, "unknown"),
        ({"shelf": "1"}, {"shelf": "1"}, "unknown"),
        ({}, {}, "unknown"),
    ],
)
def test_distance_is_what_labels_say(
    ours: dict[str, str], theirs: dict[str, str], distance: str
) -> None:
    peers = Peers(ours, random.Random(1))
    assert peers.distance(P) == "unknown"
    peers.met(P, theirs)
    assert peers.distance(P) == distance
    peers.met(P, theirs, same_host=True)
    assert peers.distance(P) == "host"


def test_peers_are_bounded_and_ends_without_a_start_are_harmless() -> None:
    peers = peers_of(capacity=3)
    for incarnation in (P, Q, R):
        peers.started(incarnation, MIB, 0.0)
    peers.finished(P, MIB, 0.1, 0.0)
    peers.met(S, {})
    assert len(peers) == 3 and peers.get(Q) is None, "the one that was heard of the longest ago"
    peers.finished(Q, MIB, 0.1, 0.0)
    peers.gone(P)
    peers.gone(P)
    peers.stopped(P, MIB)
    peers.failed(P, 0.0, error="late")
    said = {one.incarnation: one for one in peers.stats(0.0)}
    assert said[P.hex()].inflight_bytes == said[P.hex()].running == 0


def test_when_nothing_runs_nothing_is_in_flight_whatever_was_said_of_sizes() -> None:
    peers = peers_of()
    for _ in range(3):
        peers.started(P, 100, 0.0)
    peers.finished(P, 40, 0.1, 0.0)
    peers.failed(P, 0.0, error="x")
    peers.finished(P, 0, 0.1, 0.0)
    assert peers.stats(0.0)[0].inflight_bytes == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "finish", "fail", "stop"]), st.integers(1, 1000)),
        max_size=40,
    )
)
def test_what_is_in_flight_is_what_was_asked_and_has_not_ended(
    steps: list[tuple[str, int]],
) -> None:
    peers = peers_of()
    running: list[int] = []
    for what, number in steps:
        if what == "start" or not running:
            running.append(number)
            peers.started(P, number, 0.0)
            continue
        asked = running.pop(number % len(running))
        if what == "finish":
            peers.finished(P, asked // 2, 0.1, 0.0, asked=asked)
        elif what == "fail":
            peers.failed(P, 0.0, error="x", asked=asked)
        else:
            peers.stopped(P, asked)
        said = peers.stats(0.0)[0]
        assert (said.inflight_bytes, said.running) == (sum(running), len(running))


# ---- what is remembered ------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "ask"]),
            st.sampled_from(KEYS),
            st.sampled_from(NODES[:2]),
            st.sampled_from([0.0, 0.5, 1.0, 2.5]),
        )
    ),
    st.integers(1, 6),
)
def test_negative_memory_is_a_list_of_the_latest_with_their_ends(
    steps: list[tuple[str, bytes, bytes, float]], capacity: int
) -> None:
    memory, now = NegativeMemory(capacity, 2.0), 0.0
    model: list[tuple[tuple[bytes, bytes], float]] = []  # the oldest first
    for what, key, incarnation, pause in steps:
        now += pause
        name = (key, incarnation)
        if what == "add":
            memory.add(D, 3, key, incarnation, now)
            model = [*((n, end) for n, end in model if n != name), (name, now + 2.0)][-capacity:]
        assert memory.has(D, 3, *name, now) == any(n == name and end > now for n, end in model)
        assert not memory.has(D, 2, *name, now) and not memory.has(D[:-1], 3, *name, now)
        assert len(memory) <= capacity


def test_negative_memory_keeps_what_was_added_again() -> None:
    memory = NegativeMemory(2, 10.0)
    for at, key in enumerate((KEYS[0], KEYS[1], KEYS[0], KEYS[2])):
        memory.add(D, 0, key, P, float(at))
    assert [memory.has(D, 0, key, P, 4.0) for key in KEYS[:3]] == [True, False, True]


def test_what_was_said_or_asked_lately_is_remembered() -> None:
    memory, known = Remembered(2), [[Entry(P, DRAM, 1)]]
    for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[2]):
        memory.learn(D, [key], known)
    assert memory.recall(D, KEYS[:3]) == [*known, [], *known]
    memory.recall(D, [KEYS[0]])
    memory.learn(D, [KEYS[3]], known)
    assert memory.recall(D, KEYS[:4]) == [*known, [], [], *known]


def test_negative_memory_empties_itself_as_it_is_used() -> None:
    memory = NegativeMemory(1000, 1.0)
    for i in range(500):
        memory.add(D, 0, i.to_bytes(16, "big"), P, 0.0)
    for i in range(500, 1000):
        memory.add(D, 0, i.to_bytes(16, "big"), P, 10.0 + i)
    assert len(memory) <= 2


entries_of = st.lists(
    st.builds(Entry, st.sampled_from(NODES), st.integers(0, 255), st.integers(0, 1 << 4096)),
    max_size=3,
)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("learn"), st.lists(st.tuples(st.sampled_from(KEYS), entries_of))),
            st.tuples(st.just("recall"), st.lists(st.sampled_from(KEYS))),
            st.tuples(st.just("forget"), st.lists(st.sampled_from(KEYS)), st.sampled_from(NODES)),
        ),
        max_size=12,
    ),
    st.integers(1, 10),
)
def test_what_is_remembered_is_what_was_said_last(
    steps: list[tuple[Any, ...]], capacity: int
) -> None:
    memory = Remembered(capacity)
    model: dict[bytes, list[Entry]] = {}  # the longest unused first
    for what, keys, *rest in steps:
        if what == "learn":
            memory.learn(D, [key for key, _ in keys], [entries for _, entries in keys])
            for key, entries in keys:
                model.pop(key, None)
                if entries:
                    model[key] = entries
            for key in list(model)[:-capacity]:
                del model[key]
        elif what == "forget":
            memory.forget(D, keys, rest[0])
            for key in keys:
                model[key] = [e for e in model.get(key, []) if e.incarnation != rest[0]]
                if not model[key]:
                    del model[key]
        else:
            assert memory.recall(D, keys) == [model.get(key, []) for key in keys]
            for key in keys:
                if key in model:
                    model[key] = model.pop(key)
        assert len(memory) == len(model)
    assert memory.recall(b"other" * 2, KEYS) == [[] for _ in KEYS]


# ---- the dead ----------------------------------------------------------------------------------------


def every(dead: DeadIncarnations) -> set[bytes]:
    return set(dead.oldest(len(dead)))


def test_who_left_the_view_is_dead_and_who_is_in_it_never() -> None:
    dead = DeadIncarnations()
    dead.came([P, Q])
    assert every(dead) == set()
    dead.left([P])
    assert every(dead) == {P}
    assert P in dead
    dead.came([P])
    assert every(dead) == set()
    assert dead.lives(P)
    dead.left([Q, P])
    assert dead.oldest(9) == [Q, P]
    assert dead.oldest(1) == [Q]
    dead.swept([P])
    assert every(dead) == {Q}


def test_who_was_never_in_the_view_does_not_leave_it() -> None:
    dead = DeadIncarnations()
    dead.left([P])
    assert every(dead) == set()


def test_a_stranger_is_dead_only_after_time_in_which_it_could_have_been_seen() -> None:
    dead = DeadIncarnations(patience_s=30)
    dead.came([P])
    dead.passed(0.0, connected=True)
    dead.met([P, Q])
    dead.passed(20.0, connected=True)
    dead.passed(21.0, connected=False)
    dead.passed(500.0, connected=False)
    dead.passed(600.0, connected=True)
    dead.met([Q, R])
    dead.passed(609.0, connected=True)
    assert every(dead) == set(), "29 of 30 seconds"
    dead.passed(610.0, connected=True)
    assert every(dead) == {Q}
    dead.came([R])
    dead.passed(900.0, connected=True)
    assert every(dead) == {Q}, "R has come into the view"


def test_the_dead_are_forgotten_in_the_end_by_whoever_does_not_sweep() -> None:
    dead = DeadIncarnations(forget_s=600)
    dead.came([P, Q])
    dead.passed(0.0, connected=True)
    dead.left([P])
    dead.passed(300.0, connected=True)
    dead.left([Q])
    dead.passed(599.0, connected=True)
    dead.passed(9000.0, connected=False)
    dead.passed(9001.0, connected=True)
    assert every(dead) == {P, Q}, "while the membership does not answer, nobody is forgotten"
    dead.passed(9002.0, connected=True)
    assert every(dead) == {Q}
    dead.passed(9302.0, connected=True)
    assert every(dead) == set()


def test_newcomers_take_no_place_from_strangers_that_wait() -> None:
    """With more strangers in each answer than fit, the first ones still become dead."""
    dead = DeadIncarnations(patience_s=30, capacity=2)
    for second in range(40):
        dead.passed(float(second), connected=True)
        dead.met([P, Q] if second == 0 else [R, S])
    assert every(dead) == {P, Q}
    dead.swept([P, Q])
    for second in range(40, 80):
        dead.passed(float(second), connected=True)
    assert every(dead) == {R, S}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("seen"), st.sets(st.sampled_from(NODES))),
            st.tuples(st.just("met"), st.sets(st.sampled_from(NODES))),
            st.tuples(st.just("passed"), st.floats(0, 40), st.booleans()),
            st.tuples(st.just("swept"), st.sets(st.sampled_from(NODES))),
        )
    ),
    st.integers(1, 4),
)
def test_nobody_in_the_view_is_ever_declared_dead(
    steps: list[tuple[Any, ...]], capacity: int
) -> None:
    dead = DeadIncarnations(patience_s=30, forget_s=60, capacity=capacity)
    living: set[bytes] = set()
    now = 0.0
    for what, *how in steps:
        if what == "seen":
            dead.left(living - how[0])
            dead.came(how[0] - living)
            living = how[0]
        elif what == "met":
            dead.met(how[0])
        elif what == "swept":
            dead.swept(how[0])
        else:
            now += how[0]
            dead.passed(now, connected=how[1])
        assert not every(dead) & living
        assert len(dead) <= capacity
