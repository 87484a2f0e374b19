"""Which eviction policy keeps the blocks that are asked for again, and saves most time with them?

Traces are replayed. JSON lines, either requests, whose `hash_ids` are the prefix-chained blocks of a prompt, or sessions
of agents (`bench/agent_sessions.py`), as streams of 40 and of 100 sessions at a time, from seeds. Sizes of tiers are
numbers of blocks, and shares of all blocks that differ.

*One tier.* A request hits its longest prefix that is there, touches it, and inserts what was missing. Hits, and the
seconds of prefill that they save. `belady` is the optimum of an oracle that evicts what is used furthest in the future.

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

All policies are replayed in the same variant. `belady` for two tiers: hits of the optimum on 5,000 blocks come from
DRAM, the other hits of the optimum on 55,000 from SSD, as if blocks moved between the tiers for nothing.

The speeds, for a block of 512 tokens of LLaMA-3-70B (80 layers, 8,192 wide, 70.6 G parameters), are
those of a server with 8 A800. KV is 327,680 bytes a token, 160 MiB a block: 6.7 ms over one PCIe 4.0
x16 link (25 GB/s), 28 ms from two NVMe disks (6 GB/s; what follows is faster and overlaps). Prefill
runs at half of 8 x 312 TFLOPS: 2 x parameters x tokens are 58 ms, and attention, 4 x layers x width x
tokens x context, adds 0.55 ms for each block before.

*Halves.* The constants of `aged` were chosen on the sessions that `half(judged=False)` gives, on the
conversation trace, Mooncake's synthetic one, and made-up ones. Of sessions the other half is judged. Of
requests the whole is judged and, since the first half of them finds empty tiers, the second by itself;
of the conversation trace none is unseen. `best` in the checks is the best of LRU, LFU and S3-FIFO, at
the size and trace where the default is worst. `agents_default_vs_lru` takes the mean of the seeds.

    python bench/eviction.py [--quick] [--json FILE] [--trace FILE]...
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import agent_sessions
from s3fifo import S3Fifo

from kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, Costs, Lru, make_policy

TRACE = Path(__file__).resolve().parents[1] / "../shared/traces/conversation_trace.jsonl"
SIZES = (1_000, 5_000, 10_000, 30_000)
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
ACTIVE, SEEDS = (40, 100), (0, 1, 2)  # of sessions
MERGED, MERGED_QUICK = 8, 32  # 64 tokens each
BATCH = 64  # as the daemon evicts
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

    def saved_s(self, hit: int) -> float:
        """By a hit of so many blocks in DRAM, with no tier below."""
        first = self.recompute_s(0) - self.dram.load_s
        return hit * first + self.dram.recompute_s_per_depth * hit * (hit - 1) / 2

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


SPEEDS = Speeds()


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

    def discard(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            entry.queue = 0

    def take(self, n: int) -> list[Any]:
        return [self.pop() for _ in range(n)]

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
    "s3fifo": S3Fifo,
}


@dataclass(frozen=True)
class Trace:
    """A stream of requests. agents: this many sessions at a time, from that seed; (0, 0): no sessions."""

    name: str
    requests: Requests
    agents: tuple[int, int] = (0, 0)
    nexts: list[list[int]] = field(default_factory=list)

    @property
    def asked(self) -> int:
        return sum(map(len, self.requests))

    def sizes(self, *, quick: bool) -> dict[str, int]:
        """Of a tier, in blocks, by how they are called."""
        unique = len({block for blocks in self.requests for block in blocks})
        sizes = {f"{share:.0%}": int(share * unique) for share in SHARES}
        if quick:
            return dict(list(sizes.items())[: 2 if self.agents[0] else 4])
        return sizes if self.agents[0] else sizes | {f"{n:,}": n for n in SIZES if n < unique}


def read_requests(path: Path) -> Requests:
    with path.open() as lines:
        return [list(dict.fromkeys(json.loads(line)["hash_ids"])) for line in lines]


def read_traces(paths: Sequence[Path], *, quick: bool) -> list[Trace]:
    """Of the files' formats, by their first lines."""
    traces = []
    for path in paths:
        with path.open() as lines:
            of_sessions = "requests" in json.loads(lines.readline())
        if not of_sessions:
            traces.append(Trace(path.stem, read_requests(path)))
            continue
        sessions = agent_sessions.read_sessions(path, MERGED_QUICK if quick else MERGED)
        judged = agent_sessions.half(sessions, judged=True)
        for active in ACTIVE:
            for seed in SEEDS[:1] if quick else SEEDS:
                turns = agent_sessions.arrivals(judged, active, seed)
                requests = [list(dict.fromkeys(arrival.turn.blocks)) for arrival in turns]
                name = f"{path.stem}, {active}, seed {seed}"
                traces.append(Trace(name, requests, (active, seed)))
    return [replace(trace, nexts=next_uses(trace.requests)) for trace in traces]


