"""What operators do to a node with a million blocks, and what its engines notice of it.

    .venv/bin/python bench/admin.py [--quick] [--json FILE]

One node, blocks of 1 KiB: a million in one namespace, and a few in another, which one client reads all the while as an
engine does (match, acquire, copy out, release). Pages and scrapes are taken through the REST interface, as their
users take them. Evicting is a job, with the reader's p99 before it and while it runs, in turns. `--quick`: a fifth of
the blocks, fewer turns.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from harness import Report, daemon, median, parse_arguments, percentile, seconds

from kvpool.client import OperatorClient
from kvpool.types import Namespace, NamespaceRecord
from kvpool.wire import operator as operator_wire
from tests.support.servers.etcd import free_port

NBYTES = 1024
TOGETHER = 1000
READ_BLOCKS = 32
PAGE = 100
SLICE_S = 5.0
PACE_S = 0.002  # between two reads: an engine's scheduler is no closed loop


class Rest:
    """The REST interface of a daemon, as an operator asks it."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self._url + path)
        request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()


class Reader:
    """Reads blocks again and again in a thread; `take` gives the times of what was read since the last call."""

    def __init__(self, client: OperatorClient, ns: Namespace, keys: list[bytes]) -> None:
        self._client = client
        self._ns = ns
        self._keys = keys
        self._out = np.empty((READ_BLOCKS, NBYTES), dtype=np.uint8)
        self._times: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        at = 0
        while not self._stop.wait(PACE_S):
            keys = self._keys[at % len(self._keys)]
            at += 1
            begun = time.perf_counter()
            found = self._client.match(self._ns, keys)
            self._client.get_into(self._ns, keys, self._out)
            self._times.append(time.perf_counter() - begun)
            assert found == READ_BLOCKS, "nothing of this namespace is evicted"

    def take(self) -> list[float]:
        times, self._times = self._times, []
        return times

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def fill(client: OperatorClient, ns: Namespace, blocks: int) -> None:
    data = np.zeros((TOGETHER, NBYTES), dtype=np.uint8)
    rng = np.random.default_rng(time.time_ns())
    for _ in range(blocks // TOGETHER):
        client.put(ns, rng.bytes(16 * TOGETHER), data)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def pages(rest: Rest, digest: str) -> Iterator[int]:
    """How many blocks each page has."""
    cursor = ""
    while cursor is not None:
        more = f"&cursor={cursor}" if cursor else ""
        page = json.loads(rest.get(f"/v1/namespaces/{digest}/blocks?limit=1000&tier=dram{more}"))
        yield len(page["items"])
        cursor = page["next"]


def lists(report: Report, rest: Rest, digest: str, blocks: int, pids: list[int]) -> None:
    first = f"/v1/namespaces/{digest}/blocks?limit={PAGE}&tier=dram"
    times = [seconds(lambda: rest.get(first)) for _ in range(23)][3:]
    before = sum(map(resident_mib, pids))
    most = before
    seen = asked = 0
    begun = time.perf_counter()
    for count in pages(rest, digest):
        seen += count
        asked += 1
        most = max(most, sum(map(resident_mib, pids)))
    took = time.perf_counter() - begun
    report.row(
        "list of blocks",
        first_page_ms=median(times) * 1e3,
        all_s=took,
        pages=asked,
        blocks_s=seen / took,
        grew_mib=most - before,
    )
    report.check("list_first_page_ms", median(times) * 1e3, at_most=50)
    report.check("list_grew_mib", most - before, at_most=16)
    report.check("list_missed", abs(seen - blocks), at_most=0)


def scrapes(report: Report, rest: Rest) -> None:
    times = [seconds(lambda: rest.get("/metrics")) for _ in range(25)][5:]
    size = len(rest.get("/metrics"))
    report.row("metrics", ms=median(times) * 1e3, p99_ms=max(times) * 1e3, kib=size / 1024)
    report.check("metrics_ms", median(times) * 1e3, at_most=50)


def evicts(report: Report, client: OperatorClient, reader: Reader, big: Namespace) -> None:
    """The reader beside a job, and without it, a few seconds each by turns: the machine has moods of its own."""
    spec = json.dumps({"kind": "evict", "namespace": big.digest.hex()}).encode()
    turns = 4 if report.quick else 10
    idle: list[list[float]] = []
    during: list[list[float]] = []
    gone, took = 0, 0.0
    for turn in range(turns):
        name = f"bench-{turn}"
        reader.take()
        time.sleep(SLICE_S)
        idle.append(reader.take())
        begun = time.perf_counter()
        client.ask_node(operator_wire.BeginJob(name, spec))
        reader.take()
        time.sleep(SLICE_S)
        during.append(reader.take())
        client.ask_node(operator_wire.StopJob(name))
        took += time.perf_counter() - begun
        view = client.ask_node(operator_wire.Jobs([name]))[0]
        assert view.blocks, view
        gone += view.blocks
    p99 = [median([percentile(times, 0.99) for times in found]) for found in (idle, during)]
    report.row(
        "evict by namespace",
        blocks=gone,
        blocks_s=gone / took,
        p50_idle_us=median([median(times) for times in idle]) * 1e6,
        p50_us=median([median(times) for times in during]) * 1e6,
        p99_idle_us=p99[0] * 1e6,
        p99_us=p99[1] * 1e6,
        max_idle_ms=max(map(max, idle)) * 1e3,
        max_ms=max(map(max, during)) * 1e3,
    )
    report.check("evict_p99_vs_idle", p99[1] / p99[0], at_most=1.2)


def main() -> int:
    report, _ = parse_arguments(__doc__ or "")
    blocks = 200_000 if report.quick else 1_000_000
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        port = free_port()
        size = str(int(blocks * NBYTES * 1.1) + (64 << 20))
        node = stack.enter_context(
            daemon(folder, "a", size, "--http", f"127.0.0.1:{port}", "--http-rate", "1000")
        )
        token = (Path(node.socket).parent / "http.token").read_text().strip()
        rest = Rest(f"http://127.0.0.1:{port}", token)
        client = stack.enter_context(OperatorClient(node.socket, connect=True))
        served = client.open(NamespaceRecord.simple("served", block_bytes=NBYTES, block_tokens=16))
        big = client.open(NamespaceRecord.simple("big", block_bytes=NBYTES, block_tokens=16))
        keys = [np.random.default_rng(n).bytes(16 * READ_BLOCKS) for n in range(64)]
        for chain in keys:
            client.put(served, chain, np.zeros((READ_BLOCKS, NBYTES), dtype=np.uint8))
        fill(client, big, blocks)
        lists(report, rest, big.digest.hex(), blocks, node.pids)
        scrapes(report, rest)
        engine = stack.enter_context(OperatorClient(node.socket, connect=True))
        ns = engine.open(NamespaceRecord.simple("served", block_bytes=NBYTES, block_tokens=16))
        with Reader(engine, ns, keys) as reader:
            evicts(report, client, reader, big)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
