"""Sampled reuse distances, against exact ones."""

import json
import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.reuse import FORGET_S, HALF_S, PENDING_MAX, TOGETHER, ReuseCurve
from kvpool.storage.eviction import policy_maker
from kvpool.telemetry.hit_curve import TIMES, Curve, Memory, Reuse, bucket_of, bytes_of, curve
from kvpool.types import NamespaceRecord

BLOCK = 1 << 16
TRACE = Path(__file__).resolve().parents[3] / "../shared/traces/conversation_trace.jsonl"


def space(name: str = "m") -> NamespaceState:
    """A namespace of one part, of blocks of `BLOCK` bytes."""
    node = Node(make_policy=policy_maker("lru"))
    tenant = node.add_tenant("default", 0, 64 << 20)
    record = NamespaceRecord.simple(name, block_bytes=BLOCK, block_tokens=16)
    return node.namespaces.open(tenant, record.digest(), record.canonical(), record.parts)


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


class Exact:
    """A memory of any size that evicts the least recently used: by the plainest means."""

    def __init__(self) -> None:
        self.stack: OrderedDict[bytes, None] = OrderedDict()
        self.distances: list[float] = []

    def read(self, keys: Sequence[bytes]) -> None:
        for each in reversed(keys):
            if each not in self.stack:
                self.distances.append(math.inf)
                continue
            deeper = 0
            for other in reversed(self.stack):
                deeper += 1
                if other == each:
                    break
            self.distances.append(deeper)
            self.stack.move_to_end(each)

    def put(self, keys: Sequence[bytes]) -> None:
        for each in reversed(keys):
            self.stack[each] = None
            self.stack.move_to_end(each)


class Fenwick:
    """The same, fast enough for a trace: counts of the last places of all blocks."""

    def __init__(self, calls: int) -> None:
        self.tree = [0] * (calls + 1)
        self.last: dict[int, int] = {}
        self.at = 0
        self.distances: list[float] = []

    def _add(self, at: int, value: int) -> None:
        while at < len(self.tree):
            self.tree[at] += value
            at += at & -at

    def _below(self, at: int) -> int:
        found = 0
        while at:
            found += self.tree[at]
            at -= at & -at
        return found

    def _touch(self, number: int) -> None:
        self.at += 1
        if (before := self.last.get(number)) is not None:
            self._add(before, -1)
        self.last[number] = self.at
        self._add(self.at, 1)

    def read(self, numbers: Sequence[int]) -> None:
        for number in reversed(numbers):
            before = self.last.get(number)
            if before is None:
                self.distances.append(math.inf)
                continue
            self.distances.append(len(self.last) - self._below(before) + 1)
            self._touch(number)

    def put(self, numbers: Sequence[int]) -> None:
        for number in reversed(numbers):
            self._touch(number)

    def hit(self, blocks: float) -> float:
        known = [each for each in self.distances if math.isfinite(each)]
        return sum(each <= blocks for each in known) / len(self.distances)


def follow(found: ReuseCurve, now: float = 0.0) -> None:
    for _ in found.turns(now):
        pass


def of(found: Reuse, blocks: float, node: str = "a") -> Memory:
    return Memory(node, int(blocks * BLOCK), 0, found)


def points(seen: Curve) -> Iterator[tuple[float, float]]:
    return ((math.inf if p.times is None else p.times, p.hit) for p in seen.points)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True), max_size=60))
def test_few_blocks_are_all_followed_and_exactly(reads):
    namespace, oracle, found = space(), Exact(), ReuseCurve()
    for each in reads:
        keys = [key(number) for number in each]
        found.asked(namespace, b"".join(keys), 0)
        found.put(namespace, keys)
        oracle.read(keys)
        oracle.put(keys)
    follow(found)
    told = found.reuse()
    assert told.asked == len(oracle.distances)
    assert told.first == sum(map(math.isinf, oracle.distances))
    exact: dict[int, float] = {}
    for distance in oracle.distances:
        if math.isfinite(distance):
            bucket = bucket_of(distance * BLOCK)
            exact[bucket] = exact.get(bucket, 0.0) + 1
    assert told.distances == exact


