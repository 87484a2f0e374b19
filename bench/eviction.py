"""Which eviction policy keeps the blocks that are asked for again?

One tier of a given number of blocks, shared by all requests, replays a trace: JSON lines whose
`hash_ids` are the prefix-chained blocks of a prompt. A request hits its longest prefix that is
there, touches it, and inserts what was missing. `best` in the check is the best of LRU, LFU and
S3-FIFO; `belady` is the optimum of an oracle that evicts what is used furthest in the future.

    python bench/eviction.py [--quick] [--json FILE] [--trace FILE]
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, make_policy

TRACE = Path(__file__).resolve().parents[1] / "../shared/traces/conversation_trace.jsonl"
SIZES = (1_000, 5_000, 10_000, 30_000, 50_000)
JUDGED_SIZES = SIZES[:4]
OPERATIONS = ("insert", "touch", "pop", "discard")
BASELINES = ("lru", "lfu", "s3fifo")

Requests = list[list[int]]


class Entry:
    """What a tier would know of a block, as far as a policy cares."""

    __slots__ = ("block", "freq", "ident", "queue")

    def __init__(self, block: int) -> None:
        self.block = block
        self.ident = block.to_bytes(16, "little")
        self.freq = 0
        self.queue = 0


class Lfu:
    """Least frequently used among what is held, the least recent of equals first. A baseline."""

    def __init__(self, capacity: int) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._now = 0

    def insert(self, entries: Sequence[Any]) -> None:
        self.touch(entries)

    def touch(self, entries: Sequence[Any]) -> None:
        for entry in reversed(entries):
            self._now += 1
            entry.freq += 1
            entry.queue = self._now  # the one of its heap items that counts
            heapq.heappush(self._heap, (entry.freq, self._now, entry))

    def pop(self) -> Any:
        while self._heap:
            _, now, entry = heapq.heappop(self._heap)
            if entry.queue == now:
                entry.queue = entry.freq = 0
                return entry
        return None


MAKERS: dict[str, Callable[[int], Any]] = {
    **{name: (lambda capacity, name=name: make_policy(name, capacity)) for name in POLICIES},
    "lfu": Lfu,
}


def read_trace(path: Path) -> Requests:
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def hit_rate(requests: Requests, policy: Any, capacity: int) -> float:
    """Hits among all blocks asked for."""
    held: dict[int, Entry] = {}
    hits = asked = 0
    for blocks in requests:
        asked += len(blocks)
        prefix = 0
        for block in blocks:
            if block not in held:
                break
            prefix += 1
        hits += prefix
        policy.touch([held[block] for block in blocks if block in held])
        new = [Entry(block) for block in blocks if block not in held][:capacity]
        for _ in range(len(held) + len(new) - capacity):
            del held[policy.pop().block]
        policy.insert(new)
        held.update((entry.block, entry) for entry in new)
    return hits / asked


def belady_rate(requests: Requests, capacity: int) -> float:
    """The same with the future known, and free not to keep a block that is used later than all."""
    next_uses: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        next_uses.append([seen.get(block, len(requests)) for block in requests[number]])
        seen.update(dict.fromkeys(requests[number], number))
    next_uses.reverse()
    held: dict[int, int] = {}  # block → its next use
    furthest: list[tuple[int, int, int]] = []
    hits = asked = 0
    for blocks, nexts in zip(requests, next_uses, strict=True):
        asked += len(blocks)
        prefix = 0
        for block in blocks:
            if block not in held:
                break
            prefix += 1
        hits += prefix
        for depth, (block, use) in enumerate(zip(blocks, nexts, strict=True)):
            held[block] = use
            heapq.heappush(furthest, (-use, -depth, block))  # of equals the tail goes first
        while len(held) > capacity:
            use, _, block = heapq.heappop(furthest)
            if held.get(block) == -use:
                del held[block]
    return hits / asked


def ns_per_operation(name: str, rounds: int) -> dict[str, float]:
    """Median nanoseconds an entry for insert, touch, pop and discard, in batches of 64."""
    capacity, batch = 20_000, 64
    policy = MAKERS[name](capacity)
    resident = [[Entry(i * batch + j) for j in range(batch)] for i in range(capacity // batch)]
    for entries in resident:
        policy.insert(entries)
    times: dict[str, list[float]] = {op: [] for op in OPERATIONS}
    clock = time.perf_counter_ns
    for number in range(rounds):
        new = [Entry((1 << 32) + number * batch + j) for j in range(batch)]
        t0 = clock()
        popped = [policy.pop() for _ in range(batch)]
        t1 = clock()
        policy.insert(new)
        t2 = clock()
        middle = resident[(number + len(resident) // 2) % len(resident)]
        chosen = [entry for entry in middle if entry.queue]
        t3 = clock()
        policy.touch(chosen)
        t4 = clock()
        times["pop"].append((t1 - t0) / batch)
        times["insert"].append((t2 - t1) / batch)
        if chosen:
            times["touch"].append((t4 - t3) / len(chosen))
        assert all(popped)
        resident[number % len(resident)] = new
        if hasattr(policy, "discard"):
            t5 = clock()
            for entry in new:
                policy.discard(entry)
            times["discard"].append((clock() - t5) / batch)
            policy.insert(new)
    return {label: sorted(took)[len(took) // 2] for label, took in times.items() if took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds of the timings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and checks there")
    parser.add_argument("--trace", type=Path, default=Path(os.environ.get("KVPOOL_TRACE", TRACE)))
    options = parser.parse_args()
    requests = read_trace(options.trace)

    rates: dict[str, dict[int, float]] = {
        name: {size: hit_rate(requests, make(size), size) for size in SIZES}
        for name, make in MAKERS.items()
    }
    rates["belady"] = {size: belady_rate(requests, size) for size in SIZES}

    rows: list[dict[str, Any]] = []
    print(f"{'hit rate, %':14}" + "".join(f"{size:>9,}" for size in SIZES))
    for name, by_size in sorted(rates.items(), key=lambda item: item[1][5_000]):
        mark = " *" if name == DEFAULT_POLICY else ""
        print(f"{name + mark:14}" + "".join(f"{by_size[size]:9.2%}" for size in SIZES))
        rows += [{"policy": name, "blocks": s, "hit_rate": rate} for s, rate in by_size.items()]
    print(f"\n{'ns an entry':14}" + "".join(f"{op:>9}" for op in OPERATIONS))
    for name in MAKERS:
        ns = ns_per_operation(name, 400 if options.quick else 2_000)
        print(f"{name:14}" + "".join(f"{ns[op]:9.0f}" for op in OPERATIONS if op in ns))
        rows.append({"policy": name, **{f"{op}_ns": took for op, took in ns.items()}})

    worst = min(
        rates[DEFAULT_POLICY][size] / max(rates[name][size] for name in BASELINES)
        for size in JUDGED_SIZES
    )
    checks = [{"name": "one_tier_hit_vs_best", "value": round(worst, 4), "at_least": 0.97}]
    print(f"\none_tier_hit_vs_best {worst:.3f} (at least 0.97)   * the default")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "checks": checks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
