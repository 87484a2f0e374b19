"""HTTP from a command to one server: a gateway or a router. Blocking; needs nothing but Python."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from typing import NamedTuple
from urllib.parse import urlsplit

from kvpool.errors import ProtocolError

CONNECT_S = 10.0
ANSWER_BYTES_MAX = 32 << 20
IDLE_MAX = 16


class Answer(NamedTuple):
    """The answer to one request."""

    status: int
    media: str
    """The media type, in lower case and without parameters."""
    body: bytes
    headers: Message


class HttpServer:
    """One HTTP server. Thread-safe: each request in flight has a connection of its own.

    Certificates are checked against the authorities of this machine, or those in the file that SSL_CERT_FILE names.
    Redirects are not followed, nor proxies used: both would get the token.
    """

    def __init__(self, url: str, token: str = "", address: str = "") -> None:
        """url: http or https. token: sent with each request. address: of the host; by default that of its name."""
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._host = parts.hostname or ""
        self._address = address or self._host
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._tls is None else 443)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._idle: deque[_Connection] = deque()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request, with JSON as its body, and return the answer.

        Raises `OSError` and `http.client.HTTPException`: among these `TimeoutError` if the whole answer does not come
        within `timeout_s`, and `IncompleteRead` if it ends too early. Raises `ProtocolError` for one that is too long.
        """
        sent = {**self._headers, **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        while True:
            connection, used = self._connection()
            try:
                if connection.sock is None:
                    connection.connect()
                with connection.within(timeout_s):
                    connection.request(method, self._path + path, body, sent)
                    answer = connection.getresponse()
                    said = answer.read(ANSWER_BYTES_MAX + 1)
                if len(said) > ANSWER_BYTES_MAX:
                    raise ProtocolError(
                        f"the answer of {self.url} has more than {ANSWER_BYTES_MAX} bytes"
                    )
                if answer.length:
                    raise http.client.IncompleteRead(said)
            except BaseException as error:
                connection.close()
                if used and _is_closed(error):
                    continue
                raise
            if connection.sock is not None:
                self._keep(connection)
            media = (answer.getheader("Content-Type") or "").partition(";")[0].strip().lower()
            return Answer(answer.status, media, said, answer.headers)

    def _connection(self) -> tuple[_Connection, bool]:
        """Return a connection, and whether it was used before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return _Connection(self._host, self._port, self._address, self._tls), False

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()


def _is_closed(error: BaseException) -> bool:
    """Whether the server may have closed a connection since its last request."""
    ended = isinstance(error, (OSError, http.client.HTTPException))
    return ended and not isinstance(error, (TimeoutError, http.client.IncompleteRead))


class _Connection(http.client.HTTPConnection):
    """A connection to one address of a host. tls: its certificate is checked against the host's name."""

    def __init__(self, host: str, port: int, address: str, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=CONNECT_S)
        self._address = address
        self._tls = tls
        if tls is not None:
            self.default_port = 443

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit one request with its whole answer, however slowly it comes. Raises `TimeoutError`."""
        sock, late = self.sock, threading.Event()
        why = f"did not answer within {seconds:g} s"

        def shut() -> None:
            late.set()
            try:
                # Not TLS's own, which belongs to the thread that uses the connection.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended already

        sock.settimeout(seconds)
        timer = threading.Timer(seconds, shut)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise TimeoutError(why) from None
            raise
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(why)

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
