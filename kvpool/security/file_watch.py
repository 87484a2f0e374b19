"""Files whose contents are used while they may be replaced."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvpool.complaint import Complaint
from kvpool.errors import ConfigError

T = TypeVar("T")

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


class Reloaded(Generic[T]):
    """What was read from files, and is read again when they change. Thread-safe.

    load: raises `ConfigError` for invalid ones: that is logged once, and the last valid value stays in use. If the
    first ones are invalid it raises, unless there is a value from before. what: of what the files are, for messages.
    """

    def __init__(
        self,
        paths: Sequence[str],
        load: Callable[[], T],
        what: str,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        before: T | None = None,
    ) -> None:
        self._load = load
        self._what = what
        self._log = log
        wrong = f"the new {what} are invalid, the previous ones stay in use"
        self._complaint = Complaint(log, wrong)
        self._where = ", ".join(paths[:1])
        self._lock = threading.Lock()
        self._watch = FileWatch(paths, clock)
        if before is None:
            self._value = load()
        else:
            self._value = before
            try:
                self._value = load()
            except ConfigError as error:
                self._complain(error)

    def current(self) -> T:
        """The value of the files as of now, or a moment ago. The same object until they change."""
        with self._lock:
            if self._watch.changed():
                try:
                    self._value = self._load()
                except ConfigError as error:
                    self._complain(error)
                else:
                    self._complaint.worked()
                    self._log.warning("new %s are in use: %s", self._what, self._where)
            return self._value

    def _complain(self, error: ConfigError) -> None:
        self._watch.forget()  # they may have been copied half, or be unreadable for a moment
        self._complaint.failed(str(error), error)


def _state(path: str) -> tuple[int, ...] | None:
    """Changes with a file's contents, owner and mode, as far as visible from outside. None: it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
