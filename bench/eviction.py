"""Which eviction policy keeps the blocks that are asked for again, and saves most time with them?

A trace is replayed: JSON lines whose `hash_ids` are the prefix-chained blocks of a prompt.

*One tier* of a given number of blocks, shared by all requests. A request hits its longest prefix
that is there, touches it, and inserts what was missing. `belady` is the optimum of an oracle that
evicts what is used furthest in the future.

*Two tiers:* 5,000 blocks of DRAM over 50,000 of SSD, each with a policy object of its own. A request
hits the longest prefix whose blocks are each in either. A hit block saves the time to recompute it
at its depth, less the time to load it from its tier; so much of the hit is loaded as saves most.
Afterwards all blocks of the request are in DRAM. What DRAM evicts goes to the SSD, unless it is
there. The variants differ in what becomes of the SSD's copy of a block that is promoted:

* inclusive (the one that is judged): it stays where the policy has it, until it is evicted;
* covered-first: it stays until room is needed, and goes before all that only the SSD has. When DRAM
  evicts the block first, the copy is an ordinary one again;
* exclusive: it is dropped;
* write-through: as inclusive, and blocks are written when they are put, not when DRAM evicts them.

All policies are replayed in the same variant; `vs_best_anywhere` compares with the baseline's best
variant instead. `belady` for two tiers: hits of the optimum on 5,000 blocks come from DRAM, the other
hits of the optimum on 55,000 from SSD, as if blocks moved between the tiers for nothing.

The speeds, for a block of 512 tokens of LLaMA-3-70B (80 layers, 8,192 wide, 70.6 G parameters), are
those of a server with 8 A800. KV is 327,680 bytes a token, 160 MiB a block: 6.7 ms over one PCIe 4.0
x16 link (25 GB/s), 28 ms from two NVMe disks (6 GB/s; what follows is faster and overlaps). Prefill
runs at half of 8 x 312 TFLOPS: 2 x parameters x tokens are 58 ms, and attention, 4 x layers x width x
tokens x context, adds 0.55 ms for each block before.

The halves of the trace are columns of their own. Of the constants of `a2q`, the step was chosen on
the first half; the others were chosen earlier on the whole trace, so no half is quite unseen. `best` in the checks is the best of LRU, LFU and S3-FIFO.

    python bench/eviction.py [--quick] [--json FILE] [--trace FILE]
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, Costs, Lru, make_policy

TRACE = Path(__file__).resolve().parents[1] / "../shared/traces/conversation_trace.jsonl"
SIZES = (1_000, 5_000, 10_000, 30_000, 50_000)
JUDGED_SIZES = SIZES[:4]
OPERATIONS = ("insert", "touch", "pop", "discard")
BASELINES = ("lru", "lfu", "s3fifo")
DRAM_BLOCKS, SSD_BLOCKS = 5_000, 50_000
JUDGED_VARIANT = "inclusive"
VARIANTS = (JUDGED_VARIANT, "covered-first", "exclusive", "write-through")

Requests = list[list[int]]


@dataclass(frozen=True)
class Speeds:
    """Of a server with 8 A800 under LLaMA-3-70B; see the top."""

    dram_bytes_s: float = 25e9
    ssd_bytes_s: float = 6e9
    flop_s: float = 0.5 * 8 * 312e12
    block_bytes: int = 512 * 327_680
    linear_flop: float = 2 * 70.6e9 * 512
    attention_flop: float = 4 * 80 * 8192 * 512 * 512  # with one block of context

    def recompute_s(self, depth: int) -> float:
        """A block's tokens see all blocks before theirs, and half of their own."""
        return (self.linear_flop + self.attention_flop * (depth + 0.5)) / self.flop_s

    @property
    def dram(self) -> Costs:
        return Costs(
            load_s=self.block_bytes / self.dram_bytes_s,
            below_s=self.block_bytes / self.ssd_bytes_s,
            recompute_s=self.recompute_s(0),
            recompute_s_per_depth=self.attention_flop / self.flop_s,
        )

    @property
    def ssd(self) -> Costs:
        return replace(self.dram, load_s=self.block_bytes / self.ssd_bytes_s, below_s=None)


