"""A TCP proxy that does to connections what networks and broken peers do.

    with Proxy(("127.0.0.1", port)) as proxy:
        ...                        # somebody talks to proxy.address
        proxy.set(Fault(hold=BOTH))  # from now on nothing arrives, and nobody is told

One thread carries all connections. A fault holds for connections that there are and for new ones, until
another is set; what was held back is then delivered, as TCP would.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from tests.support.waiting import PATIENCE_S

CHUNK_BYTES = 64 << 10
HELD_BYTES_MAX = 1 << 20  # in one direction of a connection; then its sender is not read from
CONNECTIONS_MAX = 256
TICK_S = 0.02

Way = Literal["up", "down"]
"""up: what whoever connected says; down: what the server answers."""
Ending = Literal["close", "reset", "hold"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to bytes. The default is nothing.

    delay_s: every chunk arrives that much later.
    bytes_s: so much arrives in a second, of all connections and both ways together; 0: no limit.
    hold: nothing of these ways arrives, and nothing is lost: a cut network, or a stopped peer.
    refuse: connections are ended at once, those that there are included.
    silent: a new connection is accepted, and the server never hears of it.
    half_close: this way is ended after what was sent, while the other one goes on.
    flip: one bit of the byte at this offset of each connection's way is turned over; once a connection.
    flip_every: one bit is turned over in every so many bytes after `flip`'s offset.
    stop: so many bytes of each connection's way arrive and not one more; then comes the `ending`: both ways
        are closed, or reset, or nothing more of this way arrives until another fault is set.
    """

    delay_s: float = 0.0
    bytes_s: float = 0.0
    hold: frozenset[Way] = frozenset()
    refuse: bool = False
    silent: bool = False
    half_close: Way | None = None
    flip: tuple[Way, int] | None = None
    flip_every: int = 0
    stop: tuple[Way, int] | None = None
    ending: Ending = "close"

    def left(self, flow: _Flow) -> int:
        """Bytes of a flow that may still arrive."""
        if self.stop is None or self.stop[0] != flow.way:
            return HELD_BYTES_MAX
        return max(0, self.stop[1] - flow.passed)


BOTH: frozenset[Way] = frozenset({"up", "down"})
NOTHING = Fault()


class _Flow:
    """One direction of one connection: what was read and not yet written."""

    def __init__(
        self, way: Way, source: socket.socket, target: socket.socket | None, port: int
    ) -> None:
        self.way: Way = way
        self.port = port
        self.source = source
        self.target = target
        self.held: deque[tuple[float, bytes]] = deque()  # due, bytes
        self.held_bytes = 0
        self.seen = 0  # bytes read so far: the offset of the next one
        self.passed = 0  # bytes delivered so far
        self.over = False  # the source has ended
        self.closed = False  # and the target was told


