"""Daemons that die, hang and come back under LMCache's adapter. Bytes are right, or it is a miss; every task ends."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S, until

Attach = Callable[..., Any]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the adapter has warned of so far, each without its cause."""
    return lambda: [
        record.getMessage().partition(":")[0]
        for record in caplog.records
        if record.name == "kvpool.lmcache" and record.levelno >= logging.WARNING
    ]


def works_again(kit: Any, adapter: Any, keys: list[Any]) -> None:
    until(lambda: kit.store(adapter, keys).is_successful(), "the new daemon stores")
    until(lambda: kit.cycle(adapter, keys) == list(range(len(keys))), "and is read")


def test_a_daemon_that_is_killed_between_a_lookup_and_its_load(
    kit: Any, start: Any, attach: Attach, warned: Any
) -> None:
    daemon = start("--memory", "64MiB")
    adapter = attach(daemon)
    keys = kit.keys(range(40))
    kit.store(adapter, keys)
    assert kit.look_up(adapter, keys) == list(range(40))
    daemon.kill()
    # Its memory is still mapped here, so that what was locked may yet be read: `load` compares the bytes.
    kit.load(adapter, keys)
    adapter.submit_unlock(keys)
    for _ in range(3):
        assert not kit.store(adapter, keys).is_successful()
        assert kit.look_up(adapter, keys) == []
        assert kit.load(adapter, keys) == []
    said = warned()
    assert len(said) == len(set(said)) == 3, "each once"
    status = adapter.report_status()
    assert status["is_healthy"] and status["locks"] == 0 and status["troubles"] == 3

    start("--memory", "64MiB")
    until(lambda: kit.store(adapter, keys[:5]).is_successful(), "the new daemon stores")
    until(lambda: kit.cycle(adapter, keys) == [0, 1, 2, 3, 4], "nothing else is found there")
    works_again(kit, adapter, keys)
    assert adapter.report_status()["troubles"] == 0


def test_a_daemon_that_is_killed_while_it_stores(kit: Any, start: Any, attach: Attach) -> None:
    daemon = start("--memory", "64MiB")
    adapter = attach(daemon)
    batches = [kit.keys(range(1000 * turn, 1000 * turn + 60)) for turn in range(8)]
    tasks = [adapter.submit_store_task(keys, [kit.full(key) for key in keys]) for keys in batches]
    ended: dict[int, Any] = {}

    def all_ended(count: int) -> bool:
        ended.update(adapter.pop_completed_store_tasks())
        return len(ended) >= count

    until(lambda: all_ended(1), "the first one")
    daemon.kill()
    until(lambda: all_ended(len(tasks)), "each of them")
    assert set(ended) == set(tasks)

    start("--memory", "64MiB")
    works_again(kit, adapter, batches[0])
    assert kit.cycle(adapter, batches[1]) == []


def test_locks_of_a_dead_daemon_are_never_read_out_of_the_next_one(
    kit: Any, start: Any, attach: Attach
) -> None:
    daemon = start("--memory", "16MiB")
    adapter = attach(daemon)
    keys = kit.keys(range(20))
    kit.store(adapter, keys)
    kit.look_up(adapter, keys)
    daemon.kill()
    start("--memory", "16MiB")
    others = kit.keys(range(1000, 1150))  # fills the place that they had
    until(lambda: kit.store(adapter, others).is_successful(), "the new daemon stores")
    kit.load(adapter, keys)  # compares the bytes of what it gets
    adapter.submit_unlock(keys)
    assert kit.cycle(adapter, keys) == []


def test_a_daemon_that_hangs_delays_no_task_for_ever(kit: Any, start: Any, attach: Attach) -> None:
    daemon = start("--memory", "64MiB")
    adapter = attach(daemon, request_timeout_s=0.3, wait_s=0.1)
    keys = kit.keys(range(10))
    works_again(kit, adapter, keys)
    daemon.signal(signal.SIGSTOP)
    assert kit.look_up(adapter, keys) == []
    assert not kit.store(adapter, kit.keys(range(100, 110))).is_successful()
    assert kit.load(adapter, keys) == []
    daemon.signal(signal.SIGCONT)
    works_again(kit, adapter, keys)


def test_a_server_may_start_before_its_daemon(
    kit: Any, start: Any, attach: Attach, folder: Path, warned: Any
) -> None:
    (folder / "node").mkdir()
    adapter = attach(str(folder / "node" / "kvpool.sock"))
    assert kit.look_up(adapter, kit.keys(range(3))) == []
    assert warned()[0].startswith("no daemon answers at")
    start("--memory", "64MiB")
    works_again(kit, adapter, kit.keys(range(3)))


@pytest.fixture
def two(start: Any, attach: Attach) -> tuple[Any, Any, Any, Any]:
    """Two nodes, of which the second one knows the first, and an adapter at each."""
    first = start("--memory", "64MiB", "--listen", "tcp://127.0.0.1:0", name="a")
    url = first.ready.rsplit("peers at ", 1)[1].strip()
    second = start("--memory", "64MiB", "--peer", url, name="b")
    return first, second, attach(first), attach(second, wait_s=PATIENCE_S)


def test_what_one_node_stores_another_one_loads(kit: Any, two: Any) -> None:
    _, second, here, there = two
    keys = kit.keys(range(12))
    kit.store(here, keys[::2])
    until(lambda: kit.cycle(there, keys) == [0, 2, 4, 6, 8, 10], "they come from the other node")
    assert second.stats().counters.pulled_blocks == 6
    there.delete(keys[:6])
    assert kit.cycle(there, keys) == [6, 8, 10], "deleted at both"


def test_a_node_that_dies_takes_along_what_it_alone_had(kit: Any, two: Any, attach: Attach) -> None:
    first, second, here, there = two
    both, alone = kit.keys(range(6)), kit.keys(range(100, 106))
    kit.store(here, both)
    until(lambda: kit.cycle(there, both) == list(range(6)), "they are at both")
    kit.store(here, alone)
    first.kill()
    quick = attach(second, wait_s=0.5)
    assert kit.cycle(quick, [*both, *alone]) == list(range(6))
