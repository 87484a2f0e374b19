"""Bytes in whatever a caller holds them, and copies between them and rows."""

import array
import mmap
import os

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from kvpool.errors import InvalidRequest
from kvpool.memory.buffers import IOV_MAX, Source, as_bytes, read_rows, row_checksums, write_pieces

STRIDE = 4096


@pytest.fixture(scope="module")
def segment():
    """(memfd, the table of its rows)"""
    fd = os.memfd_create("rows")
    os.ftruncate(fd, 64 * STRIDE)
    table = np.frombuffer(mmap.mmap(fd, 64 * STRIDE), np.uint8).reshape(64, STRIDE)
    yield fd, table
    os.close(fd)


@pytest.mark.parametrize(
    "source",
    [
        b"\1\2\3\4",
        bytearray(b"\1\2\3\4"),
        memoryview(b"\1\2\3\4"),
        memoryview(b"\1\2\3\4").cast("H"),
        array.array("B", [1, 2, 3, 4]),
        np.array([1, 2, 3, 4], np.uint8),
        np.array([[1, 2], [3, 4]], np.uint8),
        np.array([[0x0201], [0x0403]], np.uint16),
        np.array(0x04030201, np.uint32),
        np.array([1, 2, 3, 4], np.int8),
        np.array([(1, 0x0302, 4)], np.dtype([("a", "u1"), ("b", "<u2"), ("c", "u1")])),
    ],
)
def test_as_bytes(source):
    assert as_bytes(source).tobytes() == b"\1\2\3\4"
    assert as_bytes(source).dtype == np.uint8


def test_memory_is_shared():
    for source in (bytearray(8), np.zeros(2, np.float32), memoryview(bytearray(8))):
        as_bytes(source, writable=True)[3] = 7
        assert bytes(source)[3] == 7


@pytest.mark.parametrize("empty", [b"", bytearray(), np.zeros(0), np.zeros((0, 5), np.int16)])
def test_nothing_is_fine(empty):
    assert as_bytes(empty).size == 0


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((4, 4)).T[:2],
        np.zeros(8)[::2],
        np.zeros(8)[::-1],
        np.asfortranarray(np.zeros((2, 3))),
        np.array([None]),
        np.array([(1, None)], np.dtype([("a", "u1"), ("b", "O")])),
        memoryview(b"abcd")[::2],
        memoryview(np.asfortranarray(np.zeros((2, 3)))),
        "text",
        7,
        None,
        [b"a"],
        object(),
        range(4),
    ],
)
def test_what_is_no_contiguous_buffer(source):
    with pytest.raises(InvalidRequest):
        as_bytes(source)


def test_read_only_destinations():
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for source in (b"1234", memoryview(b"1234"), frozen, np.broadcast_to(np.uint8(1), (4,))):
        with pytest.raises(InvalidRequest):
            as_bytes(source, writable=True)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_source_writes_and_hashes_what_it_holds(segment, data):
    fd, table = segment
    n = data.draw(st.integers(1, 6))
    nbytes = data.draw(st.integers(1, 300) | st.integers(STRIDE - 2, STRIDE))
    blocks = [os.urandom(nbytes) for _ in range(n)]
    form = data.draw(st.sampled_from(["whole", "list", "pieces", "mixed"]))
    cut = data.draw(st.integers(0, nbytes))
    if form == "whole":
        source = Source(b"".join(blocks), n, nbytes)
    elif form == "list":
        source = Source(blocks, n, nbytes)
    elif form == "pieces":
        source = Source([[one[:cut], b"", one[cut:]] for one in blocks], n, nbytes)
    else:
        source = Source(
            [one if at % 2 else (one[:cut], one[cut:]) for at, one in enumerate(blocks)], n, nbytes
        )
    assert source.total == n * nbytes
    chosen = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1).map(sorted))
    rows = np.array(data.draw(st.permutations(range(64)))[: len(chosen)])
    table[:] = 0xEE
    source.write(np.array(chosen), table, rows, fd)
    for index, row in zip(chosen, rows, strict=True):
        assert table[row, :nbytes].tobytes() == blocks[index]
        assert (table[row, nbytes:] == 0xEE).all(), "not a byte beyond the block"
    others = np.setdiff1d(np.arange(64), rows)
    assert (table[others] == 0xEE).all()
    expected = b"".join(xxhash.xxh3_128_digest(blocks[index]) for index in chosen)
    assert source.checksums(chosen) == expected
    assert row_checksums(table, rows, nbytes) == expected
    out = np.zeros((len(rows), nbytes), np.uint8)
    read_rows(table, rows, out)
    assert out.tobytes() == b"".join(blocks[index] for index in chosen)


