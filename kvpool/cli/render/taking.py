"""How far a starting daemon is with taking its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TextIO

from kvpool.cli.render.text import size_text, used_text

FIRST_S = 2.0  # before a log has the first line
LINE_S = 5.0  # between two lines in a log
SCREEN_S = 0.1  # between two updates of the line on a terminal

log = logging.getLogger("kvpool.daemon")


class Taking:
    """Says it on `stream`: a terminal has one line that is written again, a file a line every few seconds.

    A start that takes less than `FIRST_S` says nothing to a file. Called by one thread. logged: the stream is a log
    of JSON, so the lines are records of it, of level info. clock: in seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float], *, logged: bool) -> None:
        self._stream = stream
        self._clock = clock
        self._screen = stream.isatty()
        self._logged = logged
        self._next = clock() + (0 if self._screen else FIRST_S)
        self._on_screen = False

    def __call__(self, taken: int, wanted: int) -> None:
        """bytes taken so far, and to be taken in all."""
        now = self._clock()
        if taken >= wanted:
            self.end()
        elif now >= self._next:
            self._next = now + (SCREEN_S if self._screen else LINE_S)
            self._say(taken, wanted)

    def end(self) -> None:
        """Take the line off the terminal: it is done, or was stopped. Idempotent."""
        if self._on_screen:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._on_screen = False

    def _say(self, taken: int, wanted: int) -> None:
        text = f"taking {size_text(wanted)} of memory: {used_text(taken, wanted)}"
        if self._screen:
            self._stream.write(f"\r\x1b[Kkvpool: {text}, Ctrl-C stops")
            self._on_screen = True
        elif self._logged:
            log.info("%s", text)
        else:
            self._stream.write(f"kvpool: {text}\n")
        self._stream.flush()
