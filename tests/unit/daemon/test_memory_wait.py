"""How large segments become, how long a daemon waits for their memory, and what it says when it is less."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.config.tables import TenantConfig
from kvpool.daemon.server.memory_wait import (
    FORGOTTEN_S,
    LESS,
    SAY_S,
    Last,
    LastSegment,
    MemoryWait,
    end_wait,
    last_mappers,
    missing_bytes,
    read_last,
    read_wait,
    sizes,
    wait_for_room,
    write_last,
    write_wait,
)
from kvpool.memory.mappers import Mapper
from kvpool.storage.dram import KEEP_FREE_BYTES, PAGE, DramSegment

GIB = 1 << 30
TOTAL = 64 * GIB


class Machine:
    """Memory that becomes free as time goes by."""

    def __init__(self, *free: int) -> None:
        self.free = list(free)
        self.now = 0.0
        self.notes: list[MemoryWait] = []
        self.mappers: list[Mapper] = []

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
                note=self.notes.append,
                mappers=lambda: self.mappers,
            )
        )


def test_a_daemon_waits_until_engines_have_let_go(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(20 * GIB, 20 * GIB, 60 * GIB)
    with caplog.at_level(logging.WARNING):
        assert machine.wait([TenantConfig("red", 40 * GIB)], {}) == 60 * GIB
    assert machine.now == pytest.approx(2)
    (said,) = caplog.messages
    assert "20736 MiB of memory are missing" in said and "run by root, names them" in said
    assert machine.notes[0] == MemoryWait(20736 << 20, 20 * GIB, 0, 30)
    assert (machine.notes[-1].waited_s, machine.notes[-1].left_s) == (1.75, 28.25)


def test_the_log_says_who_holds_the_memory_and_says_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine(20 * GIB)
    machine.mappers = [Mapper(12, "python3", 30 * GIB), Mapper(7, "vllm", 30 * GIB)]
    with caplog.at_level(logging.WARNING):
        machine.wait([TenantConfig("red", 40 * GIB)], {}, 2.5 * SAY_S)
    assert len(caplog.messages) == 3
    assert "by python3 (process 12, 30720 MiB), vllm (process 7, 30720 MiB)" in caplog.messages[2]
    assert "waiting up to 30 s more" in caplog.messages[2]


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
    socket = str(tmp_path / "kvpool.sock")
    assert read_last(socket) == {}
    tenants = [TenantConfig("red", 0.5), TenantConfig("blue", PAGE)]
    made = {"red": DramSegment.create(7 * PAGE), "blue": DramSegment.create(PAGE)}
    write_last(socket, tenants, made)
    assert read_last(socket) == {
        "red": LastSegment(0.5, 7 * PAGE, made["red"].inode),
        "blue": LastSegment(PAGE, PAGE, made["blue"].inode),
    }
    write_last(str(tmp_path / "no" / "folder"), tenants, made)  # is only logged
    for each in made.values():
        each.close()
    kept = tmp_path / "kvpool.sock.memory"
    kept.write_bytes(b'{"red":{"memory":0.5,"nbytes":4096}}')  # of a version before inodes
    assert read_last(socket) == {"red": LastSegment(0.5, PAGE)}
    assert last_mappers(socket) == []
    kept.write_bytes(b"{")
    assert read_last(socket) == {}


def test_who_still_maps_the_last_segments_is_known(tmp_path: Path) -> None:
    socket = str(tmp_path / "kvpool.sock")
    segment, other = DramSegment.create(2 * PAGE), DramSegment.create(PAGE)
    mapped, another = segment.map(), other.map()
    write_last(socket, [TenantConfig("red", 2 * PAGE)], {"red": segment})
    segment.close()
    (own,) = last_mappers(socket)
    assert (own.pid, own.nbytes) == (os.getpid(), 2 * PAGE)
    assert own.command == Path("/proc/self/comm").read_text().strip()
    mapped.close()
    assert last_mappers(socket) == []
    another.close()
    other.close()


def test_a_wait_is_seen_until_it_ends_or_its_daemon_is_killed(tmp_path: Path) -> None:
    socket = str(tmp_path / "kvpool.sock")
    waits = MemoryWait(GIB, 2 * GIB, 3, 27)
    assert read_wait(socket) is None
    write_wait(socket, waits)
    assert read_wait(socket) == waits
    before = time.time() - FORGOTTEN_S - 1
    os.utime(f"{socket}.waits", (before, before))
    assert read_wait(socket) is None
    write_wait(socket, waits)
    end_wait(socket)
    assert read_wait(socket) is None
    end_wait(socket)
    write_wait(str(tmp_path / "no" / "folder"), waits)
