"""Processes of clients: their end, and what they hold."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from kvpool.daemon.core.blocks import Holder
from kvpool.errors import ProtocolError
from kvpool.memory.peer_process import peer_pid, peer_pidfd, peer_uid

NAMED_MAX = 3  # processes in a refusal


class Closeable(Protocol):
    """A connection of a client."""

    def close(self) -> None: ...


class ClientHandle:
    """One client: its connections, its holder, and its process."""

    def __init__(self, holder: Holder, process: ClientProcess) -> None:
        self.holder = holder
        self.process = process
        self.connections: set[Closeable] = set()
        self.departures = 0  # how often its last connection was closed


class ClientProcess:
    """A process, and its clients. pid: 0 if it is in a foreign pid namespace. pidfd: readable once it is dead."""

    def __init__(self, pid: int, uid: int, pidfd: int) -> None:
        self.pid = pid
        self.uid = uid
        self.pidfd = pidfd
        self.handles: set[ClientHandle] = set()

    @property
    def connections(self) -> int:
        return sum(len(handle.connections) for handle in self.handles)

    @property
    def dead(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def may_be(self, other: ClientProcess) -> bool:
        """Whether both are one process, as far as can be told: in a foreign pid namespace it has no number here."""
        unknown = not self.pid and not other.pid
        return self is other or (unknown and self.uid == other.uid)

    def __str__(self) -> str:
        holders = [handle.holder for handle in self.handles]
        nbytes = sum(holder.granted_bytes + holder.reserved_bytes for holder in holders)
        leases = sum(len(holder.leases) for holder in holders)
        return (
            f"process {self.pid} has {self.connections} connections of {len(holders)} clients, which hold "
            f"{nbytes >> 20} MiB to write and {leases} leases"
        )


class ClientProcesses:
    """Processes that have clients. Event loop only. died: is told of each that ends."""

    def __init__(self, died: Callable[[ClientProcess], None]) -> None:
        self._died = died
        self._by_pid: dict[int, ClientProcess] = {}
        self._all: set[ClientProcess] = set()

    def at(self, sock: socket.socket) -> ClientProcess:
        """Return the process at the other end of a socket, watched from now on until `leave`.

        Raises `ProtocolError` if it has ended, and `LimitExceeded` if there is no descriptor to watch it.
        """
        pid = peer_pid(sock)
        known = self._by_pid.get(pid)
        if known is not None:
            if not known.dead:  # so its number is not another one's
                return known
            self._died(known)
        pidfd = peer_pidfd(sock)
        if pidfd is None:
            raise ProtocolError("the client's process has ended")
        process = ClientProcess(pid, peer_uid(sock), pidfd)
        self._all.add(process)
        if pid:
            self._by_pid[pid] = process
        asyncio.get_running_loop().add_reader(pidfd, self._died, process)
        return process

    def leave(self, process: ClientProcess) -> None:
        """End the watch of a process that has no clients. Idempotent."""
        if not process.handles and process in self._all:
            self._all.discard(process)
            if self._by_pid.get(process.pid) is process:
                del self._by_pid[process.pid]
            asyncio.get_running_loop().remove_reader(process.pidfd)
            os.close(process.pidfd)

    def describe(self, uid: int) -> str:
        """Say which processes of a user have most connections, and what to do."""
        its: Iterable[ClientProcess] = (each for each in self._all if each.uid == uid)
        most = sorted(its, key=lambda each: (-each.connections, -len(each.handles)))[:NAMED_MAX]
        return (
            f"{'; '.join(map(str, most)) or 'none of them are of this user'}. Close clients that are not used any more, "
            "or raise clients_max"
        )
