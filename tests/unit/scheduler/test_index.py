"""The prefix index, against a model that keeps a set of keys for each holder."""

import math
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.scheduler.index import PrefixIndex, Reach

HOLDERS = {"gpu:a": False, "gpu:b": False, "dram:a": True, "dram:b": True}
CHAIN = [f"block-{number}" for number in range(8)]
KEYS = st.lists(st.sampled_from(CHAIN), max_size=5, unique=True)
holder = st.sampled_from(sorted(HOLDERS))


def run_length(keys: list[str], held: set[str]) -> int:
    return next((number for number, key in enumerate(keys) if key not in held), len(keys))


class IndexMachine(RuleBasedStateMachine):
    namespaces: ClassVar = {"a": "", "b": ""}

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[str]] = {}
        # By namespace and key.
        self.expected: dict[tuple[str, str], tuple[str, float, float]] = {}
        self.arrived: set[tuple[str, str]] = set()  # of what is expected
        self.unsaved: set[tuple[str, str]] = set()  # the same
        self.now = 0.0
        for name in HOLDERS:
            self.join(name)

    def join(self, name: str) -> None:
        self.index.join(name, pool=HOLDERS[name], namespace=self.namespace(name))
        self.held[name] = set()

    def namespace(self, name: str) -> str:
        return self.namespaces[name[-1]]

    @rule(name=holder, keys=KEYS)
    def add(self, name: str, keys: list[str]) -> None:
        self.index.add(name, keys)
        self.held[name] |= set(keys)

    @rule(name=holder, keys=KEYS)
    def discard(self, name: str, keys: list[str]) -> None:
        self.index.discard(name, keys)
        self.held[name] -= set(keys)

    @rule(name=st.sampled_from(["a", "b"]))
    def begin_anew(self, name: str) -> None:
        for tier in ("gpu", "dram"):
            self.begin_tier_anew(f"{tier}:{name}")

    def begin_tier_anew(self, name: str) -> None:
        self.join(name)
        self.expected = {k: found for k, found in self.expected.items() if found[0] != name}

    @rule(name=st.sampled_from(["gpu:a", "gpu:b"]), keys=KEYS, lasts=st.integers(1, 5))
    def expect(self, name: str, keys: list[str], lasts: int) -> None:
        ready = [self.now + 0.1 * number for number in range(len(keys))]
        self.index.expect(name, keys, ready, self.now + lasts)
        for key, ready_at in zip(keys, ready, strict=True):
            self.expected[self.namespace(name), key] = (name, ready_at, self.now + lasts)
            self.arrived.discard((self.namespace(name), key))
            self.unsaved.discard((self.namespace(name), key))

    @rule(name=st.sampled_from(["gpu:a", "gpu:b"]), keys=KEYS)
    def unexpect(self, name: str, keys: list[str]) -> None:
        self.index.unexpect(name, keys)
        for key in keys:
            at = self.namespace(name), key
            if at in self.expected and self.expected[at][0] == name:
                del self.expected[at]

    @rule(name=st.sampled_from(["a", "b"]), keys=KEYS)
    def arrive(self, name: str, keys: list[str]) -> None:
        self.index.arrived(f"gpu:{name}", f"dram:{name}", keys)
        for key in keys:
            at = self.namespace(name), key
            if at in self.expected and self.expected[at][0] == f"gpu:{name}":
                self.arrived.add(at)

    @rule(name=st.sampled_from(["gpu:a", "gpu:b"]), keys=KEYS)
    def not_saved(self, name: str, keys: list[str]) -> None:
        self.index.not_saved(name, keys)
        for key in keys:
            at = self.namespace(name), key
            if at in self.expected and self.expected[at][0] == name:
                self.arrived.discard(at)
                self.unsaved.add(at)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.expected = {k: found for k, found in self.expected.items() if found[2] > self.now}

    @invariant()
    def match_is_right(self) -> None:
        self.arrived &= set(self.expected)
        self.unsaved &= set(self.expected)
        for keys in (CHAIN, CHAIN[:3], CHAIN[2:5], ["unknown"], []):
            found = self.index.match(keys, self.now)
            lengths = {}
            for name, held in self.held.items():
                # On the engine itself when it is expected there, in its node's memory when it answered.
                gpu = name.replace("dram", "gpu")
                coming = {at for at, (who, _, _) in self.expected.items() if who == gpu}
                if name != gpu:
                    coming &= self.arrived
                if length := run_length(keys, held | {key for _, key in coming}):
                    lengths[name] = length
            assert found.lengths == lengths
            for namespace in set(self.namespaces.values()):
                self.reach_is_right(keys, namespace, found.of(namespace))

    def reach_is_right(self, keys: list[str], namespace: str, found: Reach) -> None:
        """Of all that others hold and compute, what is of this namespace."""
        pool = {key for at, key in self.arrived if at == namespace}
        for name, held in self.held.items():
            if HOLDERS[name] and self.namespace(name) == namespace:
                pool |= held
        reach = run_length(keys, pool)
        expected = {key: self.expected[at, key] for at, key in self.expected if at == namespace}
        comes = {key for key in expected if (namespace, key) not in self.unsaved}
        coming = run_length(keys, pool | comes)
        waits_for = [expected[key][1] for key in keys[reach:coming] if key not in pool]
        assert found == (reach, coming, max(waits_for, default=float("-inf")))

    @invariant()
    def nothing_is_kept_that_nobody_holds(self) -> None:
        self.index.add(
            "dram:a", []
        )  # what a holder that is gone had is forgotten with the next change
        assert len(self.index) == len(set().union(*self.held.values()))


IndexMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestIndex = IndexMachine.TestCase


class IndexOfTwoNamespaces(IndexMachine):
    namespaces: ClassVar = {"a": "x", "b": "y"}


IndexOfTwoNamespaces.TestCase.settings = IndexMachine.TestCase.settings
TestTwoNamespaces = IndexOfTwoNamespaces.TestCase


def test_the_most_that_an_engine_need_not_compute() -> None:
    index = PrefixIndex()
    for name, pool in HOLDERS.items():
        index.join(name, pool=pool)
    assert index.match(CHAIN, 0.0).most == 0
    index.add("dram:a", CHAIN[:3])
    index.add("dram:b", CHAIN[3:5])
    assert index.match(CHAIN, 0.0).most == 5, "block by block from whoever has it"
    index.add("gpu:b", CHAIN[:6])
    assert index.match(CHAIN, 0.0).most == 6, "on that engine"


def test_bits_of_those_that_are_gone_are_used_again() -> None:
    index = PrefixIndex()
    for life in range(200):
        index.join("gpu:a", pool=False)
        index.add("gpu:a", [f"{life}-{number}" for number in range(3)])
        index.add("gpu:a", [])
    assert len(index) == 3
    assert index.match(["199-0", "199-1"], 0.0).lengths == {"gpu:a": 2}
    assert index.match(["198-0"], 0.0).lengths == {}


def test_what_a_holder_that_left_was_sent_is_passed_over() -> None:
    index = PrefixIndex()
    index.join("gpu:a", pool=False)
    index.join("gpu:b", pool=False)
    index.join("dram:a", pool=True)
    index.expect("gpu:a", ["x"], [1.0], 10.0)
    index.expect("gpu:b", ["y"], [1.0], 10.0)
    index.leave("gpu:a")
    index.expect("gpu:a", ["z"], [1.0], 10.0)
    index.arrived("gpu:a", "dram:a", ["x"])
    index.unexpect("gpu:a", ["x"])
    assert [index.match([key], 0.0).of("").coming for key in "xyz"] == [0, 1, 0]
    index.leave("dram:a")
    index.arrived("gpu:b", "dram:a", ["y"])
    assert index.match(["y"], 0.0).lengths == {"gpu:b": 1}


def test_blocks_that_arrived_are_not_waited_for() -> None:
    index = PrefixIndex()
    index.join("gpu:a", pool=False)
    index.join("dram:a", pool=True)
    index.expect("gpu:a", ["x", "y", "z"], [1.0, 7.0, 3.0], 10.0)
    index.arrived("gpu:a", "dram:a", ["y"])
    found = index.match(["x", "y", "z"], 0.0)
    assert found.of("") == (0, 3, 3.0)
    index.arrived("gpu:a", "dram:a", ["x"])
    assert index.match(["x", "y", "z"], 0.0).of("").reach == 2


def test_what_was_not_saved_is_in_the_engines_cache_only() -> None:
    index = PrefixIndex()
    index.join("gpu:a", pool=False)
    index.join("dram:a", pool=True)
    keys = ["w", "x", "y", "z"]
    index.expect("gpu:a", keys, [1.0, 2.0, 3.0, 4.0], 10.0)
    index.arrived("gpu:a", "dram:a", keys[:3])
    index.not_saved("gpu:a", keys[2:])
    found = index.match(keys, 0.0)
    assert (found.lengths, found.of("")) == ({"gpu:a": 4, "dram:a": 2}, (2, 2, -math.inf))
    index.arrived("gpu:a", "dram:a", ["y"])
    assert index.match(keys, 0.0).of("").reach == 3, "it was saved for another request"
    index.leave("dram:a")
    index.leave("gpu:a")
    index.not_saved("gpu:a", keys)
    assert index.match(keys, 0.0).lengths == {}


def test_what_is_not_shared_is_not_waited_for() -> None:
    index = PrefixIndex()
    index.join("gpu:a", pool=False)
    keys = ["x", "y", "z"]
    index.expect("gpu:a", keys[:2], [1.0, 2.0], 10.0)
    index.expect("gpu:a", keys[2:], [3.0], 10.0, shared=False)
    found = index.match(keys, 0.0)
    assert (found.lengths, found.of("")) == ({"gpu:a": 3}, (0, 2, 2.0))


def test_what_an_engine_will_be_sent_later_may_be_waited_for_and_is_not_there() -> None:
    index = PrefixIndex()
    index.join("gpu:a", pool=False)
    index.join("dram:a", pool=True)
    keys = ["x", "y", "z"]
    index.expect("gpu:a", keys[:1], [1.0], 10.0)
    index.expect("gpu:a", keys[1:], [2.0, 3.0], 10.0, later=True)
    found = index.match(keys, 0.0)
    assert (found.lengths, found.of("")) == ({"gpu:a": 1}, (0, 3, 3.0))
    index.expect("gpu:a", ["y"], [2.5], 10.0)
    assert index.match(keys, 0.0).lengths == {"gpu:a": 2}
    index.unexpect("gpu:a", ["z"])
    assert index.match(keys, 0.0).of("").coming == 2
    assert index.match(keys, 11.0).of("").coming == 0
