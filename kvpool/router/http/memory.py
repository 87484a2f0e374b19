"""How many bytes of bodies, prompts and answers all requests hold together. No I/O; event loop only.

The first `SMALL_BYTES` of a request are not counted: what small ones hold is limited by their number, and they are
served while large ones take all the room.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvpool.errors import KvpoolError

SMALL_BYTES = 128 << 10


class NoRoom(KvpoolError):
    """A request needs more bytes than are free."""

    code = "no_room"


class Memory:
    """held: bytes that are counted now, at most bytes_max."""

    def __init__(self, bytes_max: int) -> None:
        self.held = 0
        self._bytes_max = bytes_max

    def hold(self) -> Held:
        """Nothing yet. Whoever asks gives it back, by `with`."""
        return Held(self)

    def _take(self, size: int) -> None:
        if size > 0 and self.held + size > self._bytes_max:
            raise NoRoom(
                f"the router has no room for this request now: requests hold {self.held} of at most "
                f"{self._bytes_max} bytes"
            )
        self.held += size


class Held:
    """What one request, or one answer, holds. size: in bytes."""

    __slots__ = ("_memory", "size")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.resize(0)

    def add(self, size: int) -> None:
        """It holds so many bytes more. Raises `NoRoom`; then it holds what it did before."""
        self.resize(self.size + size)

    def resize(self, size: int) -> None:
        """It holds so many bytes in all. Raises `NoRoom` as `add` does."""
        self._memory._take(max(size - SMALL_BYTES, 0) - max(self.size - SMALL_BYTES, 0))
        self.size = size
