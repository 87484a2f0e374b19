"""The default policy loses to no simple one at any size of pool, on a real conversation trace."""

from __future__ import annotations

import functools
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvpool.storage.eviction import DEFAULT_POLICY, make_policy

TRACE = Path(__file__).resolve().parents[3] / "../shared/traces/conversation_trace.jsonl"
SIZES = (1_000, 5_000, 10_000, 30_000)

pytestmark = pytest.mark.skipif(
    not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}"
)


class Entry:
    __slots__ = ("block", "freq", "ident", "newer", "older", "queue")

    def __init__(self, block: int) -> None:
        self.block = block
        self.ident = (block + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
        self.freq = 0
        self.queue = 0
        self.older: Any = None
        self.newer: Any = None


@functools.cache
def requests() -> list[list[int]]:
    with TRACE.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def s3fifo() -> Any:
    """The bench's baseline."""
    path = Path(__file__).resolve().parents[3] / "bench" / "s3fifo.py"
    return runpy.run_path(str(path))["S3Fifo"]


@functools.cache
def hit_rate(name: str, capacity: int, pulled: bool = False) -> float:
    """pulled: another node reads every new block once, right after it was put."""
    make = s3fifo() if name == "s3fifo" else functools.partial(make_policy, name)
    policy: Any = make(capacity)
    held: dict[int, Entry] = {}
    hits = 0
    for blocks in requests():
        missed = next((i for i, b in enumerate(blocks) if b not in held), len(blocks))
        hits += missed
        policy.touch([held[block] for block in blocks if block in held])
        new = [Entry(block) for block in blocks if block not in held][:capacity]
        for _ in range(len(held) + len(new) - capacity):
            del held[policy.pop().block]
        policy.insert(new)
        if pulled:
            policy.touch(new)
        held.update((entry.block, entry) for entry in new)
        assert len(policy) == len(held) <= capacity
    return hits / sum(map(len, requests()))


@pytest.mark.parametrize("capacity", SIZES)
def test_default_is_within_a_point_of_the_best(capacity: int) -> None:
    best = max(hit_rate(name, capacity) for name in ("lru", "s3fifo"))
    assert hit_rate(DEFAULT_POLICY, capacity) >= best - 0.01


@pytest.mark.parametrize("capacity", [1_000, 5_000])
def test_a_pull_right_after_each_put_does_not_spoil_it(capacity: int) -> None:
    plain = hit_rate(DEFAULT_POLICY, capacity)
    assert hit_rate(DEFAULT_POLICY, capacity, pulled=True) >= plain - 0.01


def test_baselines_are_what_others_measured() -> None:
    """Plain LRU and S3-FIFO at 5,000 blocks, so that the comparison is against the real things."""
    assert hit_rate("lru", 5_000) == pytest.approx(0.11, abs=0.005)
    assert hit_rate("s3fifo", 5_000) == pytest.approx(0.145, abs=0.005)
