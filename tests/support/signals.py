"""Signals to processes under test.

A SIGSTOP is only asked for when kill(2) returns: on a busy machine, threads of the process run on for as long as the one
that is to take the signal waits for a core. Who goes on at once meets a process that still answers.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import until


def send(pid: int, number: int) -> None:
    """Send a signal; for SIGSTOP, wait until all threads of the process have stopped, or it has ended.

    Raises `ProcessLookupError` if there is none.
    """
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        until(lambda: _states(pid) <= {"T", "t", "Z", "X"}, f"process {pid} stops")


def _states(pid: int) -> set[str]:
    """Of its threads: letters of proc_pid_stat(5)."""
    states = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                # After the name, which is in parentheses and may hold any.
                states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
