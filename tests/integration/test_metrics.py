"""What a daemon counts is what was done to it: every number here is counted in the test as well."""

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.admin.metrics import Shown, render
from kvpool.client import OperatorClient
from kvpool.telemetry.metrics import collect
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import NamespaceRecord
from tests.support.waiting import PATIENCE_S

NBYTES = 64 << 10
MEMORY_BLOCKS = 64
RECORD = NamespaceRecord.simple("counted", block_bytes=NBYTES, block_tokens=16)


def inspect(daemon) -> NodeStats:
    with OperatorClient(daemon.socket, timeout_s=PATIENCE_S, connect=True) as client:
        return client.inspect("")


class Numbers:
    """What Prometheus would see of a daemon now."""

    def __init__(self, daemon) -> None:
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(render(inspect(daemon)).decode()):
            for sample in family.samples:
                self.samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"kvpool_{name}", frozenset(labels.items())]


def keys(count: int) -> bytes:
    return secrets.token_bytes(16 * count)


def data(count: int) -> np.ndarray[Any, Any]:
    return np.zeros((count, NBYTES), np.uint8)


@pytest.fixture
def small(start) -> Iterator[Any]:
    """A daemon that has room for so many blocks."""
    return start("--memory", f"{MEMORY_BLOCKS * NBYTES >> 20}MiB")


def test_puts_reads_and_misses_are_counted_exactly(small) -> None:
    with small.client() as client:
        ns = client.open(RECORD)
        there, other, absent = keys(12), keys(8), keys(5)
        assert client.put(ns, there, data(12)) == 12
        client.put(ns, other, data(8))
        client.put(ns, there, data(12))  # stores nothing
        out = data(12)
        assert client.get_into(ns, there, out).all()  # 12 of 12
        with client.acquire(ns, there[: 16 * 4] + absent) as lease:  # 4 of 9
            assert lease.blocks == 4
        assert client.acquire(ns, absent) is None  # 0 of 5
        assert client.match(ns, there + absent) == 12
        assert client.remove(ns, other) == 8
        client.match(ns, absent)
    numbers = Numbers(small)
    assert numbers("put_parts_total", tenant="default") == 20
    assert numbers("put_bytes_total", tenant="default") == 20 * NBYTES
    assert numbers("reads_total", tenant="default") == 3
    read = {
        result: numbers("read_blocks_total", tenant="default", result=result)
        for result in ("local", "fetched", "missed")
    }
    assert read == {"local": 16, "fetched": 0, "missed": 10}
    assert numbers("read_bytes_total", tenant="default", tier="dram") == 16 * NBYTES
    assert numbers("match_blocks_total", tenant="default", result="local") == 12
    assert numbers("match_blocks_total", tenant="default", result="missed") == 10
    assert numbers("dropped_parts_total", reason="removed", location="", tier="dram") == 8
    assert numbers("dropped_parts_total", reason="full", location="", tier="dram") == 0
    assert numbers("tier_parts", location="", tier="dram") == 12
    held = {"tenant": "default", "namespace": ns.digest.hex(), "model": "counted"}
    assert numbers("namespace_held_bytes", **held, tier="dram") == 12 * NBYTES
    assert numbers("leases") == 0


def test_what_goes_is_counted_by_why(small, until) -> None:
    """By want of room, by a quota, by an operator: each for itself, and the ages of what was evicted."""
    with small.client() as client:
        plain = client.open(RECORD)
        narrow = client.open(NamespaceRecord.simple("narrow", block_bytes=NBYTES, block_tokens=16))
        client.configure(narrow.digest, dram_quota=8 * NBYTES)
        for _ in range(3):
            client.put(narrow, keys(6), data(6))
        before = Numbers(small)
        assert before("tier_parts", location="", tier="dram") == 8
        assert before("dropped_parts_total", reason="quota", location="", tier="dram") == 10
        put = 0
        for _ in range(20):
            put += client.put(plain, keys(8), data(8))
        last = keys(4)
        put += client.put(plain, last, data(4))
        assert client.evict(last, digest=plain.digest) == 4
    numbers = Numbers(small)
    here = numbers("tier_parts", location="", tier="dram")
    gone = {
        reason: numbers("dropped_parts_total", reason=reason, location="", tier="dram")
        for reason in ("full", "quota", "ttl", "operator", "removed", "corrupt", "epoch")
    }
    assert gone["quota"] == 10 and gone["operator"] == 4
    assert gone["full"] == 18 + put - 10 - 4 - here > 0
    assert not any(gone[reason] for reason in ("ttl", "removed", "corrupt", "epoch"))

    def seen() -> float:
        return Numbers(small)("evicted_idle_age_seconds_count", tier="dram")

    until(lambda: seen() == gone["full"] + gone["quota"], what="all batches were looked at")


