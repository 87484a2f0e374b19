"""Signals that end a process: which they are, and how programs of kvpool take them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import asyncio

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


def handle_ending(loop: asyncio.AbstractEventLoop, told: Callable[[signal.Signals], None]) -> None:
    """Call `told` with each signal that asks this process to end.

    Only the first signal may be a SIGHUP. The kernel and the shell both send SIGHUP when a terminal closes, and a
    second signal stands for an impatient operator.
    """
    begun = False

    def received(number: signal.Signals) -> None:
        nonlocal begun
        if not (begun and number is signal.SIGHUP):
            begun = True
            told(number)

    for number in _heeded(ENDING):
        loop.add_signal_handler(number, received, number)


def unwind_on_ending() -> None:
    """Raise `SystemExit` in the main thread on SIGTERM and SIGHUP, so that commands clean up as after Ctrl-C."""
    for number in _heeded((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _exit)


def ignore_ending() -> None:
    """Leave the end of this process to its parent: a terminal signals both."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _heeded(numbers: tuple[signal.Signals, ...]) -> list[signal.Signals]:
    """Return the signals without a SIGHUP that was ignored at the start: `nohup` outlives the terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (ignored and number is signal.SIGHUP)]


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
