"""Each policy against a plain model, and what all of them promise."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.storage import eviction
from kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, Adaptive2Q, Costs, make_policy

NAMES = sorted(POLICIES)
CAPACITY = 12


# Of no real tier: binary fractions, so that the model can say what is lost in other words.
COSTS = Costs(load_s=0.25, below_s=2.0, recompute_s=1.25, recompute_s_per_depth=0.0625)
LOST_S = [min(1.0 + depth / 16, 1.75) for depth in range(41)]


class Entry:
    def __init__(self, block: int, depth: int = 0) -> None:
        self.block = block
        self.depth = depth
        self.ident = b"%d" % block
        self.freq = 0
        self.queue = 0

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
        self.ghosts: list[int] = []
        self.reads: dict[int, int] = {}
        self.belongs_to_main: set[int] = set()
        self.capacity = capacity

    def insert(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block in self.ghosts:
                self.ghosts.remove(block)
                # It never left if its reads are known, that is if it was popped under a lease.
                if block not in self.reads:
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
                self.ghosts = [*self.ghosts, block][-self.capacity :]
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
        while len(ghosts) > (3 * self.capacity if from_probation else self.capacity):
            del ghosts[min(ghosts, key=lambda b: ghosts[b])]
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
        assert entry is known[entry.block] and entry.queue == 0 and entry not in policy
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
                    policy.discard(known[block])
                    model.discard(block)
                    policy.discard(known[block])  # of what is not held: nothing
                    assert known[block] not in policy
                    if step == "lease":
                        leased.append(block)
                    else:
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
            assert (entry in policy) == (block not in leased) == bool(entry.queue)


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


@pytest.mark.parametrize("name", ["a2q", "lru"])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "touch", "pop"]), st.integers(1, 30)), max_size=30
    ),
    n=st.integers(1, 12),
)
def test_what_is_put_back_goes_as_if_it_had_stayed(
    name: str, steps: list[tuple[str, int]], n: int
) -> None:
    orders = []
    for put_back in (False, True):
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
        if put_back:
            popped = [entry for _ in range(n) if (entry := policy.pop()) is not None]
            policy.put_back(popped[::-1])
            assert all(entry in policy for entry in popped)
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
    assert all(entry in policy for entry in hot)


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
        policy.discard(entry)
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
    assert not policy._probation_ghosts


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


@pytest.mark.parametrize("name", ["a2q", "s3fifo"])
def test_ghosts_are_bounded_and_shrink_with_the_capacity(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ghosts(policy: Any) -> int:
        lists = (getattr(policy, n, ()) for n in ("_ghosts", "_probation_ghosts", "_proven_ghosts"))
        return sum(map(len, lists))

    policy: Any = make_policy(name, 50)
    for start in range(0, 1_000, 10):
        policy.insert(entries(*range(start, start + 10)))
        while len(policy) > 50:
            policy.pop()
    most = {"a2q": 3 * 50, "s3fifo": 50}[name]
    assert ghosts(policy) == most
    policy.resize(10)
    for start in range(2_000, 3_000, 10):
        policy.insert(entries(*range(start, start + 10)))
        while len(policy) > 10:
            policy.pop()
    assert ghosts(policy) == most // 5
    monkeypatch.setattr(eviction, "GHOSTS_MAX", 16)
    capped: Any = make_policy(name, 50)
    for start in range(0, 1_000, 10):
        capped.insert(entries(*range(start, start + 10)))
        while len(capped) > 50:
            capped.pop()
    assert ghosts(capped) <= 16
