"""What does not work at present, logged once until it works again."""

from __future__ import annotations

import logging
import threading


class Complaint:
    """Logs what is wrong: once for each cause, and when it is over. Thread-safe.

    wrong: begins the line. over: the line when it is over, or empty for none.
    """

    def __init__(self, log: logging.Logger, wrong: str, over: str = "") -> None:
        self._log = log
        self._wrong = wrong.replace("%", "%%") + ": %s"
        self._over = over
        self._lock = threading.Lock()
        self._cause = ""

    def failed(self, cause: str, detail: object) -> None:
        """Log the failure, unless the last one had the same cause."""
        with self._lock:
            if cause == self._cause:
                return
            self._cause = cause
        self._log.warning(self._wrong, detail)

    def worked(self) -> None:
        """End the failure, if there is one."""
        if not self._cause:
            return
        with self._lock:
            self._cause = ""
        if self._over:
            self._log.info("%s", self._over)
