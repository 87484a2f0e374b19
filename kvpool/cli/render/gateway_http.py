"""Operators' requests over the HTTP of a cluster's gateway, from another machine."""

from __future__ import annotations

import http.client
import secrets
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import quote, urlsplit

import msgspec

from kvpool import __version__
from kvpool.client.operator import OperatorClient, OperatorRequests
from kvpool.decoding import decode_json, finite
from kvpool.errors import (
    ConfigError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
    from_code,
)
from kvpool.net import is_loopback
from kvpool.telemetry import node_stats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import Keys, check_digest, pack_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire.operator_json import CHANGES, NUMBERED, OperatorAnswer, to_json

PATH = "/v1/operator"
TIMEOUT_S = 30.0  # for each request, on top of its own wait
CONNECT_S = 10.0
ANSWER_BYTES_MAX = 32 << 20
IDLE_MAX = 16


class GatewayUrl:
    """The checked parts of a URL. Raises `ConfigError`: nothing but the token travels with a request, and not in clear.

    insecure_http: http:// is allowed to other machines too.
    """

    def __init__(self, url: str, *, insecure_http: bool = False) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r:.200} is not a URL: {error}") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"{url!r:.200}: give a gateway's URL, https://HOST:PORT")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError("a gateway's URL has neither a user or password nor ? or #")
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError("a gateway's URL has printable ASCII characters only")
        if parts.scheme == "http" and not insecure_http and not is_loopback(parts.hostname):
            raise ConfigError(
                f"{url}: http:// would send the token in clear: use https://, or in a network that is trusted "
                "--insecure-http"
            )
        self.tls = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/")
        self.text = url.rstrip("/")


