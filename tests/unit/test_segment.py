"""Shared memory as a process takes it over, and as a daemon makes it."""

import errno
import fcntl
import mmap
import os
import re
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool.errors import SegmentError
from kvpool.memory.segment import F_ADD_SEALS, F_GET_SEALS, FAULT_CHUNK_BYTES, SEALS, Segment
from kvpool.storage import dram
from kvpool.storage.dram import KEEP_FREE_BYTES, PAGE, DramSegment, free_memory_bytes
from tests.support.waiting import until

MIB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def segment():
    segment = DramSegment.create(MIB)
    yield segment
    segment.close()


def test_sealed_against_every_change_of_size(segment):
    assert fcntl.fcntl(segment.fd, F_GET_SEALS) & SEALS == SEALS
    for size in (0, MIB // 2, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, F_ADD_SEALS, 8)


def test_all_pages_are_there(segment):
    assert os.fstat(segment.fd).st_blocks * 512 >= MIB


def test_not_inherited_by_programs(segment):
    assert not os.get_inheritable(segment.fd)


@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 3 * PAGE - 1, MIB + 123])
def test_whole_pages(size):
    segment = DramSegment.create(size)
    assert segment.size == size - size % PAGE
    assert os.fstat(segment.fd).st_size == segment.size
    segment.close()


@pytest.mark.parametrize("size", [0, -1, PAGE - 1])
def test_too_small(size):
    with pytest.raises(SegmentError, match="page"):
        DramSegment.create(size)


def test_larger_than_memory():
    before = descriptors()
    with pytest.raises(SegmentError, match=r"1073741824 MiB does not fit.*--memory"):
        DramSegment.create(1 << 50)
    assert descriptors() == before


def test_something_stays_with_the_machine():
    with pytest.raises(SegmentError, match="does not fit"):
        DramSegment.create(MIB, free_bytes=MIB + KEEP_FREE_BYTES - 1)
    DramSegment.create(MIB, free_bytes=MIB + KEEP_FREE_BYTES).close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_no_room_in_the_memory_file_system(monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = descriptors()
    with pytest.raises(SegmentError, match="no room for a DRAM segment of 1 MiB") as caught:
        DramSegment.create(MIB)
    assert os.strerror(number) in str(caught.value)
    assert "--memory" in str(caught.value)
    assert descriptors() == before


def test_other_failures_are_not_hidden(monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = descriptors()
    with pytest.raises(OSError, match="broken"):
        DramSegment.create(MIB)
    assert descriptors() == before


def test_a_limit_of_the_process():
    """The real kernel's no, in a process whose files may not grow."""
    code = """
from kvpool.storage.dram import DramSegment
from kvpool.errors import SegmentError
try:
    DramSegment.create(8 << 20)
except SegmentError as error:
    print(error)
DramSegment.create(1 << 20)
print("goes on")
"""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))

    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert "no room for a DRAM segment of 8 MiB" in first
    assert "File too large" in first
    assert second == "goes on"


def test_mappings_share_and_outlive_the_descriptor(segment):
    one, two = segment.map(), Segment.attach(os.dup(segment.fd), MIB).map(fault_in=True)
    one[5:8] = b"abc"
    segment.close()
    segment.close()
    assert two[5:8] == b"abc"


def entered_kib() -> int:
    """How much of its segments this process has in its page table."""
    parts = Path("/proc/self/smaps").read_text().split("kvpool-segment")[1:]
    return sum(int(re.search(r"^Rss: +(\d+) kB", part, re.MULTILINE)[1]) for part in parts)


def test_pages_are_faulted_in_while_a_mapping_is_used():
    with closing(DramSegment.create(FAULT_CHUNK_BYTES + MIB)) as segment:
        before = entered_kib()
        mapping = segment.map(fault_in=True)
        until(lambda: entered_kib() == before + segment.size // 1024, "all pages are entered")
        del mapping
        until(lambda: entered_kib() == before, "the mapping ends with its last user")


def test_a_forked_child_does_not_have_the_mapping(segment):
    mapping = segment.map()
    assert "kvpool-segment" in Path("/proc/self/maps").read_text()
    pid = os.fork()
    if pid == 0:
        os._exit("kvpool-segment" in Path("/proc/self/maps").read_text())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    mapping.close()


def test_attach_checks_what_it_is_given(tmp_path):
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    with pytest.raises(SegmentError, match="not sealed"):
        Segment.attach(fd, PAGE)
    with pytest.raises(SegmentError, match="announced"):
        Segment.attach(fd, 2 * PAGE)
    os.close(fd)
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(SegmentError, match="not a memory segment"):
        Segment.attach(fd, PAGE)
    os.close(fd)


# ---- free memory -------------------------------------------------------------------------------------


def test_free_memory_is_plausible():
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    assert 0 <= free_memory_bytes() < page * pages


@pytest.fixture
def cgroup(monkeypatch, tmp_path):
    """A made-up control group: files by name."""

    class Fake(type(tmp_path)):
        def read_text(self, *args, **kwargs):
            text = str(self)
            if text in files:
                return files[text]
            raise FileNotFoundError(text)

    files = {
        "/proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:   4096 kB\n",
        "/proc/self/cgroup": "0::/pod/box\n",
    }
    monkeypatch.setattr(dram, "Path", Fake)

    def write(folder: str = "pod/box", **values: str) -> None:
        for name, value in values.items():
            files[f"/sys/fs/cgroup/{folder}/{name.replace('_', '.', 1)}"] = value

    return SimpleNamespace(write=write, files=files)


def test_without_a_control_group(cgroup):
    assert free_memory_bytes() == 4 * MIB


def test_a_control_group_without_a_limit(cgroup):
    cgroup.write(memory_max="max\n", memory_current="5\n")
    assert free_memory_bytes() == 4 * MIB


def test_what_a_control_group_leaves(cgroup):
    cgroup.write(memory_max=f"{3 * MIB}\n", memory_current=f"{MIB}\n")
    assert free_memory_bytes() == 2 * MIB


def test_what_the_kernel_would_drop_from_its_cache_is_free(cgroup):
    """A container that has read a model's weights has its limit full of cached file pages."""
    cgroup.write(
        memory_max=f"{3 * MIB}\n",
        memory_current=f"{3 * MIB}\n",
        memory_stat=f"anon {MIB}\ninactive_file {MIB}\nactive_file {MIB}\nshmem 7\n",
    )
    assert free_memory_bytes() == 2 * MIB


def test_a_limit_further_up_counts(cgroup):
    cgroup.write(memory_max="max\n", memory_current=f"{MIB}\n")
    cgroup.write("pod", memory_max=f"{2 * MIB}\n", memory_current=f"{MIB}\n")
    assert free_memory_bytes() == MIB


def test_a_machine_that_tells_nothing(cgroup):
    cgroup.files.clear()
    with pytest.raises(SegmentError, match="free memory"):
        free_memory_bytes()


def test_repr_names_the_size(segment):
    assert "1 MiB" in repr(segment)
    assert isinstance(segment.map(), mmap.mmap)
