"""Daemons with NIXL: it carries what is pulled; where it breaks, TCP does, and that is counted."""

import os
import signal
from typing import Any

import pytest

from kvpool.telemetry.cluster_stats import NixlStats, WorkerStats
from tests.support.signals import send

pytest.importorskip("nixl_cu12", reason="NIXL is not installed: pip install --no-deps nixl-cu12")

NIXL = "nixl://127.0.0.1:"


def worker_of(seat: Any) -> WorkerStats:
    """The one for NIXL."""
    assert len(seat.stats.transfer_workers) == 2
    return seat.stats.transfer_workers[-1]


@pytest.fixture
def seats(start_cluster) -> tuple[Any, Any]:
    cluster = start_cluster(nodes=2, flags=["--listen", f"{NIXL}0"])
    a, b = cluster.seats()
    return a, b


def test_nixl_carries_what_is_pulled_and_tcp_what_it_cannot(seats, numbers, until):
    a, b = seats

    def moves(count: int) -> NixlStats:
        """Put at a, read at b: what b says of NIXL afterwards."""
        some = numbers(count)
        assert a.put(some) == count
        until(lambda: a.announced)
        assert b.read(some) == count  # compares each byte
        return b.stats.nixl

    members = b.members
    assert [t["url"].split(":")[0] for t in members["a"]["transports"]] == ["tcp", "nixl"]
    assert [t["metadata"] for t in members["a"]["transports"]] == ["", ""], (
        "nothing that opens memory"
    )

    seen = moves(40)
    assert (seen.blocks, seen.failed_over, seen.last_error) == (40, 0, "")
    assert seen.bytes == 40 * b.record.parts[0].nbytes
    until(lambda: not worker_of(a).loans)

    # It answers no more: TCP takes over, says so, and has its reason.
    send(worker_of(a).pid, signal.SIGSTOP)
    try:
        seen = moves(30)
    finally:
        os.kill(worker_of(a).pid, signal.SIGCONT)
    assert (seen.blocks, seen.failed_over, seen.failed_over_blocks) == (40, 1, 30)
    assert worker_of(a).listening[0] in seen.last_error
    assert "did not answer" in seen.last_error

    # It answers again, and is used again.
    until(lambda: moves(20).blocks > 40)

    # Another life at the same address: met anew.
    dead = worker_of(a).pid
    os.kill(dead, signal.SIGKILL)
    until(lambda: worker_of(a).alive and worker_of(a).pid != dead)
    before = b.stats.nixl.blocks
    until(lambda: moves(10).blocks > before)
    assert worker_of(b).restarts == 0, "nothing was under way when a's went"