def test_a_sample_of_many_blocks_gives_the_hit_rates_of_all():
    rng = random.Random(3)
    namespace, found = space(), ReuseCurve(1024, work_max=1 << 30)
    numbers = [int(rng.paretovariate(0.6)) % 60_000 for _ in range(150_000)]
    oracle = Fenwick(2 * len(numbers))
    for at in range(0, len(numbers), 10):
        chain = list(dict.fromkeys(numbers[at : at + 10]))
        packed = b"".join(map(key, chain))
        found.asked(namespace, packed, 0)
        found.put(namespace, packed)
        oracle.read(chain)
        oracle.put(chain)
        if at % 5000 == 0:
            follow(found)
    follow(found)
    told = found.reuse()
    assert told.share < 0.5, "they are sampled"
    assert len(told.samples) // 8 <= 1024
    seen = curve([of(told, 4000)])
    for times, hit in points(seen):
        assert abs(hit - oracle.hit(times * 4000)) <= max(2 * seen.error, 0.02), times


@pytest.mark.skipif(not TRACE.exists(), reason="no trace")
@pytest.mark.parametrize("blocks", [2_000, 20_000])
def test_the_conversation_trace(blocks):
    rows = [json.loads(line)["hash_ids"] for line in TRACE.read_text().splitlines()[:6000]]
    namespace, found = space(), ReuseCurve()
    oracle = Fenwick(2 * sum(map(len, rows)))
    keys: dict[int, bytes] = {}
    for at, row in enumerate(rows):
        packed = b"".join([keys.setdefault(n, key(n)) for n in row])
        found.asked(namespace, packed, 0)
        found.put(namespace, packed)
        oracle.read(row)
        oracle.put(row)
        if at % 20 == 0:
            follow(found)
    follow(found)
    seen = curve([of(found.reuse(), blocks)])
    assert not seen.skipped
    worst = max(abs(hit - oracle.hit(times * blocks)) for times, hit in points(seen))
    assert worst <= max(2 * seen.error, 0.02), (worst, seen.error)
    assert seen.ceiling == pytest.approx(oracle.hit(math.inf), abs=0.02)


def test_a_block_that_was_never_put_can_hit_in_no_memory():
    namespace, found = space(), ReuseCurve()
    for _ in range(3):
        found.asked(namespace, key(1), 0)
    follow(found)
    seen = curve([of(found.reuse(), 10)])
    assert (seen.asked, seen.ceiling) == (3, 0.0)


def test_what_was_had_but_not_put_here_hits_in_the_present_memory_and_in_no_smaller_one():
    namespace, found = space(), ReuseCurve()
    found.present_bytes = 64 * BLOCK
    keys = [key(number) for number in range(4)]
    found.asked(namespace, b"".join(keys), 2)
    follow(found)
    seen = curve([of(found.reuse(), 64)])
    assert seen.at(0.5) == 0.0
    assert seen.at(1.0) == 0.5
    assert seen.ceiling == 0.5
    # An engine pulls the rest after it.
    found.came(namespace, keys[2:])
    follow(found)
    seen = curve([of(found.reuse(), 64)])
    assert seen.at(1.0) == seen.ceiling == 1.0
    assert found.reuse().samples == b"", "none of them was put here"
    found.asked(namespace, b"".join(keys), 4)
    follow(found)
    assert curve([of(found.reuse(), 64)]).at(0.5) == 0.5, "it is here now"


