"""The gateway's listeners: addresses, TLS, limits on connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
import struct
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from kvpool.admin.api import FIELD_BYTES_MAX, HEADERS_MAX
from kvpool.config import HTTP_UNIX, host_and_port
from kvpool.errors import ConfigError

log = logging.getLogger("kvpool.admin")

CONNECTIONS_MAX = 512
IDLE_S = 15.0  # to the first request, and between two; a head that comes slowly has no longer
TLS_S = 5.0  # for its handshake
CLOSE_S = 2.0
TLS_LOOK_S = 2.0
_UCRED = struct.Struct("3i")


class Listeners:
    """All that is listened on, for one application. Event loop only."""

    def __init__(self, app: web.Application, cert: str, key: str) -> None:
        self._runner = web.AppRunner(
            app,
            # A client that leaves cancels its handler, and with it all that runs for it.
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=IDLE_S,
            max_line_size=FIELD_BYTES_MAX,
            max_field_size=FIELD_BYTES_MAX,
            max_headers=HEADERS_MAX,
            shutdown_timeout=CLOSE_S,
            lingering_time=CLOSE_S,
        )
        self._cert = cert
        self._key = key
        self._tls: ssl.SSLContext | None = None
        self._servers: list[asyncio.Server] = []
        self._places: dict[Path, tuple[int, int]] = {}  # of unix sockets, and which they are there

    async def open(self, addresses: list[str], unix_mode: int) -> list[str]:
        """Listen on all of them, as written in the configuration. Their URLs. Raises `ConfigError`."""
        await self._runner.setup()
        server_logger.addFilter(NotOurs())
        if self._cert:
            self._tls = tls_context(self._cert, self._key)
        urls = []
        for address in addresses:
            try:
                if address.startswith(HTTP_UNIX):
                    urls.append(await self._open_unix(address, unix_mode))
                else:
                    urls.append(await self._open_tcp(address))
            except OSError as error:
                raise ConfigError(
                    f"http: cannot listen on {address}: {error.strerror or error}"
                ) from None
        return urls

    async def _open_tcp(self, address: str) -> str:
        host, port = host_and_port(address)
        server = await asyncio.get_running_loop().create_server(
            self._accept,
            host,
            port,
            ssl=self._tls,
            backlog=128,
            ssl_handshake_timeout=None if self._tls is None else TLS_S,
        )
        self._servers.append(server)
        bound = server.sockets[0].getsockname()[1]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}"

    async def _open_unix(self, address: str, mode: int) -> str:
        path = Path(address.removeprefix(HTTP_UNIX))
        sock = _bind(path, mode)
        self._places[path] = _which(path)
        server = await asyncio.get_running_loop().create_unix_server(
            self._accept, sock=sock, backlog=128
        )
        self._servers.append(server)
        return address

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        if server is None or len(server.connections) >= CONNECTIONS_MAX:
            return _Refusing()
        protocol: asyncio.Protocol = server()
        return protocol

    async def tend(self) -> None:
        """Load new certificates when the files change, until cancelled."""
        seen = self._look()
        while self._tls is not None:
            await asyncio.sleep(TLS_LOOK_S)
            now = self._look()
            if now == seen:
                continue
            seen = now
            try:
                tls_context(self._cert, self._key)  # whether they belong together
                self._tls.load_cert_chain(self._cert, self._key)
            except (ConfigError, OSError) as error:
                log.warning(
                    "the new TLS files are invalid, the previous ones stay in use: %s", error
                )

    def _look(self) -> list[tuple[int, int]]:
        found = []
        for path in (self._cert, self._key) if self._cert else ():
            try:
                state = Path(path).stat()
            except OSError:
                found.append((0, 0))
            else:
                found.append((state.st_mtime_ns, state.st_ino))
        return found

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for path, which in self._places.items():
            _leave(path, which)
        await self._runner.cleanup()


class NotOurs(logging.Filter):
    """Omits clients' errors: these are in their answers, and may contain their tokens."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


class _Refusing(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


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


def _bind(path: Path, mode: int) -> socket.socket:
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
    sock.setblocking(False)
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
