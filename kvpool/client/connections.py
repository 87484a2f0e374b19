"""The connections of one client: a pool of them, and back-off while the daemon is unreachable.

Internal to `kvpool.client`.
"""

from __future__ import annotations

import _thread
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from kvpool.client.connection import Connection, DaemonState, DroppableSocket
from kvpool.client.daemon_watch import DaemonWatch
from kvpool.client.dialer import Dialer, welcome_of
from kvpool.client.leftovers import Leftovers
from kvpool.errors import (
    InternalError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
)
from kvpool.memory.owner_liveness import LifeView
from kvpool.retry import Backoff
from kvpool.wire import client as client_wire
from kvpool.wire import frame

BACKOFF_S = (0.05, 1.0)
LOOK_S = 0.1  # between two looks for a free connection: one that was dropped wakes nobody
STEPS = 4  # of an introduction, each with the time-out: two to connect, one to send, one to receive

T = TypeVar("T")


class Connections:
    """Connections to the daemon of this node, as many as are needed at a time. Thread-safe.

    An exception may end a caller's thread at any bytecode, and whatever the thread refers to is dropped then. So a
    connection counts as open as long as it exists and is not closed, callers take no locks, and a new connection is
    made by a thread of its own, whose exceptions are all its own.

    After a failure requests fail at once until the next attempt is due; then one thread at a time tries
    to reconnect. Leftovers are sent ahead of the next request.

    daemon: the incarnation that answered last; None: none did, or its process has ended. incarnation: its name, also
    after its end. read_only: the segment is mapped without the right to write.

    The memory of a dead daemon is let go at once, whether there are requests or not: it is unmapped with the last
    lease, reservation or array of the caller that refers to it.
    """

    def __init__(
        self, dialer: Dialer, *, timeout_s: float, connections_max: int, read_only: bool = False
    ) -> None:
        self.dialer = dialer
        self.timeout_s = timeout_s
        self.read_only = read_only
        self.daemon: DaemonState | None = None
        self.incarnation = ""
        self.closed = False
        self.leftovers = Leftovers()
        self._watch: DaemonWatch | None = None
        self._pid = os.getpid()
        self._idle: deque[Connection] = deque()
        # Every connection that was made and may be open; replaced as a whole.
        self._made: list[weakref.ref[Connection]] = []
        self._making = 0
        self._long: set[Connection] = set()  # those with a request that may take long
        self._connections_max = connections_max
        self._lock = threading.Lock()  # never taken by a caller's thread
        self._waiting: deque[SimpleQueue[None]] = deque()
        """Bells of threads that wait for a connection."""
        self._failure = ""
        self._backoff = Backoff(*BACKOFF_S)
        self._probing = False
        last = weakref.finalize(self, _take_leave, self._idle, self.leftovers.finished, self._pid)
        last.atexit = False  # the end of the process ends all that it holds

    @property
    def available(self) -> bool:
        """Whether a request would be sent now."""
        return not self.closed and self._backoff.due(time.monotonic())

    def connect(self) -> None:
        """Connect now. Raises `Unavailable`, or the daemon's refusal."""
        self.give_back(self.take(self.timeout_s))

    def close(self) -> None:
        """Send the remaining messages, and close all connections; long waits end. Idempotent."""
        if self.leftovers.finished and self._idle:
            try:
                with self.request() as connection:
                    connection.flush()
            except KvpoolError:
                pass  # they end by themselves
        daemon = self.daemon
        used = daemon is not None and bool(daemon.stashes or daemon.grants.doubtful)
        if daemon is not None and used and self._idle and daemon.grants.begin_last():
            try:
                with self.request() as connection:
                    if connection.daemon is daemon:
                        connection.tell(client_wire.GiveBack(0, b""))
            except KvpoolError:
                pass  # the daemon frees them at the end of this process
        self.closed = True
        for connection in list(self._long):
            connection.shut()
        self._end()

    def _end(self) -> None:
        """Let go of all that requests need: none will come. Idempotent."""
        self._close_idle()
        watch, self._watch, self.daemon = self._watch, None, None
        if (
            watch is not None and os.getpid() == self._pid
        ):  # a forked child must not stop its parent's
            watch.stop()

    def ask_long(self, connection: Connection, message: frame.Message, timeout_s: float) -> Any:
        """As `connection.ask`, but `close` by another thread ends it with `Unavailable`."""
        try:
            self._long.add(connection)
            if self.closed:
                raise Unavailable("this client is closed")
            return connection.ask(message, timeout_s)
        finally:
            self._long.discard(connection)

    def attach_device(self) -> tuple[client_wire.Welcome, LifeView] | None:
        """A handle of spare device memory, and the descriptor that signals its end; None: there is none, or no
        daemon.
        """
        self._check_process()
        if self.closed:
            return None

        def introduce() -> tuple[client_wire.Welcome, LifeView | None]:
            connection, welcome, view = self._introduce(device=True)
            connection.close()  # a descriptor can only come with a connection's first answer
            return welcome, view

        try:
            welcome, view = _apart(introduce, self.dialer.socket_path, STEPS * self.timeout_s)
        except Unavailable:
            return None
        return None if view is None else (welcome, view)

    def request(self, wait_s: float | None = None) -> Request:
        """wait_s: for a free connection, if not `timeout_s`."""
        return Request(self, self.timeout_s if wait_s is None else wait_s)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidRequest(
                "this client was created before a fork: create a new one in the child process"
            )

    def take(self, timeout_s: float) -> Connection:
        """A connection for one request; give it back or drop it. Raises `Unavailable`."""
        if self.closed:
            raise Unavailable("this client is closed")
        self._check_process()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._another(timeout_s)
        try:
            self.leftovers.send(connection)
        except Unavailable:
            self.drop(connection)
            raise
        return connection

    def _another(self, timeout_s: float) -> Connection:
        """A new connection, or, at the limit, the next one that is free."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._count() < self._connections_max:
                _apart(self._make, self.dialer.socket_path, STEPS * self.timeout_s)
            else:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"all connections were busy for {timeout_s:g} s")
                self._listen(min(left, LOOK_S))
            try:
                return self._idle.pop()
            except IndexError:  # another thread was faster
                if self.closed:
                    raise Unavailable("this client is closed") from None

    def _listen(self, seconds: float) -> None:
        """Wait until a connection is free, or may be."""
        bell: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(bell)
        try:
            if not self._idle:
                bell.get(timeout=seconds)
        except Empty:
            pass
        finally:
            try:
                self._waiting.remove(bell)
            except ValueError:
                pass  # it has rung

    def _count(self) -> int:
        """Connections that are open, or about to be."""
        made = [ref() for ref in self._made]
        return self._making + sum(each is not None and not each.closed for each in made)

    def _make(self) -> None:
        """Add a connection to the idle ones, if there may be one more. On a thread of its own."""
        with self._lock:
            if self._count() >= self._connections_max:
                return
            self._making += 1
        try:
            connection = self._connect()
            with self._lock:
                known = [(ref, ref()) for ref in self._made]
                kept = [ref for ref, each in known if each is not None and not each.closed]
                self._made = [*kept, weakref.ref(connection)]
        finally:
            with self._lock:
                self._making -= 1
        self._idle.append(connection)
        if self.closed:
            self._end()

    def give_back(self, connection: Connection) -> None:
        if self.closed or connection.daemon is not self.daemon:
            connection.close()
        else:
            self._idle.append(connection)
        self._ring()

    def _ring(self) -> None:
        """Wake all threads that wait for a connection."""
        while self._waiting:
            try:
                self._waiting.popleft().put(None)
            except IndexError:
                return  # another thread was faster

    def drop(self, connection: Connection) -> None:
        """A connection failed: the daemon is gone, hangs, or violates the protocol. Back off."""
        connection.close()
        if connection.daemon is self.daemon:  # not one whose successor answers already
            self._close_idle()
            self._back_off(f"the daemon at {self.dialer.socket_path} failed")
        self._ring()

    def end(self, connection: Connection) -> None:
        """Close a connection whose exchange was interrupted, or that the daemon closes. Others are as good as before."""
        connection.close()
        self._ring()

    def _close_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return  # a request was faster, and will find out itself

    def _back_off(self, why: str) -> None:
        """Fail requests at once for a while. Concurrent failures count as one."""
        now = time.monotonic()
        self._failure = why
        if self._backoff.due(now):
            self._backoff.failed(now)

    def _connect(self) -> Connection:
        """A new connection. After a failure of the daemon, one thread at a time tries to reconnect."""
        with self._lock:
            wait_s = self._backoff.retry_at - time.monotonic()
            probe = self._backoff.failures > 0
            if wait_s > 0 or (probe and self._probing):
                raise Unavailable(
                    f"{self._failure} (the next attempt is in {max(wait_s, 0):.2f} s)"
                )
            self._probing = probe
        try:
            connection, _, _ = self._introduce()
            return connection
        finally:
            if probe:
                self._probing = False

    def _introduce(
        self, *, device: bool = False
    ) -> tuple[Connection, client_wire.Welcome, LifeView | None]:
        """A connection; with `device`, the descriptor that signals the end of the device memory in its Welcome,
        if any.
        """
        sock = DroppableSocket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            data, fds = self.dialer.introduce(sock, self.timeout_s, device=device)
        except NotAuthenticated:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                self._nobody_listens()
            why = (
                f"no kvpool daemon answers at {self.dialer.socket_path} ({error.strerror or error}). "
                f"Start one with `kvpool serve`, or name its socket (--socket, KVPOOL_SOCKET)"
            )
            self._back_off(why)
            raise Unavailable(why) from None
        try:
            welcome = welcome_of(data, fds)
            view = LifeView(fds.pop()) if welcome.device else None
            daemon = self._meet(welcome, fds.pop(), sock)
        except LimitExceeded as error:
            sock.close()
            why = f"the daemon at {self.dialer.socket_path} takes no more: {error}"
            self._back_off(why)
            raise Unavailable(why) from None
        except KvpoolError as error:
            sock.close()
            for fd in fds:
                os.close(fd)
            self._back_off(str(error))
            raise
        return Connection(sock, daemon), welcome, view

    def _meet(self, welcome: client_wire.Welcome, fd: int, sock: socket.socket) -> DaemonState:
        """The state of this incarnation: the known one, or a new one."""
        with self._lock:
            self._backoff.succeeded()
            daemon = self.daemon
            if daemon is not None and daemon.incarnation == welcome.incarnation:
                os.close(fd)
                return daemon
            if self.read_only:
                # So that the descriptor has no more rights than the mapping.
                narrow = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                os.close(fd)
                fd = narrow
            daemon = DaemonState(welcome, fd, writable=not self.read_only)
            self.daemon = daemon
            self.incarnation = daemon.incarnation
            self._close_idle()
            # Held weakly: a client that is not closed ends with its last reference, its daemon alive or not.
            ours, its = weakref.ref(self), weakref.ref(daemon)
            self._watch = DaemonWatch(sock, lambda: _let_go(ours, its))
            return daemon

    def _nobody_listens(self) -> None:
        """Where the daemon's process cannot be watched, this is taken for its end."""
        watch, daemon = self._watch, self.daemon
        if daemon is not None and (watch is None or not watch.watches):
            self.ended(daemon)

    def ended(self, daemon: DaemonState) -> None:
        """Its process is dead. Any thread; idempotent."""
        with self._lock:
            if self.daemon is daemon:
                self.daemon = None
                self._close_idle()
                self._back_off(f"the daemon at {self.dialer.socket_path} has ended")


