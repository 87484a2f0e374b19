"""How soon does the first token come, under kvpool's scheduler and under those of others?

The simulator replays a trace on 16 engines that compute prompts, LLaMA-3-70B on 8 A800 each, with a pool of
50 M tokens over their nodes. Every policy has the same pool, the same estimates and the same engines; only
the decision differs, and the queue: others send requests at once to the engine of their choice, where they
wait in the order of arrival. `kvpool/fifo` is our policy with requests in the order of arrival and whole. With
`/queued` another policy has our queue, so that only where a request goes differs. With `/wspt` requests wait in
the order of their sizes alone, the shortest first, as Dynamo's WSPT has it for requests of equal weight.

*Load* is the share of what the engines can do that the trace's work is over an infinite cache. The trace is
played faster or slower for it, so that it is the same for every policy. The trace tells times in steps of
3 s; a seed puts each arrival somewhere within its step. Judged is the second half of the trace, beginning
with an empty pool; constants were chosen on the first half (`--half 1` shows it). Ratios are means over seeds.

`bound`: one central queue in the order of arrival, over an infinite cache that has every block as soon as it
was asked for, whose loads cost nothing.

`pool_hit_vs_ideal`: hits over the whole trace at load 0.8 with 16 separate nodes, and events that reach the
scheduler's index 50 ms late, beside an infinite cache.

`--links`: half of the engines decode, and not all links are alike: two halves of the cluster with little between them,
and one card that is slow. Prompts and answers are paired by labels and assumptions (`assumed`), or by what daemons
have measured, as routers do (`measured`).

Runs are spread over the cores (`KVPOOL_BENCH_JOBS=1` for one at a time). A decision is timed, before
they begin: 64 engines, 1 M blocks, prompts of 12 k tokens in blocks of 16.

    python bench/sim.py [--quick] [--json FILE] [--trace FILE] [--half 1|2] [--wide | --paper | --links]
        [--plot PNG]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from harness import Report, percentile

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import POLICIES, make_policy
from kvpool.scheduler.queue import QueueRule
from kvpool.scheduler.values import Engine, Request, Role
from kvpool.simulator.bound import scale_for
from kvpool.simulator.plot import draw
from kvpool.simulator.report import spread, summary
from kvpool.simulator.shape import Shape
from kvpool.simulator.simulated_cluster import Simulation
from kvpool.simulator.speeds import Speeds, load_hardware, load_model
from kvpool.simulator.traces import STEP_S, Entry, arrivals, ideal_hits, read_trace
from tests.support.central_queue import central_queue

TRACE = Path(__file__).resolve().parents[1] / "../shared/traces/conversation_trace.jsonl"
LOAD, HEAVY = 0.8, 0.92
OURS, OURS_FIFO, OURS_WSPT = "kvpool", "kvpool/fifo", "kvpool/wspt"
WSPT = QueueRule(knee_s=1e9, aging=1e-9, begun=1.0)
"""So large a knee is the size itself."""
BASELINES = [name for name in POLICIES if name != OURS]
QUICK_BASELINES = ["mooncake-global"]
"""The strongest of all at both loads."""
WIDE_BASELINES = ["mooncake-global", "mooncake-local", "least-loaded"]
"""The strongest; the strongest on slow links; and the pool without affinity."""
BOUND = "bound"
WIDE_LOADS = (0.1, 0.4, 0.6, 0.8, 0.95)
WIDE_LINKS = (5e9, 25e9, 100e9)
CAPACITY_P90_S = 5.0
CAPACITY_LOADS = (0.75, 0.8, 0.84, 0.88, 0.92, 0.96, 1.0, 1.04)
"""Capacity is the highest of these loads, and all before it, at which 90 % have their token in that time."""

PAPER_TTFT_S = {
    "mooncake-global": 3.07,
    "mooncake-local": 3.58,
    "least-loaded": 5.27,
    "random": 19.65,
}
PAPER_FLOP_SHARE = 0.197

LINK_BYTES_S = 25e9
LINK_LOAD = 0.6
LINK_REQUESTS = 1500
SLOW_TIMES = 20.0
"""How many times slower than others a slow link is."""

RUNS = ProcessPoolExecutor(int(os.environ.get("KVPOOL_BENCH_JOBS", os.cpu_count() or 1)))
"""Runs are independent, and what they tell does not depend on the time that they take."""

Rows = dict[str, list[dict[str, float]]]


def played(entries: list[Entry], shape: Shape, load: float, seed: int) -> list[Request]:
    """The requests at this load, by this seed."""
    requests = arrivals(entries, seed, step_s=STEP_S)
    scale = scale_for(requests, shape.speeds, shape.prefill, shape.step_tokens, load)
    return arrivals(entries, seed, scale, step_s=STEP_S)


def simulate(requests: list[Request], shape: Shape, name: str) -> dict[str, Any]:
    policy, _, queue = name.partition("/")
    own = replace(shape, policy=policy, fifo=queue == "fifo", queued=queue == "queued")
    if queue == "wspt":
        own = replace(own, settings=replace(own.settings, queue=WSPT))
    began = time.process_time()
    simulation = Simulation(own, requests)
    found = summary(own, simulation, simulation.run())
    return {**found, "cpu_s": time.process_time() - began}


def task(todo: tuple[list[Entry], Shape, float, str]) -> dict[str, Any]:
    """One run, in whichever process: of these entries at this load under this policy, or the bound."""
    entries, shape, load, name = todo
    requests = played(entries, shape, load, shape.seed)
    if name == BOUND:
        ttft_s = central_queue(requests, shape.speeds, shape.prefill, shape.step_tokens)
        return {"ttft_s": spread(ttft_s)}
    return simulate(requests, shape, name)


def compare(
    report: Report, entries: list[Entry], shape: Shape, load: float, names: list[str], seeds: int
) -> Rows:
    """Times to first token of each policy and of the bound at one load, a row a seed."""
    todo = [
        (entries, replace(shape, seed=seed), load, name)
        for seed in range(seeds)
        for name in (*names, BOUND)
    ]
    found: Rows = {name: [] for name in (*names, BOUND)}
    for (_, own, _, name), result in zip(todo, RUNS.map(task, todo), strict=True):
        found[name].append(result["ttft_s"])
        if name == BOUND:
            continue
        report.row(
            f"{name}, load {load:g}",
            load=load,
            seed=own.seed,
            policy=name,
            **result["ttft_s"],
            hit=result["hit"],
            busy=result["busy"],
            pulled=result["pulled_blocks"],
            estimate_error=result["estimate_error"]["prefill"],
            cpu_s=result["cpu_s"],
        )
    for name, spreads in found.items():
        report.row(f"{name}, load {load:g}, mean", load=load, policy=name, **means(spreads))
    return found


def means(spreads: list[dict[str, float]]) -> dict[str, float]:
    return {key: mean(each[key] for each in spreads) for key in spreads[0]}


def best(found: Rows, key: str) -> float:
    """Of the baselines that ran."""
    return min(means(found[name])[key] for name in BASELINES if found.get(name))


def judge(report: Report, entries: list[Entry], shape: Shape, seeds: int) -> None:
    baselines = QUICK_BASELINES if report.quick else BASELINES
    names = [OURS, OURS_FIFO, OURS_WSPT, *baselines]
    normal = compare(report, entries, shape, LOAD, names, seeds)
    ours, fifo, bound = (means(normal[name]) for name in (OURS, OURS_FIFO, BOUND))
    for key in ("mean", "p90"):
        report.check(f"ttft_{key}_vs_best", ours[key] / best(normal, key), at_most=0.85)
    heavy_ones = QUICK_BASELINES[:1] if report.quick else baselines
    heavy = compare(report, entries, shape, HEAVY, [OURS, *heavy_ones], seeds)
    ratio = means(heavy[OURS])["mean"] / best(heavy, "mean")
    report.check("ttft_mean_vs_best_heavy", ratio, at_most=0.5)
    report.check("ttft_p99_vs_fifo", ours["p99"] / fifo["p99"], at_most=1.1)
    report.check("fifo_vs_bound", fifo["mean"] / bound["mean"], at_most=1.03)


def judge_hits(
    report: Report, entries: list[Entry], shape: Shape, run: Future[dict[str, Any]]
) -> None:
    requests = played(entries, shape, LOAD, 0)
    asked = sum(len(request.keys) for request in requests)
    ideal = sum(ideal_hits(requests)) / asked
    found = run.result()
    report.row("hits, whole trace", ideal=ideal, hit=found["hit"], cpu_s=found["cpu_s"])
    report.check("pool_hit_vs_ideal", found["hit"] / ideal, at_least=0.97)


def wide(report: Report, entries: list[Entry], shape: Shape) -> None:
    """Ours beside baselines: loads, links, estimates that are off, and what can be served in time."""
    for link in WIDE_LINKS:
        for load in WIDE_LOADS:
            own = replace(shape, network_bytes_s=link)
            versus(report, entries, own, load, f"{link / 1e9:g} GB/s, load {load:g}")
    versus(report, entries, replace(shape, noise=0.3), LOAD, "estimates with 30 % noise")
    versus(report, entries, replace(shape, shared=False), LOAD, "no pulling between nodes")
    capacity(report, entries, shape)


def versus(report: Report, entries: list[Entry], shape: Shape, load: float, label: str) -> None:
    names = [OURS, *WIDE_BASELINES]
    runs = RUNS.map(task, [(entries, shape, load, name) for name in names])
    ours, *others = [run["ttft_s"]["mean"] for run in runs]
    theirs = dict(zip(WIDE_BASELINES, others, strict=True))
    report.row(label, ours=ours, **theirs, ratio=ours / min(theirs.values()))


def capacity(report: Report, entries: list[Entry], shape: Shape) -> None:
    """Effective request capacity: up to which load requests get their first token in time."""
    served = {}
    for name in (OURS, *WIDE_BASELINES):
        served[name] = 0.0
        for load in CAPACITY_LOADS:
            (run,) = RUNS.map(task, [(entries, shape, load, name)])
            if run["ttft_s"]["p90"] > CAPACITY_P90_S:
                break
            served[name] = load
    report.row(f"load with p90 <= {CAPACITY_P90_S:g} s", **served)


def paper(report: Report, entries: list[Entry], shape: Shape) -> None:
    """FAST'25, Figures 5 and 10: the whole trace at its own speed, engines fitted to the first figure.

    Fitted is `flop_share`, so that the global scheduler's mean is the paper's 3.07 s. Not published, and
    stated here: 16 nodes, arrivals anywhere within their steps of 3 s, pools of 3.1 M tokens a node. Only
    the global scheduler pulls from other nodes.
    """
    fitted = replace(shape.speeds.hardware, flop_share=PAPER_FLOP_SHARE)
    base = replace(shape, speeds=replace(shape.speeds, hardware=fitted))
    requests = arrivals(entries, 0, step_s=STEP_S)
    load = scale_for(requests, base.speeds, base.prefill, base.step_tokens, 1.0)
    names = list(PAPER_TTFT_S)
    todo = [(requests, replace(base, shared=name == "mooncake-global"), name) for name in names]
    found = {}
    for name, run in zip(names, RUNS.map(simulate_as, todo), strict=True):
        found[name] = run["ttft_s"]["mean"]
        report.row(f"figure 5, {name}", load=load, mean=found[name], paper=PAPER_TTFT_S[name])
    ordered = sum(found[first] < found[then] for first, then in pairwise(names)) / (len(names) - 1)
    report.check("figure_5_order", ordered, at_least=1.0)
    gain = 1 - found["mooncake-global"] / found["mooncake-local"]
    report.check("figure_5_global_vs_local", gain, at_least=0.04)
    kinds = [(shared, name) for name in ("random", "mooncake-global") for shared in (False, True)]
    ten = replace(base, prefill=10, pool_tokens=30_000_000)
    slow = played(entries, ten, 0.5, 0)
    todo = [(slow, replace(ten, shared=shared), name) for shared, name in kinds]
    for (shared, _), run in zip(kinds, RUNS.map(simulate_as, todo), strict=True):
        pool = "global" if shared else "local"
        report.row(
            f"figure 10, {pool} pool", policy=run["policy"], hit=run["hit"], busy=run["busy"]
        )


def unequal_links(report: Report, entries: list[Entry], shape: Shape) -> None:
    """Seconds to the first token and to the end, with measured links and with assumed ones."""
    sides = [(f"prefill-{n}", f"decode-{n + 8}", n % 2) for n in range(8)]
    nodes = [(name, half) for prefill, decode, half in sides for name in (prefill, decode)]
    slow = LINK_BYTES_S / SLOW_TIMES
    halves = {(s, t): slow for s, one in nodes for t, other in nodes if one != other}
    card = {(s, "decode-8"): slow for s, _ in nodes if s != "decode-8"}
    labels = {name: {"rack": str(half)} for name, half in nodes}
    base = replace(shape, prefill=8, decode=8, pool_tokens=25_000_000, network_bytes_s=LINK_BYTES_S)
    kinds = {
        "alike": base,
        "two halves": replace(base, slow=halves),
        "two halves, labelled": replace(base, slow=halves, labels=labels),
        "one slow card": replace(base, slow=card),
    }
    runs = [(kind, measured) for kind in kinds for measured in (False, True)]
    todo = [
        (entries[:LINK_REQUESTS], replace(kinds[kind], measured=measured), LINK_LOAD, OURS)
        for kind, measured in runs
    ]
    found = dict(zip(runs, RUNS.map(task, todo), strict=True))
    for (kind, measured), run in found.items():
        report.row(
            f"{kind}, {'measured' if measured else 'assumed'}",
            load=LINK_LOAD,
            ttft_mean=run["ttft_s"]["mean"],
            ttft_p90=run["ttft_s"]["p90"],
            tpot_mean_ms=1e3 * run["tpot_s"]["mean"],
            tpot_p90_ms=1e3 * run["tpot_s"]["p90"],
            cpu_s=run["cpu_s"],
        )

    def check(name: str, kind: str, at_most: float) -> None:
        ours, theirs = (found[kind, measured]["tpot_s"]["mean"] for measured in (True, False))
        report.check(name, ours / theirs, at_most=at_most)

    check("alike_tpot_vs_assumed", "alike", 1.02)
    check("two_halves_tpot_vs_assumed", "two halves", 0.5)
    check("two_halves_tpot_vs_labels", "two halves, labelled", 1.0)
    check("slow_card_tpot_vs_assumed", "one slow card", 0.95)


def simulate_as(todo: tuple[list[Request], Shape, str]) -> dict[str, Any]:
    return simulate(*todo)


def decisions(report: Report, rounds: int) -> None:
    """Time of one decision, its look into the index included; hashing the prompt is not."""
    engines, index = decision_cluster()
    fit = StepEstimate((0.004, 1e-4, 1e-9))
    loads = {"dram": LoadEstimate(1e-4, 2e11), "peer": LoadEstimate(1e-3, 9e10)}
    kinds = {"engine": KindEstimates(fit, fit, loads, 2048, 16, 16 * 327_680)}
    cluster = Cluster(kinds, {e.tiers[0]: e.node for e in engines}, Traffic())
    rng = Random(0)
    policy = make_policy(OURS)
    gc.freeze()  # as a process does that holds such an index: no collection walks over it
    times, cpu = [], []
    for number in range(rounds):
        # A prompt whose parts lie on different nodes: what conversations that moved look like.
        keys = []
        for run in range(3):
            at = rng.randrange(64), rng.randrange(60) * 250
            keys += [key(at[0], at[1] + offset) for offset in range(250)]
            if number % 2:
                index.add(engines[(number + run) % 64].gpu, keys[:200])
        request = Request(number, keys, 12_000, 300, 0.0)
        began, began_cpu = time.perf_counter(), time.thread_time()
        match = index.match(keys, 0.0)
        policy.choose(DecisionContext(request, match, engines, cluster, rng, 0.0))
        cpu.append(1e3 * (time.thread_time() - began_cpu))
        times.append(1e3 * (time.perf_counter() - began))
    figures = {"p50_ms": percentile(times, 0.5), "p99_ms": percentile(times, 0.99)}
    figures["cpu_p99_ms"] = percentile(cpu, 0.99)
    report.row("decision", engines=64, blocks=len(index), prompt_blocks=750, **figures)


def key(node: int, block: int) -> bytes:
    return node.to_bytes(8) + block.to_bytes(8)


def decision_cluster() -> tuple[list[Engine], PrefixIndex]:
    index = PrefixIndex()
    engines = []
    for number in range(64):
        name = f"node-{number}"
        tiers = (f"dram:{name}",)
        engines.append(Engine(name, name, Role.PREFILL, "engine", f"gpu:{name}", tiers, 1 << 20))
        index.join(f"gpu:{name}", pool=False)
        index.join(f"dram:{name}", pool=True)
        index.add(f"dram:{name}", [key(number, block) for block in range(15_625)])
    return engines, index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, one baseline")
    parser.add_argument("--json", metavar="FILE", help="write rows and checks there")
    parser.add_argument(
        "--plot", metavar="PNG", help="draw times to first token by policy and load"
    )
    parser.add_argument("--trace", type=Path, default=Path(os.environ.get("KVPOOL_TRACE", TRACE)))
    parser.add_argument("--half", type=int, choices=(1, 2), default=2, help="of the trace")
    parser.add_argument("--wide", action="store_true", help="loads, links and noise as well")
    parser.add_argument("--paper", action="store_true", help="the figures of FAST'25 instead")
    parser.add_argument("--links", action="store_true", help="unequal links instead")
    options = parser.parse_args()
    if not options.trace.is_file():
        raise SystemExit(f"there is no trace at {options.trace}; name one with --trace")
    entries = read_trace(options.trace)
    middle = len(entries) // 2
    half = entries[:middle] if options.half == 1 else entries[middle:]
    report = Report(options.quick, options.json)
    shape = Shape(Speeds(load_hardware("a800x8"), load_model("llama-3-70b")))
    if options.paper:
        with RUNS:
            paper(report, entries, shape)
        raise SystemExit(report.finish())
    if options.links:
        with RUNS:
            unequal_links(report, half, shape)
        raise SystemExit(report.finish())
    decisions(report, 200 if options.quick else 2000)
    with RUNS:
        name = OURS_FIFO if options.quick else OURS  # in order and whole is half the work
        longest = RUNS.submit(task, (entries, shape, LOAD, name))  # so it goes first
        judge(report, half, shape, seeds=1 if options.quick else 3)
        judge_hits(report, entries, shape, longest)
        if options.wide:
            wide(report, half, shape)
    if options.plot is not None:
        draw(report.rows, options.plot)
    raise SystemExit(report.finish())


if __name__ == "__main__":
    main()
