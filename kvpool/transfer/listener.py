"""The owner's half of a transfer over streams: listen, admit peers, lend, send."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.errors import (
    ConfigError,
    Declined,
    InternalError,
    KvpoolError,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
)
from kvpool.net import host_and_port
from kvpool.security.failed_logins import FailedLogins
from kvpool.transfer.addresses import is_loopback, resolve, url_of
from kvpool.transfer.admission import PeerSlots
from kvpool.transfer.base import Deadline, Identity, Source, TransferLimits, check_secrets
from kvpool.transfer.handshake import admit, refuse
from kvpool.transfer.memory import Memory
from kvpool.transfer.priority import Priority
from kvpool.transfer.responder import Budgets, Conversation, Converse
from kvpool.transfer.stream import Closed, Stream
from kvpool.transfer.tls import open_stream
from kvpool.wire.faults import Faults
from kvpool.wire.peer import Fetch

BACKLOG = 1024  # a SYN that finds no room is sent again a second later, which fails a peer's pull
RESOLVE_S = 10.0
ACCEPT_PAUSE_S = 0.1  # when the machine is out of descriptors
COMPLAINT_S = 1.0
STRANGERS_MAX = 64  # authenticating at a time while all places of peers are taken

log = logging.getLogger("kvpool.transfer")


class Complaints:
    """Logs why peers were refused: at most one line a second. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next = 0.0
        self._unsaid = 0

    def say(self, error: KvpoolError) -> None:
        now = self._clock()
        with self._lock:
            if now < self._next:
                self._unsaid += 1
                return
            self._next = now + COMPLAINT_S
            unsaid, self._unsaid = self._unsaid, 0
        more = f" ({unsaid} more since the last such line)" if unsaid else ""
        log.warning("a peer was refused: %s%s", error, more)


