"""When a rank maps the daemon's device memory, and when it lets go of it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.plan import QUIET_S
from kvpool.engine_plugins.vllm.worker.attachment import REFUSED_S, Attachment
from kvpool.errors import SegmentError


class Daemon:
    """What the daemon has at the moment: memory, None, or an error."""

    def __init__(self) -> None:
        self.has: Any = None
        self.asked = 0
        self.now = 100.0

    def attach(self) -> Any:
        self.asked += 1
        if isinstance(self.has, Exception):
            raise self.has
        return self.has


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def attachment(daemon: Daemon, threads: Any) -> Attachment:
    return Attachment(daemon.attach, threads, lambda: daemon.now)


def step(attachment: Attachment, threads: Any) -> Any:
    """A step of the engine, and what the thread does meanwhile."""
    ended = attachment.look()
    threads.run()
    return ended


def test_the_first_try_is_waited_for(daemon: Daemon, pool_types: Any) -> None:
    daemon.has = pool_types.FakeDevice(7)
    attachment = Attachment(daemon.attach, ThreadPoolExecutor(1), lambda: daemon.now)
    attachment.begin()
    assert attachment.memory is daemon.has
    assert attachment.life == 7
    attachment.close()
    assert daemon.has.closed


def test_a_step_waits_for_nothing(
    daemon: Daemon, attachment: Attachment, threads: Any, pool_types: Any
) -> None:
    daemon.has = pool_types.FakeDevice(7)
    for _ in range(5):
        assert attachment.look() is None
        assert attachment.life == 0
    assert len(threads.waiting) == 1
    threads.run()
    attachment.look()
    assert attachment.life == 7
    for _ in range(5):
        step(attachment, threads)
    assert daemon.asked == 1


def test_a_daemon_without_device_memory_is_asked_ever_more_rarely(
    daemon: Daemon, attachment: Attachment, threads: Any
) -> None:
    for _ in range(3600):
        step(attachment, threads)
        daemon.now += 1
    assert 3600 / QUIET_S[1] <= daemon.asked <= 3600 / QUIET_S[1] + 10


def test_memory_that_cannot_be_mapped_is_told_once_and_left_alone(
    daemon: Daemon, attachment: Attachment, threads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.has = SegmentError("on another device")
    with caplog.at_level(logging.WARNING, "kvpool.vllm"):
        for _ in range(100):
            step(attachment, threads)
            daemon.now += REFUSED_S / 200
    assert daemon.asked == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "on another device" in caplog.text
    daemon.now += REFUSED_S
    step(attachment, threads)
    assert daemon.asked == 2
    assert attachment.life == 0


def test_the_next_life_is_attached_to(
    daemon: Daemon, attachment: Attachment, threads: Any, pool_types: Any
) -> None:
    first = daemon.has = pool_types.FakeDevice(7)
    step(attachment, threads)
    step(attachment, threads)
    first.alive, daemon.has = False, None
    assert step(attachment, threads) is first
    assert attachment.life == 0
    assert not first.closed, "that is for who knows of its readers"
    assert step(attachment, threads) is None
    daemon.has = pool_types.FakeDevice(8)
    for _ in range(20):  # it took the daemon a while
        step(attachment, threads)
        daemon.now += 0.1
    assert attachment.memory is daemon.has


def test_lives_that_end_at_once_are_not_tried_at_every_step(
    daemon: Daemon, attachment: Attachment, threads: Any, pool_types: Any
) -> None:
    ended = []
    for life in range(1, 1001):
        daemon.has = pool_types.FakeDevice(life)
        daemon.has.alive = False
        ended.append(step(attachment, threads))
        daemon.now += 0.01
    assert daemon.asked < 20
    assert sum(memory is not None for memory in ended) >= daemon.asked - 1


def test_what_was_mapped_and_never_taken_is_closed(
    daemon: Daemon, attachment: Attachment, threads: Any, pool_types: Any
) -> None:
    daemon.has = pool_types.FakeDevice(7)
    attachment.look()
    threads.run()
    attachment.close()
    assert daemon.has.closed
    assert attachment.memory is None


def test_a_try_that_never_began_is_dropped(
    daemon: Daemon, attachment: Attachment, threads: Any
) -> None:
    attachment.look()
    attachment.close()
    threads.run()
    assert daemon.asked == 0


def test_a_broken_invariant_is_not_hidden(
    daemon: Daemon, attachment: Attachment, threads: Any
) -> None:
    daemon.has = AssertionError("broken")
    step(attachment, threads)
    with pytest.raises(AssertionError):
        attachment.look()
