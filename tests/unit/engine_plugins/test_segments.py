"""The pool's segments as the driver knows them: all of each, the newest one, and older ones while copies run."""

from __future__ import annotations

import gc
import mmap
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is in the vLLM environment only")

from kvpool.engine_plugins.vllm.worker import device_copies
from kvpool.engine_plugins.vllm.worker.device import PinnedSegments
from kvpool.errors import SegmentError

pytestmark = pytest.mark.torch


class Driver(PinnedSegments):
    """With a driver that keeps a list."""

    def __init__(self, thread: Any = None) -> None:
        super().__init__(SimpleNamespace(type="cuda"), thread)
        self.registered: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.refuses = False
        self.refuses_after: int | None = None

    def _pin(self, address: int, size: int) -> None:  # type: ignore[override]
        self.asked.append(address)
        if self.refuses or len(self.registered) == self.refuses_after:
            raise SegmentError("refused")
        self.registered.append((address, size))

    def _unpin(self, address: int) -> None:
        self.registered.remove(next(each for each in self.registered if each[0] == address))


def segment(size: int = 1 << 16) -> np.ndarray:
    return np.zeros(size, np.uint8)


def rows(whole: np.ndarray, stride: int) -> np.ndarray:
    n = len(whole) // stride
    return whole[: n * stride].reshape(n, stride)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_all_of_a_segment_is_registered_once(driver: Driver) -> None:
    whole = segment()
    for stride in (1 << 12, 3000, 1 << 13):
        table = rows(whole, stride)
        with driver.using(table) as tensor:
            assert tuple(tensor.shape) == table.shape
            assert tensor.data_ptr() == whole.ctypes.data
            tensor[1, 5] = 7
            assert table[1, 5] == 7
    assert driver.registered == [(whole.ctypes.data, whole.nbytes)]
    driver.close()
    assert driver.registered == []


def mapped_again(old: np.ndarray) -> np.ndarray:
    """Another daemon's segment at the same address, as the kernel likes to place it."""
    interface = {"data": (old.ctypes.data, False), "shape": old.shape, "typestr": "|u1"}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"version": 3}))


def test_another_segment_at_the_same_address_is_another_one(driver: Driver) -> None:
    memory = segment()
    old, new = mapped_again(memory), mapped_again(memory)
    driver.tensor(rows(old, 4096))
    driver.tensor(rows(old, 4096))
    driver.tensor(rows(new, 4096))
    assert driver.asked == [memory.ctypes.data] * 2
    assert len(driver.registered) == 1


def test_an_old_segment_goes_when_the_last_copy_in_it_has_ended(driver: Driver) -> None:
    old, new = segment(), segment(1 << 17)
    gone = weakref.ref(old)
    with driver.using(rows(old, 4096)):
        with driver.using(rows(old, 8192)):
            driver.tensor(rows(new, 4096))
            assert len(driver.registered) == 2
        assert len(driver.registered) == 2
        del old
    assert driver.registered == [(new.ctypes.data, new.nbytes)]
    gc.collect()
    assert gone() is None, "nothing keeps its memory"


def test_a_segment_that_its_client_lets_go_of_is_unregistered_first(driver: Driver) -> None:
    whole = segment()
    place = whole.ctypes.data, whole.nbytes
    table = rows(whole, 4096)
    with driver.using(table):
        del whole
        gc.collect()
        assert driver.registered == [place], "it is in use"
    assert driver.registered == [place], "the table of a lease is enough"
    del table
    gc.collect()
    assert driver.registered == []
    driver.close()


def test_what_the_driver_refuses_is_tried_again(driver: Driver) -> None:
    table = rows(segment(), 4096)
    driver.refuses = True
    with pytest.raises(SegmentError):
        driver.tensor(table)
    driver.refuses = False
    driver.tensor(table)
    assert len(driver.registered) == 1


# --- slice by slice, in a thread

SLICE = device_copies.PIN_SLICE
MAP_NORESERVE = 0x4000  # of Linux; Python 3.11 does not name it


def huge(size: int) -> np.ndarray:
    """Memory that takes none until it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


@pytest.fixture
def sliced(threads: Any) -> Driver:
    return Driver(threads)


def test_it_is_registered_in_slices_beside_the_engine(sliced: Driver, threads: Any) -> None:
    whole = huge(5 * SLICE + 100)
    sliced.begin(rows(whole, 4096))
    assert not sliced.ready
    with pytest.raises(SegmentError, match="being registered"), sliced.using(rows(whole, 4096)):
        pass
    threads.run()
    assert sliced.ready
    with sliced.using(rows(whole, 4096)) as tensor:
        assert tensor.data_ptr() == whole.ctypes.data
    start = whole.ctypes.data
    ends = [address + size for address, size in sliced.registered]
    assert [address for address, _ in sliced.registered] == [start, *ends[:-1]]
    assert ends[-1] == start + whole.nbytes
    assert all(end % SLICE == 0 for end in ends[:-1])
    sliced.close()
    assert sliced.registered == []


def test_what_is_refused_in_the_middle_is_given_back_and_tried_again(
    sliced: Driver, threads: Any
) -> None:
    whole = huge(4 * SLICE)
    table = rows(whole, 4096)
    sliced.refuses_after = 2
    sliced.begin(table)
    threads.run()
    assert sliced.registered == []
    with pytest.raises(SegmentError, match="refused"):
        sliced.tensor(table)
    sliced.refuses_after = None
    with pytest.raises(SegmentError, match="being registered"):
        sliced.tensor(table)
    threads.run()
    sliced.tensor(table)


def test_a_segment_that_is_replaced_while_it_is_registered_is_given_up(
    sliced: Driver, threads: Any
) -> None:
    old, new = huge(4 * SLICE), huge(2 * SLICE)
    sliced.begin(rows(old, 4096))
    sliced.begin(rows(new, 4096))
    threads.run()
    sliced.tensor(rows(new, 4096))
    assert sum(size for _, size in sliced.registered) == new.nbytes


def test_copies_are_cut_where_slices_meet() -> None:
    """The driver refuses others, which only a GPU shows."""
    import torch

    whole = huge(2 * SLICE)
    meet = SLICE - whole.ctypes.data % SLICE
    host = torch.from_numpy(whole[max(0, meet - 5000) : meet + 7000])
    staged = torch.arange(len(host)).to(torch.uint8)
    pieces = list(device_copies._pieces(staged[100:-7], host[100:-7]))
    assert len(pieces) == 2
    assert sum(len(piece) for _, piece in pieces) == len(host) - 107
    for one, piece in pieces:
        assert len(one) == len(piece)
        first, last = piece.data_ptr(), piece.data_ptr() + len(piece) - 1
        assert first // SLICE == last // SLICE
        piece.copy_(one)
    assert torch.equal(host[100:-7], staged[100:-7])
