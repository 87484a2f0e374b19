"""What any correct transfer between two nodes must do on these cores: the limits of bench/transfer.py.

    python bench/transfer_limits.py KIND PAYLOAD_FD PAYLOAD_BYTES OPTIONS

As `peers_worker.py`, with contestants that keep nothing:

hashed stream  one plain TCP connection from another process, whose receiver hashes each MiB as it arrives. Both ends
               go through as much memory as the stores do, so neither finds its bytes in a cache
tagged stream  the same, and behind each MiB its tag, which one end makes when the MiB has been sent and the other checks
hops           a message as long as a request for one block, through the same kinds of sockets and processes: from the
               caller over a unix socket to a process, over a socket pair to another one, over TCP to a third; and the
               same way back, with the block as far as the second one's memory
hashed nixl    NIXL itself, and the hash of each MiB when all has been read
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peers_worker import (
    KILLED_WITH_PARENT,
    KINDS,
    Contestant,
    Nixl,
    WrongBytesError,
    serve,
)
from xxhash import xxh3_128_digest

MIB = 1 << 20
MEMORY_BYTES = 96 * MIB  # of each end: several times a cache
REQUEST_BYTES = 256
REPORT_BYTES = 64
CHUNK_BYTES = MIB
KEY, TAG_BYTES = bytes(range(32)), 16
_LENGTH = 8  # the first bytes of a request: how much is wanted


class _Stream(Contestant):
    """Moves bytes that nobody asked for by name."""

    ops = ("pull",)

    def names(self, serial: int) -> Any:
        return serial

    def put(self, names: Any, batch: int) -> None:
        pass  # nothing is kept

    def remove(self, names: Any) -> None:
        pass


class HashedStream(_Stream):
    """See the module."""

    def __init__(self, *, tagged: bool = False) -> None:
        self._sender, address = _started("sender", KEY.hex() if tagged else "")
        self._sealer = _sealer(KEY) if tagged else None
        self._tag = bytearray(TAG_BYTES)
        self._sock = socket.create_connection(("127.0.0.1", int(address)))
        self._memory = _memory()
        self._at = 0

    def pull(self, names: Any) -> None:
        left = self.out.nbytes
        self._sock.sendall(left.to_bytes(_LENGTH, "big"))
        while left:
            if self._at + CHUNK_BYTES > MEMORY_BYTES:
                self._at = 0
            here = self._memory[self._at : self._at + min(left, CHUNK_BYTES)]
            _receive_into(self._sock, here)
            xxh3_128_digest(here)
            if self._sealer is not None:
                _receive_into(self._sock, memoryview(self._tag))
                self._sealer.check([here], self._tag)
            self._at += len(here)
            left -= len(here)

    def pids(self) -> list[int]:
        return [self._sender.pid]

    def close(self) -> None:
        self._sock.close()
        _ended(self._sender)


class Hops(_Stream):
    """See the module. A batch is asked for at once."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-hops-")
        self._owner, address = _started("owner")
        path = str(Path(self._folder.name) / "control.sock")
        self._control, _ = _started("control", path, address)
        children = Path(f"/proc/{self._control.pid}/task/{self._control.pid}/children")
        self._mover = int(children.read_text())
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._report = bytearray(REPORT_BYTES)

    def pull(self, names: Any) -> None:
        self._sock.sendall(self.out.nbytes.to_bytes(_LENGTH, "big").ljust(REQUEST_BYTES, b"k"))
        _receive_into(self._sock, memoryview(self._report))

    def pids(self) -> list[int]:
        return [self._owner.pid, self._control.pid, self._mover]

    def close(self) -> None:
        self._sock.close()
        _ended(self._control)
        _ended(self._owner)
        self._folder.cleanup()


class HashedNixl(Nixl):
    """See the module."""

    def pull(self, names: Any) -> None:
        self.get(names)
        whole = self.out.reshape(-1).data
        for at in range(0, len(whole), CHUNK_BYTES):
            xxh3_128_digest(whole[at : at + CHUNK_BYTES])


def _sealer(key: bytes) -> Any:
    # Imported here: the peers' environment has not what it needs.
    from kvpool.transfer.sealing import Sealer

    return Sealer(key)


def _memory() -> memoryview:
    """Pages of its own, each touched."""
    return memoryview(bytearray(b"\1") * MEMORY_BYTES)


def _started(role: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A process of this file, and the line that it says once it is ready."""
    process = subprocess.Popen(
        [*KILLED_WITH_PARENT, sys.executable, __file__, role, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the limit's {role} did not start")
    return process, line.strip()


def _ended(process: subprocess.Popen[str]) -> None:
    """They end when their connection does."""
    assert process.stdout is not None
    process.stdout.close()
    process.wait(timeout=10)


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            raise WrongBytesError("the stream ended early")
        view = view[got:]


# ---- the other processes -----------------------------------------------------------------------------


def _listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def send_what_is_asked(key: bytes) -> None:
    """The other end of `HashedStream`. key: empty for one without tags."""
    memory, sealer = _memory(), _sealer(key) if key else None
    sock, at = _listening(), 0
    while question := sock.recv(_LENGTH, socket.MSG_WAITALL):
        left = int.from_bytes(question, "big")
        while left:
            if at + CHUNK_BYTES > len(memory):
                at = 0
            count = min(left, CHUNK_BYTES)
            sock.sendall(memory[at : at + count])
            if sealer is not None:
                sock.sendall(sealer.tag([memory[at : at + count]]))
            at += count
            left -= count


def own_blocks() -> None:
    """The third process of `Hops`."""
    memory = _memory()
    sock = _listening()
    while request := sock.recv(REQUEST_BYTES, socket.MSG_WAITALL):
        sock.sendmsg([bytes(REPORT_BYTES), memory[: int.from_bytes(request[:_LENGTH], "big")]])


def move_blocks(orders: socket.socket, port: str) -> None:
    """The second one."""
    memory = _memory()
    peer = socket.create_connection(("127.0.0.1", int(port)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    report = memoryview(bytearray(REPORT_BYTES))
    while request := orders.recv(REQUEST_BYTES, socket.MSG_WAITALL):
        peer.sendall(request)
        _receive_into(peer, report)
        _receive_into(peer, memory[: int.from_bytes(request[:_LENGTH], "big")])
        orders.sendall(report)


def control(path: str, port: str) -> None:
    """The first one."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        move_blocks(theirs, port)
        os._exit(0)
    theirs.close()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    client, _ = listener.accept()
    while request := client.recv(REQUEST_BYTES, socket.MSG_WAITALL):
        ours.sendall(request)
        client.sendall(ours.recv(REPORT_BYTES, socket.MSG_WAITALL))


LIMITS: dict[str, Callable[..., Contestant]] = {
    "hashed-stream": HashedStream,
    "tagged-stream": partial(HashedStream, tagged=True),
    "hops": Hops,
    "hashed-nixl": HashedNixl,
}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["sender", key]:
            send_what_is_asked(bytes.fromhex(key))
        case ["owner"]:
            own_blocks()
        case ["control", path, port]:
            control(path, port)
        case [kind, fd, nbytes, options]:
            serve({**KINDS, **LIMITS}[kind], int(fd), int(nbytes), json.loads(options))