def prefix_length(blocks: Sequence[int], held: dict[int, Any]) -> int:
    for position, block in enumerate(blocks):
        if block not in held:
            return position
    return len(blocks)


@dataclass
class Saved:
    """By the hits of a replay: blocks and seconds of prefill, in all and in the second half of the requests."""

    asked: int = 0
    asked_late: int = 0
    hits: int = 0
    hits_late: int = 0
    s: float = 0.0
    late_s: float = 0.0

    def add(self, blocks: Sequence[int], hit: int, *, late: bool) -> None:
        saved_s = SPEEDS.saved_s(hit)
        self.asked += len(blocks)
        self.hits += hit
        self.s += saved_s
        if late:
            self.asked_late += len(blocks)
            self.hits_late += hit
            self.late_s += saved_s


def one_tier(requests: Requests, policy: Any, capacity: int) -> Saved:
    held: dict[int, Entry] = {}
    saved = Saved()
    for number, blocks in enumerate(requests):
        saved.add(blocks, prefix_length(blocks, held), late=2 * number >= len(requests))
        policy.touch([held[block] for block in blocks if block in held])
        new = [Entry(b, depth) for depth, b in enumerate(blocks) if b not in held][:capacity]
        room = max(0, len(held) + len(new) - capacity)
        for victim in policy.take(room):
            del held[victim.block]
        policy.insert(new)
        held.update((entry.block, entry) for entry in new)
    return saved


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


def one_tier_belady(requests: Requests, nexts: list[list[int]], capacity: int) -> Saved:
    """What `one_tier` is with the future known."""
    oracle = Belady(capacity)
    saved = Saved()
    for number, (blocks, following) in enumerate(zip(requests, nexts, strict=True)):
        saved.add(blocks, prefix_length(blocks, oracle.held), late=2 * number >= len(requests))
        oracle.use(blocks, following)
    return saved


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


