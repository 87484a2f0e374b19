"""What does it gain to know the sessions of agents, and does the default policy do without?

Sessions of agents begin as a Poisson process, so often that 40 or 100 are active on average. All share one tier of
memory, a share of all their unique blocks. Each turn leases the longest prefix that is there, puts the rest in batches,
as chunks of a prefill do, and releases; it is a hit for the blocks that it found. This runs the daemon's own rules
(`kvpool.daemon.core.node.Node`), in which nothing is simulated but time and bytes.

    lru, default    nothing is told
    ends            each turn tells its session, agent and blocks, and the last one that it is the last
    belady          blocks that are used furthest in the future go first: the most hits that there can be

*Gap closed*: the share of what Belady has above LRU. *Seconds*: of prefill saved, with the speeds of eviction.py.
`bytes for 99`: the least memory with 0.99 of an infinite cache's hits, interpolated between capacities, beside LRU's.
`--judged` takes the half of the sessions on which nothing was chosen, `--chosen` the other half.

    python bench/agents.py [--quick] [--json FILE] [--sessions FILE] [--judged | --chosen]
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from agent_sessions import Arrival, Session, arrivals, default_path, half, read_sessions
from eviction import Speeds
from harness import Report

from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.sessions import Sessions
from kvpool.storage.eviction import DEFAULT_POLICY, policy_maker
from kvpool.types import KEY_BYTES, PartSpec, split_keys

ACTIVE = (40, 100)
SHARES = (0.02, 0.03, 0.04, 0.05, 0.07, 0.10, 0.20, 0.50)
JUDGED_SHARES = (0.02, 0.05, 0.10, 0.20, 0.50)
SEEDS = (1, 2, 3)
TRACE_BLOCK_TOKENS, SPEEDS_BLOCK_TOKENS = 64, 512
BATCH_TOKENS = 16_384  # of a put
SLOT_BYTES = 4096  # of which none are there
SLABS_MAX = 65_536  # of a segment
LEASE_S = 60.0
ENOUGH = 0.99
AGE_SAMPLE_S = 1.0


class Cell(NamedTuple):
    """One replay. how: see the top."""

    how: str
    active: int
    share: float
    seed: int


@dataclass
class Outcome:
    """hits, asked: blocks. saved_s: of prefill."""

    hits: int = 0
    asked: int = 0
    saved_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.hits / self.asked


class Worth:
    """Seconds of prefill that a hit of so many blocks saves."""

    def __init__(self, block_tokens: int) -> None:
        speeds = Speeds()
        scale = block_tokens / SPEEDS_BLOCK_TOKENS
        self._block_s = (speeds.recompute_s(0)) * scale
        self._growth_s = speeds.attention_flop / speeds.flop_s * scale * scale

    def seconds(self, blocks: int) -> float:
        return blocks * (self._block_s + self._growth_s * (blocks - 1) / 2)


@dataclass(frozen=True)
class Setting:
    """Which sessions, and in blocks of how many of the file's."""

    path: Path
    part: str  # all, judged, chosen
    merged: int

    @property
    def worth(self) -> Worth:
        return Worth(TRACE_BLOCK_TOKENS * self.merged)


@lru_cache(maxsize=1)
def sessions_of(setting: Setting) -> list[Session]:
    sessions = read_sessions(setting.path, setting.merged)
    return sessions if setting.part == "all" else half(sessions, judged=setting.part == "judged")


@lru_cache(maxsize=2)
def stream_of(setting: Setting, active: int, seed: int) -> list[Arrival]:
    return arrivals(sessions_of(setting), active, seed)


def capacity_of(setting: Setting, share: float) -> int:
    return max(1, int(share * sum(session.unique for session in sessions_of(setting))))


def replay(setting: Setting, cell: Cell) -> Outcome:
    stream = stream_of(setting, cell.active, cell.seed)
    if cell.how == "infinite":
        return infinite(stream, setting.worth)
    capacity = capacity_of(setting, cell.share)
    if cell.how == "belady":
        return belady(stream, capacity, setting.worth)
    policy = "lru" if cell.how == "lru" else DEFAULT_POLICY
    return on_a_node(setting, stream, capacity, policy, cell)


