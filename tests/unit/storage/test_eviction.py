"""Each policy against a plain model, and what all of them promise."""

from __future__ import annotations

import random
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.storage import eviction
from kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, Adaptive2Q, Costs, make_policy
from kvpool.storage.eviction_queue import EvictionQueue, Ghosts

NAMES = sorted(POLICIES)
CAPACITY = 12


# Of no real tier: binary fractions, so that the model can say what is lost in other words.
COSTS = Costs(load_s=0.25, below_s=2.0, recompute_s=1.25, recompute_s_per_depth=0.0625)
LOST_S = [min(1.0 + depth / 16, 1.75) for depth in range(41)]


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


class ModelS3Fifo:
    def __init__(self, capacity: int) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: dict[int, int] = {}  # the number of its eviction
        self.evictions = 0
        self.reads: dict[int, int] = {}
        self.belongs_to_main: set[int] = set()
        self.capacity = capacity

    def insert(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            known = self.evictions - self.ghosts.pop(block, -99) < self.capacity
            # It never left if its reads are known, that is if it was popped under a lease.
            if known and block not in self.reads:
                self.belongs_to_main.add(block)
            self.reads.setdefault(block, 0)
            (self.main if block in self.belongs_to_main else self.small).append(block)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.reads:
                self.reads[block] = min(3, self.reads[block] + 1)

    def refresh(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            for queue in (self.small, self.main):
                if block in queue:
                    queue.remove(block)
                    queue.append(block)

    def discard(self, block: int) -> None:
        for queue in (self.small, self.main):
            if block in queue:
                queue.remove(block)

    def pop(self) -> int | None:
        while self.small or self.main:
            if len(self.small) * 10 > len(self.small) + len(self.main):
                block = self.small.pop(0)
                if self.reads[block]:
                    self.reads[block] = 0
                    self.belongs_to_main.add(block)
                    self.main.append(block)
                    continue
                self.evictions += 1
                self.ghosts[block] = self.evictions
            else:
                block = self.main.pop(0)
                if self.reads[block]:
                    self.reads[block] -= 1
                    self.main.append(block)
                    continue
            return block
        return None

    def gone(self, block: int) -> None:
        self.reads.pop(block, None)
        self.belongs_to_main.discard(block)


class ModelAdaptive2Q:
    """lost: what the eviction of a block has lost, against that of a first block."""

    def __init__(self, capacity: int, lost: list[float] | None = None) -> None:
        self.lost = lost
        self.probation: list[int] = []
        self.proven: list[int] = []
        self.capacity = capacity
        self.share = 0.5
        self.evicted: dict[str, list[int]] = {"probation": [], "proven": []}
        self.ghosts: dict[str, dict[int, int]] = {"probation": {}, "proven": {}}
        self.is_proven: set[int] = set()
        self.born: dict[int, int] = {}
        self.inserted = 0

    def held(self) -> int:
        return len(self.probation) + len(self.proven)

    def insert(self, blocks: list[int]) -> None:
        self.inserted += len(blocks)
        for block in reversed(blocks):
            number: dict[str, int | None] = {
                name: self.ghosts[name].pop(block, None) for name in self.ghosts
            }
            if block not in self.born:
                self.born[block] = self.inserted
                for name, sign in (("probation", 1), ("proven", -1)):
                    at = number[name]
                    if at is not None:
                        self.is_proven.add(block)
                        since = len(self.evicted[name]) - at
                        if since < 0.2 * self.held():
                            weight = self.lost[block] if self.lost else 1
                            self.share += sign * min(4 * weight / self.held(), 0.05)
                            self.share = min(max(self.share, 0.02), 0.9)
                        break
            (self.proven if block in self.is_proven else self.probation).append(block)

    def touch(self, blocks: list[int]) -> None:
        recent = self.inserted - 0.1 * self.held()
        for block in reversed(blocks):
            held = block in self.probation or block in self.proven
            if block in self.born and self.born[block] < recent:
                self.is_proven.add(block)
            if held:
                self.discard(block)
                (self.proven if block in self.is_proven else self.probation).append(block)

    def refresh(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            for queue in (self.probation, self.proven):
                if block in queue:
                    queue.remove(block)
                    queue.append(block)

    def discard(self, block: int) -> None:
        for queue in (self.probation, self.proven):
            if block in queue:
                queue.remove(block)

    def pop(self) -> int | None:
        if not self.held():
            return None
        from_probation = len(self.probation) > self.share * self.held()
        name = "probation" if from_probation else "proven"
        block = (self.probation if from_probation else self.proven).pop(0)
        self.evicted[name].append(block)
        ghosts = self.ghosts[name]
        ghosts[block] = len(self.evicted[name])
        most = 3 * self.capacity if from_probation else self.capacity
        for old in [b for b, at in ghosts.items() if len(self.evicted[name]) - at >= most]:
            del ghosts[old]
        return block

    def gone(self, block: int) -> None:
        self.born.pop(block, None)
        self.is_proven.discard(block)


MODELS: dict[str, Any] = {"lru": ModelLru, "s3fifo": ModelS3Fifo, "a2q": ModelAdaptive2Q}

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


@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_against_a_plain_model_with_costs(steps: list[tuple[str, list[int]]]) -> None:
    run_beside_model("a2q", CAPACITY, steps, COSTS, LOST_S)


def test_against_a_plain_model_with_costs_for_long() -> None:
    """At 300 places and more a weighted step is below its limit."""
    lost = [min(1.0 + depth / 16, 1.75) for depth in range(1_100)]
    run_beside_model("a2q", 300, long_steps(1_000), COSTS, lost)


def run_beside_model(
    name: str,
    capacity: int,
    steps: list[tuple[str, list[int]]],
    costs: Costs | None = None,
    lost: list[float] | None = None,
) -> None:
    """lost: the same as the costs, for the model. The depth of a block is its number."""
    policy: Any = make_policy(name, capacity, costs)
    model = MODELS[name](capacity, lost) if lost else MODELS[name](capacity)
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
        if name != "s3fifo":
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
            known.update((block, Entry(block, block)) for block in new)
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


@pytest.mark.parametrize("name", ["a2q", "lru"])
@given(steps=STEPS, n=st.integers(1, 40))
def test_coldest_are_in_the_order_of_eviction(
    name: str, steps: list[tuple[str, int]], n: int
) -> None:
    policy = after(name, steps)
    coldest = [entry.block for entry in policy.coldest(n)]
    assert coldest == drain(policy)[:n]


@given(steps=STEPS, n=st.integers(1, 40))
def test_coldest_of_s3fifo_are_the_victims_in_sight(steps: list[tuple[str, int]], n: int) -> None:
    policy = after("s3fifo", steps)
    coldest = policy.coldest(n)
    assert len(coldest) == min(n, len(policy))
    assert len({entry.block for entry in coldest}) == len(coldest)
    found = [entry.block for entry in takewhile(lambda entry: not entry.freq & 3, coldest)]
    assert drain(policy)[: len(found)] == found, "up to the first that is spared"


@pytest.mark.parametrize("name", ["a2q", "lru"])
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
    with pytest.raises(ConfigError, match=r"'clock'.*a2q, lru, s3fifo"):
        make_policy("clock", 10)


@pytest.mark.parametrize("name", NAMES)
def test_a_capacity_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make_policy(name, 0)
    with pytest.raises(ConfigError, match="at least 1"):
        make_policy(name, 5).resize(-1)


# What the default adds


def test_a_scan_does_not_push_out_what_is_proven() -> None:
    policy = Adaptive2Q(100)
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
    policy = Adaptive2Q(100)
    policy.insert(entries(*range(100, 200)))
    pulled = entries(1, 2, 3)
    policy.insert(pulled)
    policy.touch(pulled)
    order = drain(policy)
    assert order[-3:] == [3, 2, 1], "still the youngest, on probation"
    again = entries(*range(100, 200))
    policy.insert(again)
    policy.insert(pulled := entries(7))
    policy.insert(entries(*range(300, 320)))
    policy.touch(pulled)
    assert pulled[0].freq == Adaptive2Q._PROVEN, "once others came in between it does"


def test_what_a_lease_took_out_and_brings_back_is_still_proven() -> None:
    policy = Adaptive2Q(10)
    chain = entries(0, 1)
    policy.insert(chain)
    policy.insert(entries(*range(10, 18)))
    for entry in chain:
        policy.discard([entry])
    policy.touch(chain)
    policy.insert(chain)
    policy.insert(entries(*range(20, 30)))
    assert all(entry.queue == Adaptive2Q._AMONG_PROVEN for entry in chain)


def test_popped_under_a_lease_it_comes_back_as_if_it_had_never_left() -> None:
    policy = Adaptive2Q(10)
    policy.insert(entries(0, 1, 2, 3))
    leased = policy.pop()
    share = policy._share
    policy.insert([leased])
    assert leased.queue == Adaptive2Q._ON_PROBATION
    assert policy._share == share
    assert policy._ghosts.take([leased.ident]) == {}


def test_the_share_follows_the_load() -> None:
    policy = Adaptive2Q(100)
    start = policy._share
    policy.insert(entries(*range(100)))
    for _ in range(10):  # what was evicted a moment ago is asked for again: too short a probation
        policy.insert(entries(policy.pop().block))
    assert policy._share > start
    grown = policy._share
    proven = -1
    while len(policy._proven) == 10:
        proven = policy.pop().block
    policy.insert(entries(proven))
    assert policy._share < grown


def share_after_a_comeback(costs: Costs | None, depth: int) -> float:
    """Of 400, the youngest of all is evicted from probation and put again."""
    policy = Adaptive2Q(400, costs)
    policy.insert([Entry(number, depth) for number in range(400)])
    policy.insert([Entry(policy.pop().block, depth)])
    return policy._share - Adaptive2Q._START


def test_a_comeback_weighs_by_the_seconds_that_were_lost() -> None:
    plain = share_after_a_comeback(None, 0)
    alone = Costs(load_s=1.0, below_s=None, recompute_s=2.0, recompute_s_per_depth=0.5)
    assert share_after_a_comeback(None, 8) == pytest.approx(plain)
    assert share_after_a_comeback(alone, 0) == pytest.approx(plain), "a first block is the unit"
    assert share_after_a_comeback(alone, 2) == pytest.approx(2 * plain)


def test_what_the_tier_below_has_is_not_recomputed() -> None:
    plain = share_after_a_comeback(None, 0)
    backed = Costs(load_s=1.0, below_s=2.5, recompute_s=2.0, recompute_s_per_depth=0.5)
    assert share_after_a_comeback(backed, 1) == pytest.approx(1.5 * plain)
    assert share_after_a_comeback(backed, 7) == pytest.approx(1.5 * plain)


def test_a_comeback_that_lost_nothing_teaches_nothing() -> None:
    slow = Costs(load_s=3.0, below_s=None, recompute_s=2.0, recompute_s_per_depth=0.5)
    assert share_after_a_comeback(slow, 0) == 0
    assert share_after_a_comeback(slow, 2) == 0, "as fast one way as the other"
    assert share_after_a_comeback(slow, 3) == pytest.approx(share_after_a_comeback(None, 0))


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
    policy.insert(back)
    known = {"Adaptive2Q": Adaptive2Q._AMONG_PROVEN, "S3Fifo": eviction.S3Fifo._MAIN}
    return sum(entry.queue == known[type(policy).__name__] for entry in back)


def stream(policy: Any, blocks: range, held: int) -> None:
    for start in range(blocks.start, blocks.stop, 10):
        policy.insert(entries(*range(start, start + 10)))
        while len(policy) > held:
            policy.pop()


@pytest.mark.parametrize(("name", "reach"), [("a2q", 3), ("s3fifo", 1)])
def test_evictions_are_remembered_for_as_long_as_the_capacity_says(name: str, reach: int) -> None:
    policy: Any = make_policy(name, 50)
    stream(policy, range(1_000), 50)
    policy.resize(10)
    stream(policy, range(2_000, 3_000), 10)
    assert remembered(policy, range(2_990 - 10 * reach, 2_990)) == 10 * reach
    assert remembered(policy, range(2_000, 2_990 - 10 * reach)) == 0


def test_few_evictions_are_forgotten_early_and_hardly_any_taken_for_another() -> None:
    """As many as its size, of idents at random: the rule says about one in a hundred."""
    chance = random.Random(11)
    idents = [chance.getrandbits(64) for _ in range(40_000)]
    ghosts = Ghosts(20_000)
    for number in range(1, 20_000, 4):
        ghosts.remember(idents[number - 1 : number + 3], number >> 2 & 1, number)
    assert not ghosts.take(idents[20_000:])
    found = ghosts.take(idents[:20_000])
    assert all(ghost == (at >> 2 & 1, at + 1) for at, ghost in found.items())
    assert len(found) > 19_600
    assert not ghosts.take(idents), "each is given once"


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
