"""Device segments, on the CPU device everywhere and on a CUDA device where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.errors import InvalidRequest, SegmentError  # noqa: E402
from kvpool.storage import gpu  # noqa: E402
from kvpool.storage.gpu import DeviceSegment  # noqa: E402

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
ROWS, STRIDE = 37, 1000

ENGINE = """
import sys
import numpy as np
from kvpool.storage.gpu import DeviceSegment

for line in sys.stdin:
    segment = DeviceSegment.attach(bytes.fromhex(line))
    out = segment.host_rows(2)
    segment.to_host(np.array([5, 1]), out)
    print(out.numpy().tobytes().hex(), flush=True)
    source = segment.host_rows(1)
    source[:] = 77
    segment.from_host(source, np.array([3]))
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
    source = segment.host_rows(ROWS)
    source.numpy()[:] = content
    segment.from_host(source, np.arange(ROWS))
    return content


@pytest.mark.parametrize("staging_bytes", [1, 3 * STRIDE, 1 << 20])
def test_rows_cross_in_any_order(
    segment: DeviceSegment, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "STAGING_BYTES", staging_bytes)
    random = np.random.default_rng(2)
    expected = filled(segment)
    for count in (0, 1, 8, ROWS):
        rows = random.permutation(ROWS)[:count]
        out = segment.host_rows(count)
        segment.to_host(rows, out)
        assert np.array_equal(out.numpy(), expected[rows])
        out.numpy()[:] = random.integers(0, 256, (count, STRIDE), np.uint8)
        segment.from_host(out, rows)
        expected[rows] = out.numpy()
        assert np.array_equal(segment.table.cpu().numpy(), expected)
    assert (segment.rows, segment.stride) == (ROWS, STRIDE)


def test_an_engine_in_another_process_shares_the_memory(segment: DeviceSegment) -> None:
    content = filled(segment)
    engine = subprocess.run(
        [sys.executable, "-c", ENGINE],
        input=f"{segment.export().hex()}\n{segment.export().hex()}\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert engine.returncode == 0, engine.stderr
    assert engine.stdout.split() == 2 * [content[[5, 1]].tobytes().hex()]
    content[3] = 77
    assert np.array_equal(segment.table.cpu().numpy(), content)


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
    before = len(os.listdir("/proc/self/fd"))
    handle = msgspec.msgpack.decode(owner.export())
    handle[at] = value
    with pytest.raises(SegmentError):
        DeviceSegment.attach(msgspec.msgpack.encode(handle))
    assert len(os.listdir("/proc/self/fd")) == before
    owner.close()


@pytest.mark.parametrize("handle", [b"", b"\x90", b"handle", msgspec.msgpack.encode(["cpu", 1])])
def test_what_is_no_handle(handle: bytes) -> None:
    with pytest.raises(SegmentError, match="no handle"):
        DeviceSegment.attach(handle)


@pytest.mark.parametrize("rows", [[-1], [0, ROWS]])
def test_rows_that_do_not_exist(segment: DeviceSegment, rows: list[int]) -> None:
    host = segment.host_rows(len(rows))
    with pytest.raises(InvalidRequest, match="no such row"):
        segment.to_host(np.array(rows), host)
    with pytest.raises(InvalidRequest, match="no such row"):
        segment.from_host(host, np.array(rows))


def test_host_memory_of_another_shape(segment: DeviceSegment) -> None:
    rows = np.array([0, 1])
    for host in (segment.host_rows(3), segment.host_rows(4)[::2], segment.host_rows(2)[:, 1:]):
        with pytest.raises(InvalidRequest, match="do not fit"):
            segment.to_host(rows, host)
        with pytest.raises(InvalidRequest, match="do not fit"):
            segment.from_host(host, rows)


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
