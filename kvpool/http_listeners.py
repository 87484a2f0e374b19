"""HTTP listeners of the gateway and of the router: addresses, TLS, and who has a place when there is no room for more.

A connection that no request has authenticated is a stranger's. When all places are taken, a stranger makes way for a
new connection, first one of an address that has more than its share: so neither those who connect and say nothing, nor
one address with many connections, keep out others or a health probe. While there is room nobody makes way: behind a
proxy all connections come from one address, and thousands may come before the first request is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from kvpool.config import HTTP_UNIX, host_and_port
from kvpool.errors import ConfigError
from kvpool.security.file_watch import FileWatch

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

log = logging.getLogger("kvpool.http")

TLS_S = 5.0  # for its handshake
CLOSE_S = 2.0
TLS_LOOK_S = 2.0
ACCEPT_PAUSE_S = 0.1  # such as when the process is out of descriptors
COMPLAINT_S = 10.0
BACKLOG = 4096
ACCEPTS = 16  # in a row, while others wait
OF_AN_ADDRESS = 4  # so many of them, each with its share, fill all places with strangers
_UCRED = struct.Struct("3i")

C = TypeVar("C")


class HttpSlots(Generic[C]):
    """The connections of a listener, at most `limit`. Rules only: no I/O. Its owner serialises the calls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._share = max(1, limit // OF_AN_ADDRESS)
        self._strangers: dict[C, str] = {}  # and their addresses; the oldest first
        self._count: Counter[str] = Counter()  # of strangers, by address
        self._known: dict[C, None] = {}  # the one whose last request is longest ago first

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    @property
    def full(self) -> bool:
        return len(self) >= self._limit

    def displaced_by(self, address: str, idle: Callable[[C], bool]) -> C | None:
        """Who makes way for a connection from this address; None: nobody has to, or nobody can (`full`).

        Strangers go first: those of an address with more than its share, the new connection's own one included; then
        the oldest. Without any, the known one that has been idle for longest.
        address: empty where all connections have the same (a unix socket): they have no share. idle: whether one has
        no request under way.
        """
        if not self.full:
            return None
        if address and self._count[address] >= self._share:
            return next(each for each, its in self._strangers.items() if its == address)
        crowds = {its for its, count in self._count.items() if its and count > self._share}
        if crowds:
            return next(each for each, its in self._strangers.items() if its in crowds)
        return next(iter(self._strangers), next(filter(idle, self._known), None))

    def admit(self, connection: C, address: str) -> None:
        """Give it a place, as a stranger. There must be room."""
        assert not self.full, "nobody has made way"
        self._strangers[connection] = address
        self._count[address] += 1

    def trust(self, connection: C) -> None:
        """A request of it was authenticated. No effect on one without a place."""
        if self._forget_stranger(connection) or connection in self._known:
            self._known.pop(connection, None)
            self._known[connection] = None  # as the last one

    def leave(self, connection: C) -> None:
        """It has ended. Idempotent."""
        self._forget_stranger(connection)
        self._known.pop(connection, None)

    def _forget_stranger(self, connection: C) -> bool:
        address = self._strangers.pop(connection, None)
        if address is None:
            return False
        self._count[address] -= 1
        if not self._count[address]:
            del self._count[address]
        return True


class HttpLimits(NamedTuple):
    """Limits of an application's connections.

    idle_s: to the first request, and between two; a head that comes slowly has no longer. close_s: for what is under
    way when it ends. field_bytes: of a line of a head. headers: in one.
    """

    connections: int
    idle_s: float
    close_s: float
    field_bytes: int
    headers: int


class Listeners:
    """All that is listened on, for one application, which says which connections are known: `trust`. Event loop only.

    cert, key: PEM files for TLS; empty: none. setting: that names the addresses, for messages. dropped: called for each
    connection that is closed because all places are taken: an idle one, to make way, or a new one. reuse_port: let other
    processes of this user listen at the same TCP port.
    """

    def __init__(
        self,
        cert: str,
        key: str,
        limits: HttpLimits,
        setting: str,
        dropped: Callable[[], object],
        *,
        reuse_port: bool = False,
    ) -> None:
        self._setting = setting
        self._dropped = dropped
        self._reuse_port = reuse_port
        self._limits = limits
        self._runner: web.AppRunner | None = None
        self._cert = cert
        self._key = key
        self._tls: ssl.SSLContext | None = None
        self._connections: HttpSlots[_Connection] = HttpSlots(limits.connections)
        self._of_handler: dict[RequestHandler, _Connection] = {}
        self._complain_at = 0.0
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        # Of connections that the application does not have yet.
        self._serving: set[asyncio.Task[None]] = set()
        self._unix: dict[Path, tuple[int, int]] = {}  # unix sockets, and which they are there

    async def open(
        self, app: web.Application, addresses: list[str], unix_mode: int = 0o600
    ) -> list[str]:
        """Listen on all of them, as written in the configuration. Their URLs. Raises `ConfigError`."""
        limits = self._limits
        self._runner = web.AppRunner(
            app,
            # A client that leaves cancels its handler, and with it all that runs for it.
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.idle_s,
            max_line_size=limits.field_bytes,
            max_field_size=limits.field_bytes,
            max_headers=limits.headers,
            shutdown_timeout=limits.close_s,
            lingering_time=CLOSE_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None, "it was set up"
        self._server = self._runner.server
        # The one place that hears of every end, however it came.
        heard = self._server.connection_lost

        def lost(handler: RequestHandler, exc: BaseException | None = None) -> None:
            heard(handler, exc)
            if (connection := self._of_handler.get(handler)) is not None:
                self._ended(connection)

        self._server.connection_lost = lost  # type: ignore[method-assign]
        server_logger.addFilter(NotOurs())
        if self._cert:
            self._tls = tls_context(self._cert, self._key)
        urls = []
        for address in addresses:
            try:
                if address.startswith(HTTP_UNIX):
                    urls.append(self._open_unix(address, unix_mode))
                else:
                    urls.append(await self._open_tcp(address))
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise ConfigError(f"{self._setting}: cannot listen on {address}: {why}") from None
        return urls

    async def _open_tcp(self, address: str) -> str:
        """At all addresses that the host's name has, with one port. Its URL. Raises `OSError`."""
        host, port = host_and_port(address)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        refused: OSError | None = None
        bound = 0
        for family, *_, place in dict.fromkeys(found):
            try:
                where = (place[0], bound or port, *place[2:])
                sock = _bind_tcp(family, where, reuse_port=self._reuse_port)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refused = error  # such as ::1 of localhost where there is no IPv6
                continue
            bound = sock.getsockname()[1]
            self._listen(sock)
        if not bound and refused is not None:
            raise refused
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}"

    def _open_unix(self, address: str, mode: int) -> str:
        path = Path(address.removeprefix(HTTP_UNIX))
        sock = _bind_unix(path, mode)
        self._unix[path] = _which(path)
        self._listen(sock)
        return address

    def _listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._listening.append(sock)
        self._accepting.append(asyncio.create_task(self._accept(sock)))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in count(1):
            if not number % ACCEPTS:
                await asyncio.sleep(0)
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # which died while it waited
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._receive(sock, address[0] if isinstance(address, tuple) else "")

    def _receive(self, sock: socket.socket, address: str) -> None:
        """Give a new connection a place, or close it."""
        places = self._connections
        displaced = places.displaced_by(address, lambda each: each.idle)
        if displaced is not None:
            places.leave(displaced)
            displaced.end()
            self._dropped()
        if places.full:  # of requests under way
            self._dropped()
            self._complain(address)
            sock.close()
            return
        connection = _Connection(sock)
        places.admit(connection, address)
        connection.task = task = asyncio.create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: _Connection) -> None:
        """Hand a connection to the application, after TLS."""
        try:
            connection.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._handler(connection),
                connection.sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else TLS_S,
            )
        except OSError:  # a failed handshake, too
            self._ended(connection)
        except BaseException:  # it makes way for another one, or all ends
            self._ended(connection)
            raise
        if connection.handler is not None and connection.handler.transport is None:
            self._ended(connection)  # it was lost within the handshake

    def _handler(self, connection: _Connection) -> RequestHandler:
        connection.handler = handler = self._server()
        self._of_handler[handler] = connection
        return handler

    def _ended(self, connection: _Connection) -> None:
        """Its socket is closed. Idempotent."""
        if connection.handler is not None:
            self._of_handler.pop(connection.handler, None)
        self._connections.leave(connection)
        connection.sock.close()

    def _complain(self, address: str) -> None:
        """Say that a connection was refused, at most once in a while."""
        now = time.monotonic()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAINT_S
            log.warning(
                "a connection from %s was refused: all %d are in use",
                address or "a socket",
                len(self._connections),
            )

    def trust(self, request: web.BaseRequest) -> None:
        """This request is authenticated: its connection makes way for no stranger."""
        found = self._of_handler.get(request.protocol)
        if found is not None:
            self._connections.trust(found)

    async def tend(self) -> None:
        """Load new certificates when the files change, until cancelled."""
        watch = FileWatch([self._cert, self._key] if self._cert else [])
        while self._tls is not None:
            await asyncio.sleep(TLS_LOOK_S)
            if not watch.changed():
                continue
            try:
                tls_context(self._cert, self._key)  # whether they belong together
                self._tls.load_cert_chain(self._cert, self._key)
            except (ConfigError, OSError) as error:
                log.warning(
                    "the new TLS files are invalid, the previous ones stay in use: %s", error
                )

    async def stop_accepting(self) -> None:
        """Connections that are open go on; new ones are for whoever else listens at the same port."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._accepting.clear()
        for sock in self._listening:
            # Those that wait in the kernel would be reset.
            with contextlib.suppress(BlockingIOError):
                while True:
                    connected, address = sock.accept()
                    connected.setblocking(False)
                    self._receive(connected, address[0] if isinstance(address, tuple) else "")
            sock.close()
        self._listening.clear()

    async def close(self) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for sock in self._listening:
            sock.close()
        for path, which in self._unix.items():
            _leave(path, which)
        if self._runner is not None:
            await self._runner.cleanup()


class _Connection:
    """One that has a place. handler, transport: the application's, once there are any."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.handler: RequestHandler | None = None
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no request of it is under way."""
        return self.handler is None or self.handler._current_request is None

    def end(self) -> None:
        """At once, whatever is under way."""
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class NotOurs(logging.Filter):
    """Omits clients' errors: these are in their answers, and may contain their tokens."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def tls_context(cert: str, key: str) -> ssl.SSLContext:
    """Raises `ConfigError` for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert, tls_key: {cert} or {key} cannot be used: {error.reason or error}"
        ) from None
    except OSError as error:
        raise ConfigError(f"tls_cert, tls_key: cannot read them: {error.strerror}") from None
    return context


def _no_password() -> str:
    raise ConfigError("tls_key: the key is encrypted: use a key without a password")


def _bind_tcp(family: int, place: tuple[Any, ...], *, reuse_port: bool) -> socket.socket:
    """Raises `OSError`."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_unix(path: Path, mode: int) -> socket.socket:
    """A unix socket; one of a dead owner is replaced. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 & ~mode)
    try:
        sock.bind(str(path))
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(mask)
    return sock


def _which(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _leave(path: Path, which: tuple[int, int]) -> None:
    """Remove this socket, unless another gateway has put its own in the place."""
    with contextlib.suppress(FileNotFoundError):
        if _which(path) == which:
            path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


def peer_uid(request: web.Request) -> int | None:
    """Whose process has connected to a unix socket, by the kernel's word; None: it came over TCP."""
    transport = request.transport
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(packed)
    return int(uid)
