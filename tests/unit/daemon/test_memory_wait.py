"""How large segments become, how long a daemon waits for their memory, and what it says when it is less."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.config.tables import TenantConfig
from kvpool.daemon.server.memory_wait import (
    LESS,
    Last,
    LastSegment,
    missing_bytes,
    read_last,
    sizes,
    wait_for_room,
    write_last,
)
from kvpool.storage.dram import KEEP_FREE_BYTES, PAGE

GIB = 1 << 30
TOTAL = 64 * GIB


class Machine:
    """Memory that becomes free as time goes by."""

    def __init__(self, *free: int) -> None:
        self.free = list(free)
        self.now = 0.0

    def free_bytes(self) -> int:
        return self.free[min(int(self.now), len(self.free) - 1)]

    async def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def wait(self, tenants: list[TenantConfig], last: Last, seconds: float = 30.0) -> int:
        return asyncio.run(
            wait_for_room(
                tenants,
                last,
                seconds,
                free_bytes=self.free_bytes,
                total_bytes=TOTAL,
                pause=self.pause,
                clock=lambda: self.now,
            )
        )


def test_a_daemon_waits_until_engines_have_let_go(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(20 * GIB, 20 * GIB, 60 * GIB)
    with caplog.at_level(logging.WARNING):
        assert machine.wait([TenantConfig("red", 40 * GIB)], {}) == 60 * GIB
    assert machine.now == pytest.approx(2)
    (said,) = caplog.messages
    assert "20736 MiB of memory are missing" in said and "ended daemon" in said


def test_a_share_becomes_as_large_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    last = {"red": LastSegment(0.5, 30 * GIB)}
    machine = Machine(30 * GIB, 31 * GIB, 58 * GIB)
    with caplog.at_level(logging.WARNING):
        assert machine.wait([TenantConfig("red", 0.5)], last) == 58 * GIB
    assert len(caplog.messages) == 1


def test_a_share_that_cannot_be_had_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    last = {"red": LastSegment(0.5, 30 * GIB)}
    machine = Machine(20 * GIB)
    with caplog.at_level(logging.WARNING):
        assert machine.wait([TenantConfig("red", 0.5)], last, 7.0) == 20 * GIB
    assert machine.now == pytest.approx(7)
    assert "tenant red is smaller than before: 10240 MiB instead of 30720 MiB" in caplog.messages[1]


@pytest.mark.parametrize(
    ("memory", "last", "seconds"),
    [
        (40 * GIB, {}, 0.0),  # the setting says so
        (100 * GIB, {}, 30.0),  # more than the machine has
        (0.5, {}, 30.0),  # nothing is known of an earlier life
        (0.5, {"red": LastSegment(0.9, 50 * GIB)}, 30.0),  # it had another setting
        (0.5, {"blue": LastSegment(0.5, 50 * GIB)}, 30.0),
    ],
)
def test_nothing_is_waited_for_in_vain(memory: float, last: Last, seconds: float) -> None:
    machine = Machine(20 * GIB)
    assert machine.wait([TenantConfig("red", memory)], last, seconds) == 20 * GIB
    assert machine.now == 0


@given(
    st.lists(st.integers(PAGE, 80 * GIB) | st.floats(0.01, 0.3), min_size=1, max_size=3),
    st.lists(st.integers(0, 60 * GIB), min_size=3, max_size=3),
    st.integers(0, TOTAL),
)
def test_what_is_missing_is_enough(memory: list[int | float], before: list[int], free: int) -> None:
    tenants = [TenantConfig(str(number), each) for number, each in enumerate(memory)]
    last = {
        tenant.name: LastSegment(tenant.memory, had)
        for tenant, had in zip(tenants, before, strict=False)
    }
    missing = missing_bytes(tenants, free, last)
    assert missing >= 0
    if not missing:
        planned = sizes(tenants, free)
        assert sum(planned.values()) + KEEP_FREE_BYTES <= free
        for tenant in tenants:
            if isinstance(tenant.memory, float):
                assert planned[tenant.name] >= LESS * last[tenant.name].nbytes


def test_sizes_are_kept_for_the_next_life(tmp_path: Path) -> None:
    path = str(tmp_path / "kvpool.sock.memory")
    assert read_last(path) == {}
    tenants = [TenantConfig("red", 0.5), TenantConfig("blue", GIB)]
    write_last(path, tenants, {"red": 7 * PAGE, "blue": GIB})
    assert read_last(path) == {"red": LastSegment(0.5, 7 * PAGE), "blue": LastSegment(GIB, GIB)}
    Path(path).write_bytes(b"{")
    assert read_last(path) == {}
    write_last(str(tmp_path / "no" / "folder"), tenants, {"red": 1, "blue": 1})  # is only logged
