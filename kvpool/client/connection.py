"""A client's connections: one request at a time over each, and the state of a daemon's incarnation.

Internal to `kvpool.client`.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import threading
import time
import weakref
from typing import Any

import numpy as np

from kvpool.errors import KvpoolError, ProtocolError, Unavailable, UnknownReservation
from kvpool.memory.buffers import Rows2D
from kvpool.memory.segment import Segment
from kvpool.wire import client as client_wire
from kvpool.wire import frame

SPIN_S = 200e-6  # answers within this time are polled for: sleeping and waking costs as much
SPIN_S_PER_BYTE = 2e-11  # and longer beside a large copy, after which the daemon wakes up slowly
SPIN_PAUSE_MIN = 4  # requests without polling, after it was in vain
SPIN_PAUSE_MAX = 128
TIMEOUT_S_MAX = 86_400.0
_HEADER_BYTES = frame.HEADER.size


class DaemonState:
    """State of one incarnation of the daemon: its segment and its numbers.

    Dropped as a whole when another incarnation answers; the mapping is removed when its last reader ends. writable:
    the mapping.
    """

    def __init__(self, welcome: client_wire.Welcome, fd: int, *, writable: bool = True) -> None:
        self._writable = writable
        weakref.finalize(self, os.close, fd)
        self.incarnation = welcome.incarnation
        self.node = welcome.node
        self.protocol = welcome.version
        self.segment = Segment.attach(fd, welcome.segment_bytes)
        self.numbers: dict[bytes, int] = {}
        self.stashes: dict[tuple[bytes, int], Stash] = {}
        self.grants = Grants()
        self._bytes: Rows2D | None = None
        self._tables: dict[int, Rows2D] = {}
        self._lock = threading.Lock()

    def renumber(self, digest: bytes, number: int) -> None:
        """A namespace has another number from now on."""
        self.numbers[digest] = number

    def table(self, stride: int) -> Rows2D:
        """The whole segment as rows of `stride` bytes; mapped on first use."""
        table = self._tables.get(stride)
        if table is None:
            with self._lock:
                if self._bytes is None:
                    mapping = self.segment.map(populate=True, writable=self._writable)
                    self._bytes = np.frombuffer(mapping, dtype=np.uint8)
                n = self.segment.size // stride
                table = self._bytes[: n * stride].reshape(n, stride)
                self._tables[stride] = table
        return table


class Stash:
    """Slots that the daemon has granted ahead of the next small put. Thread-safe."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        # Whether the last put met present blocks: then the next one asks before it copies.
        self.ask_first = False
        self.most: float = math.inf  # fewer than this were available
        self._rows: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, n: int) -> list[int]:
        """Up to n of them."""
        if n <= 0:
            return []
        with self._lock:
            taken = self._rows[-n:]
            del self._rows[-n:]
        return taken

    def add(self, packed: bytes) -> None:
        if packed:
            with self._lock:
                self._rows += np.frombuffer(packed, dtype=np.uint32).tolist()

    def put_back(self, rows: list[int]) -> None:
        with self._lock:
            self._rows += rows


