"""The connections of one client: a pool of them, and back-off while the daemon is unreachable.

Internal to `kvpool.client`.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

from kvpool.client.connection import Connection, DaemonState, timeval
from kvpool.client.daemon_watch import DaemonWatch
from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
)
from kvpool.memory.owner_liveness import LifeView
from kvpool.memory.peer_process import check_owner
from kvpool.retry import Backoff
from kvpool.wire import client as client_wire
from kvpool.wire import frame

BACKOFF_S = (0.05, 1.0)
FINISHED_MAX = 1024


class Connections:
    """Connections to the daemon of this node, as many as are needed at a time. Thread-safe.

    After a failure requests fail at once until the next attempt is due; then one thread at a time tries
    to reconnect. Messages that need no answer (`abandon`, `release_later`)
    are sent ahead of the next request.

    daemon: the incarnation that answered last; None: none did, or its process has ended. incarnation: its name, also
    after its end. read_only: the segment is mapped without the right to write.

    The memory of a dead daemon is let go at once, whether there are requests or not: it is unmapped with the last
    lease, reservation or array of the caller that refers to it.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        tenant: str,
        token: str | None,
        instance: str,
        operator_token: str,
        operator_socket: str | None,
        timeout_s: float,
        connections_max: int,
        read_only: bool = False,
    ) -> None:
        self.read_only = read_only
        self.socket_path = socket_path
        self._operator_socket = operator_socket
        self.tenant = tenant
        self.timeout_s = timeout_s
        self.instance = instance
        self.daemon: DaemonState | None = None
        self.incarnation = ""
        self.closed = False
        self._watch: DaemonWatch | None = None
        self.client_id = secrets.token_hex(16)
        self._token = token
        self._operator_token = operator_token
        self._pid = os.getpid()
        self._idle: deque[Connection] = deque()
        self._open = 0  # connections, idle ones included
        self._long: set[Connection] = set()  # those with a request that may take long
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0
        self._finished: deque[str] = deque(maxlen=FINISHED_MAX)  # tokens of leases to release
        self._orphans: deque[tuple[str, frame.Message]] = deque(maxlen=1 << 16)
        self._failure = ""
        self._backoff = Backoff(*BACKOFF_S)
        self._probing = False

    @property
    def available(self) -> bool:
        """Whether a request would be sent now."""
        return not self.closed and self._backoff.due(time.monotonic())

    def connect(self) -> None:
        """Connect now. Raises `Unavailable`, or the daemon's refusal."""
        self.give_back(self.take(self.timeout_s))

    def close(self) -> None:
        """Send the remaining messages, and close all connections; long waits end."""
        if self._finished and self._idle:
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
        with self._lock:
            self._close_idle()
            watch = self._watch
            self._watch = None
            self.daemon = None
        if watch is not None:
            watch.stop()

    def ask_long(self, connection: Connection, message: frame.Message, timeout_s: float) -> Any:
        """As `connection.ask`, but `close` by another thread ends it with `Unavailable`."""
        self._long.add(connection)
        try:
            if self.closed:
                raise Unavailable("this client is closed")
            return connection.ask(message, timeout_s)
        finally:
            self._long.discard(connection)

    def release_later(self, token: str) -> None:
        """Release a lease together with the next request."""
        self._finished.append(token)

    def abandon(self, incarnation: str, ticket: int) -> None:
        """Have a reservation aborted by the daemon of that incarnation, if it answers next."""
        self._orphans.append((incarnation, client_wire.Abort([ticket])))

    def attach_device(self) -> tuple[client_wire.Welcome, LifeView] | None:
        """A handle of spare device memory, and the descriptor that signals its end; None: there is none, or no
        daemon.
        """
        self._check_process()
        if self.closed:
            return None
        with self._freed:
            self._open += 1
        try:
            connection, welcome, view = self._introduce(device=True)
            connection.close()  # a descriptor can only come with a connection's first answer
        except Unavailable:
            return None
        finally:
            self._closed_one()
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
        if self._orphans:
            self._tell_orphans(connection)
        if self._finished:
            tokens: list[str] = []
            while self._finished and len(tokens) < FINISHED_MAX:
                try:
                    tokens.append(self._finished.popleft())
                except IndexError:  # another thread took the last one
                    break
            connection.ahead += frame.encode(client_wire.Release(tokens), 0)
        return connection

    def _another(self, timeout_s: float) -> Connection:
        """A new connection, or, at the limit, the next one that is free."""
        with self._freed:
            if self._open >= self._connections_max:
                deadline = time.monotonic() + timeout_s
                self._waiting += 1
                try:
                    while self._open >= self._connections_max:
                        try:
                            return self._idle.pop()
                        except IndexError:
                            pass  # none, or another thread was faster
                        left = deadline - time.monotonic()
                        if left <= 0 or not self._freed.wait(left):
                            raise Unavailable(f"all connections were busy for {timeout_s:g} s")
                finally:
                    self._waiting -= 1
            self._open += 1
        try:
            return self._connect()
        except BaseException:
            self._closed_one()
            raise

    def _closed_one(self) -> None:
        with self._freed:
            self._open -= 1
            self._freed.notify()

    def give_back(self, connection: Connection) -> None:
        if self.closed or connection.daemon is not self.daemon:
            connection.close()
            self._closed_one()
            return
        self._idle.append(connection)
        if self._waiting:
            with self._freed:
                self._freed.notify()

    def drop(self, connection: Connection) -> None:
        """A connection failed: the daemon is gone, hangs, or violates the protocol. Back off."""
        connection.close()
        with self._freed:
            self._open -= 1
            if connection.daemon is self.daemon:  # not one whose successor answers already
                self._close_idle()
                self._back_off(f"the daemon at {self.socket_path} failed")
            self._freed.notify()

    def _close_idle(self) -> None:
        """With the lock held, or at the end."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return  # a request was faster, and will find out itself
            connection.close()
            self._open -= 1

    def _tell_orphans(self, connection: Connection) -> None:
        """Report to the daemon slots that nobody will commit."""
        while self._orphans:
            try:
                incarnation, message = self._orphans.popleft()
            except IndexError:
                break  # another thread reports it
            if incarnation == connection.daemon.incarnation:
                try:
                    connection.tell(message)
                except Unavailable:
                    self._orphans.append((incarnation, message))
                    self.drop(connection)
                    raise

    def _back_off(self, why: str) -> None:
        """With the lock held. Concurrent failures count as one."""
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

    def _dial(self, sock: socket.socket) -> None:
        """An operator's connection goes to the operators' socket, where this process can open one."""
        if self._operator_socket is not None:
            try:
                sock.connect(self._operator_socket)
            except (FileNotFoundError, ConnectionRefusedError, PermissionError):
                pass  # an older daemon, or a caller who is no operator: the daemon says so when it matters
            else:
                check_owner(sock, self._operator_socket)
                return
        sock.connect(self.socket_path)
        check_owner(sock, self.socket_path)

    def _say_hello(self, sock: socket.socket, *, device: bool) -> tuple[bytes, list[int]]:
        """The daemon's answer, and the descriptors that came with it. Raises `OSError`, and `NotAuthenticated` for
        somebody else who listens there.
        """
        limit = timeval(self.timeout_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._dial(sock)
        hello = client_wire.Hello(
            frame.PROTOCOL_VERSION,
            self.tenant,
            self.instance,
            self.client_id,
            self._token,
            self._operator_token,
            device,
            frame.PROTOCOL_OLDEST,
        )
        try:
            sock.sendall(frame.encode(hello, 1))
        except BrokenPipeError:
            pass  # refused; the reason can be read
        data, fds, _, _ = socket.recv_fds(sock, frame.HELLO_BYTES_MAX, 2)
        for fd in fds:
            os.set_inheritable(fd, False)  # `recv_fds` drops the flag that would set it
        return data, fds

    def _introduce(
        self, *, device: bool = False
    ) -> tuple[Connection, client_wire.Welcome, LifeView | None]:
        """A connection; with `device`, the descriptor that signals the end of the device memory in its Welcome,
        if any.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            data, fds = self._say_hello(sock, device=device)
        except NotAuthenticated:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                self._nobody_listens()
            why = (
                f"no kvpool daemon answers at {self.socket_path} ({error.strerror or error}). "
                f"Start one with `kvpool serve`, or name its socket (--socket, KVPOOL_SOCKET)"
            )
            with self._lock:
                self._back_off(why)
            raise Unavailable(why) from None
        try:
            frames = frame.FrameReader(frame.HELLO_BYTES_MAX).feed(data)
            if not frames:
                raise Unavailable("the daemon closed the connection before its Welcome")
            welcome = client_wire.decode_daemon(frames[0][1])
            if type(welcome) is frame.Error:
                frame.raise_error(welcome)
            if type(welcome) is not client_wire.Welcome or len(fds) != 1 + bool(welcome.device):
                raise ProtocolError("the daemon's first answer is not a Welcome with a segment")
            frame.agree(welcome.version, welcome.version, "the daemon")
            view = LifeView(fds.pop()) if welcome.device else None
            daemon = self._meet(welcome, fds.pop(), sock)
        except LimitExceeded as error:
            sock.close()
            why = f"the daemon at {self.socket_path} takes no more: {error}"
            with self._lock:
                self._back_off(why)
            raise Unavailable(why) from None
        except KvpoolError as error:
            sock.close()
            for fd in fds:
                os.close(fd)
            with self._lock:
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
                self._back_off(f"the daemon at {self.socket_path} has ended")


def _let_go(ours: weakref.ref[Connections], its: weakref.ref[DaemonState]) -> None:
    connections, daemon = ours(), its()
    if connections is not None and daemon is not None:
        connections.ended(daemon)


class Request:
    """A connection for the length of a `with`: back to the pool, or dropped if it failed."""

    __slots__ = ("connection", "connections", "wait_s")

    def __init__(self, connections: Connections, wait_s: float) -> None:
        self.connections = connections
        self.wait_s = wait_s

    def __enter__(self) -> Connection:
        self.connection = self.connections.take(self.wait_s)
        return self.connection

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None or (
            issubclass(kind, KvpoolError) and not issubclass(kind, (Unavailable, ProtocolError))
        ):
            self.connections.give_back(self.connection)
        else:
            self.connections.drop(self.connection)