def test_what_comes_from_disks_is_claimed_served_and_timed(start, folder, until) -> None:
    daemon = start(
        *("--memory", f"{MEMORY_BLOCKS * NBYTES >> 20}MiB"),
        *("--ssd", f"{folder / 'disk'}=64MiB", "--ssd-write", "through"),
    )
    path = str(folder / "disk")
    with daemon.client() as client:
        ns = client.open(RECORD)
        first = keys(16)
        client.put(ns, first, data(16))
        until(
            lambda: Numbers(daemon)("tier_parts", location=path, tier="ssd") == 16, what="written"
        )
        for _ in range(30):
            client.put(ns, keys(8), data(8))
        assert not client.contains(ns, first).any()
        assert client.get_into(ns, first, data(16), wait_s=PATIENCE_S).all()
    numbers = Numbers(daemon)
    assert numbers("read_blocks_total", tenant="default", result="fetched") == 16
    assert numbers("read_blocks_total", tenant="default", result="local") == 0
    loads = {"tenant": "default", "tier": "ssd"}
    assert numbers("load_parts_total", **loads, outcome="loaded") == 16
    for outcome in ("absent", "mismatched", "failed", "cancelled"):
        assert numbers("load_parts_total", **loads, outcome=outcome) == 0
    assert numbers("load_bytes_total", **loads) == 16 * NBYTES
    assert numbers("tier_read_parts_total", location=path, tier="ssd") == 16
    assert numbers("fetch_wait_seconds_count") == 1
    transfers = numbers("load_seconds_count", tier="ssd")
    assert transfers >= 1
    assert numbers("load_estimate_ratio_count", tier="ssd") == transfers
    assert numbers("load_actual_seconds_total", tier="ssd") == pytest.approx(
        numbers("load_seconds_sum", tier="ssd")
    )
    assert numbers("tier_written_bytes_total", location=path, tier="ssd") >= 16 * NBYTES


def test_the_budget_for_writes_is_shown(start, folder) -> None:
    daemon = start("--ssd", f"{folder / 'disk'}=64MiB", "--ssd-bytes-per-day", "24GiB")
    numbers = Numbers(daemon)
    assert numbers("write_budget_bytes_per_day") == 24 << 30
    assert numbers("write_budget_left_bytes") == pytest.approx(1 << 30, rel=0.01)


def test_processes_are_told_of(start, folder) -> None:
    daemon = start("--ssd", f"{folder / 'disk'}=64MiB", "--transfer-workers", "2")
    kinds = sorted(process.kind for process in inspect(daemon).processes)
    assert kinds == ["control", "disk_worker", "transfer_worker", "transfer_worker"]
    assert {process.pid for process in inspect(daemon).processes} == set(daemon.family())
    numbers = Numbers(daemon)
    assert numbers("process_private_bytes", process="control") > 1 << 20
    assert numbers("process_cpu_seconds_total", process="control") > 0


def test_a_tenant_is_told_of_no_other(start) -> None:
    config = 'memory = "16MiB"\n[tenants.vermilion]\nmemory = "16MiB"\n'
    daemon = start(config=config)
    with daemon.client(tenant="vermilion") as client:
        ns = client.open(RECORD)
        client.put(ns, keys(3), data(3))
    assert "vermilion" not in str(daemon.stats())
    numbers = Numbers(daemon)
    assert numbers("put_parts_total", tenant="vermilion") == 3
    assert numbers("put_parts_total", tenant="default") == 0


def test_every_metric_is_told_by_a_node_with_disks_and_a_store(start, folder, until) -> None:
    (folder / "store").mkdir()
    daemon = start(
        *("--ssd", f"{folder / 'disk'}=64MiB"),
        *("--object-store", f"file://{folder / 'store'}", "--data-dir", str(folder / "data")),
    )
    # A node does not wait long for its disk before it is ready.
    until(lambda: daemon.stats().tiers.ssd[0].state == "serving", "the disk is open")
    stats = inspect(daemon)
    samples = collect(stats, Shown(stats, 200, 200))  # raises what is missing
    states = {
        (tier, state): value for (tier, _, state), value in samples["kvpool_tier_state"].items()
    }
    assert states["ssd", "serving"] and not states["ssd", "failed"]
    assert sum(on for (tier, _), on in states.items() if tier == "object") == 1
