"""A worker's orders: each is answered once, and at once where it is called off before a thread has begun it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from kvpool.daemon.workers.worker_main import Control, Jobs
from kvpool.errors import Unavailable
from kvpool.transfer.base import Deadline, Stop
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire
from tests.support.waiting import PATIENCE_S


class World:
    """One thread for jobs, and what control hears."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(PATIENCE_S)
        self._theirs = theirs
        self._reader = frame.FrameReader()
        self._heard: list[tuple[int, frame.Message]] = []
        self.jobs = Jobs("test", 1, Control(theirs))
        self.begun: list[int] = []
        self.running = threading.Semaphore(0)
        self.gate = threading.Event()

    def add(self, request: int) -> None:
        def job(stop: Stop, deadline: Deadline) -> frame.Message:
            self.begun.append(request)
            self.running.release()
            assert self.gate.wait(PATIENCE_S)
            if stop.is_set:
                raise Unavailable("it was stopped")
            return frame.Done(request)

        self.jobs.add(request, PATIENCE_S, job)

    def wait_until_running(self) -> None:
        assert self.running.acquire(timeout=PATIENCE_S)

    def hear(self) -> tuple[int, frame.Message]:
        """The next answer."""
        while not self._heard:
            frames = self._reader.feed(self._ours.recv(1 << 16))
            self._heard += [
                (request, worker_wire.decode_transfer(payload)) for request, payload in frames
            ]
        return self._heard.pop(0)

    def close(self) -> None:
        self.gate.set()
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_what_waits_for_a_thread_is_called_off_at_once(world: World) -> None:
    world.add(1)
    world.wait_until_running()
    world.add(2)
    world.add(3)
    world.jobs.stop(2)
    number, answer = world.hear()
    assert number == 2
    assert isinstance(answer, frame.Error)
    world.jobs.stop(2)  # it has been answered
    world.gate.set()
    assert [world.hear() for _ in range(2)] == [(1, frame.Done(1)), (3, frame.Done(3))]
    assert world.begun == [1, 3]


def test_what_runs_is_told_and_answers_by_itself(world: World) -> None:
    world.add(1)
    world.wait_until_running()
    world.jobs.stop(1)
    world.jobs.stop(1)
    world.gate.set()
    number, answer = world.hear()
    assert (number, isinstance(answer, frame.Error)) == (1, True)
    world.add(2)
    assert world.hear() == (2, frame.Done(2))
