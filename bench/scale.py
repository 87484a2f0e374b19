"""Many at a time: what a cluster does under as many requests as one node takes.

    .venv/bin/python bench/scale.py [--quick] [--json FILE] [--only PART]

hung_peer  sixty-four prompts of eight parts at a time, while one of three nodes is stopped and the others have all
"""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from harness import Report, median, parse_arguments

from kvpool.client import OperatorClient
from kvpool.types import Namespace, NamespaceRecord, PartSpec
from tests.support.local_cluster import LocalCluster
from tests.support.waiting import until

PROMPTS, PARTS, BLOCKS = 64, 8, 4
PART_BYTES = 16 << 10
WAIT_S = 4.0
DATA = np.random.default_rng(7).integers(0, 255, (PARTS, BLOCKS, PART_BYTES), dtype=np.uint8)

Prompt = list[bytes]


def hung_peer(report: Report) -> None:
    """A prompt's blocks have the same bytes in all prompts, so that each can be compared."""
    rounds = 2 if report.quick else 5
    record = NamespaceRecord({"model": "hung peer"}, (PartSpec(PART_BYTES),) * PARTS)
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        LocalCluster(Path(folder), memory="1GiB") as cluster,
        ThreadPoolExecutor(PROMPTS) as threads,
    ):
        cluster.wait_acquainted()
        owners = [cluster.node(name).client(connect=True) for name in "ab"]
        reader = cluster.node("c").client(connect=True, connections_max=PROMPTS)
        ns = reader.open(record)

        def fill() -> list[Prompt]:
            prompts = [[secrets.token_bytes(16) for _ in range(BLOCKS)] for _ in range(PROMPTS)]
            for owner in owners:
                mine = owner.open(record)
                for prompt in prompts:
                    for part in range(PARTS):
                        owner.put(mine, prompt, DATA[part], part=part)
            until(lambda: all(_announced(owner) for owner in owners), "all is announced")
            return prompts

        def read(prompts: Sequence[Prompt]) -> list[tuple[int, int, float]]:
            return list(threads.map(lambda prompt: _read(reader, ns, prompt), prompts))

        filled = [fill() for _ in range(2 * rounds + 1)]
        read(filled.pop())
        healthy = [found for _ in range(rounds) for found in read(filled.pop())]
        stopped = cluster.node("a")
        stopped.signal(signal.SIGSTOP)
        try:
            hung = [found for _ in range(rounds) for found in read(filled.pop())]
        finally:
            stopped.signal(signal.SIGCONT)
        for name, found in (("all nodes well", healthy), ("one of three stopped", hung)):
            report.row(
                name,
                prompts=len(found),
                missed=sum(BLOCKS - blocks for blocks, _, _ in found),
                wrong=sum(wrong for _, wrong, _ in found),
                median_ms=1e3 * median([taken for _, _, taken in found]),
                max_ms=1e3 * max(taken for _, _, taken in found),
            )
        report.check("hung_peer_missed", sum(BLOCKS - blocks for blocks, _, _ in hung), at_most=0)
        report.check("hung_peer_wrong", sum(wrong for _, wrong, _ in hung), at_most=0)
        report.check("hung_peer_max_s", max(taken for _, _, taken in hung), at_most=1.0)
        for client in (*owners, reader):
            client.close()


def _announced(client: OperatorClient) -> bool:
    directory = client.stats().cluster.directory
    return directory is not None and directory.queued == 0


def _read(client: OperatorClient, ns: Namespace, prompt: Prompt) -> tuple[int, int, float]:
    """The blocks that were there, the parts with wrong bytes, and the seconds until they were."""
    began = time.perf_counter()
    lease = client.acquire(ns, prompt, wait_s=WAIT_S)
    taken = time.perf_counter() - began
    if lease is None:
        return 0, 0, taken
    with lease:
        wrong = sum(
            bytes(slots.view(at)) != DATA[part, at].tobytes()
            for part, slots in lease.slots.items()
            for at in range(len(slots))
        )
        return lease.blocks, wrong, taken


PARTS_OF_BENCH = {"hung_peer": hung_peer}


def main() -> int:
    report, arguments = parse_arguments(__doc__.splitlines()[0])
    for name, part in PARTS_OF_BENCH.items():
        if arguments.only in name:
            part(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
