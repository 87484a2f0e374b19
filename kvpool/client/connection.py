"""A client's connections: one request at a time over each, and the state of a daemon's incarnation.

Signal handlers, time-outs and debuggers raise exceptions at any bytecode of a caller's thread. A lock that is taken
there may be left taken for ever. So nothing here takes a lock: state changes by single operations of built-in types,
which other threads and exceptions see done or not done. Internal to `kvpool.client`.
"""

from __future__ import annotations

import _socket
import itertools
import math
import os
import socket
import struct
import time
import weakref
from collections import deque
from dataclasses import dataclass
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


class DroppableSocket(socket.socket):
    """A socket that closes without a warning when it is dropped: an interrupted thread cannot always close it.

    The finalizer is C code, which no exception interrupts.
    """

    __del__ = _socket.socket.close


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
        self.segment = Segment.attach(fd, welcome.segment_bytes)
        self.numbers: dict[bytes, int] = {}
        self.stashes: dict[tuple[bytes, int], Stash] = {}
        self.grants = Grants()
        self._tables: dict[int, Rows2D] = {}  # by stride

    def renumber(self, digest: bytes, number: int) -> None:
        """A namespace has another number from now on."""
        self.numbers[digest] = number

    def table(self, stride: int) -> Rows2D:
        """The whole segment as rows of `stride` bytes; mapped on first use."""
        table = self._tables.get(stride)
        if table is None:
            whole = self._tables.get(1)
            if (
                whole is None
            ):  # of mappings that two threads make at the same time, the first one stays
                mapping = self.segment.map(fault_in=True, writable=self._writable)
                whole = np.frombuffer(mapping, dtype=np.uint8).reshape(-1, 1)
                whole = self._tables.setdefault(1, whole)
            n = self.segment.size // stride
            table = whole[: n * stride].reshape(n, stride)
            self._tables[stride] = table
        return table


class Stash:
    """Slots that the daemon has granted ahead of the next small put. Thread-safe.

    An exception in the middle of a call may lose rows, which the end of the put's `Use` has the daemon take back.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride
        # Whether the last put met present blocks: then the next one asks before it copies.
        self.ask_first = False
        self.most: float = math.inf  # fewer than this were available
        self._rows: deque[list[int]] = deque()  # as they came

    def __len__(self) -> int:
        return sum(map(len, list(self._rows)))

    def take(self, n: int) -> list[int]:
        """Up to n of them."""
        taken: list[int] = []
        while len(taken) < n:
            try:
                taken += self._rows.pop()
            except IndexError:
                return taken
        if len(taken) > n:
            self.put_back(taken[n:])
            del taken[n:]
        return taken

    def add(self, packed: bytes) -> None:
        if packed:
            self._rows.append(np.frombuffer(packed, dtype=np.uint32).tolist())

    def put_back(self, rows: list[int]) -> None:
        self._rows.append(rows)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Use:
    """A put that uses granted slots, for as long as anybody may write to them."""

    number: int
    settles: bool = False
    """Whether the daemon has to confirm first that all grants are void."""


class Grants:
    """Whether client and daemon agree about the granted slots. Thread-safe.

    They may disagree after a failed exchange: slots may have been granted in an answer that was lost, and
    slots to be stored may have been freed and granted again. So none of them can be named
    safely. Granted slots are then not used until all their current users have ended, and the
    daemon has confirmed that all grants are void.

    A use that is dropped without its `end`, by an exception, leaves the same doubt.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._uses: dict[
            int, weakref.ref[Use]
        ] = {}  # without an end: one that is dead leaves doubt
        self._doubtful = False
        self._over = False

    def begin(self) -> Use | None:
        """The use of granted slots, with an `end` to follow; None if they must not be used now."""
        use = Use(next(self._numbers))
        self._uses[use.number] = weakref.ref(use)
        if self._over or self._doubtful or len(self._uses) > 1:  # usually none of these
            use.settles = self.doubtful
            if self._over or (use.settles and len(self._uses) > 1):
                self._uses.pop(use.number, None)
                return None
        return use

    def begin_last(self) -> bool:
        """Whether granted slots have no users; if so, there will be no new ones."""
        self._over = True
        if self.doubtful or self._uses:
            self._over = not self._uses
        return self._over

    @property
    def doubtful(self) -> bool:
        """Whether slots may be granted that the client does not know of."""
        for number, ref in list(self._uses.items()):
            if ref() is None:
                self._doubtful = True
                self._uses.pop(number, None)
        return self._doubtful

    def settled(self, by: Use) -> None:
        """The daemon has confirmed that all grants are void. by: the only use at that time."""
        self._doubtful = by.settles = False

    def end(self, use: Use, *, doubtful: bool = False) -> None:
        """Nobody writes to the slots any more. Idempotent."""
        if doubtful:
            self._doubtful = True
        self._uses.pop(use.number, None)


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

    def leave(self, finished: list[str]) -> None:
        """Return the leases of these tokens and all granted slots, if that can be said at once."""
        ahead = self.ahead
        if finished:
            ahead += frame.encode(client_wire.Release(finished), 0)
        if self.daemon.stashes or self.daemon.grants.doubtful:
            ahead += frame.encode(client_wire.GiveBack(0, b""), 0)
        if ahead:
            try:
                self.sock.send(ahead, socket.MSG_DONTWAIT)
            except OSError:
                pass  # the daemon is gone, or does not read

    def close(self) -> None:
        self.sock.close()

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

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