def on_a_node(
    setting: Setting, stream: Sequence[Arrival], capacity: int, policy: str, cell: Cell
) -> Outcome:
    node = Node(make_policy=policy_maker(policy), limits=Limits(grant_share=1.0))
    sessions = Sessions(node)
    slab_slots = -(-capacity // SLABS_MAX)
    capacity -= capacity % slab_slots
    slab_bytes = slab_slots * SLOT_BYTES
    tenant = node.add_tenant("", 0, capacity * SLOT_BYTES, slab_bytes)
    holder = node.holders.add("", "engine")
    parts = (PartSpec(SLOT_BYTES),)
    namespace = node.namespaces.open(tenant, b"n" * 16, b"{}", parts, may_free=lambda _: True)
    worth, outcome = setting.worth, Outcome()
    batch = max(1, BATCH_TOKENS // (TRACE_BLOCK_TOKENS * setting.merged))
    packed: dict[int, bytes] = {}  # by the identity of a turn's blocks, which turns share
    ticket, sampled_s = 0, -math.inf
    for arrival in stream:
        now, blocks = arrival.at_s, arrival.turn.blocks[:capacity]
        if not blocks:
            continue
        if now - sampled_s >= AGE_SAMPLE_S:
            node.idle_age.note(now, node.ledger.tick)
            sampled_s = now
        chain = packed.get(id(arrival.turn.blocks))
        if chain is None:
            chain = b"".join([block.to_bytes(KEY_BYTES, "little") for block in blocks])
            packed[id(arrival.turn.blocks)] = chain
        keys = split_keys(chain)
        lease = node.leases.acquire(holder, namespace, (0,), keys, LEASE_S, now)
        found = 0 if lease is None else lease.blocks
        outcome.hits += found
        outcome.asked += len(keys)
        outcome.saved_s += worth.seconds(found)
        at = found
        while at < len(keys):
            ticket += 1
            parent = keys[at - 1] if at else b""
            some = keys[at : at + batch]
            node.puts.reserve(holder, namespace, 0, ticket, some, parent)
            reserved = holder.reservations.get(ticket)
            if reserved is not None:
                node.puts.commit(holder, ticket, bytes(16 * len(reserved.rows)), None)
            at += len(some)
        if lease is not None:
            node.leases.release(holder, lease.token)
        node.settle()
        if cell.how == "ends":
            name, ended = str(arrival.session), arrival.pause_s is None
            sessions.turn(
                *(tenant, namespace, name, arrival.turn.agent, chain, now),
                ended=ended,
            )
            while sessions.work(4096):
                pass
    return outcome


def infinite(stream: Sequence[Arrival], worth: Worth) -> Outcome:
    outcome = Outcome()
    held: set[int] = set()
    for arrival in stream:
        blocks = arrival.turn.blocks
        found = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
        outcome.hits += found
        outcome.asked += len(blocks)
        outcome.saved_s += worth.seconds(found)
        held.update(blocks)
    return outcome


def belady(stream: Sequence[Arrival], capacity: int, worth: Worth) -> Outcome:
    following: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(stream) - 1, -1, -1):
        blocks = stream[number].turn.blocks
        following.append([seen.get(block, len(stream)) for block in blocks])
        seen.update(dict.fromkeys(blocks, number))
    following.reverse()
    outcome = Outcome()
    held: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    for arrival, nexts in zip(stream, following, strict=True):
        blocks = arrival.turn.blocks
        found = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
        outcome.hits += found
        outcome.asked += len(blocks)
        outcome.saved_s += worth.seconds(found)
        for depth, (block, use) in enumerate(zip(blocks, nexts, strict=True)):
            held[block] = use
            heapq.heappush(furthest, (-use, -depth, block))
        while len(held) > capacity:
            use, _, block = heapq.heappop(furthest)
            if held.get(block) == -use:
                del held[block]
    return outcome


def share_for(enough: float, rates: dict[float, float]) -> float:
    """The least capacity with this hit rate, on a straight line between the logarithms of those that were run."""
    before: tuple[float, float] | None = None
    for share, rate in sorted(rates.items()):
        if rate >= enough:
            if before is None:
                return share
            low, low_rate = before
            part = (enough - low_rate) / (rate - low_rate)
            return math.exp(math.log(low) + part * (math.log(share) - math.log(low)))
        before = share, rate
    return math.inf


def cells_of(seeds: Sequence[int], *, quick: bool) -> list[Cell]:
    """quick: only what checks are about."""
    wide = {"lru": SHARES, "default": JUDGED_SHARES, "ends": SHARES[:6]}
    wide |= {"belady": (0.05, 0.10), "infinite": (1.0,)}
    shares = dict.fromkeys(ACTIVE, wide)
    if quick:
        few = {"default": JUDGED_SHARES[:4], "infinite": (1.0,)}
        shares = {
            40: {**few, "lru": (0.02, 0.03, 0.04, 0.05, 0.10, 0.20), "ends": (0.02, 0.03, 0.05)},
            100: {**few, "lru": (0.02, 0.05, 0.07, 0.10, 0.20), "ends": (0.05, 0.07, 0.10)},
        }
        shares[40] |= {"belady": (0.05,)}
        shares[100] |= {"belady": (0.05, 0.10)}
    return [
        Cell(how, active, share, seed)
        for active in ACTIVE
        for seed in seeds
        for how, some in shares[active].items()
        for share in some
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one seed, larger blocks, few capacities"
    )
    parser.add_argument("--json", metavar="FILE", help="write rows and checks there")
    parser.add_argument("--sessions", type=Path, default=default_path(), metavar="FILE")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--judged", action="store_true", help="half of the sessions: not chosen on")
    part.add_argument("--chosen", action="store_true", help="the other half")
    options = parser.parse_args()
    if not options.sessions.is_file():
        raise SystemExit(
            f"there are no sessions at {options.sessions}; name a file with --sessions"
        )
    which = "judged" if options.judged else "chosen" if options.chosen else "all"
    setting = Setting(options.sessions, which, 32 if options.quick else 8)
    seeds = SEEDS[:1] if options.quick else SEEDS
    cells = cells_of(seeds, quick=options.quick)
    jobs = int(os.environ.get("KVPOOL_BENCH_JOBS", os.cpu_count() or 1))
    with ProcessPoolExecutor(jobs) as pool:
        # Those of one stream are replayed by one process, which has read it.
        outcomes = dict(
            zip(cells, pool.map(replay, [setting] * len(cells), cells, chunksize=4), strict=True)
        )
    report(Report(options.quick, options.json), setting, seeds, outcomes)


def report(
    out: Report, setting: Setting, seeds: Sequence[int], outcomes: dict[Cell, Outcome]
) -> None:
    tokens = TRACE_BLOCK_TOKENS * setting.merged
    print(
        f"{len(sessions_of(setting))} sessions ({setting.part}), blocks of {tokens} tokens, {len(seeds)} seeds"
    )

    def rate(how: str, active: int, share: float) -> float | None:
        some = [
            outcomes[cell] for seed in seeds if (cell := Cell(how, active, share, seed)) in outcomes
        ]
        return mean(each.rate for each in some) if some else None

    def closed(how: str, active: int, share: float, *, seconds: bool = False) -> float:
        """Mean over seeds."""

        def of(how: str, seed: int) -> float:
            outcome = outcomes[Cell(how, active, share, seed)]
            return outcome.saved_s if seconds else float(outcome.hits)

        return mean(
            (of(how, seed) - of("lru", seed)) / (of("belady", seed) - of("lru", seed))
            for seed in seeds
        )

    print(f"\n{'hit rate, %':20}" + "".join(f"{share:>9.0%}" for share in SHARES))
    for active in ACTIVE:
        for how in ("lru", "default", "ends", "belady"):
            rates = {share: rate(how, active, share) for share in SHARES}
            shown = ["        -" if each is None else f"{each:9.2%}" for each in rates.values()]
            print(f"{active:4} active {how:8}" + "".join(shown))
            out.rows += [
                {"active": active, "how": how, "share": share, "hit_rate": each}
                for share, each in rates.items()
                if each is not None
            ]
        print(f"{active:4} active infinite {rate('infinite', active, 1.0):9.2%}")
    print("\ngap closed           hits  seconds")
    for cell in sorted({(c.how, c.active, c.share) for c in outcomes if c.how == "ends"}):
        if ("belady", *cell[1:]) in {(c.how, c.active, c.share) for c in outcomes}:
            print(
                f"{cell[0]:7}{cell[1]:4} {cell[2]:5.0%}{closed(*cell):9.3f}{closed(*cell, seconds=True):9.3f}"
            )
    worst = min(
        outcomes[cell].hits / outcomes[cell._replace(how="lru")].hits
        for cell in outcomes
        if cell.how == "default"
    )
    needed = []
    for active in ACTIVE:
        enough = ENOUGH * (rate("infinite", active, 1.0) or 0.0)
        least = {
            how: share_for(
                enough, {s: r for s in SHARES if (r := rate(how, active, s)) is not None}
            )
            for how in ("lru", "ends")
        }
        print(
            f"{active:4} active: {ENOUGH} of the infinite cache's hits with {least['lru']:.1%} under LRU, "
            f"{least['ends']:.1%} where sessions are told"
        )
        needed.append(least["ends"] / least["lru"])
    out.check("agents_default_vs_lru", worst, at_least=1.0)
    out.check("agents_gap_closed_40_5", closed("ends", 40, 0.05), at_least=0.75)
    out.check("agents_gap_closed_100_10", closed("ends", 100, 0.10), at_least=0.5)
    out.check("agents_bytes_for_99", max(needed), at_most=0.75)
    out.finish()


if __name__ == "__main__":
    main()
