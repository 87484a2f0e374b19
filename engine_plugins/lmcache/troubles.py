"""What does not work at present, logged once each, until it works again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.complaint import Complaint
from kvpool.errors import KvpoolError

TROUBLES_MAX = 1024


class Troubles:
    """A `Complaint` for each consequence. Thread-safe. Beyond `TROUBLES_MAX` new ones are not logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._present: dict[str, Complaint] = {}

    def __len__(self) -> int:
        return len(self._present)

    @contextmanager
    def noted(self, consequence: str) -> Iterator[None]:
        """An error of ours inside is not raised, but logged, if it is not known yet. Anything else is raised."""
        try:
            yield
        except KvpoolError as error:
            if consequence in self._present or len(self._present) < TROUBLES_MAX:
                fresh = Complaint(self._log, consequence, f"no longer so: {consequence}")
                complaint = self._present.setdefault(consequence, fresh)
                complaint.failed(type(error).__name__, error)
        else:
            self.clear(consequence)

    def clear(self, consequence: str) -> None:
        """It is so no longer."""
        if (ended := self._present.pop(consequence, None)) is not None:
            ended.worked()
