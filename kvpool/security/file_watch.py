"""Files whose contents are used while they may be replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

LOOK_S = 1.0  # between two looks at the files


class FileWatch:
    """Says when files were replaced or changed. Its owner serialises the calls.

    A change counts as seen before its contents are read: one that comes meanwhile is seen the next time.
    """

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._seen: list[tuple[int, ...] | None] = self._look()
        self._looked = clock()

    def changed(self) -> bool:
        """Whether they differ from the last time. Looks at most once in `LOOK_S`."""
        if self._clock() - self._looked < LOOK_S:
            return False
        self._looked = self._clock()
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def forget(self) -> None:
        """What was seen could not be read: the next look counts as a change, whatever it sees."""
        self._seen = []

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state(path) for path in self._paths]


def _state(path: str) -> tuple[int, ...] | None:
    """Changes with a file's contents, owner and mode, as far as visible from outside. None: it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