@pytest.mark.parametrize("offset", [0, 16, 32, 48])
@pytest.mark.parametrize("order", ["run", "backwards", "two runs", "swapped"])
@pytest.mark.parametrize("nbytes", [256 << 10, (256 << 10) - 8], ids=["whole rows", "narrower"])
def test_large_copies_wherever_a_buffer_begins(offset, order, nbytes):
    """Many rows are one copy where they follow each other, and never else."""
    stride, n = 256 << 10, 8
    table = np.zeros((16, stride), np.uint8)
    held = np.frombuffer(mmap.mmap(-1, n * stride + 4096), np.uint8)
    blocks = held[offset : offset + n * nbytes].reshape(n, nbytes)
    blocks[:] = np.random.default_rng(1).integers(0, 256, blocks.shape, dtype=np.uint8)
    rows = {
        "run": np.arange(3, 11),
        "backwards": np.arange(10, 2, -1),
        "two runs": np.array([0, 1, 2, 3, 5, 6, 7, 8]),
        "swapped": np.array([3, 5, 4, 6, 7, 8, 9, 10]),  # from first to last as far as a run
    }[order]
    Source(blocks, n, nbytes).write(np.arange(n), table, rows, -1)
    for block, row in zip(blocks, rows, strict=True):
        assert (table[row, :nbytes] == block).all()
    table[rows, :nbytes] += 1
    expected = blocks + 1
    read_rows(table, rows, blocks)
    assert (blocks == expected).all()
    others = np.setdiff1d(np.arange(16), rows)
    assert not table[others].any()
    assert not table[:, nbytes:].any()


def test_more_pieces_than_one_system_call_takes(segment):
    fd, table = segment
    data = os.urandom(3000)
    pieces = [as_bytes(data[at : at + 1]) for at in range(len(data))]
    assert len(pieces) > 2 * IOV_MAX
    write_pieces(fd, 5 * STRIDE, pieces)
    assert table[5, : len(data)].tobytes() == data


@pytest.mark.parametrize(
    ("blocks", "hint"),
    [
        (b"123", "4 are needed"),
        ([b"12"], "1 blocks for 2 keys"),
        ([b"12", b"3"], "block 1 has 1 bytes"),
        ([[b"1", b"2", b"3"], b"12"], "block 0 has 3 bytes"),
        ([[], b"12"], "block 0 has 0 bytes"),
        ([b"12", None], "neither"),
    ],
)
def test_sizes_that_do_not_fit(blocks, hint):
    with pytest.raises(InvalidRequest, match=hint):
        Source(blocks, 2, 2)


@pytest.mark.torch
def test_torch_tensors():
    torch = pytest.importorskip("torch")
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.uint8,
        torch.bool,
        torch.int64,
        torch.float8_e4m3fn,
    ):
        tensor = torch.zeros(3, 8, dtype=torch.uint8).view(dtype)
        as_bytes(tensor, writable=True)[:] = 1
        assert (tensor.view(torch.uint8) == 1).all()
    assert as_bytes(torch.tensor(1, dtype=torch.int16)).tobytes() == b"\1\0"
    assert as_bytes(torch.zeros(2, requires_grad=True)).size == 8
    with pytest.raises(InvalidRequest, match="not contiguous"):
        as_bytes(torch.zeros(4, 4).T)
    with pytest.raises(InvalidRequest, match="meta"):
        as_bytes(torch.zeros(4, device="meta"))
