"""The other side of `refusing`: become a Python whose system calls somebody is asked about.

    python refused.py SOCKET ARGUMENT...

Runs by itself: it imports nothing of this project, since the program may be one of another version.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from typing import NamedTuple

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Calls(NamedTuple):
    """Numbers of system calls. by_descriptor: that change the file of their first argument."""

    seccomp: int
    by_descriptor: tuple[int, ...]
    openat: int


# By descriptor: pwrite64, pwritev, pwritev2, ftruncate, fallocate.
CALLS = {
    "x86_64": Calls(317, (18, 296, 328, 77, 285), 257),
    "aarch64": Calls(277, (68, 70, 287, 46, 47), 56),
}

# From prctl.h, seccomp.h and bpf_common.h.
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 8
SECCOMP_RET_USER_NOTIF, SECCOMP_RET_ALLOW = 0x7FC00000, 0x7FFF0000
LOAD_WORD, IF_EQUAL, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
AT_CALL, AT_FLAGS = 0, 32  # in what a filter sees: the number of the call, the third argument


def filter_program(calls: Calls) -> bytes:
    """For the kernel: ask about what changes a file, and about an open that is to write."""
    last = len(calls.by_descriptor) + 5  # the instruction that asks
    # Each with how many to jump over, if it is so and if not.
    steps = [(LOAD_WORD, 0, 0, AT_CALL)]
    for number in calls.by_descriptor:
        steps.append((IF_EQUAL, last - len(steps) - 1, 0, number))
    steps += [
        (IF_EQUAL, 0, 2, calls.openat),
        (LOAD_WORD, 0, 0, AT_FLAGS),
        (IF_ANY_BIT, 1, 0, WRITES),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
        (RETURN, 0, 0, SECCOMP_RET_USER_NOTIF),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def have_asked(path: str) -> None:
    """From here on, who listens at a path is asked about the calls of this process and of its children."""
    calls = CALLS[platform.machine()]
    code = ctypes.create_string_buffer(filter_program(calls))
    program = struct.pack("<HxxxxxxQ", (len(code) - 1) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        # Without it only root may have a filter.
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        listener = libc.syscall(
            calls.seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, program
        )
        if listener < 0:
            raise OSError(ctypes.get_errno(), "seccomp")
        socket.send_fds(door, [b"x"], [listener])
        os.close(listener)


def main(arguments: list[str]) -> None:
    """See the module."""
    path, *others = arguments
    have_asked(path)
    os.execv(sys.executable, [sys.executable, *others])


if __name__ == "__main__":
    main(sys.argv[1:])
