"""Device segments, on the CPU device everywhere and on a CUDA device where there is one."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.errors import InvalidRequest, SegmentError  # noqa: E402
from kvpool.storage import device as gpu  # noqa: E402
from kvpool.storage.device import DeviceSegment  # noqa: E402

pytestmark = pytest.mark.torch
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda:0", marks=needs_gpu)]
ROWS, STRIDE = 37, 1000

ENGINE = """
import sys
import numpy as np
from kvpool.storage.device import DeviceSegment

for line in sys.stdin:
    segment = DeviceSegment.attach(bytes.fromhex(line))
    host = np.zeros((2, segment.stride), np.uint8)
    segment.to_host(np.array([5, 1]), host, np.array([0, 1]))
    print(host.tobytes().hex(), flush=True)
    host[1] = 77
    segment.from_host(host, np.array([1]), np.array([3]))
    segment.close()
"""


@pytest.fixture(params=DEVICES)
def segment(request: pytest.FixtureRequest) -> Iterator[DeviceSegment]:
    made = DeviceSegment.create(request.param, ROWS, STRIDE)
    yield made
    made.close()


def filled(segment: DeviceSegment) -> np.ndarray:
    """Its rows, which are random bytes."""
    content = np.random.default_rng(1).integers(0, 256, (ROWS, STRIDE), np.uint8)
    segment.from_host(content, np.arange(ROWS), np.arange(ROWS))
    return content


@pytest.mark.parametrize("registered", [False, True])
def test_rows_cross_in_any_order(segment: DeviceSegment, registered: bool) -> None:
    memory = mmap.mmap(-1, 50 * STRIDE)
    if registered:
        if segment.table.device.type == "cpu":
            pytest.skip("the CPU device has no driver")
        gpu.register(memory)
    host = np.frombuffer(memory, np.uint8).reshape(50, STRIDE)
    random = np.random.default_rng(2)
    expected = filled(segment)
    with_runs = np.array([30, 20, 21, 22, 23, 1, 2, 9]), np.array([0, 5, 6, 7, 8, 40, 30, 31])
    scattered = [
        (random.permutation(ROWS)[:n], random.permutation(50)[:n]) for n in (0, 1, 8, ROWS)
    ]
    for rows, host_rows in (with_runs, *scattered, (np.arange(ROWS), np.arange(3, ROWS + 3))):
        wanted = host.copy()
        wanted[host_rows] = expected[rows]
        segment.to_host(rows, host, host_rows)
        assert np.array_equal(host, wanted)
        host[:] = random.integers(0, 256, host.shape, np.uint8)
        segment.from_host(host, host_rows, rows)
        expected[rows] = host[host_rows]
        assert np.array_equal(segment.table.cpu().numpy(), expected)
    assert (segment.rows, segment.stride) == (ROWS, STRIDE)


def test_an_engine_in_another_process_shares_the_memory(segment: DeviceSegment) -> None:
    content = filled(segment)
    engine = subprocess.run(
        [sys.executable, "-c", ENGINE],
        input=f"{segment.export().hex()}\n{segment.export().hex()}\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert engine.returncode == 0, engine.stderr
    assert engine.stdout.split() == 2 * [content[[5, 1]].tobytes().hex()]
    content[3] = 77
    assert np.array_equal(segment.table.cpu().numpy(), content)


def test_the_same_memory_cut_into_other_rows(segment: DeviceSegment) -> None:
    content = filled(segment).reshape(-1)
    rows = np.array([7, 0, 3])
    cut = segment.cut(3000)
    assert (cut.rows, cut.stride) == (ROWS * STRIDE // 3000, 3000)
    out = np.zeros((3, 3000), np.uint8)
    cut.to_host(rows, out, np.arange(3))
    assert np.array_equal(out, content[: cut.rows * 3000].reshape(-1, 3000)[rows])
    out[:] = 9
    cut.from_host(out, np.arange(3), rows)
    for row in rows:
        content[row * 3000 : (row + 1) * 3000] = 9
    cut.close()
    assert np.array_equal(segment.table.cpu().numpy().reshape(-1), content)
    for stride in (0, -1, ROWS * STRIDE + 1):
        with pytest.raises(InvalidRequest, match="no rows"):
            segment.cut(stride)


def test_what_is_attached_outlives_the_owners_close() -> None:
    owner = DeviceSegment.create("cpu", ROWS, STRIDE)
    content = filled(owner)
    engine = DeviceSegment.attach(owner.export())
    before = len(os.listdir("/proc/self/fd"))
    owner.close()
    owner.close()
    assert np.array_equal(engine.table.numpy(), content)
    engine.close()
    # Of each the descriptor, and the one that a mapping keeps for itself.
    assert len(os.listdir("/proc/self/fd")) == before - 4


def test_a_handle_of_a_closed_segment() -> None:
    owner = DeviceSegment.create("cpu", ROWS, STRIDE)
    handle = owner.export()
    owner.close()
    with pytest.raises(SegmentError, match="cannot be opened"):
        DeviceSegment.attach(handle)
    others = DeviceSegment.create("cpu", ROWS, STRIDE)  # under the same number
    with pytest.raises(SegmentError, match="its owner has closed it"):
        DeviceSegment.attach(handle)
    others.close()


@pytest.mark.parametrize(("at", "value"), [(1, -1), (1, 10**6), (2, 0), (3, 2**22), (6, 4096)])
def test_a_handle_that_was_altered(at: int, value: int) -> None:
    owner = DeviceSegment.create("cpu", ROWS, STRIDE)
    handle = msgspec.msgpack.decode(owner.export())
    inode = handle[5]
    before = _open_files(inode)
    assert before
    handle[at] = value
    with pytest.raises(SegmentError):
        DeviceSegment.attach(msgspec.msgpack.encode(handle))
    assert _open_files(inode) == before
    owner.close()


def _open_files(inode: int) -> int:
    """How often this process has this one open. Others come and go beside a test, and with the garbage."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            found += os.fstat(int(fd)).st_ino == inode
    return found


