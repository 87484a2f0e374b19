"""What does not work at present, logged once each, until it works again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.errors import KvpoolError

TROUBLES_MAX = 1024


class Troubles:
    """Thread-safe. Beyond `TROUBLES_MAX` new ones are not logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._present: dict[str, type[KvpoolError]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._present)

    @contextmanager
    def noted(self, consequence: str) -> Iterator[None]:
        """An error of ours inside is not raised, but logged, if it is not known yet. Anything else is raised."""
        try:
            yield
        except KvpoolError as error:
            self._note(consequence, error)
        else:
            self.clear(consequence)

    def _note(self, consequence: str, error: KvpoolError) -> None:
        with self._lock:
            known = self._present.get(consequence)
            if known is type(error) or (known is None and len(self._present) >= TROUBLES_MAX):
                return
            self._present[consequence] = type(error)
        self._log.warning("%s: %s", consequence, error)

    def clear(self, consequence: str) -> None:
        """It is so no longer."""
        if consequence not in self._present:
            return
        with self._lock:
            ended = self._present.pop(consequence, None)
        if ended is not None:
            self._log.info("no longer so: %s", consequence)
