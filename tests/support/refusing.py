"""Programs whose writes to a folder are refused while a test wants it: what a file system that turned read-only does.

    if reason := unavailable(): pytest.skip(reason)
    with Refusing(folder) as refusing:
        subprocess.Popen([*refusing.python, "-m", "kvpool.cli", "serve", ...])
        refusing.error = errno.EROFS  # from now on
        refusing.error = 0

A seccomp filter, which a program gets before it begins and its children inherit, hands the system calls that change a
file to a thread of the test, which lets them go on, or answers in the kernel's place. So libraries that are not Python
see it too, and descriptors that are open already; no rights are needed. Reads are not touched, nor what is written by
`write` and `writev`, which sockets use all the time. Needs Linux 5.5 on x86-64 or ARM.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.support import refused
from tests.support.waiting import PATIENCE_S

PATH_BYTES_MAX = 4096
ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")
# From seccomp.h.
NOTIF_RECV, NOTIF_SEND = 0xC0502100, 0xC0182101
NOTICE = struct.Struct("<QIIiIQ6Q")  # id, process, flags; call, architecture, where, arguments
ANSWER = struct.Struct("<QqiI")  # id, value, error, flags
GOES_ON = 1


def unavailable() -> str:
    """Why this machine cannot do it; empty if it can."""
    if sys.platform != "linux" or platform.machine() not in refused.CALLS:
        return f"the numbers of {platform.machine()}'s system calls are not known"
    if not ACTIONS.exists() or "user_notif" not in ACTIONS.read_text().split():
        return "this kernel does not hand over system calls"
    return ""


class Refusing:
    """See the module. error: a number of errno, with which what changes the folder is refused; 0: it is not. Any thread.

    refused: how often that has happened.
    """

    def __init__(self, folder: Path) -> None:
        self.error = 0
        self.refused = 0
        self._folder = folder
        self._place = tempfile.TemporaryDirectory(prefix="kvpool-refusing-")
        self._path = f"{self._place.name}/door"
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self._path)
        self._door.listen()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._admit, name="refusing-door")]

    @property
    def python(self) -> list[str]:
        """A Python like this one."""
        return [sys.executable, refused.__file__, self._path]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """The programs have to end before, or are never answered."""
        self._over.set()
        self._door.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._door.close()
        self._place.cleanup()

    def _admit(self) -> None:
        """Each program sends the descriptor at which questions about its calls come."""
        while not self._over.is_set():
            try:
                guest, _ = self._door.accept()
            except OSError:
                return  # it is over
            with guest:
                guest.settimeout(PATIENCE_S)
                _, questions, _, _ = socket.recv_fds(guest, 1, 1)
            for descriptor in questions:
                thread = threading.Thread(
                    target=self._answer_all, args=(descriptor,), name="refusing-calls"
                )
                self._threads.append(thread)
                thread.start()

    def _answer_all(self, questions: int) -> None:
        """Until all processes with this filter have ended."""
        poll = select.poll()
        poll.register(questions, select.POLLIN)
        try:
            while not self._over.is_set():
                for _, events in poll.poll(1000):
                    if not events & select.POLLIN:
                        return
                    with contextlib.suppress(FileNotFoundError):  # who asked was killed
                        self._answer(questions)
        finally:
            os.close(questions)

    def _answer(self, questions: int) -> None:
        notice = bytearray(NOTICE.size)
        fcntl.ioctl(questions, NOTIF_RECV, notice)
        number, pid, _, call, _, _, *arguments = NOTICE.unpack(notice)
        error = self.error
        if error and self._is_inside(pid, call, arguments):
            self.refused += 1
            answer = ANSWER.pack(number, 0, -error, 0)
        else:
            answer = ANSWER.pack(number, 0, 0, GOES_ON)
        fcntl.ioctl(questions, NOTIF_SEND, bytearray(answer))

    def _is_inside(self, pid: int, call: int, arguments: Sequence[int]) -> bool:
        """Whether what a call of a process would change is in the folder."""
        descriptor = ctypes.c_int(arguments[0] & 0xFFFFFFFF).value
        try:
            if call != refused.CALLS[platform.machine()].openat:
                return Path(os.readlink(f"/proc/{pid}/fd/{descriptor}")).is_relative_to(
                    self._folder
                )
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                there = os.pread(memory.fileno(), PATH_BYTES_MAX, arguments[1])
            start = "cwd" if descriptor < 0 else f"fd/{descriptor}"
            base = Path(os.readlink(f"/proc/{pid}/{start}"))
        except OSError:
            return False  # the process has ended, or named nothing that there is
        return (base / os.fsdecode(there.partition(b"\0")[0])).is_relative_to(self._folder)
