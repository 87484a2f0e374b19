"""The pool's segments as the driver knows them: all of each, the newest one, and older ones while copies run."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is in the vLLM environment only")

from kvpool.engine_plugins.vllm.device import PinnedSegments
from kvpool.errors import SegmentError


class Driver(PinnedSegments):
    """With a driver that keeps a list."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(type="cuda"))
        self.registered: list[tuple[int, int]] = []
        self.refuses = False

    def _pin(self, whole: Any) -> None:  # type: ignore[override]
        if self.refuses:
            raise SegmentError("refused")
        self.registered.append((whole.ctypes.data, whole.nbytes))

    def _unpin(self, address: int, nbytes: int) -> None:
        self.registered.remove((address, nbytes))


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
    asked: list[Any] = []
    pin = driver._pin

    def asks(whole: Any) -> Any:
        asked.append(whole)
        return pin(whole)

    driver._pin = asks
    driver.tensor(rows(old, 4096))
    driver.tensor(rows(new, 4096))
    assert [one is two for one, two in zip(asked, [old, new], strict=True)] == [True, True]
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