class Proxy:
    """See the module. Starts with `with`; all but `set` and `cut` belongs to the thread that made it.

    target: host and port of the server, or a function that says them at each new connection. host: where
        it listens itself. caller: names whoever connects, by the port that it comes from, for faults of its own;
        called by the thread that carries, while there are some.
    connections: how many were accepted so far. delivered: bytes, by way. stopped: set when a connection
        came to the `stop` of the fault, since that was set.
    """

    def __init__(
        self,
        target: tuple[str, int] | Callable[[], tuple[str, int]],
        host: str = "127.0.0.1",
        caller: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._target = target if callable(target) else lambda: target
        self._listener = socket.socket()
        self._listener.bind((host, 0))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.connections = 0
        self.delivered: dict[Way, int] = {"up": 0, "down": 0}
        self.stopped = threading.Event()
        self._fault = NOTHING
        self._caller = caller
        self._callers_faults: dict[str, Fault] = {}
        self._names: dict[int, str] = {}
        self._room = 0.0  # bytes that may be delivered now, where that is limited
        self._filled_at = time.monotonic()
        self._pairs: list[tuple[_Flow, _Flow]] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._closing = False
        self._cutting = False
        self._cut = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-proxy", daemon=True)

    @property
    def carried(self) -> int:
        """Bytes delivered, both ways."""
        return sum(self.delivered.values())

    @property
    def url(self) -> str:
        """As peers are told it."""
        return f"tcp://{self.address[0]}:{self.address[1]}"

    @property
    def fault(self) -> Fault:
        return self._fault

    def set(self, fault: Fault = NOTHING) -> None:
        """Do this from now on. Any thread."""
        self.stopped.clear()
        self._fault = fault
        self._wake.send(b"x")

    def set_for(self, caller: str, fault: Fault | None) -> None:
        """Do this to what one caller says and hears, in place of what is done to all; None: no longer. Any thread."""
        self._callers_faults = {
            **{name: one for name, one in self._callers_faults.items() if name != caller},
            **({} if fault is None else {caller: fault}),
        }
        self._wake.send(b"x")

    def cut(self) -> None:
        """End the connections that there are, once; returns when that is done. Any thread."""
        self._cut.clear()
        self._cutting = True
        self._wake.send(b"x")
        assert self._cut.wait(PATIENCE_S), "the proxy does not run"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections. Idempotent."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):  # the thread has seen it, and closed its end
            self._wake.send(b"x")
        self._thread.join(PATIENCE_S)
        self._wake.close()

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        selector = self._selector
        selector.register(self._listener, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        try:
            while not self._closing:
                for key, _ in selector.select(TICK_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(CHUNK_BYTES)
                self._fill()
                if self._fault.refuse or self._cutting:
                    self._cutting = False
                    self._end_all()
                    self._cut.set()
                for pair in list(self._pairs):
                    self._carry(pair)
        finally:
            self._end_all()
            selector.close()
            self._listener.close()
            self._woken.close()

    def _fill(self) -> None:
        """What may be delivered by now; what nobody used is lost after a tick."""
        now = time.monotonic()
        rate, passed_s = self._fault.bytes_s, now - self._filled_at
        self._filled_at = now
        if rate:
            self._room = min(self._room + rate * passed_s, max(rate * TICK_S, 1.0))

    def _fault_of(self, port: int) -> Fault:
        """Of a connection from a port. Who that is, is asked only while some callers have faults of their own."""
        if not self._callers_faults:
            return self._fault
        if port not in self._names:
            self._names[port] = self._caller(port)
        return self._callers_faults.get(self._names[port], self._fault)

    def _accept(self) -> None:
        try:
            near, (_, port) = self._listener.accept()
        except BlockingIOError:
            return
        self.connections += 1
        self._names.pop(port, None)  # another one had it
        fault = self._fault_of(port)
        if fault.refuse or len(self._pairs) >= CONNECTIONS_MAX:
            _reset(near)
            return
        far: socket.socket | None = None
        if not fault.silent:
            try:
                far = socket.create_connection(self._target(), PATIENCE_S)
            except OSError:
                _reset(near)  # as if it had connected to the server itself
                return
            far.setblocking(False)
        near.setblocking(False)
        up = _Flow("up", near, far, port)
        down = _Flow("down", far if far is not None else near, near, port)
        if far is None:
            down.over = down.closed = True
        self._pairs.append((up, down))
        self._watch((up, down))

    def _carry(self, pair: tuple[_Flow, _Flow]) -> None:
        try:
            for flow in pair:
                self._read(flow)
                self._write(flow)
                fault = self._fault_of(flow.port)
                if not fault.left(flow):
                    self.stopped.set()
                    if fault.ending != "hold":
                        self._end(pair)
                        return
        except OSError:
            self._end(pair)
            return
        if all(flow.closed for flow in pair) or (pair[0].target is None and pair[0].over):
            self._end(pair)
            return
        self._watch(pair)

    def _read(self, flow: _Flow) -> None:
        while not flow.over and flow.held_bytes < HELD_BYTES_MAX:
            try:
                data = flow.source.recv(CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                flow.over = True
                return
            if flow.target is None:
                continue  # silent: it is taken, and nobody hears of it
            data = self._damaged(flow, data)
            flow.seen += len(data)
            due = time.monotonic() + self._fault_of(flow.port).delay_s
            flow.held.append((due, data))
            flow.held_bytes += len(data)

    def _write(self, flow: _Flow) -> None:
        fault, target = self._fault_of(flow.port), flow.target
        if target is None or flow.way in fault.hold:
            return
        while flow.held and flow.held[0][0] <= time.monotonic():
            left = fault.left(flow)
            if not left or (fault.bytes_s and self._room < 1):
                return
            due, data = flow.held[0]
            try:
                sent = target.send(data[: min(left, int(self._room)) if fault.bytes_s else left])
            except BlockingIOError:
                return
            if fault.bytes_s:
                self._room -= sent
            flow.passed += sent
            flow.held_bytes -= sent
            self.delivered[flow.way] += sent
            if sent < len(data):
                flow.held[0] = (due, data[sent:])
                return
            flow.held.popleft()
        if not flow.held and not flow.closed and (flow.over or fault.half_close == flow.way):
            flow.closed = flow.over = True
            with contextlib.suppress(OSError):  # it has gone already
                target.shutdown(socket.SHUT_WR)

    def _damaged(self, flow: _Flow, data: bytes) -> bytes:
        fault = self._fault_of(flow.port)
        if fault.flip is None or fault.flip[0] != flow.way:
            return data
        offset, end = fault.flip[1], flow.seen + len(data)
        if fault.flip_every and offset < flow.seen:
            passed = -(-(flow.seen - offset) // fault.flip_every)
            offset += passed * fault.flip_every
        if not flow.seen <= offset < end:
            return data
        broken = bytearray(data)
        step = fault.flip_every or len(data)
        for at in range(offset - flow.seen, len(data), step):
            broken[at] ^= 0x10
        return bytes(broken)

    def _watch(self, pair: tuple[_Flow, _Flow]) -> None:
        """Wake up for what can be done about this connection; the tick does the rest."""
        wanted: dict[socket.socket, int] = {}
        for flow in pair:
            if not flow.over and flow.held_bytes < HELD_BYTES_MAX:
                wanted[flow.source] = wanted.get(flow.source, 0) | selectors.EVENT_READ
            due = flow.held and flow.held[0][0] <= time.monotonic()
            fault = self._fault_of(flow.port)
            held = (
                flow.way in fault.hold or not fault.left(flow) or (fault.bytes_s and self._room < 1)
            )
            if due and flow.target is not None and not held:
                wanted[flow.target] = wanted.get(flow.target, 0) | selectors.EVENT_WRITE
        for sock in {sock for flow in pair for sock in (flow.source, flow.target) if sock}:
            events = wanted.get(sock, 0)
            if sock in self._selector.get_map():
                if events:
                    self._selector.modify(sock, events)
                else:
                    self._selector.unregister(sock)
            elif events:
                self._selector.register(sock, events)

    def _end(self, pair: tuple[_Flow, _Flow]) -> None:
        self._pairs.remove(pair)
        for sock in {sock for flow in pair for sock in (flow.source, flow.target) if sock}:
            if sock in self._selector.get_map():
                self._selector.unregister(sock)
            fault = self._fault_of(pair[0].port)
            broken = fault.refuse or (fault.stop and fault.ending == "reset")
            _reset(sock) if broken else sock.close()

    def _end_all(self) -> None:
        for pair in list(self._pairs):
            self._end(pair)


def _reset(sock: socket.socket) -> None:
    """Close with a reset, as a machine does that has nobody there."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
