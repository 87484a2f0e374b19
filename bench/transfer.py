"""A block from another node, beside what any correct transfer must do on the same cores (`transfer_limits.py`).

    .venv/bin/python bench/transfer.py [--quick] [--json FILE] [--only PART]

pulls   two nodes on etcd and Redis: a batch that another node has is brought here. Beside a plain stream, and one whose
        receiver hashes each MiB, without and with the tags of connections without TLS (decision 48); and one block beside the fewest hand-overs between processes that there can be
nixl    the same over NIXL's lanes for TCP, beside NIXL itself and the hash. In the environment of the peers, which
        scripts/peers-venv makes on the first run
puts    on one node, beside memcpy
under   the p99 of `match` while pulls run, beside idle nodes
stages  where the time of one block, and of a prompt of 8 parts from 4 other nodes, goes: CPU by process
many    prompts of 8 parts, each of whose blocks are on 4 other nodes: throughput and the slowest by how many prompts
        are pulled at a time. Beside FILE comes FILE.png, which draws it

CPU seconds are those of all processes that take part.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import REPO, Daemon, Report, daemon, parse_arguments, percentile
from peers import (
    PEERS_PYTHON,
    UCX_TCP,
    Entry,
    alone,
    judge,
    kvpool_nixl,
    kvpool_tcp,
    make_environment,
    members,
    nobody,
    race,
)
from peers_results import KIB, LARGE, MIB, MIDDLE_MANY, Check, Results, Shape, compared
from store import fresh_keys, lookups_under_pulls, shared_memory

from kvpool.client import Client, OperatorClient
from kvpool.types import KEY_BYTES, Namespace, NamespaceRecord, PartSpec
from tests.support.servers.etcd import Etcd
from tests.support.servers.redis import Redis
from tests.support.waiting import until

SMALL_MANY, ONE = (4 * KIB, 4096), (4 * KIB, 1)
PULLS: Mapping[Shape, Sequence[str]] = dict.fromkeys(
    (LARGE, MIDDLE_MANY, SMALL_MANY, ONE), ("pull",)
)
OURS, NIXL = "kvpool tcp", "kvpool nixl tcp"
STREAM, HASHED, TAGGED, HOPS = "stream", "hashed stream", "tagged stream", "hops"
PUTS = ((64 * KIB, 64), LARGE)
RAW_NIXL, HASHED_NIXL = "nixl tcp", "hashed nixl"
LIMITS = "transfer_limits.py"


def pulls(folder: Path, etcd: str) -> list[Entry]:
    ours = sys.executable
    nothing: Any = lambda _: ({}, nobody)  # noqa: E731
    return [
        Entry(OURS, "kvpool-remote", kvpool_tcp(folder, etcd), ours),
        Entry(STREAM, "streams", lambda _: ({"count": 1}, nobody), ours),
        Entry(HASHED, "hashed-stream", nothing, ours, script=LIMITS),
        Entry(TAGGED, "tagged-stream", nothing, ours, script=LIMITS),
        Entry(HOPS, "hops", nothing, ours, script=LIMITS),
    ]


def over_nixl(folder: Path, etcd: str) -> list[Entry]:
    return [
        Entry(NIXL, "kvpool-remote", kvpool_nixl(folder, etcd, "tcp", UCX_TCP), sys.executable),
        Entry(RAW_NIXL, "nixl", alone(), variables=UCX_TCP),
        Entry(HASHED_NIXL, "hashed-nixl", alone(), variables=UCX_TCP, script=LIMITS),
    ]


def checks(results: Results) -> Iterator[Check]:
    def seconds(who: str, shape: Shape) -> float:
        return results.seconds((who,), "pull", shape)

    def cpu(who: str) -> float:
        return results.cpu((who,), "pull", LARGE)

    def to_limit(name: str, shape: Shape, bound: float) -> Check:
        return compared(name, lambda: seconds(HASHED, shape) / seconds(OURS, shape), at_least=bound)

    yield to_limit("pull_1m_vs_limit", LARGE, 0.95)
    yield to_limit("pull_64k_vs_limit", MIDDLE_MANY, 0.9)
    yield to_limit("pull_4k_vs_limit", SMALL_MANY, 0.5)
    yield compared("pull_cpu_vs_limit", lambda: cpu(OURS) / cpu(HASHED), at_most=1.15)
    yield compared("pull_one_vs_hops", lambda: seconds(OURS, ONE) / seconds(HOPS, ONE), at_most=1.5)


def nixl_checks(results: Results) -> Iterator[Check]:
    def seconds(who: str) -> float:
        return results.seconds((who,), "pull", LARGE)

    yield compared("nixl_1m_vs_limit", lambda: seconds(HASHED_NIXL) / seconds(NIXL), at_least=0.9)


# ---- many at once ------------------------------------------------------------------------------------

PEERS, PARTS = 4, 8
PROMPTS = 64
BLOCKS, PART_BYTES = 16, 64 * KIB  # 8 MiB a prompt
PATIENCE_S = 60.0
CLIENT_PULLS = 8  # of one client at a time
TOGETHER = (1, 2, 4, 8, 16, 32, 64)
KNEE_SHARE = 0.95  # of the most
COLLAPSE_TIMES = 4


def knee(throughput: Mapping[int, float]) -> int:
    """The fewest prompts at a time that give about as much as any number."""
    most = max(throughput.values())
    return min(n for n, gb_s in throughput.items() if gb_s >= KNEE_SHARE * most)


@dataclass
class Prompts:
    """64 prompts of 8 parts, each of whose blocks are on 4 nodes, and a fifth node to bring them to."""

    nodes: Sequence[Daemon]
    directory: Redis
    record: NamespaceRecord
    keys: Sequence[bytes]


def prompts_elsewhere(stack: contextlib.ExitStack, folder: Path, etcd: str, name: str) -> Prompts:
    record = NamespaceRecord({"model": "many", "block_tokens": 16}, (PartSpec(PART_BYTES),) * PARTS)
    rng = np.random.default_rng(6)
    data = rng.integers(0, 255, (BLOCKS, PART_BYTES), dtype=np.uint8)
    prompts = [fresh_keys(BLOCKS) for _ in range(PROMPTS)]
    memories = (1 << 30, *(256 * MIB for _ in range(PEERS)))
    nodes, directory = members(stack, folder, etcd, name, memories)
    share = BLOCKS // PEERS
    for number, node in enumerate(nodes[1:]):
        low = number * share
        with Client(node.socket, connect=True) as client:
            ns = client.open(record)
            for keys in prompts:
                for part in range(PARTS):
                    some = keys[KEY_BYTES * low : KEY_BYTES * (low + share)]
                    stored = client.put(ns, some, data[low : low + share], part=part)
                    assert stored == share, f"{stored} of {share} blocks are stored"
    with (
        Client(nodes[0].socket, connect=True) as engine,
        OperatorClient(nodes[0].socket, connect=True) as here,
    ):
        engine.open(record)
        until(lambda: all(len(here.locate(keys)) == BLOCKS for keys in prompts), "the directory")
    return Prompts(nodes, directory, record, prompts)


def many(report: Report, folder: Path, etcd: str) -> None:
    print("prompts of 8 parts from 4 nodes")
    with contextlib.ExitStack() as stack:
        made = prompts_elsewhere(stack, folder, etcd, "many")
        engines = [
            stack.enter_context(Client(made.nodes[0].socket, connect=True))
            for _ in range(max(TOGETHER) // CLIENT_PULLS)
        ]
        namespaces = [engine.open(made.record) for engine in engines]
        ns, prompts = namespaces[0], made.keys
        throughput: dict[int, float] = {}
        for together in TOGETHER:
            rounds = 1 if report.quick else 3
            at_once(engines, ns, prompts, together)  # warms up
            times, seconds = [], 0.0
            for _ in range(rounds):
                of_round, taken = at_once(engines, ns, prompts, together)
                times += of_round
                seconds += taken
            throughput[together] = BLOCKS * PARTS * PART_BYTES * len(times) / 1e9 / seconds
            report.row(
                f"{together} at a time",
                together=together,
                gb_s=throughput[together],
                p50_ms=1e3 * percentile(times, 0.5),
                p99_ms=1e3 * percentile(times, 0.99),
                slowest_ms=1e3 * max(times),
            )
        found = knee(throughput)
        beyond = min(COLLAPSE_TIMES * found, max(throughput))
        report.row("the knee", together=found)
        report.check("knee_collapse", throughput[beyond] / throughput[found], at_least=0.9)


def at_once(
    engines: Sequence[Client], ns: Namespace, prompts: Sequence[bytes], together: int
) -> tuple[list[float], float]:
    """Brings all prompts here, so many at a time: the seconds of each, and of all."""
    for keys in prompts:
        engines[0].remove(ns, keys)
    free: queue.SimpleQueue[Client] = queue.SimpleQueue()
    for number in range(together):
        free.put(engines[number % len(engines)])

    def bring(keys: bytes) -> float:
        engine = free.get()
        start = time.perf_counter()
        pulled = engine.pull(ns, keys, wait_s=PATIENCE_S)
        free.put(engine)
        taken = time.perf_counter() - start
        assert pulled == BLOCKS, f"{pulled} of {BLOCKS} blocks arrived"
        return taken

    with ThreadPoolExecutor(together) as threads:
        start = time.perf_counter()
        times = list(threads.map(bring, prompts))
        return times, time.perf_counter() - start


def draw(report: Report) -> None:
    """The picture beside the file."""
    assert report.json_path is not None
    picture = str(Path(report.json_path).with_suffix(".png"))
    command = [
        str(PEERS_PYTHON),
        str(REPO / "bench" / "transfer_plot.py"),
        report.json_path,
        picture,
    ]
    if subprocess.run(command, check=False).returncode:
        print("NO PLOT: matplotlib of .venv-peers failed", flush=True)


# ---- where the time goes -----------------------------------------------------------------------------

STAGES = (
    "client",
    "control here",
    "transfer worker here",
    "directory",
    "control there",
    "transfer workers there",
)
BAR = 40  # characters of the longest


def stages(report: Report, folder: Path, etcd: str) -> None:
    """CPU of each process for one block of 4 KiB, and for a prompt whose blocks have 8 parts on 4 nodes."""
    with contextlib.ExitStack() as stack:
        nodes, directory = members(stack, folder, etcd, "one", (256 * MIB, 256 * MIB))
        count = 500 if report.quick else 2000
        keys = fresh_keys(count)
        record = NamespaceRecord({"model": "one", "block_tokens": 16}, (PartSpec(4 * KIB),))
        with Client(nodes[1].socket, connect=True) as owner:
            owner.put(owner.open(record), keys, np.zeros((count, 4 * KIB), np.uint8))
        here = stack.enter_context(OperatorClient(nodes[0].socket, connect=True))
        with Client(nodes[0].socket, connect=True) as engine:
            ns = engine.open(record)
            until(lambda: len(here.locate(keys)) == count, "the directory")
            one = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
            _stages(report, "one block of 4 KiB", engine, ns, one, 1, nodes, directory)
    with contextlib.ExitStack() as stack:
        made = prompts_elsewhere(stack, folder, etcd, "stages")
        with Client(made.nodes[0].socket, connect=True) as engine:
            ns = engine.open(made.record)
            name = f"{BLOCKS} blocks of {PARTS} parts of 64 KiB from {PEERS} nodes"
            rounds = made.keys if report.quick else [*made.keys] * 4
            _stages(report, name, engine, ns, rounds, BLOCKS, made.nodes, made.directory)


def _stages(
    report: Report,
    name: str,
    engine: Client,
    ns: Namespace,
    prompts: Sequence[bytes],
    blocks: int,
    nodes: Sequence[Daemon],
    directory: Redis,
) -> None:
    here, *there = [psutil.Process(node.process.pid) for node in nodes]
    assert directory.process is not None
    processes = {
        "client": [psutil.Process()],
        "control here": [here],
        "transfer worker here": _transfer_workers(here),
        "directory": [psutil.Process(directory.process.pid)],
        "control there": there,
        "transfer workers there": [worker for each in there for worker in _transfer_workers(each)],
    }
    spent = dict.fromkeys(STAGES, 0.0)
    times = []
    for keys in prompts:
        engine.remove(ns, keys)
    before = {stage: _cpu_s(some) for stage, some in processes.items()}
    for number, keys in enumerate(prompts):
        if number and number % len(set(prompts)) == 0:
            for each in dict.fromkeys(prompts):
                engine.remove(ns, each)
        start = time.perf_counter()
        pulled = engine.pull(ns, keys, wait_s=PATIENCE_S)
        times.append(time.perf_counter() - start)
        assert pulled == blocks, f"{pulled} of {blocks} blocks arrived"
    for stage, some in processes.items():
        spent[stage] = (_cpu_s(some) - before[stage]) / len(prompts)
    print(f"{name}: {1e3 * percentile(times, 0.5):.2f} ms, and ms of CPU")
    longest = max(spent.values())
    for stage in STAGES:
        bar = "#" * round(BAR * spent[stage] / longest)
        print(f"  {stage:24}{1e3 * spent[stage]:7.2f} {bar}", flush=True)
    report.rows.append(
        {
            "name": name,
            "ms": 1e3 * percentile(times, 0.5),
            "cpu_ms": {s: 1e3 * spent[s] for s in STAGES},
        }
    )


def _transfer_workers(node: psutil.Process) -> list[psutil.Process]:
    return [each for each in node.children() if "transfer_worker" in " ".join(each.cmdline())]


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


# ---- all of it ---------------------------------------------------------------------------------------


def one_node(report: Report, folder: Path) -> None:
    with daemon(folder, "one", "1GiB") as node, Client(node.socket, connect=True) as client:
        shared_memory(report, client, PUTS)


def two_nodes(report: Report, folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(daemon(folder, "a", "1GiB", "--listen", "tcp://127.0.0.1:0"))
        b = stack.enter_context(daemon(folder, "b", "1GiB", "--peer", a.url))
        owner = stack.enter_context(Client(a.socket, connect=True))
        puller = stack.enter_context(Client(b.socket, connect=True))
        lookups_under_pulls(report, owner, puller, [a.socket, b.socket])


def main() -> int:
    report, arguments = parse_arguments(__doc__ or "")

    def wanted(part: str) -> bool:
        return arguments.only in part

    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name,
        Etcd(Path(name)) as etcd,
    ):
        folder = Path(name)
        if wanted("pulls"):
            results = Results()
            race(report, results, lambda into: pulls(into, etcd.url), PULLS)
            judge(report, results, checks(results))
        if wanted("nixl"):
            make_environment()
            results = Results()
            race(report, results, lambda into: over_nixl(into, etcd.url), {LARGE: ("pull",)})
            judge(report, results, nixl_checks(results))
        if wanted("under"):
            two_nodes(report, folder)
        if wanted("puts"):
            one_node(report, folder)
        if wanted("stages"):
            stages(report, folder, etcd.url)
        if wanted("many"):
            many(report, folder, etcd.url)
    status = report.finish()
    if report.json_path and wanted("many"):
        draw(report)
    return status


if __name__ == "__main__":
    sys.exit(main())
