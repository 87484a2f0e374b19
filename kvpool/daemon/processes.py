"""Which process is at the other end of a unix socket, and when it dies."""

from __future__ import annotations

import os
import socket
import struct

SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
_UCRED = struct.Struct("3i")


def peer_pid(sock: socket.socket) -> int:
    """The process that connected, by the kernel's word (0 if it lives in a foreign pid namespace)."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)


def peer_pidfd(sock: socket.socket) -> int | None:
    """A descriptor that becomes readable when the peer's process is dead; the caller closes it.

    None if it is dead already. The kernel's own descriptor is used where there is one (Linux 6.5); before
    that, the process is looked up by number, which a process that died and whose number was given
    away in the meantime could deceive; the number is therefore read again afterwards.
    """
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        return int(struct.unpack("i", packed)[0])
    except ProcessLookupError:
        return None
    except OSError:
        pass  # an older kernel
    try:
        return os.pidfd_open(peer_pid(sock))
    except OSError:
        return None
