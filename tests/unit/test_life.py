"""What tells readers that the owner of memory may be gone."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvpool.errors import SegmentError
from kvpool.memory import owner_liveness as life
from kvpool.memory.owner_liveness import LifeView, OwnerLiveness

# A process of several threads that says when it lives, and ends when it is killed.
OWNER = """
import sys, threading, time
from kvpool.memory import owner_liveness as life
for _ in range(4):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
life.begin(int(sys.argv[1]))
print("lives", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def page() -> Iterator[OwnerLiveness]:
    page = OwnerLiveness()
    yield page
    with contextlib.suppress(ValueError):  # a test has ended it
        page.end()


@pytest.fixture
def owner(page: OwnerLiveness) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(page.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(page.fd,),
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "lives\n"
        yield process
        process.kill()


def view(page: OwnerLiveness) -> LifeView:
    return LifeView(os.dup(page.fd))


def test_nobody_lives_before_it_begins(page: OwnerLiveness) -> None:
    assert not view(page).alive


def test_a_life_ends_with_its_process(page: OwnerLiveness, owner: subprocess.Popen[str]) -> None:
    reader = view(page)
    assert reader.alive
    owner.send_signal(signal.SIGSTOP)
    assert reader.alive, "stopped is not dead"
    owner.kill()
    owner.wait()
    assert not reader.alive
    assert not view(page).alive


def test_a_life_ends_when_its_process_exits_by_itself(
    page: OwnerLiveness, owner: subprocess.Popen[str]
) -> None:
    reader = view(page)
    owner.communicate()
    assert owner.returncode == 0
    assert not reader.alive


def test_readers_cannot_change_it(page: OwnerLiveness, owner: subprocess.Popen[str]) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(page.fd, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.pwrite(page.fd, bytes(4), 0)
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)
    assert view(page).alive


def test_its_keeper_can_end_it(owner: subprocess.Popen[str], page: OwnerLiveness) -> None:
    reader = view(page)
    assert reader.alive
    page.end()
    assert not reader.alive


def test_what_is_no_life_is_refused() -> None:
    read, write = os.pipe()
    with pytest.raises(SegmentError):
        LifeView(read)
    with pytest.raises(SegmentError):
        life.begin(write)
