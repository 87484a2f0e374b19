"""A daemon that takes its memory: what it says of it, and that it stops when it is told to."""

import io
import json
import os
import signal
from pathlib import Path

import pytest

from kvpool.cli.render.starting import waiting
from kvpool.cli.render.taking import FIRST_S, LINE_S, SCREEN_S, Taking
from kvpool.config import load
from kvpool.daemon.server.memory_wait import MemoryWait, write_wait
from kvpool.daemon.server.server import serve
from kvpool.memory.segment import Segment
from kvpool.storage.dram import PREFAULT_CHUNK_BYTES, DramSegment
from kvpool.telemetry import logs

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_has_a_line_every_few_seconds_and_none_of_a_quick_start():
    clock, file = Clock(), io.StringIO()
    taking = Taking(file, clock, logged=False)
    taking(GIB, 4 * GIB)
    assert file.getvalue() == ""
    clock.now_s += FIRST_S
    taking(2 * GIB, 4 * GIB)
    clock.now_s += LINE_S / 2
    taking(3 * GIB, 4 * GIB)
    assert file.getvalue() == "kvpool: taking 4 GiB of memory: 2/4 GiB\n"
    clock.now_s += LINE_S
    taking(4 * GIB, 4 * GIB)
    taking.end()
    assert file.getvalue().count("\n") == 1, "the last is the daemon's own line"


def test_a_terminal_has_one_line_that_goes_away():
    clock, screen = Clock(), Terminal()
    taking = Taking(screen, clock, logged=False)
    taking(GIB, 4 * GIB)
    taking(2 * GIB, 4 * GIB)  # too soon
    clock.now_s += SCREEN_S
    taking(3 * GIB, 4 * GIB)
    assert screen.getvalue().count("\r\x1b[Kkvpool: taking 4 GiB of memory") == 2
    assert "\n" not in screen.getvalue()
    taking(4 * GIB, 4 * GIB)
    taking.end()
    assert screen.getvalue().endswith(" stops\r\x1b[K")


def test_a_log_of_json_has_records(capsys):
    clock, file = Clock(), io.StringIO()
    logs.setup("info", "json")
    taking = Taking(file, clock, logged=True)
    clock.now_s += FIRST_S
    taking(GIB, 4 * GIB)
    logs.setup("warning", "text")
    assert file.getvalue() == ""
    record = json.loads(capsys.readouterr().err)
    assert (record["level"], record["message"]) == ("info", "taking 4 GiB of memory: 1/4 GiB")


def test_who_finds_no_daemon_learns_how_far_it_is(tmp_path):
    socket = str(tmp_path / "kvpool.sock")
    write_wait(socket, MemoryWait(0, 0, 0, 0, GIB, 4 * GIB))
    assert waiting(socket) == (
        f"the daemon at {socket} is starting, and takes its memory: 1/4 GiB so far"
    )


def test_a_segment_is_taken_in_steps():
    told: list[int] = []
    segment = DramSegment.create(2 * PREFAULT_CHUNK_BYTES + 4096, taken=told.append)
    segment.close()
    assert told == [PREFAULT_CHUNK_BYTES, 2 * PREFAULT_CHUNK_BYTES, 2 * PREFAULT_CHUNK_BYTES + 4096]


def test_nothing_stays_taken_when_it_is_stopped():
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        DramSegment.create(4096, taken=stop)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("number", "interrupted"), [(signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_a_signal_is_obeyed_between_two_steps(tmp_path, monkeypatch, number, interrupted):
    """Memory without end: only the signal ends it."""
    at: list[int] = []

    def endless(size: int, *, taken) -> Segment:
        while True:
            at.append(len(at))
            taken(size // 2)

    def tell(taken: int, wanted: int) -> None:
        assert (taken, wanted) == (8 << 20, 16 << 20)
        if len(at) == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(DramSegment, "create", endless)
    socket = tmp_path / "kvpool.sock"
    config = load(flags={"socket": str(socket), "memory": "16MiB"}, environ={})
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            serve(config, taking=tell)
    else:
        serve(config, taking=tell)
    assert len(at) > 2
    assert not socket.exists()
    assert not Path(f"{socket}.waits").exists()
    assert not Path(f"{socket}.memory").exists(), "what the next one may expect is what was taken"