def _later(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


@dataclass(eq=False)
class Server:
    """Listens, and serves each peer's connection in a thread of its own.

    `connections_max` of them are for authenticated peers (`admission.PeerSlots` decides whose go when they are all taken),
    and some more for those that have not authenticated yet, of which the oldest makes way for a new one. So
    unauthenticated connections cannot starve peers, and a peer for whom there is no place is told so.
    """

    _memory: Memory
    _source: Source
    _identity: Identity
    _limits: TransferLimits
    _precedence: Priority
    _converse: Converse = Conversation

    def __post_init__(self) -> None:
        self._budgets = Budgets.of(self._limits.inflight_bytes_max)
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._left = threading.Condition(self._lock)  # a connection has ended
        self._streams: set[Stream] = set()
        self._strangers: dict[Stream, None] = {}  # those not admitted yet, in the order of arrival
        self._places: PeerSlots[Stream] = PeerSlots(self._limits.connections_max)
        extra = min(STRANGERS_MAX, max(1, self._limits.connections_max // 4))
        self._streams_max = self._limits.connections_max + extra
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._complaints = Complaints()
        self._failed = FailedLogins(self._source.logins_failed, _later)
        self._faults = Faults(time.monotonic, self._source.request_failed)

    def listen(self, url: str) -> str:
        """See `Transport.listen`."""
        host, port = host_and_port(url)
        try:
            family, address = resolve(host, port, Deadline(RESOLVE_S))[0]
        except Unavailable as error:
            raise ConfigError(f"cannot listen on {url}: {error}") from None
        check_secrets(self._identity, url)
        if self._identity.secrets.source.local and not is_loopback((family, address)):
            raise ConfigError(
                f"{url} is reachable from other machines, and no cluster secret is set: set one "
                "(cluster_secret_file, or KVPOOL_CLUSTER_SECRET), the same on all daemons, or listen on 127.0.0.1"
            )
        safe = self._identity.tls is not None or self._identity.plaintext
        if not safe and not is_loopback((family, address)):
            raise ConfigError(
                f"{url} is reachable from other machines, and its connections would not be encrypted: create "
                "certificates (kvpool certs init; for each node kvpool certs node) and set tls_cert, tls_key and "
                "tls_ca; or, in a trusted network, plaintext (--plaintext)"
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A restarted transfer worker takes the same port while old connections are still closing.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {url}: {error.strerror}") from None
        with self._lock:
            self._listeners.append(listener)
        self._start("kvpool-accept", self._accept, listener)
        return url_of(host, listener.getsockname()[1])

    def close(self) -> None:
        """End all connections and wait for their threads."""
        self._closing.set()
        with self._lock:
            for listener in self._listeners:
                # Unlike close, this wakes the accepting thread. Not connected: ENOTCONN.
                try:
                    listener.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            for stream in self._streams:
                stream.shut()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _start(self, name: str, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)  # type: ignore[arg-type]
        with self._lock:
            # Within the lock, so that `close` never joins a thread that has not begun.
            thread.start()
            self._threads.add(thread)

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._closing.is_set():
                try:
                    sock, address = listener.accept()
                except OSError as error:
                    if self._closing.is_set():
                        return
                    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        self._closing.wait(ACCEPT_PAUSE_S)
                    continue  # otherwise the connection died while it waited
                deadline = Deadline(self._limits.hello_s)
                stream = open_stream(sock, deadline, self._identity.tls, listens=True)
                self._welcome(stream, str(address[0]))
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _welcome(self, stream: Stream, address: str) -> None:
        with self._lock:
            welcome = self._has_room() and not self._closing.is_set()
            if welcome:
                self._streams.add(stream)
                self._strangers[stream] = None
        if not welcome:
            stream.close()
            return
        try:
            self._start("kvpool-serve", self._serve, stream, address)
        except RuntimeError:  # the machine has no thread left
            with self._lock:
                self._streams.discard(stream)
                self._strangers.pop(stream, None)
            stream.close()

    def _has_room(self) -> bool:
        """Whether one more connection is possible, perhaps replacing an unauthenticated one. With the lock."""
        if len(self._streams) < self._streams_max:
            return True
        first = next(iter(self._strangers), None)
        if first is not None:
            del self._strangers[first]
            first.shut()
        # Without a stranger the rest are refused ones, which are about to leave.
        return self._left.wait_for(
            lambda: len(self._streams) < self._streams_max, self._limits.leave_s
        )

    def _admit(self, stream: Stream) -> None:
        """It is authenticated. Raises `Declined` if there is no place for its peer."""
        assert stream.peer_node is not None, "it is authenticated"
        with self._lock:
            if self._strangers.pop(stream, stream) is not None:
                raise Closed("another connection has taken its place")
            displaced = self._places.admit(stream, stream.peer_node)
        if displaced is not None:
            displaced.shut()

    def _serve(self, stream: Stream, address: str) -> None:
        try:
            stream.secure()
            admit(stream, self._identity, lambda: self._admit(stream))
            conversation = self._converse(
                stream, self._memory, self._source, self._limits, self._budgets, self._precedence
            )
            while True:
                request, message = conversation.hear()
                with self._lock:
                    self._places.busy(stream)
                try:
                    conversation.answer(request, message)
                except Exception as error:
                    told = self._faults.answer(message, error)
                    if told is error:
                        raise
                    if not isinstance(message, Fetch):  # its bytes may be half sent
                        refuse(stream, told, request)
                    raise told from error
                with self._lock:
                    self._places.idle(stream)
        except InternalError:  # the peer was told
            stream.linger()
        except (ProtocolError, NotAuthenticated, Declined) as error:
            self._complaints.say(error)
            if isinstance(error, NotAuthenticated):
                self._failed.add(address, str(error))
            refuse(stream, error)
            stream.linger()
        except KvpoolError:
            # The peer has gone, or does not read. Unsent bytes would otherwise wait in the
            # kernel for minutes.
            stream.reset()
        finally:
            with self._lock:
                self._streams.discard(stream)
                self._strangers.pop(stream, None)
                self._places.leave(stream)
                self._threads.discard(threading.current_thread())
                self._left.notify_all()
            stream.close()