@pytest.mark.parametrize("handle", [b"", b"\x90", b"handle", msgspec.msgpack.encode(["cpu", 1])])
def test_what_is_no_handle(handle: bytes) -> None:
    with pytest.raises(SegmentError, match="not a valid handle"):
        DeviceSegment.attach(handle)


@pytest.mark.parametrize(
    ("rows", "host_rows"), [([-1], [0]), ([0, ROWS], [0, 1]), ([0], [-1]), ([0, 1], [1, 4])]
)
def test_rows_that_do_not_exist(
    segment: DeviceSegment, rows: list[int], host_rows: list[int]
) -> None:
    host = np.zeros((4, STRIDE), np.uint8)
    with pytest.raises(InvalidRequest, match="a row is not among"):
        segment.to_host(np.array(rows), host, np.array(host_rows))
    with pytest.raises(InvalidRequest, match="a row is not among"):
        segment.from_host(host, np.array(host_rows), np.array(rows))


def test_host_memory_of_another_shape(segment: DeviceSegment) -> None:
    rows, host = np.array([0, 1]), np.zeros((4, STRIDE + 8), np.uint8)
    for wrong in (host, host[:, :STRIDE], host[:, 8:], np.zeros(STRIDE, np.uint8)):
        with pytest.raises(InvalidRequest, match="do not fit"):
            segment.to_host(rows, wrong, rows)
        with pytest.raises(InvalidRequest, match="do not fit"):
            segment.from_host(wrong, rows, rows)
    right = np.zeros((4, STRIDE), np.uint8)
    with pytest.raises(InvalidRequest, match="2 rows of the device, but 1 of the host"):
        segment.to_host(rows, right, rows[:1])


@pytest.mark.parametrize(("rows", "stride"), [(0, 8), (8, 0), (-1, -1)])
def test_sizes_that_are_none(rows: int, stride: int) -> None:
    with pytest.raises(InvalidRequest, match="device segment"):
        DeviceSegment.create("cpu", rows, stride)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(SegmentError, match="cuda:63"):
        DeviceSegment.create("cuda:63", ROWS, STRIDE)


def test_memory_that_is_not_there() -> None:
    with pytest.raises(SegmentError, match="MiB"):
        DeviceSegment.create("cpu", 1 << 30, 1 << 20)