def ns_per_block(name: str, rounds: int) -> dict[str, float]:
    """Median nanoseconds a block for put, evict and touch, in batches, on a tier of 20,000 blocks."""
    capacity = 20_000
    policy = MAKERS[name](capacity)
    resident = [[Entry(i * BATCH + j) for j in range(BATCH)] for i in range(capacity // BATCH)]
    for entries in resident:
        policy.insert(entries)
    times: dict[str, list[float]] = {"put": [], "evict": [], "touch": []}
    clock = time.perf_counter_ns
    for number in range(rounds):
        new = [Entry((1 << 32) + number * BATCH + j) for j in range(BATCH)]
        t0 = clock()
        taken = policy.take(BATCH)
        t1 = clock()
        policy.insert(new)
        t2 = clock()
        middle = resident[(number + len(resident) // 2) % len(resident)]
        chosen = [entry for entry in middle if entry.queue]
        t3 = clock()
        policy.touch(chosen)
        t4 = clock()
        assert len(taken) == BATCH
        times["evict"].append((t1 - t0) / BATCH)
        times["put"].append((t2 - t1) / BATCH)
        if chosen:
            times["touch"].append((t4 - t3) / len(chosen))
        resident[number % len(resident)] = new
    return {label: sorted(took)[len(took) // 2] for label, took in times.items()}


@dataclass(frozen=True)
class Job:
    """A replay: of one tier of so many blocks, or of two in that variant."""

    trace: int
    policy: str
    size: int = 0
    variant: str = ""
    ssd_factor: float = 1.0


TRACES: list[Trace] = []


def replay(job: Job) -> Any:
    trace = TRACES[job.trace]
    speeds = replace(SPEEDS, ssd_bytes_s=job.ssd_factor * SPEEDS.ssd_bytes_s)
    if job.variant:
        if job.policy == "belady":
            return belady_two_tiers(trace.requests, trace.nexts, speeds)
        return two_tiers(trace.requests, job.policy, job.variant, speeds)
    if job.policy == "belady":
        return one_tier_belady(trace.requests, trace.nexts, job.size)
    costs = replace(SPEEDS.dram, below_s=None)
    return one_tier(trace.requests, MAKERS[job.policy](job.size, costs), job.size)


def jobs_of(number: int, trace: Trace, *, quick: bool) -> list[Job]:
    active, seed = trace.agents
    known = [*BASELINES, DEFAULT_POLICY, "belady"]
    if active and (quick or seed):  # LFU is far behind there, and slow to replay
        known = ["lru", "s3fifo", DEFAULT_POLICY]
    jobs = [
        Job(number, name, size)
        for size in trace.sizes(quick=quick).values()
        for name in known
        if not quick or name != "belady"
    ]
    if active and (quick or seed):
        return jobs
    jobs += [Job(number, name, variant=JUDGED_VARIANT) for name in known]
    if not quick and not active:
        names = (*BASELINES, DEFAULT_POLICY)
        jobs += [Job(number, name, variant=variant) for variant in VARIANTS[1:] for name in names]
        jobs += [Job(number, name, 0, JUDGED_VARIANT, f) for f in (0.5, 2.0) for name in names]
    return jobs


class Report:
    """Prints the outcomes and collects rows and checks."""

    def __init__(self, outcomes: dict[Job, Any], *, quick: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self._outcomes = outcomes
        self._quick = quick
        self._worst: dict[str, tuple[float, str]] = {}

    def _lower(self, check: str, value: float, where: str) -> None:
        self._worst[check] = min(self._worst.get(check, (9.0, "")), (value, where))

    def one_tier(self, number: int, trace: Trace) -> None:
        print(f"\n{trace.name}: {len(trace.requests):,} requests, {trace.asked:,} blocks")
        print(f"{'hits, %, and ks saved':24}", end="")
        names = [*BASELINES, DEFAULT_POLICY, "belady"]
        print(
            "".join(f"{name:>16}" for name in names)
            + f"{'hits':>9}{'judged':>8}{'s':>8}{'judged':>8}  vs best"
        )
        for label, size in trace.sizes(quick=self._quick).items():
            by_name = {name: self._outcomes.get(Job(number, name, size)) for name in names}
            cells = [
                "" if o is None else f"{o.hits / o.asked:8.2%}{o.s / 1e3:8.1f}"
                for o in by_name.values()
            ]
            ours = by_name[DEFAULT_POLICY]
            base = [o for name in BASELINES if (o := by_name[name]) is not None]
            ratios = {
                what: getattr(ours, what) / max(1e-9, *(getattr(o, what) for o in base))
                for what in ("hits", "hits_late", "s", "late_s")
            }
            if not any(o.hits_late for o in base):
                continue
            told = "".join(f"{ratio:8.3f}" for ratio in ratios.values())
            print(
                f"{label + f' {size:,}':24}" + "".join(f"{cell:>16}" for cell in cells) + " " + told
            )
            where = f"{trace.name}, {label}"
            self._lower("one_tier_hit_vs_best", min(ratios["hits"], ratios["hits_late"]), where)
            self._lower("one_tier_seconds_vs_best", min(ratios["s"], ratios["late_s"]), where)
            for name, o in by_name.items():
                if o is not None:
                    row = {"trace": trace.name, "size": label, "blocks": size, "policy": name}
                    self.rows.append(row | {"hit_rate": o.hits / o.asked, "saved_s": o.s})

    def two_tiers(self, number: int, trace: Trace) -> None:
        jobs = [job for job in self._outcomes if job.trace == number and job.variant]
        if jobs:
            print(f"\n{trace.name}, {DRAM_BLOCKS:,} blocks of DRAM over {SSD_BLOCKS:,} of SSD")
            header = ("saved, s", "judged", "DRAM", "SSD", "written")
            print(" " * 34 + "".join(f"{column:>10}" for column in header))
        for job in jobs:
            outcome: Outcome = self._outcomes[job]
            label = job.variant + (f", SSD x {job.ssd_factor:g}" if job.ssd_factor != 1 else "")
            counts = (outcome.dram_hits, outcome.ssd_hits, outcome.written)
            shares = [n / trace.asked for n in counts]
            print(
                f"{label:24}{job.policy:10}{outcome.saved_s:10.0f}{outcome.late_s:10.0f}"
                + "".join(f"{share:10.2%}" for share in shares)
            )
            figures = dict(zip(("dram_hits", "ssd_hits", "ssd_writes"), shares, strict=True))
            row = {"trace": trace.name, "two_tiers": label, "policy": job.policy}
            self.rows.append(row | {"saved_s": outcome.saved_s, "late_s": outcome.late_s} | figures)
            if job.policy == DEFAULT_POLICY:
                base = [
                    self._outcomes[replace(job, policy=name)]
                    for name in BASELINES
                    if replace(job, policy=name) in self._outcomes
                ]
                whole = outcome.saved_s / max(o.saved_s for o in base)
                late = outcome.late_s / max(o.late_s for o in base)
                print(f"{label:24}{'vs best':10}{whole:10.3f}{late:10.3f}")
                if label == JUDGED_VARIANT:
                    self._lower("two_tier_cost_vs_best", min(whole, late), trace.name)

    def agents(self) -> None:
        """The default's hits against LRU's, for each number of sessions and size: means of the seeds."""
        cells: dict[tuple[int, str], list[float]] = {}
        for number, trace in enumerate(TRACES):
            if active := trace.agents[0]:
                for label, size in trace.sizes(quick=self._quick).items():
                    ours, lru = (
                        self._outcomes[Job(number, n, size)] for n in (DEFAULT_POLICY, "lru")
                    )
                    cells.setdefault((active, label), []).append(ours.hits / lru.hits)
        if cells:
            print("\nhits of agents against LRU's")
        for (active, label), ratios in cells.items():
            ratio = sum(ratios) / len(ratios)
            print(
                f"{active:5} sessions, {label:>4}: {ratio:.4f}  (seeds: {', '.join(f'{r:.4f}' for r in ratios)})"
            )
            self.rows.append({"active": active, "size": label, "default_vs_lru": ratio})
            self._lower("agents_default_vs_lru", ratio, f"{active} sessions, {label}")

    def speeds(self) -> None:
        print(
            f"\n{'ns a block':14}" + "".join(f"{op:>9}" for op in ("put", "evict", "touch", "all"))
        )
        totals = {}
        for name in MAKERS:
            ns = ns_per_block(name, 400 if self._quick else 2_000)
            totals[name] = sum(ns.values())
            print(f"{name:14}" + "".join(f"{took:9.0f}" for took in (*ns.values(), totals[name])))
            self.rows.append({"policy": name, **{f"{op}_ns": took for op, took in ns.items()}})
        self.checks.append(
            {
                "name": "policy_ns_per_block",
                "value": round(totals[DEFAULT_POLICY]),
                "at_most": round(2 * totals["lru"]),
            }
        )

    def finish(self) -> None:
        bounds = {
            "one_tier_hit_vs_best": 0.97,
            "one_tier_seconds_vs_best": 0.985,
            "two_tier_cost_vs_best": 1.0,
            "agents_default_vs_lru": 1.0,
        }
        print()
        for check, bound in bounds.items():
            if check in self._worst:
                value, where = self._worst[check]
                print(f"{check} {value:.4f} (at least {bound}; worst: {where})")
                self.checks.append(
                    {"name": check, "value": round(value, 4), "at_least": bound, "worst": where}
                )
        for row in self.checks:
            if "at_most" in row:
                print(f"{row['name']} {row['value']} (at most {row['at_most']}, twice LRU's)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer sizes, variants and seeds, larger blocks of agents",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and checks there")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        metavar="FILE",
        help="may be repeated; default: the known ones that are there",
    )
    options = parser.parse_args()
    known = [Path(os.environ.get("KVPOOL_TRACE", TRACE)), agent_sessions.default_path()]
    paths = options.trace or [path for path in known if path.is_file()]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise SystemExit(
            f"there is no trace at {', '.join(missing or map(str, known))}; name one with --trace"
        )
    TRACES.extend(read_traces(paths, quick=options.quick))
    jobs = [
        job for at, trace in enumerate(TRACES) for job in jobs_of(at, trace, quick=options.quick)
    ]
    longest_first = sorted(
        jobs, key=lambda job: -TRACES[job.trace].asked * (3 if job.variant else 1)
    )
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as processes:
        outcomes = dict(zip(longest_first, processes.map(replay, longest_first), strict=True))
    report = Report({job: outcomes[job] for job in jobs}, quick=options.quick)
    for number, trace in enumerate(TRACES):
        report.one_tier(number, trace)
        report.two_tiers(number, trace)
    report.agents()
    report.speeds()
    report.finish()
    if options.json:
        told = {"rows": report.rows, "checks": report.checks}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
