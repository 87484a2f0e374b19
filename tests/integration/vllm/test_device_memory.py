"""Blocks that lie in the daemon's spare device memory are read there. The device is the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.telemetry.tier_stats import DeviceStats

Oracle = Callable[..., list[list[int]]]

DEVICE = ("--device", "cpu=16MiB")


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(4)


@pytest.fixture(scope="module")
def expected(oracle: Oracle, asked: list[list[int]]) -> list[list[int]]:
    return oracle("llama", asked)


def device(daemon: Any) -> DeviceStats:
    (found,) = daemon.client.stats().tiers.device
    return found


@contextmanager
def run_daemon(kit: Any, folder: Path, socket: str | None = None) -> Iterator[Any]:
    """A daemon whose device memory serves."""
    folder.mkdir()
    with kit.run_daemon(folder, socket=socket, more=DEVICE) as daemon:
        kit.until(lambda: device(daemon).state == "serving", "the device memory serves")
        yield daemon


def blocks_of(kit: Any, asked: list[list[int]]) -> int:
    return sum(len(prompt) // kit.BLOCK for prompt in asked)


def lift(kit: Any, engine: Any, daemon: Any, asked: list[list[int]]) -> None:
    """Have the prompts' blocks in device memory, and nowhere else."""
    blocks = blocks_of(kit, asked)
    for _ in range(2):  # the first time they are computed, the second time they are read
        engine.generate(asked)
        engine.forget()
    kit.until(lambda: device(daemon).blocks >= blocks, "what was read is on the device")
    kit.until(lambda: daemon.leases() == 0, "nothing is held")
    daemon.client.evict(tier="dram")


def test_an_engine_reads_the_daemons_device_memory(
    kit: Any,
    llama: Path,
    tmp_path: Path,
    expected: list[list[int]],
    asked: list[list[int]],
) -> None:
    # Nothing that depends on time decides which requests are computed together, which shows in the last bits.
    settings = {"load_mode": "sync", "resave_s": 0, "pull_wait_s": 0}
    with run_daemon(kit, tmp_path / "first") as daemon:
        path = daemon.socket
        with kit.run_engine(llama, path, settings) as engine:
            lift(kit, engine, daemon, asked)
            reads_it_there(kit, engine, daemon, asked, expected)
            a_block_that_is_given_up_while_it_is_read(kit, engine, daemon, asked, expected)
            lift(kit, engine, daemon, asked)
            a_daemon_that_dies_under_a_load(kit, engine, daemon, asked, expected)
            with run_daemon(kit, tmp_path / "second", socket=path) as second:
                the_next_daemon_is_attached_to(kit, engine, second, asked, expected)
                engine.assert_nothing_held(second)


def reads_it_there(
    kit: Any, engine: Any, daemon: Any, asked: list[list[int]], expected: list[list[int]]
) -> None:
    before = engine.metric("loaded_blocks")
    assert engine.metric("device_blocks") == 0
    outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected
    assert all(
        output.cached >= kit.hit(len(prompt)) for output, prompt in zip(outputs, asked, strict=True)
    )
    loaded = engine.metric("loaded_blocks") - before
    assert loaded >= sum(kit.hit(len(prompt)) // kit.BLOCK for prompt in asked)
    assert engine.metric("device_blocks") == loaded
    assert engine.metric("device_bytes") * engine.metric("loaded_blocks") == (
        engine.metric("loaded_bytes") * loaded
    )
    assert device(daemon).read_blocks == 0, "nothing was brought through memory"
    assert device(daemon).leased_blocks >= loaded
    assert engine.metric("failed_loads") == 0
    engine.forget()


def a_block_that_is_given_up_while_it_is_read(
    kit: Any, engine: Any, daemon: Any, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """It is held for its readers."""
    before = engine.metric("device_blocks")
    daemon.client.evict(tier="dram")
    held = []

    def evict_first(copy: Callable[..., None], *arguments: Any) -> None:
        daemon.client.evict(tier="device")
        held.append(device(daemon).used_bytes)
        copy(*arguments)

    with kit.loads_through(engine, evict_first):
        outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected
    assert engine.metric("device_blocks") > before
    assert engine.metric("failed_loads") == 0
    assert held[0] > 0
    engine.forget()
    daemon.client.evict(tier="device")
    kit.until(lambda: device(daemon).used_bytes == 0, "what was held came back")


def a_daemon_that_dies_under_a_load(
    kit: Any,
    engine: Any,
    daemon: Any,
    asked: list[list[int]],
    expected: list[list[int]],
) -> None:
    """What is copied from memory that may be somebody else's by then is not used."""
    half, copied = engine.worker, []
    memory = half._attachment.memory

    def kill_first(copy: Callable[..., None], group: Any, lease: Any, *rest: Any) -> None:
        if not copied:
            daemon.kill()
            kit.until(lambda: not memory.alive, "the death of the device process is known")
            for slots in lease.slots.values():
                slots.device_table[:] = 0x5A
        copied.append(1)
        copy(group, lease, *rest)

    with kit.loads_through(engine, kill_first):
        outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected
    assert copied == [1], "the other loads had no lease to join"
    assert engine.metric("failed_loads") == len(asked)
    assert half.report.life == 0
    assert engine.lookups.life == 0
    engine.forget()
    assert [output.tokens for output in engine.generate(asked)] == expected
    assert engine.metric("failed_loads") == len(asked)
    engine.forget()


def the_next_daemon_is_attached_to(
    kit: Any, engine: Any, daemon: Any, asked: list[list[int]], expected: list[list[int]]
) -> None:
    before = engine.metric("device_blocks")

    def used() -> bool:
        assert [output.tokens for output in engine.generate(asked)] == expected
        engine.forget()
        attached = engine.lookups.life
        return bool(attached) and device(daemon).blocks >= blocks_of(kit, asked)

    kit.until(used, "attached, saved anew, read, copied up: when the back-offs are over")
    daemon.client.evict(tier="dram")
    assert [output.tokens for output in engine.generate(asked)] == expected
    assert engine.metric("device_blocks") > before


def test_an_engine_that_is_told_not_to_reads_through_memory(
    kit: Any, llama: Path, tmp_path: Path, asked: list[list[int]]
) -> None:
    settings = {"attach_device": False}
    with (
        run_daemon(kit, tmp_path / "d") as daemon,
        kit.run_engine(llama, daemon, settings) as engine,
    ):
        lift(kit, engine, daemon, asked)
        before = engine.metric("loaded_blocks")
        engine.generate(asked)
        assert engine.metric("loaded_blocks") > before
        assert engine.metric("device_blocks") == 0
        assert device(daemon).read_blocks > 0
