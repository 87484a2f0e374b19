"""A device whose copies are made when somebody waits for them, without torch.

What a real one does in its own time, at the latest possible moment: whoever gives memory away before the wait is
found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np


class ScriptedStream:
    """Copies in their order, made by `land`."""

    def __init__(self, **_: Any) -> None:
        self.queued: list[Callable[[], None]] = []

    def land(self) -> None:
        while self.queued:
            self.queued.pop(0)()


class ScriptedEvent:
    """Everything that its stream had before it."""

    def __init__(self) -> None:
        self._stream: ScriptedStream | None = None

    def record(self, stream: ScriptedStream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        assert self._stream is not None
        self._stream.land()


class DeviceModule:
    """In the place of torch's module of a device."""

    Stream, Event = ScriptedStream, ScriptedEvent

    def __init__(self) -> None:
        self.current: list[ScriptedStream] = []

    @contextmanager
    def stream(self, stream: ScriptedStream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy between arrays on the current stream."""

        def land() -> None:
            target[...] = source

        self.current[-1].queued.append(land)


class Rows:
    """A tensor of rows, as far as the copies' bookkeeping goes. `data`: its bytes."""

    def __init__(self, module: DeviceModule, data: np.ndarray) -> None:
        self.data = data
        self.shape = data.shape
        self.device = SimpleNamespace(type="scripted")
        self._module = module

    def stride(self, axis: int) -> int:
        return self.data.strides[axis] // self.data.itemsize

    def view(self, dtype: Any) -> Rows:
        return Rows(self._module, self.data.view(dtype))

    def __getitem__(self, index: Any) -> Rows:
        return Rows(self._module, self.data[index])

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        if isinstance(source, Exception):
            raise source
        self._module.copy(self.data, source.data)


def scripted_torch(module: DeviceModule) -> Any:
    """What stands for torch in `sys.modules` meanwhile."""
    return SimpleNamespace(
        uint8=np.uint8,
        int64=np.int64,
        get_device_module=lambda device: module,
        from_numpy=lambda array: Rows(module, array),
    )