def test_disks_count_as_memory_that_does_not_grow():
    namespace, found = space(), ReuseCurve()
    keys = [key(number) for number in range(100)]
    found.put(namespace, keys)
    found.asked(namespace, b"".join(keys), 100)
    follow(found)
    reuse = found.reuse()
    assert curve([Memory("a", 10 * BLOCK, 0, reuse)]).at(1.0) == 0.0, (
        "a loop through more than there is"
    )
    assert curve([Memory("a", 10 * BLOCK, 100 * BLOCK, reuse)]).at(1.0) == 1.0
    assert curve([Memory("a", 10 * BLOCK, 0, reuse)]).at(16.0) == 1.0


def test_nodes_together_find_what_each_of_them_had_to_compute():
    namespace = space()
    both = [ReuseCurve(), ReuseCurve()]
    chains = [[key(100 * at + number) for number in range(10)] for at in range(50)]
    for turn, chain in enumerate(chains * 2):
        # The second time another node is asked, which does not have it: with enough memory in the pool it would.
        at = both[(turn + turn // len(chains)) % 2]
        at.asked(namespace, b"".join(chain), 0)
        at.put(namespace, chain)
    for each in both:
        follow(each)
    memories = [of(each.reuse(), 100, name) for each, name in zip(both, "ab", strict=True)]
    assert curve(memories[:1]).ceiling == 0.0
    assert curve(memories).ceiling == pytest.approx(0.5)


def test_nodes_that_differ_in_size_grow_in_proportion():
    namespace = space()
    memories = []
    for name, blocks in (("a", 10), ("b", 1000)):
        found = ReuseCurve()
        keys = [key(number + blocks) for number in range(2 * blocks)]
        for _ in range(4):
            found.asked(namespace, b"".join(keys), 0)
            found.put(namespace, keys)
            follow(found)
        memories.append(of(found.reuse(), blocks, name))
    seen = curve(memories)
    assert seen.at(1.0) < 0.1
    assert seen.at(3.0) == pytest.approx(0.75, abs=0.02)
    assert seen.dram_bytes == 1010 * BLOCK


def test_what_is_asked_for_too_fast_is_left_out_and_said():
    namespace, found = space(), ReuseCurve()
    packed = b"".join(key(number) for number in range(1000))
    for _ in range(PENDING_MAX // 1000 + 10):
        found.asked(namespace, packed, 0)
    follow(found)
    told = found.reuse()
    assert told.skipped == 10_000
    assert told.asked + told.skipped == 1000 * (PENDING_MAX // 1000 + 10)


def test_work_is_limited_by_following_fewer_blocks():
    namespace, found = space(), ReuseCurve(work_max=1000)
    for first in range(0, 20_000, 500):
        found.put(namespace, [key(number) for number in range(first, first + 500)])
        follow(found)
    before = found.reuse().share
    found.put(namespace, [key(number) for number in range(20_000, 60_000)])
    turns = sum(1 for _ in found.turns(0.0))
    assert found.reuse().share < before
    assert turns <= 2 * 1000 / TOGETHER


def test_old_reads_count_less_and_old_blocks_are_forgotten():
    namespace, found = space(), ReuseCurve()
    keys = [key(number) for number in range(10)]
    found.put(namespace, keys)
    found.asked(namespace, b"".join(keys), 10)
    follow(found, 0.0)
    follow(found, HALF_S)
    assert found.reuse().asked == pytest.approx(5.0)
    assert sum(found.reuse().distances.values()) == pytest.approx(5.0)
    follow(found, FORGET_S + 1.0)
    assert found.reuse().samples == b""


def test_buckets_are_a_quarter_of_an_octave():
    for nbytes in (1.0, 1.5, 4096.0, 1e6, 1e15):
        assert bytes_of(bucket_of(nbytes)) >= nbytes * (1 - 1e-6)
        assert bytes_of(bucket_of(nbytes)) <= nbytes * 2**0.25 * (1 + 1e-6)


def test_nothing_was_asked_for():
    seen = curve([])
    assert (seen.hit, seen.ceiling, seen.error) == (None, 0.0, 1.0)
    assert [p.times for p in seen.points] == [None if math.isinf(t) else t for t in TIMES]
