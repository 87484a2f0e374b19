"""LMCache's own programs over the adapter: its bench of adapters, and its server with the bench of that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S, until

Run = Callable[..., str]


@pytest.fixture(scope="module")
def shared(start_one: Any) -> Iterator[Any]:
    with start_one("--memory", "256MiB") as daemon:
        yield daemon


@pytest.fixture
def lmcache(tmp_path: Path) -> Run:
    """Run one of its commands to the end; what it says."""

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "lmcache.cli.main", *arguments],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def numbers(said: str, label: str) -> list[float]:
    """What its summary has under a label, in its order."""
    return [
        float(found)
        for found in re.findall(rf"^{re.escape(label)}: +([\d.]+)$", said, re.MULTILINE)
    ]


def test_its_bench_of_adapters_finds_every_byte(lmcache: Run, shared: Any, spec: Any) -> None:
    said = lmcache(
        *("bench", "l2", "--l2-adapter", json.dumps(spec(shared.socket)), "--no-skip-verify"),
        *("--num-keys", "8", "--data-size-kb", "256", "--rounds", "3", "--in-flight", "2"),
        *("--lookup-max-hit-rate", "1.0"),
    )
    assert numbers(said, "Total success") == [48.0] * 3, said
    assert numbers(said, "Rounds timed out") == [0.0] * 3
    assert numbers(said, "Actual hit rate") == [1.0]
    assert "keys data verified OK" in said
    speeds = numbers(said, "Throughput avg (MB/s)")
    assert speeds[0] > 0 and speeds[2] > 0


def test_its_servers_share_the_pool(lmcache: Run, serve: Any, shared: Any) -> None:
    def bench(server: Any) -> str:
        return lmcache(
            *("bench", "server", "--mode", "cpu", "--transfer-mode", "lmcache_driven"),
            *("--rpc-url", server.rpc, "--url", server.http, "--interval", "0"),
            *("--kvcache-shape-spec", "(2,128,16,2,64):float32:2", "--start", "1", "--end", "3"),
        )

    def chunks(said: str) -> dict[str, str]:
        """Of each request, the checksum of what it stored or got."""
        return dict(re.findall(r"\[(seq \d+)/(?:cold|warm)\] CHECKSUM: (\w+)", said))

    one = serve(shared)
    stored = bench(one)
    assert stored.count("/cold] LOOKUP: 0/8") == 2 and len(chunks(stored)) == 2
    until(one.idle, "all is stored")
    other = serve(shared)
    loaded = bench(other)
    assert loaded.count("/cold] LOOKUP: 8/8") == 2 and chunks(loaded) == chunks(stored)
    assert "(0 L1, 8 L2)" in other.log.read_text()
    status = other.ask("/status")["storage_manager"]["l2_adapters"][0]
    assert status["type"] == "KvpoolL2Adapter" and status["locks"] == 0

    # The control: without what the pool had, nothing is found.
    other.clear()
    with shared.client() as client:
        for digest in client.stats().tenants["default"].namespaces:
            client.evict(digest=bytes.fromhex(digest))
    assert bench(other).count("/cold] LOOKUP: 0/8") == 2