class Entry:
    """What a tier would know of a block, as far as a policy cares."""

    __slots__ = ("block", "depth", "freq", "ident", "newer", "older", "queue")

    def __init__(self, block: int, depth: int = 0) -> None:
        self.block = block
        self.depth = depth
        self.ident = (block + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        self.freq = 0
        self.queue = 0
        self.older: Any = None
        self.newer: Any = None


class Lfu:
    """Least frequently used among what is held, the least recent of equals first. A baseline."""

    def __init__(self, capacity: int, costs: Costs | None = None) -> None:
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

    def discard(self, entry: Any) -> None:
        entry.queue = entry.freq = 0

    def pop(self) -> Any:
        while self._heap:
            _, now, entry = heapq.heappop(self._heap)
            if entry.queue == now:
                entry.queue = entry.freq = 0
                return entry
        return None


MAKERS: dict[str, Callable[..., Any]] = {
    **{name: (lambda *args, name=name: make_policy(name, *args)) for name in POLICIES},
    "lfu": Lfu,
}


def read_trace(path: Path) -> Requests:
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def prefix_length(blocks: Sequence[int], held: dict[int, Any]) -> int:
    for position, block in enumerate(blocks):
        if block not in held:
            return position
    return len(blocks)


def hit_rate(requests: Requests, policy: Any, capacity: int) -> float:
    """Hits among all blocks asked for."""
    held: dict[int, Entry] = {}
    hits = asked = 0
    for blocks in requests:
        asked += len(blocks)
        hits += prefix_length(blocks, held)
        policy.touch([held[block] for block in blocks if block in held])
        new = [Entry(block) for block in blocks if block not in held][:capacity]
        for _ in range(len(held) + len(new) - capacity):
            del held[policy.pop().block]
        policy.insert(new)
        held.update((entry.block, entry) for entry in new)
    return hits / asked


class Belady:
    """The optimum: it knows when a block is used next, and may choose not to keep a new one."""

    def __init__(self, capacity: int) -> None:
        self.held: dict[int, int] = {}  # block → the number of the request that uses it next
        self._capacity = capacity
        self._furthest: list[tuple[int, int, int]] = []

    def use(self, blocks: Sequence[int], nexts: Sequence[int]) -> None:
        held, furthest = self.held, self._furthest
        for depth, (block, following) in enumerate(zip(blocks, nexts, strict=True)):
            held[block] = following
            heapq.heappush(furthest, (-following, -depth, block))  # of equals the tail goes first
        while len(held) > self._capacity:
            following, _, block = heapq.heappop(furthest)
            if held.get(block) == -following:
                del held[block]


def next_uses(requests: Requests) -> list[list[int]]:
    """Of each block of each request, the number of the next request with it; else their count."""
    nexts: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        nexts.append([seen.get(block, len(requests)) for block in requests[number]])
        seen.update(dict.fromkeys(requests[number], number))
    nexts.reverse()
    return nexts


def belady_rate(requests: Requests, nexts: list[list[int]], capacity: int) -> float:
    """What `hit_rate` is with the future known."""
    oracle = Belady(capacity)
    hits = 0
    for blocks, following in zip(requests, nexts, strict=True):
        hits += prefix_length(blocks, oracle.held)
        oracle.use(blocks, following)
    return hits / sum(map(len, requests))


@dataclass
class Outcome:
    """Of a replay on two tiers. Seconds of prefill saved: by each half of the requests."""

    early_s: float = 0.0
    late_s: float = 0.0
    dram_hits: int = 0
    ssd_hits: int = 0
    written: int = 0  # blocks, to the SSD

    @property
    def saved_s(self) -> float:
        return self.early_s + self.late_s

    def add(self, sources: Sequence[bool], speeds: Speeds, *, late: bool) -> int:
        """A hit, as whether each block is in DRAM; how many of the blocks are loaded."""
        costs = speeds.ssd, speeds.dram
        saved = most = 0.0
        loaded = 0
        for depth, in_dram in enumerate(sources):
            saved += speeds.recompute_s(depth) - costs[in_dram].load_s
            if saved > most:
                most, loaded = saved, depth + 1
        if late:
            self.late_s += most
        else:
            self.early_s += most
        in_dram_all = sum(sources[:loaded])
        self.dram_hits += in_dram_all
        self.ssd_hits += loaded - in_dram_all
        return loaded


class Ssd:
    """The slower tier: a policy, and before it the copies that DRAM covers, in that variant."""

    def __init__(self, policy: Any) -> None:
        self.held: dict[int, Entry] = {}
        self._policy = policy
        self._covered = Lru(1)  # its capacity bounds nothing

    def read(self, blocks: Sequence[int]) -> None:
        self._policy.touch([self.held[block] for block in blocks])

    def cover(self, blocks: Sequence[int]) -> None:
        """They are in DRAM now."""
        entries = [self.held[block] for block in blocks]
        self._policy.discard(entries)
        self._covered.insert(entries)

    def uncover(self, blocks: Sequence[int]) -> None:
        """They are not in DRAM any more."""
        entries = [self.held[block] for block in blocks]
        self._covered.discard(entries)
        self._policy.insert(entries)

    def drop(self, blocks: Sequence[int]) -> None:
        self._policy.discard([self.held.pop(block) for block in blocks])

    def put(self, entries: Sequence[Entry]) -> None:
        for _ in range(len(self.held) + len(entries) - SSD_BLOCKS):
            victim: Any = self._covered.pop() or self._policy.pop()
            del self.held[victim.block]
        self._policy.insert(entries)
        self.held.update((entry.block, entry) for entry in entries)


def two_tiers(requests: Requests, name: str, variant: str, speeds: Speeds) -> Outcome:
    """Replay on DRAM over SSD, both under the policy of this name."""
    policy = MAKERS[name](DRAM_BLOCKS, speeds.dram)
    ssd = Ssd(MAKERS[name](SSD_BLOCKS, speeds.ssd))
    dram: dict[int, Entry] = {}
    outcome = Outcome()
    for number, whole in enumerate(requests):
        blocks = whole[:DRAM_BLOCKS]
        sources: list[bool] = []
        for block in blocks:
            if block not in dram and block not in ssd.held:
                break
            sources.append(block in dram)
        loaded = outcome.add(sources, speeds, late=2 * number >= len(requests))
        policy.touch([dram[block] for block in blocks if block in dram])
        new = [Entry(b, depth) for depth, b in enumerate(blocks) if b not in dram]
        ssd.read([e.block for e in new if e.depth < loaded])
        both = [e.block for e in new if e.block in ssd.held]
        if variant == "exclusive":
            ssd.drop(both)
        elif variant == "covered-first":
            ssd.cover(both)
        victims = [policy.pop().block for _ in range(len(dram) + len(new) - DRAM_BLOCKS)]
        victims.reverse()  # tails went first
        demoted = [(block, dram.pop(block).depth) for block in victims]
        if variant == "covered-first":
            ssd.uncover([block for block in victims if block in ssd.held])
        if variant == "write-through":
            demoted = [(entry.block, entry.depth) for entry in new]
        written = [Entry(*block) for block in demoted if block[0] not in ssd.held]
        outcome.written += len(written)
        ssd.put(written)
        policy.insert(new)
        dram.update((entry.block, entry) for entry in new)
    return outcome


def belady_two_tiers(requests: Requests, nexts: list[list[int]], speeds: Speeds) -> Outcome:
    dram, both = Belady(DRAM_BLOCKS), Belady(DRAM_BLOCKS + SSD_BLOCKS)
    outcome = Outcome()
    for number, (blocks, following) in enumerate(zip(requests, nexts, strict=True)):
        hit = blocks[: prefix_length(blocks, both.held)]
        late = 2 * number >= len(requests)
        outcome.add([block in dram.held for block in hit], speeds, late=late)
        dram.use(blocks, following)
        both.use(blocks, following)
    return outcome


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
            policy.discard(new)
            times["discard"].append((clock() - t5) / batch)
            policy.insert(new)
    return {label: sorted(took)[len(took) // 2] for label, took in times.items() if took}


def one_tier_report(requests: Requests, nexts: list[list[int]], rows: list[Any]) -> float:
    """Print it; the default policy against the best of the baselines, at its worst size."""
    rates: dict[str, dict[int, float]] = {
        name: {size: hit_rate(requests, make(size), size) for size in SIZES}
        for name, make in MAKERS.items()
    }
    rates["belady"] = {size: belady_rate(requests, nexts, size) for size in SIZES}
    print(f"{'hit rate, %':14}" + "".join(f"{size:>9,}" for size in SIZES))
    for name, by_size in sorted(rates.items(), key=lambda item: item[1][5_000]):
        mark = " *" if name == DEFAULT_POLICY else ""
        print(f"{name + mark:14}" + "".join(f"{by_size[size]:9.2%}" for size in SIZES))
        rows += [{"policy": name, "blocks": s, "hit_rate": rate} for s, rate in by_size.items()]
    return min(
        rates[DEFAULT_POLICY][size] / max(rates[name][size] for name in BASELINES)
        for size in JUDGED_SIZES
    )


def two_tier_report(
    requests: Requests, nexts: list[list[int]], rows: list[Any], *, quick: bool
) -> float:
    """Print it; the default policy against the best of the baselines, in the judged variant."""
    normal = Speeds()
    depth_ms = 1e3 * normal.dram.recompute_s_per_depth
    print(
        f"\n{DRAM_BLOCKS:,} blocks of DRAM over {SSD_BLOCKS:,} of SSD. A block: "
        f"{normal.block_bytes / 2**20:.0f} MiB; from DRAM {1e3 * normal.dram.load_s:.1f} ms, from "
        f"SSD {1e3 * normal.ssd.load_s:.1f} ms, recomputed {1e3 * normal.recompute_s(0):.1f} ms "
        f"and {depth_ms:.2f} ms more for each block before it"
    )
    asked = sum(map(len, requests))
    header = ("saved, s", "1st half", "2nd half", "DRAM", "SSD", "written")
    print(f"{'':34}" + "".join(f"{column:>10}" for column in header))

    def show(label: str, name: str, outcome: Outcome) -> None:
        shares = [n / asked for n in (outcome.dram_hits, outcome.ssd_hits, outcome.written)]
        print(
            f"{label:24}{name:10}{outcome.saved_s:10.0f}{outcome.early_s:10.0f}{outcome.late_s:10.0f}"
            + "".join(f"{share:10.2%}" for share in shares),
            flush=True,
        )
        figures = dict(zip(("dram_hits", "ssd_hits", "ssd_writes"), shares, strict=True))
        row = {"two_tiers": label, "policy": name, "saved_s": outcome.saved_s}
        halves = {"saved_s_1st_half": outcome.early_s, "saved_s_2nd_half": outcome.late_s}
        rows.append({**row, **halves, **figures})

    def ratios(label: str, outcomes: dict[str, Outcome]) -> float:
        ours = outcomes[DEFAULT_POLICY]
        whole = ours.saved_s / max(outcomes[name].saved_s for name in BASELINES)
        early = ours.early_s / max(outcomes[name].early_s for name in BASELINES)
        late = ours.late_s / max(outcomes[name].late_s for name in BASELINES)
        print(f"{label:24}{'vs best':10}{whole:10.3f}{early:10.3f}{late:10.3f}")
        halves = {"vs_best_1st_half": early, "vs_best_2nd_half": late}
        rows.append({"two_tiers": label, "vs_best": whole, **halves})
        return whole

    def replay(label: str, variant: str, speeds: Speeds) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for name in (*BASELINES, DEFAULT_POLICY):
            outcomes[name] = two_tiers(requests, name, variant, speeds)
            show(label, name, outcomes[name])
        return outcomes

    judged = 0.0
    by_variant: dict[str, dict[str, Outcome]] = {}
    for variant in (JUDGED_VARIANT, "exclusive") if quick else VARIANTS:
        by_variant[variant] = replay(variant, variant, normal)
        ratio = ratios(variant, by_variant[variant])
        if variant == JUDGED_VARIANT:
            judged = ratio
    show("future known", "belady", belady_two_tiers(requests, nexts, normal))
    best = max(o[name].saved_s for o in by_variant.values() for name in BASELINES)
    ours = max(o[DEFAULT_POLICY].saved_s for o in by_variant.values())
    print(f"best variant of each: {ours / best:.3f}")
    rows.append({"two_tiers": "best variant of each", "vs_best_anywhere": ours / best})
    if not quick:
        for factor in (0.5, 2.0):
            label = f"{JUDGED_VARIANT}, SSD x {factor:g}"
            speeds = replace(normal, ssd_bytes_s=factor * normal.ssd_bytes_s)
            ratios(label, replay(label, JUDGED_VARIANT, speeds))
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer variants and timing rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and checks there")
    parser.add_argument("--trace", type=Path, default=Path(os.environ.get("KVPOOL_TRACE", TRACE)))
    options = parser.parse_args()
    if not options.trace.is_file():
        raise SystemExit(f"there is no trace at {options.trace}; name one with --trace")
    requests = read_trace(options.trace)
    nexts = next_uses(requests)

    rows: list[dict[str, Any]] = []
    one_tier = one_tier_report(requests, nexts, rows)
    two_tier = two_tier_report(requests, nexts, rows, quick=options.quick)
    print(f"\n{'ns an entry':14}" + "".join(f"{op:>9}" for op in OPERATIONS))
    for name in MAKERS:
        ns = ns_per_operation(name, 400 if options.quick else 2_000)
        print(f"{name:14}" + "".join(f"{ns[op]:9.0f}" for op in OPERATIONS if op in ns))
        rows.append({"policy": name, **{f"{op}_ns": took for op, took in ns.items()}})

    checks = [
        {"name": "two_tier_cost_vs_best", "value": round(two_tier, 4), "at_least": 1.03},
        {"name": "one_tier_hit_vs_best", "value": round(one_tier, 4), "at_least": 0.97},
    ]
    print("\n* the default")
    for check in checks:
        print(f"{check['name']} {check['value']:.3f} (at least {check['at_least']})")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "checks": checks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