class GatewayClient(OperatorRequests):
    """A gateway, as `OperatorClient` is a daemon. ca: of its certificate; empty: those that this machine trusts.

    where: what an operator calls it. May be called from any thread; each request in flight has a connection of its own.
    """

    def __init__(
        self, url: GatewayUrl, token: str, *, tenant: str, ca: str = "", where: str = ""
    ) -> None:
        self.tenant = tenant
        self.where = where or url.text
        self._url = url
        self._token = token
        self._tls = _trusting(ca) if url.tls else None
        self._idle: deque[_Connection] = deque()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    # ---- what `Client` has beside operators' requests ------------------------------------------------------------

    def stats(self) -> NodeStats:
        """As `Client.stats`, of the gateway's node."""
        return node_stats.decode(self._ask(client_wire.Stats()).data)

    def engines(self) -> list[dict[str, Any]]:
        """As `Client.engines`."""
        return decode_json(self._ask(client_wire.Engines()).data, list[dict[str, Any]], "engines")

    def prefixes(
        self, digest: bytes, keys: Keys, *, wait_s: float = 0.05
    ) -> dict[str, tuple[int, int]]:
        """As `Client.prefixes`."""
        wait_s = finite(wait_s, "wait_s")
        answer = self._ask(
            client_wire.Prefixes(check_digest(digest), pack_keys(keys), wait_s), wait_s
        )
        return decode_json(answer.data, dict[str, tuple[int, int]], "prefixes")

    # ---- requests --------------------------------------------------------------------------------------------------

    def _ask(self, message: frame.Message, wait_s: float = 0.0) -> Any:
        return self._ask_node(message, "", wait_s=wait_s)

    def _ask_node(
        self, message: frame.Message, node: str, tenant: str = "", by: str = "", wait_s: float = 0.0
    ) -> Any:
        """by: the gateway tells the token's name instead."""
        body = msgspec.json.encode({"request": to_json(message), "node": node, "wait_s": wait_s})
        path = f"{PATH}?tenant={quote(tenant or self.tenant, safe='')}"
        # One that was cut off is sent again by the same key: a change is made once.
        key = secrets.token_hex(16) if type(message) in CHANGES else ""
        status, media, said = self._exchange("POST", path, body, TIMEOUT_S + wait_s, key)
        if status == 200:
            try:
                found = decode_json(said, OperatorAnswer, "an answer of a kvpool gateway")
            except ProtocolError:
                raise self._no_gateway() from None
            if type(message) in NUMBERED:
                if found.value is not None:
                    return frame.Done(found.value)
            elif found.value is None and bytes(found.answer)[:1] in {b"{", b"["}:
                return frame.Bytes(bytes(found.answer))
            raise self._no_gateway()
        raise self._error(status, media, said)

    def _error(self, status: int, media: str, said: bytes) -> KvpoolError:
        """What an answer other than 200 means."""
        if 300 <= status < 400:
            return ProtocolError(
                f"{self.where} redirects to another address, which is not followed: set its context to the gateway's "
                "own URL"
            )
        if media != "application/problem+json":
            return self._no_gateway(status)
        try:
            problem = decode_json(said, _Problem, "a problem")
        except ProtocolError:
            return self._no_gateway(status)
        text = f"{self.where}: {problem.detail}"
        if status == 401:
            return NotAuthenticated(
                f"{self.where} does not know this token: check the context's token file, or {TOKEN}"
            )
        if status == 403:
            return NotAuthenticated(text)
        if status in {404, 405} and not self._has_route():
            return InvalidRequest(
                f"the gateway of {self.where} is older than this command ({__version__}) and forwards no requests: "
                "upgrade it, or run the command on one of its nodes"
            )
        if status == 429:
            return LimitExceeded(text)
        error = from_code(problem.code, text)
        if type(error) is KvpoolError or isinstance(error, NotAuthenticated):
            return InvalidRequest(text)  # 502: its daemon does not let the gateway in
        return error

    def _has_route(self) -> bool:
        """Whether what was not found is not the route itself."""
        status, _, said = self._exchange("GET", "/openapi.json", None, TIMEOUT_S)
        if status != 200:
            return True
        try:
            return PATH in decode_json(said, _Described, "a description").paths
        except ProtocolError:
            return True

    def _no_gateway(self, status: int = 200) -> ProtocolError:
        return ProtocolError(
            f"the server of {self.where} is not a kvpool gateway (it answered {status}): check the context's URL"
        )

    def _exchange(
        self, method: str, path: str, body: bytes | None, timeout_s: float, key: str = ""
    ) -> tuple[int, str, bytes]:
        """The status, the media type, and the body. Raises `KvpoolError`."""
        headers = {"Authorization": f"Bearer {self._token}"}
        if key:
            headers["Idempotency-Key"] = key
        if body is not None:
            headers["Content-Type"] = "application/json"
        while True:
            connection, used = self._connection()
            try:
                if connection.sock is None:
                    connection.connect()
                with connection.within(timeout_s):
                    connection.request(method, self._url.path + path, body, headers)
                    answer = connection.getresponse()
                    said = answer.read(ANSWER_BYTES_MAX + 1)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if connection.late:
                    raise self._late(timeout_s) from None
                if used:
                    continue  # the gateway has closed it meanwhile
                raise self._unreachable(error) from None
            except BaseException:
                connection.close()
                raise
            if connection.late:
                connection.close()
                raise self._late(timeout_s)
            if len(said) > ANSWER_BYTES_MAX:
                connection.close()
                raise ProtocolError(
                    f"the answer of {self.where} has more than {ANSWER_BYTES_MAX} bytes"
                )
            if answer.length:
                connection.close()
                raise Unavailable(f"{self.where} closed the connection in the middle of its answer")
            if connection.sock is not None:
                self._keep(connection)
            media = (answer.getheader("Content-Type") or "").partition(";")[0].strip().lower()
            return answer.status, media, said

    def _late(self, timeout_s: float) -> Unavailable:
        return Unavailable(f"{self.where} did not answer within {timeout_s:g} s")

    def _connection(self) -> tuple[_Connection, bool]:
        """One that was used before, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return _Connection(self._url, self._tls), False

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _unreachable(self, error: Exception) -> KvpoolError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return NotAuthenticated(
                f"the certificate of {self.where} is not trusted ({error.verify_message}): name its authority with "
                "--ca, and the host as in the certificate"
            )
        if isinstance(error, ssl.SSLError):
            return ProtocolError(
                f"no TLS with {self.where} ({error.reason or error}): check whether its URL is https:// or http://"
            )
        if isinstance(error, http.client.BadStatusLine) and not isinstance(
            error, http.client.RemoteDisconnected
        ):
            return self._no_gateway()
        return Unavailable(
            f"no gateway answers at {self.where} ({error}): check the context's URL, and that a daemon runs there with "
            "the setting http"
        )


Operator = OperatorClient | GatewayClient
"""Whom a command asks."""
TOKEN = "KVPOOL_GATEWAY_TOKEN"  # noqa: S105  (the variable's name)


class _Problem(msgspec.Struct):
    detail: str
    code: str


class _Described(msgspec.Struct):
    paths: dict[str, Any]


class _Connection(http.client.HTTPConnection):
    """Redirects are not followed, nor proxies used: both would get the token."""

    def __init__(self, url: GatewayUrl, tls: ssl.SSLContext | None) -> None:
        super().__init__(url.host, url.port, timeout=CONNECT_S)
        self._tls = tls
        self.late = False
        if tls is not None:
            self.default_port = 443

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All of one request and its answer, however they trickle: then the connection is shut, and `late`."""
        sock = self.sock
        self.late = False

        def shut() -> None:
            self.late = True
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
        except TimeoutError:
            self.late = True
            raise
        finally:
            timer.cancel()

    def connect(self) -> None:
        self.sock = socket.create_connection((self.host, self.port), self.timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)


def _trusting(ca: str) -> ssl.SSLContext:
    """Raises `ConfigError`."""
    try:
        return ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read certificates of authorities from {ca}: {error}") from None
