"""What does not work at present, said once in the log of an engine."""

from __future__ import annotations

import logging
import threading


class Complaint:
    """Logs what is wrong: once for each cause, and when it is over. Thread-safe.

    over: what to log then; empty: nothing.
    """

    def __init__(self, log: logging.Logger, wrong: str, over: str = "") -> None:
        self._log = log
        self._wrong = wrong.replace("%", "%%") + ": %s"
        self._over = over
        self._lock = threading.Lock()
        self._cause = ""

    def failed(self, cause: str, detail: object) -> None:
        """cause: the same for what is to be said once."""
        with self._lock:
            if cause == self._cause:
                return
            self._cause = cause
        self._log.warning(self._wrong, detail)

    def worked(self) -> None:
        if not self._cause:
            return
        with self._lock:
            self._cause = ""
        if self._over:
            self._log.info("%s", self._over)
