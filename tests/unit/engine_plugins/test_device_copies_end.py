"""Nothing is copied any more when a copy of the device has failed: its slots are given away at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.engine_plugins.vllm.worker.device import DevicePages
from kvpool.engine_plugins.vllm.worker.device_copies import Paged, Strategy
from kvpool.storage.device import DeviceSegment
from tests.support.scripted_device import DeviceModule, Rows, scripted_torch

STRIDE, COUNT = 64, 4


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> DeviceModule:
    module = DeviceModule()
    monkeypatch.setitem(sys.modules, "torch", scripted_torch(module))
    return module


class Segments:
    """The driver's registry of segments, reduced to one."""

    def __init__(self, module: DeviceModule, order: list[str]) -> None:
        self._module = module
        self._order = order

    @contextmanager
    def using(self, table: np.ndarray) -> Iterator[Rows]:
        try:
            yield Rows(self._module, table)
        finally:
            self._order.append("given up")


def filled(value: int) -> np.ndarray:
    return np.full((COUNT, STRIDE), value, np.uint8)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["to_slots", "from_slots"])
def test_a_copy_that_failed_half_way_writes_nothing_later(
    module: DeviceModule, way: str, fails: bool
) -> None:
    order: list[str] = []
    paged, slots = filled(1), SimpleNamespace(table=filled(2))

    def copy(layers: Paged, blocks: Any, segment: Rows, rows: Any) -> None:
        first, second = layers.layers[0].view(np.uint8), segment
        if way == "to_slots":
            first, second = second, first
        first[0].copy_(second[0], non_blocking=True)
        module.current[-1].queued.append(lambda: order.append("landed"))
        if fails:
            raise RuntimeError("the device refused the second chunk")

    pages = DevicePages(
        [Rows(module, paged)], Segments(module, order), strategy=Strategy(copy, copy, copy)
    )
    numbers = np.arange(COUNT)
    with pytest.raises(RuntimeError) if fails else _nothing():
        if way == "to_slots":
            pages.to_slots(numbers, slots, numbers)
        else:
            pages.from_slots(slots, numbers, numbers)
    assert order == ["landed", "given up"]


@pytest.mark.parametrize("way", ["to_host", "from_host"])
def test_a_device_segment_leaves_no_copy_under_way(module: DeviceModule, way: str) -> None:
    device, host = Rows(module, filled(1)), filled(2)
    segment = DeviceSegment(device, None, None)
    # Two runs; the second copy is refused.
    source, target = np.array([0, 2]), np.array([1, 3])
    made = module.copy

    def refuses_the_second(target: Any, source: Any) -> None:
        if module.current[-1].queued:
            raise RuntimeError("out of memory")
        made(target, source)

    module.copy = refuses_the_second  # type: ignore[method-assign]

    def copy() -> None:
        if way == "to_host":
            segment.to_host(source, host, target)
        else:
            segment.from_host(host, source, target)

    with pytest.raises(RuntimeError):
        copy()
    changed = host if way == "to_host" else device.data
    assert changed[1, 0] == (1 if way == "to_host" else 2), "the first copy has landed"
    others = {"to_host": 3, "from_host": 4}  # its next owner's bytes
    changed[1] = others[way]
    segment._stream.land()
    assert changed[1, 0] == others[way]


@contextmanager
def _nothing() -> Iterator[None]:
    yield
