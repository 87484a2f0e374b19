"""Each policy against a plain model, and what all of them promise."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, Aged, Costs, make_policy
from kvpool.storage.eviction_miniature import RUNGS, Miniature, Trial
from kvpool.storage.eviction_queue import EvictionQueue, Ghosts

NAMES = sorted(POLICIES)
CAPACITY = 12


class Entry:
    def __init__(self, block: int, depth: int = 0) -> None:
        self.block = block
        self.depth = depth
        self.ident = (block + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
        self.freq = 0
        self.queue = 0
        self.older: Any = None
        self.newer: Any = None

    def __repr__(self) -> str:
        return f"<{self.block}>"


def entries(*blocks: int) -> list[Entry]:
    return [Entry(block) for block in blocks]


def drain(policy: Any) -> list[int]:
    out = []
    while (entry := policy.pop()) is not None:
        out.append(entry.block)
    return out


# Reference models: lists, no cleverness, written from the descriptions.


class ModelLru:
    def __init__(self, capacity: int) -> None:
        self.old_to_new: list[int] = []

    def insert(self, blocks: list[int]) -> None:
        self.old_to_new += reversed(blocks)

    def touch(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block in self.old_to_new:
                self.old_to_new.remove(block)
                self.old_to_new.append(block)

    refresh = touch

    def discard(self, block: int) -> None:
        if block in self.old_to_new:
            self.old_to_new.remove(block)

    def pop(self) -> int | None:
        return self.old_to_new.pop(0) if self.old_to_new else None


def is_remembered(number: int | None, evictions: int, most: int) -> bool:
    """Whether the eviction of this number is, after so many: the last `most`, rounded up to whole halves of them."""
    half = -(-most // 2)
    return number is not None and (number - 1) // half >= (evictions - 1) // half - 2


class ModelAged:
    def __init__(self, capacity: int, rung: int = 0) -> None:
        self.capacity = capacity
        self.divisors = RUNGS[rung]
        self.old_to_new: list[int] = []
        self.level: dict[int, int] = {}  # of all that have not left
        self.used: dict[int, int] = {}
        self.clock = 0
        self.evictions = 0
        self.ghosts: dict[int, int] = {}

    def insert(self, blocks: list[int]) -> None:
        self.clock += len(blocks)
        lowest = 0
        for block in reversed(blocks):
            number = self.ghosts.pop(block, None)
            back = is_remembered(number, self.evictions, 3 * self.capacity)
            lowest = max(lowest, self.level.get(block, int(back)))
            self.level[block] = lowest
            self.used[block] = self.clock
            self.old_to_new.append(block)

    def touch(self, blocks: list[int]) -> None:
        recent = self.clock - 0.1 * len(self.old_to_new)
        self.clock += len(blocks)
        lowest = 0
        for block in reversed(blocks):
            if block not in self.level:
                continue
            read_anew = self.used[block] < recent
            lowest = max(lowest, min(2, self.level[block] + read_anew))
            self.level[block] = lowest
            self.used[block] = self.clock
            self.renew(block)

    def refresh(self, blocks: list[int]) -> None:
        self.clock += 1
        for block in reversed(blocks):
            if block in self.old_to_new:
                self.used[block] = self.clock
                self.renew(block)

    def renew(self, block: int) -> None:
        if block in self.old_to_new:
            self.old_to_new.remove(block)
            self.old_to_new.append(block)

    def discard(self, block: int) -> None:
        if block in self.old_to_new:
            self.old_to_new.remove(block)

    def pop(self) -> int | None:
        if not self.old_to_new:
            return None

        def slowed(block: int) -> tuple[float, int]:
            level = self.level[block]
            return (self.clock - self.used[block]) / self.divisors[level], -level

        block = max(self.old_to_new, key=slowed)  # the first, so the oldest, of equals
        self.old_to_new.remove(block)
        self.evictions += 1
        self.ghosts[block] = self.evictions
        return block

    def gone(self, block: int) -> None:
        self.level.pop(block)
        self.used.pop(block)


class Still:
    """Stands in for a trial: it stays on one rung, and notes what it was given."""

    def __init__(self, rung: int) -> None:
        self.rung = rung
        self.given: list[tuple[list[int], list[float], int]] = []

    def replay(self, batch: tuple[list[int], list[float]], places: int) -> None:
        self.given.append((*batch, places))


def aged_on(
    rung: int, capacity: int, costs: Costs | None = None, trial: Still | None = None
) -> Any:
    policy: Any = Aged(capacity, costs)
    policy._trial = trial or Still(rung)
    policy._divisors = RUNGS[rung]
    return policy


MODELS: dict[str, Any] = {"lru": ModelLru, "aged": ModelAged}

blocks = st.integers(0, 40)
chains = st.lists(blocks, min_size=1, max_size=6, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), chains),
        st.tuples(st.just("touch"), chains),
        st.tuples(st.just("refresh"), chains),
        st.tuples(st.just("lease"), chains),
        st.tuples(st.just("remove"), chains),
        st.tuples(st.just("remove all"), chains),
        st.tuples(st.just("release"), st.just([])),
        st.tuples(st.just("pop"), st.just([])),
        st.tuples(st.just("pop leased"), st.just([])),
    ),
    max_size=120,
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_against_a_plain_model(name: str, steps: list[tuple[str, list[int]]]) -> None:
    run_beside_model(name, CAPACITY, steps)


def long_steps(blocks: int) -> list[tuple[str, list[int]]]:
    chance = random.Random(7)
    steps: list[tuple[str, list[int]]] = []
    for _ in range(1_500):
        start = int(blocks * chance.random() ** 2)
        steps.append(
            (chance.choice(["put", "put", "touch"]), [*range(start, start + chance.randint(1, 6))])
        )
    return steps


@pytest.mark.parametrize("name", NAMES)
def test_against_a_plain_model_for_long(name: str) -> None:
    """Queues and ghosts long enough that every share and window makes a difference."""
    run_beside_model(name, 60, long_steps(200))


@pytest.mark.parametrize("rung", range(len(RUNGS)))
@settings(max_examples=100, deadline=None)
@given(steps=steps)
def test_aged_on_each_rung_against_a_plain_model(
    rung: int, steps: list[tuple[str, list[int]]]
) -> None:
    run_beside_model("aged", CAPACITY, steps, rung)


@pytest.mark.parametrize("rung", range(len(RUNGS)))
def test_aged_on_each_rung_against_a_plain_model_for_long(rung: int) -> None:
    run_beside_model("aged", 60, long_steps(200), rung)


def run_beside_model(
    name: str, capacity: int, steps: list[tuple[str, list[int]]], rung: int = 0
) -> None:
    policy: Any = aged_on(rung, capacity) if name == "aged" else make_policy(name, capacity)
    model = MODELS[name](capacity, rung) if rung else MODELS[name](capacity)
    known: dict[int, Entry] = {}  # in the tier: held by the policy or leased
    leased: list[int] = []

    def popped_alike() -> int | None:
        peeked = policy.peek()
        entry = policy.pop()
        expected = model.pop()
        assert (entry and entry.block) == expected
        if entry is None:
            return None
        assert entry is known[entry.block] and entry.queue == 0
        assert peeked is entry
        return int(entry.block)

    def gone(block: int) -> None:
        del known[block]
        if hasattr(model, "gone"):
            model.gone(block)

    for step, named in steps:
        there = [block for block in named if block in known]
        if step == "put":
            new = [block for block in named if block not in known]
            while len(known) - len(leased) + len(new) > capacity:
                victim = popped_alike()
                assert victim is not None
                gone(victim)
            known.update((block, Entry(block)) for block in new)
            policy.insert([known[block] for block in new])
            model.insert(new)
        elif step in ("touch", "refresh"):
            getattr(policy, step)([known[block] for block in there])
            getattr(model, step)(there)
        elif step in ("lease", "remove"):
            for block in there:
                if block not in leased:
                    policy.discard([known[block]])
                    model.discard(block)
                    policy.discard([known[block]])  # of what is not held: nothing
                    assert not known[block].queue
                    if step == "lease":
                        leased.append(block)
                    else:
                        gone(block)
        elif step == "remove all":
            policy.discard([known[block] for block in there])  # of what is leased: nothing
            for block in there:
                if block not in leased:
                    model.discard(block)
                    gone(block)
        elif step == "release":
            policy.insert([known[block] for block in leased])
            model.insert(leased)
            leased = []
        elif (victim := popped_alike()) is not None:
            if step == "pop leased":
                leased.append(victim)
            else:
                gone(victim)
        assert len(policy) == len(known) - len(leased)
        for block, entry in known.items():
            assert bool(entry.queue) == (block not in leased)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(steps=steps, n=st.integers(1, 8))
def test_victims_taken_at_once_are_those_of_as_many_pops(
    name: str, steps: list[tuple[str, list[int]]], n: int
) -> None:
    known: list[dict[int, Entry]] = [{}, {}]
    policies: list[Any] = [make_policy(name, CAPACITY) for _ in known]
    for step, named in steps:
        victims: list[list[int]] = []
        for policy, held in zip(policies, known, strict=True):
            if step == "put":
                new = {block: Entry(block) for block in named if block not in held}
                held.update(new)
                policy.insert([*new.values()])
            elif step == "touch":
                policy.touch([held[block] for block in named if block in held])
            elif policy is policies[0]:
                victims.append([entry.block for entry in policy.take(n)])
            else:
                popped = [policy.pop() for _ in range(min(n, len(policy)))]
                victims.append([entry.block for entry in popped])
        if victims:
            assert sorted(victims[0]) == sorted(victims[1])
            for held in known:
                for block in victims[0]:
                    assert held.pop(block).queue == 0


@pytest.mark.parametrize("name", NAMES)
def test_tails_of_a_chain_go_first(name: str) -> None:
    policy: Any = make_policy(name, 100)
    policy.insert(entries(*range(50)))
    assert drain(policy) == list(range(49, -1, -1))


@pytest.mark.parametrize("name", NAMES)
def test_tails_go_first_after_reads_of_prefixes(name: str) -> None:
    policy: Any = make_policy(name, 100)
    chain = entries(*range(50))
    policy.insert(chain)
    policy.insert(entries(*range(100, 130)))
    policy.touch(chain[:20])
    policy.touch(chain[:10])
    order = [block for block in drain(policy) if block < 50]
    assert order == list(range(49, -1, -1))


@pytest.mark.parametrize("name", NAMES)
def test_refreshing_ancestors_keeps_chunks_in_order(name: str) -> None:
    policy: Any = make_policy(name, 100)
    chain = entries(*range(40))
    for start in range(0, 40, 8):
        policy.insert(chain[start : start + 8])
        policy.refresh(chain[:start])
    assert drain(policy) == list(range(39, -1, -1))


def test_without_a_refresh_the_first_chunk_goes_first() -> None:
    policy: Any = make_policy(DEFAULT_POLICY, 100)
    policy.insert(entries(0, 1))
    policy.insert(entries(2, 3))
    assert drain(policy) == [1, 0, 3, 2]


@pytest.mark.parametrize("name", NAMES)
def test_inserting_what_is_held_is_an_invariant_error(name: str) -> None:
    policy: Any = make_policy(name, 4)
    (entry,) = entries(1)
    policy.insert([entry])
    for again in (policy.insert, policy.put_back):
        with pytest.raises(AssertionError, match="already holds"):
            again([entry])


@pytest.mark.parametrize("name", NAMES)
def test_coldest_are_the_next_victims_and_stay(name: str) -> None:
    policy: Any = make_policy(name, 100)
    policy.insert(entries(*range(20)))
    assert [entry.block for entry in policy.coldest(3)] == [19, 18, 17]
    assert len(policy) == 20
    assert drain(policy)[:3] == [19, 18, 17]
    assert policy.coldest(3) == []
    assert policy.peek() is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "pop"]), st.integers(1, 30)), max_size=30
)


def after(name: str, steps: list[tuple[str, int]]) -> Any:
    """A policy of this name after these steps."""
    policy: Any = make_policy(name, CAPACITY)
    known: dict[int, Entry] = {}
    for what, number in steps:
        if what == "insert":
            new = [e for e in entries(number, number + 40) if e.block not in known]
            known.update({entry.block: entry for entry in new})
            policy.insert(new)
        elif what == "touch":
            policy.touch([known[number]] if number in known else [])
        elif (gone := policy.pop()) is not None:
            del known[gone.block]
    return policy


@pytest.mark.parametrize("name", ["aged", "lru"])
@given(steps=STEPS, n=st.integers(1, 40))
def test_coldest_are_in_the_order_of_eviction(
    name: str, steps: list[tuple[str, int]], n: int
) -> None:
    policy = after(name, steps)
    coldest = [entry.block for entry in policy.coldest(n)]
    assert coldest == drain(policy)[:n]


@pytest.mark.parametrize("name", ["aged", "lru"])
@given(steps=STEPS, n=st.integers(1, 12))
def test_what_is_put_back_goes_as_if_it_had_stayed(
    name: str, steps: list[tuple[str, int]], n: int
) -> None:
    orders = []
    for put_back in (False, True):
        policy = after(name, steps)
        if put_back:
            popped = [entry for _ in range(n) if (entry := policy.pop()) is not None]
            policy.put_back(popped[::-1])
            assert all(entry.queue for entry in popped)
        orders.append(drain(policy))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_put_back_is_next(name: str) -> None:
    policy: Any = make_policy(name, 100)
    policy.insert(entries(*range(20)))
    held = [policy.pop(), policy.pop()]
    assert policy.pop().block == 17
    policy.insert(entries(30))
    policy.put_back(held[::-1])
    assert drain(policy)[:3] == [19, 18, 16]


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'clock'.*aged, lru"):
        make_policy("clock", 10)


@pytest.mark.parametrize("name", NAMES)
def test_a_capacity_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make_policy(name, 0)
    with pytest.raises(ConfigError, match="at least 1"):
        make_policy(name, 5).resize(-1)


# What the default adds


@pytest.mark.parametrize("rung", range(len(RUNGS)))
def test_entries_that_come_from_another_policy_are_as_old_as_they_were_there(rung: int) -> None:
    def filled() -> tuple[Any, list[Entry]]:
        policy = aged_on(rung, CAPACITY)
        some = entries(*range(10))
        for entry in some:
            policy.insert([entry])
        policy.touch([some[0], some[1]])
        return policy, some

    whole, _ = filled()
    other, moved = filled()
    policy = aged_on(rung, CAPACITY)
    policy.succeed(other)
    other.discard(moved)
    policy.put_back([*moved[:2], *moved[:1:-1]])  # the youngest first
    for each in (whole, policy):
        for number in range(10):
            each.insert(entries(100 + number))
    assert drain(policy) == drain(whole)


@pytest.mark.parametrize("rung", [2, 3])
def test_a_scan_does_not_push_out_what_was_read(rung: int) -> None:
    policy = aged_on(rung, 100)
    hot = entries(*range(20))
    policy.insert(hot)
    policy.insert(entries(*range(100, 150)))
    policy.touch(hot)
    for start in range(1_000, 2_000, 10):
        while len(policy) > 90:
            policy.pop()
        policy.insert(entries(*range(start, start + 10)))
    assert all(entry.queue for entry in hot)


def test_a_read_right_after_the_insert_proves_nothing() -> None:
    policy = aged_on(2, 100)
    policy.insert(entries(*range(100, 200)))
    pulled = entries(1, 2, 3)
    policy.insert(pulled)
    policy.touch(pulled)
    order = drain(policy)
    assert order[-3:] == [3, 2, 1], "still the youngest, on level 0"
    policy.insert(entries(*range(200, 300)))
    policy.insert(pulled := entries(7))
    policy.insert(entries(*range(300, 320)))
    policy.touch(pulled)
    policy.insert(entries(400))
    assert drain(policy)[-2:] == [7, 400], "once others came in between it does"


def test_a_lease_does_not_lose_the_level() -> None:
    policy = aged_on(2, 10)
    chain = entries(0, 1)
    policy.insert(chain)
    policy.insert(entries(*range(10, 18)))
    for entry in chain:
        policy.discard([entry])
    policy.touch(chain)
    policy.insert(chain)
    policy.insert(entries(*range(20, 30)))
    policy.insert(entries(30))
    assert drain(policy)[-3:] == [1, 0, 30]


def test_popped_under_a_lease_it_comes_back_as_if_it_had_never_left() -> None:
    policy = aged_on(2, 10)
    policy.insert(entries(0, 1, 2, 3))
    leased = policy.pop()
    policy.insert([leased])
    policy.insert(entries(9))
    assert drain(policy) == [2, 1, 0, 3, 9], "on level 0: its eviction was none"


def test_a_head_has_at_least_its_tail_s_level() -> None:
    policy = aged_on(2, 10)
    policy.insert(entries(1, 2))
    while policy.pop():
        pass
    chain = entries(0, 1)  # 1 comes back, its new head was never here
    policy.insert(chain)
    policy.insert(entries(3))
    assert drain(policy) == [1, 0, 3]


def test_many_victims_are_taken_from_several_queues_in_order() -> None:
    policies = [aged_on(1, 300) for _ in range(2)]
    for policy in policies:
        held = entries(*range(300))
        for start in range(0, 300, 3):
            policy.insert(held[start : start + 3])
        for start in range(0, 300, 7):
            policy.touch(held[start : start + 2])
    taken = [entry.block for entry in policies[0].take(280)]
    assert taken == [policies[1].pop().block for _ in range(280)]


def test_a_part_of_all_reads_and_puts_is_tried_with_what_they_cost() -> None:
    costs = Costs(load_s=1.0, below_s=3.0, recompute_s=2.0, recompute_s_per_depth=0.5)
    trial = Still(0)
    policy = aged_on(0, 1_000, costs, trial)
    chain = [Entry(block, depth) for depth, block in enumerate(range(400))]
    policy.insert(chain)
    policy.touch(chain[:200])
    policy.insert(entries(*range(1_000, 1_100)))
    policy.touch(chain[:200])
    (put, put_s, places), pulled, _, (read, read_s, _) = trial.given
    assert 70 < len(put) < 130 and 30 < len(read) < 70
    depths = {entry.ident: entry.depth for entry in chain}
    assert put_s == [min(1.0 + 0.5 * depths[ident], 2.0) for ident in put]
    assert read == [ident for ident in put if depths[ident] < 200]
    assert pulled == (read, [0.0] * len(read), places), "right after the put it saves nothing"
    assert read_s == put_s[-len(read) :]
    assert places == 250


# The trial


@pytest.mark.parametrize("rung", range(len(RUNGS)))
@settings(deadline=None)
@given(batches=st.lists(chains, max_size=60))
def test_a_miniature_is_a_small_tier(rung: int, batches: list[list[int]]) -> None:
    places = 10
    miniature, model = Miniature(RUNGS[rung]), ModelAged(places, rung)
    evicted: list[int] = []
    for batch in batches:
        here = [block for block in batch if block in model.level]
        missed = [block for block in batch if block not in model.level]
        cost_s = {block: float(block) for block in batch}
        for part, hit_s in ((here, sum(here)), (missed, 0)):
            tail_first = part[::-1]
            lost_s = [cost_s[block] for block in tail_first]
            assert miniature.replay((tail_first, lost_s), places) == hit_s
        model.touch(here)
        for _ in range(len(model.old_to_new) + len(missed) - places):
            victim = model.pop()
            assert victim is not None
            model.gone(victim)
            evicted.append(victim)
        # It forgets evictions one by one.
        model.ghosts = {
            block: model.evictions for block in evicted[-3 * places :] if block in model.ghosts
        }
        model.insert(missed)


@given(batches=st.lists(chains, max_size=60), places=st.integers(1, 8))
def test_a_miniature_of_few_places_holds_what_was_asked_for_last(
    batches: list[list[int]], places: int
) -> None:
    """Also of a chain of which some blocks are there, and that may be longer than all it holds."""
    miniature = Miniature(RUNGS[0])
    for batch in batches:
        miniature.replay((batch[::-1], [1.0] * len(batch)), places)
        assert sum(map(len, miniature._levels)) <= places
        if len(batch) <= places:
            assert miniature.replay((batch[:1], [1.0]), places) == 1


class OneByOne(Trial):
    """Replays each batch by itself."""

    TOGETHER = 1


def rung_after(
    batches: Any, lost_s: float = 1.0, places: int = 40, kind: type[Trial] = Trial
) -> int:
    trial = kind()
    for batch in batches:
        trial.replay((batch, [lost_s] * len(batch)), places)
    return trial.rung


def scans(count: int) -> Any:
    """Thirty blocks are read in turn, between scans of what is never read again."""
    for number in range(count):
        yield [number % 15 * 2, number % 15 * 2 + 1]
        yield list(range(1_000 + 8 * number, 1_008 + 8 * number))


def test_where_scans_pass_it_moves_away_from_lru() -> None:
    assert rung_after(scans(600)) > 0


def test_it_moves_one_rung_at_a_time() -> None:
    trial = OneByOne()
    rungs = []
    for batch in scans(600):
        trial.replay((batch, [1.0] * len(batch)), 40)
        rungs.append(trial.rung)
    assert max(rungs) > 1
    assert all(abs(after - before) <= 1 for before, after in pairwise(rungs))


def test_where_sessions_go_on_it_stays_lru() -> None:
    """A few sessions at a time, each of a growing prompt that is read whole at every turn; then they end."""

    def sessions() -> Any:
        chance = random.Random(3)
        active = [[number * 1_000] for number in range(4)]
        for number in range(4, 2_000):
            turn = chance.choice(active)
            turn.append(turn[-1] + 1)
            yield turn[::-1]
            if len(turn) == 9:
                active.remove(turn)
                active.append([number * 1_000])

    assert rung_after(sessions()) == 0


def test_a_single_difference_is_not_enough() -> None:
    """A block that came back once is a hit on rung 2 after a long scan, and not under LRU."""
    twice = [[1], *([number] for number in range(1_000, 1_010)), [1]]
    scans = [[[number] for number in range(start, start + 41)] for start in (2_000, 3_000, 4_000)]
    assert rung_after([*twice, *scans[0], [1]], kind=OneByOne) == 0
    often = [*twice, *scans[0], [1], *scans[1], [1], *scans[2], [1]]
    assert rung_after(often, kind=OneByOne) == 1


def test_what_costs_nothing_teaches_nothing() -> None:
    assert rung_after(scans(600), lost_s=0.0) == 0


def test_a_trial_follows_the_load() -> None:
    """After scans, new blocks are read soon and old ones never again."""

    def sliding() -> Any:
        for number in range(6_000):
            yield [5_000_000 + number]
            yield [5_000_000 + max(0, number - 18)]

    trial = Trial()
    for batch in scans(600):
        trial.replay((batch, [1.0] * len(batch)), 40)
    assert trial.rung > 1
    for batch in sliding():
        trial.replay((batch, [1.0] * len(batch)), 40)
    assert trial.rung < 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"load_s": -0.1},
        {"below_s": -0.1},
        {"recompute_s": 0.0},
        {"recompute_s": -1.0},
        {"recompute_s_per_depth": -0.1},
    ],
)
def test_costs_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    right = {"load_s": 0.0, "below_s": 0.0, "recompute_s": 0.1, "recompute_s_per_depth": 0.0}
    Costs(**right)
    with pytest.raises(ConfigError, match=r"costs|recomputing"):
        Costs(**(right | wrong))


def remembered(policy: Any, blocks: range) -> int:
    """How many of these evicted blocks the policy knows when they come back."""
    back = entries(*blocks)
    for entry in back:
        policy.insert([entry])
    return sum(entry.freq & 3 != 0 for entry in back)


def stream(policy: Any, blocks: range, held: int) -> None:
    for start in range(blocks.start, blocks.stop, 10):
        policy.insert(entries(*range(start, start + 10)))
        while len(policy) > held:
            policy.pop()


def test_evictions_are_remembered_for_as_long_as_the_capacity_says() -> None:
    """Up to half as long again, since halves are forgotten at once."""
    policy: Any = make_policy("aged", 50)
    stream(policy, range(1_000), 50)
    policy.resize(10)
    stream(policy, range(2_000, 3_000), 10)
    assert remembered(policy, range(2_990 - 30, 2_990)) == 30
    assert remembered(policy, range(2_000, 2_980 - 45)) == 0


def test_generations_of_many_evictions_are_of_a_bounded_size() -> None:
    ghosts = Ghosts(1 << 20)
    for start in range(0, 3 << 19, 1 << 12):
        ghosts.remember(range(start, start + (1 << 12)))
    assert max(map(len, ghosts._generations)) == 1 << 17
    assert ghosts.take([(1 << 19) - (1 << 17) - 1]) == set()
    assert ghosts.take([1 << 19, (3 << 19) - 1]) == {1 << 19, (3 << 19) - 1}
    assert ghosts.take([1 << 19]) == set(), "each is given once"


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(
                ["append", "first", "remove", "remove all", "renew", "pop", "take", "move over"]
            ),
            st.lists(st.integers(0, 9), max_size=6, unique=True),
        ),
        max_size=60,
    )
)
def test_queues_against_lists(steps: list[tuple[str, list[int]]]) -> None:
    known = entries(*range(10))
    queues = EvictionQueue(), EvictionQueue()
    models: tuple[list[int], list[int]] = [], []
    for number, (step, named) in enumerate(steps):
        at = number % 2
        queue, model, other = queues[at], models[at], models[1 - at]
        free = [block for block in named if block not in model and block not in other]
        held = [block for block in named if block in model]
        if step == "append":
            queue.append([known[block] for block in free])
            model += free
        elif step == "first":
            for block in free:
                queue.put_first(known[block])
                model.insert(0, block)
        elif step == "remove":
            for block in held:
                queue.remove([known[block]])
                model.remove(block)
        elif step == "remove all":
            queue.remove([known[block] for block in held])
            model[:] = [block for block in model if block not in held]
        elif step == "renew":
            queue.renew([known[block] for block in held])
            model[:] = [block for block in model if block not in held] + held
        elif step == "move over":
            queues[1 - at].renew([known[block] for block in held])
            queue.give(queues[1 - at], len(held))
            model[:] = [block for block in model if block not in held]
            other += held
        elif step == "take":
            taken = queue.take(len(named))
            assert [entry.block for entry in taken] == model[: len(named)]
            del model[: len(named)]
        else:
            popped = queue.pop()
            assert (None if popped is None else popped.block) == (model.pop(0) if model else None)
        for each, expected in zip(queues, models, strict=True):
            assert [entry.block for entry in each.oldest(20)] == expected
            assert len(each) == len(expected)
            assert each.peek() is (known[expected[0]] if expected else None)
