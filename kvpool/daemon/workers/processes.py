"""The process at the other end of a unix socket, and its death; resource usage of this process and its children."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

from kvpool.errors import LimitExceeded
from kvpool.telemetry.node_stats import ProcessStats

SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
_UCRED = struct.Struct("3i")
_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def peer_pid(sock: socket.socket) -> int:
    """The connected process, from the kernel (0 if it is in a foreign pid namespace)."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)


def peer_uid(sock: socket.socket) -> int:
    """The connected user, from the kernel."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def peer_pidfd(sock: socket.socket) -> int | None:
    """A descriptor that becomes readable when the peer's process is dead; the caller closes it.

    None if it is dead already. Uses the kernel's own descriptor if available (Linux 6.5).
    Before that the process is looked up by its number, which in theory may have been reused since
    it connected. Raises `LimitExceeded` when no descriptors are left.
    """
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        return int(struct.unpack("i", packed)[0])
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            _raise_unless_gone(error)
            return None
    try:
        return os.pidfd_open(peer_pid(sock))
    except OSError as error:
        _raise_unless_gone(error)
        return None


def _raise_unless_gone(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise LimitExceeded(
            f"the daemon has no free descriptor to watch a client's process ({error.strerror}): raise its limit of "
            "open files"
        ) from None
    if error.errno not in (errno.ESRCH, errno.EINVAL):
        raise error


def family() -> list[ProcessStats]:
    """Resource usage of this process (`control`) and its children, by module. A few reads each.

    resident_bytes: including shared memory such as segments; private_bytes: without.
    """
    own = os.getpid()
    found = [_usage(own, "control")]
    children = Path(f"/proc/{own}/task/{own}/children")
    # The kernel lists children only with CONFIG_PROC_CHILDREN, as in all distributions.
    for word in children.read_text().split() if children.exists() else []:
        try:
            command = Path(f"/proc/{word}/cmdline").read_bytes().split(b"\0")
            module = command[command.index(b"-m") + 1].decode() if b"-m" in command else "other"
            found.append(_usage(int(word), module.rpartition(".")[2]))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended meanwhile
    return found


def _usage(pid: int, kind: str) -> ProcessStats:
    # The name, in parentheses, may have spaces.
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return ProcessStats(
        kind=kind,
        pid=pid,
        cpu_s=(int(words[11]) + int(words[12])) / _TICKS_S,
        resident_bytes=int(resident) * _PAGE,
        private_bytes=(int(resident) - int(shared)) * _PAGE,
    )