def _apart(work: Callable[[], T], socket_path: str, timeout_s: float) -> T:
    """Return what the work returns, or raise what it raises. It goes on when the caller is interrupted.

    Raises `Unavailable` after the time-out.
    """
    outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            outcome.put((None, error))

    try:
        # `threading.Thread.start` waits with a lock that an exception may leave taken.
        _thread.start_new_thread(run, ())
        result, error = outcome.get(timeout=timeout_s)
    except RuntimeError:
        raise Unavailable("no thread is left to connect to the daemon with") from None
    except Empty:
        raise Unavailable(f"the daemon at {socket_path} did not answer in time") from None
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    return cast(T, result)


def _let_go(ours: weakref.ref[Connections], its: weakref.ref[DaemonState]) -> None:
    connections, daemon = ours(), its()
    if connections is not None and daemon is not None:
        connections.ended(daemon)


def _take_leave(idle: deque[Connection], finished: deque[str], pid: int) -> None:
    """Tell the daemon that nobody uses a client any more, which was not closed; its sockets close by themselves.

    Runs on any thread, within any allocation: it takes no lock and waits for nothing. What the daemon does not hear
    it finds out when this process does not map the segment any more.
    """
    if os.getpid() == pid and idle:
        idle.pop().leave(list(finished))


@dataclass(slots=True, eq=False)
class Request:
    """A connection for the length of a `with`: back to the pool, or closed if it failed or was interrupted."""

    connections: Connections
    wait_s: float
    connection: Connection = field(init=False)

    def __enter__(self) -> Connection:
        self.connection = self.connections.take(self.wait_s)
        return self.connection

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and issubclass(kind, (Unavailable, ProtocolError)):
            self.connections.drop(self.connection)
        elif kind is None or (
            issubclass(kind, KvpoolError) and not issubclass(kind, InternalError)
        ):
            self.connections.give_back(self.connection)
        else:
            self.connections.end(self.connection)
