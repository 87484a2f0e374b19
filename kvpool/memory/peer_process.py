"""The process at the other end of a unix socket, and its death."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping

from kvpool.errors import LimitExceeded, NotAuthenticated

SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
_UCRED = struct.Struct("3i")


def peer_pid(sock: socket.socket) -> int:
    """The connected process, from the kernel (0 if it is in a foreign pid namespace)."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)


def peer_uid(sock: socket.socket) -> int:
    """The connected user, from the kernel."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def check_owner(sock: socket.socket, path: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises `NotAuthenticated` unless a trusted user listens at this path, to which the socket is connected.

    That is this process's own user, root, or the owner of the folder; with `KVPOOL_DAEMON_UID` only that user.
    Others could have replaced the socket where they may write to its folder, and would be given blocks and tokens.
    """
    uid = peer_uid(sock)
    if wanted := environ.get("KVPOOL_DAEMON_UID"):
        trusted = {int(wanted)} if wanted.isdecimal() else set()
    else:
        trusted = {os.getuid(), 0, os.stat(os.path.dirname(os.path.abspath(path))).st_uid}
    if uid not in trusted:
        raise NotAuthenticated(
            f"user {uid} listens at {path}, who is neither this user, nor root, nor the owner of the folder: if that is "
            "the daemon's user, set KVPOOL_DAEMON_UID"
        )


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
            f"there is no free descriptor to watch the process at the other end of a socket ({error.strerror}): raise "
            "the limit of open files"
        ) from None
    if error.errno not in (errno.ESRCH, errno.EINVAL):
        raise error