class Grants:
    """Whether client and daemon agree about the granted slots. Thread-safe.

    They may disagree after a failed exchange: slots may have been granted in an answer that was lost, and
    slots to be stored may have been freed and granted again. So none of them can be named
    safely. Granted slots are then not used until all their current users have ended, and the
    daemon has confirmed that all grants are void.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.doubtful = False

    def begin(self) -> bool:
        """Whether granted slots may be used, or settled; if so, `end` must follow."""
        with self.lock:
            if self.doubtful and self.users:
                return False
            self.users += 1
            return True

    def begin_last(self) -> bool:
        """Whether granted slots have no users; if so, there will be no new ones."""
        with self.lock:
            if self.users:
                return False
            self.users += 1
            self.doubtful = True
            return True

    def end(self) -> None:
        with self.lock:
            self.users -= 1


def refused(error: BaseException) -> bool:
    """Whether the daemon has answered that nothing was changed."""
    doubt = (Unavailable, ProtocolError, UnknownReservation)
    return isinstance(error, KvpoolError) and not isinstance(error, doubt)


class Connection:
    """One connection, one request at a time. Any failure makes it unusable: close it."""

    def __init__(self, sock: socket.socket, daemon: DaemonState) -> None:
        self.sock = sock
        self.daemon = daemon
        self.ahead = b""  # frames without an answer, sent with the next request
        self._requests = itertools.count(1)
        self._timeout = -1.0
        self._spin_s = SPIN_S  # for the next answer only
        self._spin_pause = SPIN_PAUSE_MIN  # requests to skip after the next failed poll
        self._no_spin = 0

    def ask(self, message: frame.Message, timeout_s: float) -> Any:
        """Send and wait. Raises the daemon's error, `Unavailable`, or `ProtocolError`."""
        request = self.send(message, timeout_s)
        return self.receive(request, timeout_s)

    def send(self, message: frame.Message, timeout_s: float) -> int:
        request = next(self._requests) & 0x7FFFFFFF or next(self._requests)
        self._limit(timeout_s)
        self._write(frame.encode(message, request))
        return request

    def tell(self, message: frame.Message) -> None:
        """Send without requesting an answer."""
        self._write(frame.encode(message, 0))

    def flush(self) -> None:
        """Send the queued frames ahead of the next request."""
        if self.ahead:
            self._write(b"")

    def _write(self, framed: bytes) -> None:
        try:
            self.sock.sendall(self.ahead + framed)
        except OSError as error:
            raise Unavailable(f"the connection to the daemon failed: {error}") from None
        self.ahead = b""

    def be_patient(self, nbytes: int) -> None:
        """Poll longer for the next answer, which comes beside a copy of this many bytes."""
        self._spin_s = SPIN_S + nbytes * SPIN_S_PER_BYTE

    def receive(self, request: int, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        try:
            data = self._poll() or self.sock.recv(1 << 16)
            while len(data) < _HEADER_BYTES or len(data) < _HEADER_BYTES + self._length(data):
                if data and time.monotonic() > deadline:
                    raise BlockingIOError
                more = self.sock.recv(1 << 16)
                if not more:
                    data = b""
                    break
                data += more
        except BlockingIOError:
            raise Unavailable(f"the daemon did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise Unavailable(f"the connection to the daemon failed: {error}") from None
        if not data:
            raise Unavailable("the daemon closed the connection")
        length, answered = frame.HEADER.unpack_from(data)
        message = client_wire.decode_daemon(data[_HEADER_BYTES:])
        if type(message) is frame.Error:
            frame.raise_error(message)
        if answered != request or len(data) != _HEADER_BYTES + length:
            raise ProtocolError("the daemon answered a different request")
        return message

    def _poll(self) -> bytes:
        """Bytes that arrive within a moment, without sleeping; empty if none did.

        On a busy machine that may keep the daemon from the core it needs, and in a process with a
        busy Python thread each try waits a switch interval for the GIL. Both show as late
        answers; polling then pauses, twice as long each time. One late answer in a hundred hardly
        stops it, one in ten does.
        """
        if self._no_spin:
            self._no_spin -= 1
            return b""
        until = time.perf_counter() + self._spin_s
        self._spin_s = SPIN_S
        while True:
            try:
                data = self.sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter() < until:
                    continue
                self._no_spin = self._spin_pause
                self._spin_pause = min(2 * self._spin_pause, SPIN_PAUSE_MAX)
                return b""
            self._spin_pause -= (self._spin_pause - SPIN_PAUSE_MIN + 7) // 8
            return data

    def shut(self) -> None:
        """End it under a thread that waits for an answer. Any thread."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended

    def close(self) -> None:
        self.sock.close()

    @staticmethod
    def _length(data: bytes) -> int:
        length = int(frame.HEADER.unpack_from(data)[0])
        if length > frame.FRAME_BYTES_MAX:
            raise ProtocolError(f"the daemon's answer has {length} bytes; the limit is 16 MiB")
        return length

    def _limit(self, timeout_s: float) -> None:
        """Let the kernel keep the deadline: no extra system call a request, unlike `settimeout`."""
        if timeout_s != self._timeout:
            limit = timeval(timeout_s)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._timeout = timeout_s


def timeval(seconds: float) -> bytes:
    """A timeout as the kernel's `struct timeval`; never zero, which would be none."""
    seconds = min(max(seconds, 1e-6), TIMEOUT_S_MAX)
    whole = int(seconds)
    micros = int((seconds - whole) * 1e6)
    return struct.pack("@ll", whole, micros or (0 if whole else 1))
