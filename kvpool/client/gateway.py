"""Operators' requests over the HTTP of a cluster's gateway, from another machine."""

from __future__ import annotations

import http.client
import secrets
import ssl
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import msgspec

from kvpool import __version__
from kvpool.client.engines import Routing
from kvpool.client.operator import OperatorClient, OperatorRequests
from kvpool.config import secret_of
from kvpool.decoding import decode_json
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
from kvpool.http_client import Answer, HttpServer
from kvpool.net import is_loopback
from kvpool.secret_files import is_printable
from kvpool.telemetry import node_stats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire.command import COMMANDS, to_json

URL = "KVPOOL_GATEWAY"
TOKEN = "KVPOOL_GATEWAY_TOKEN"  # noqa: S105  (the variable's name)
REQUEST_ID = "x-request-id"  # with each answer of a gateway


def check_url(url: str) -> None:
    """Raises `ConfigError`: nothing but the token travels with a request, and not in clear."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{URL}: {url!r:.200} is not a URL: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"{URL}: {url!r:.200}: give a gateway's URL, https://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{URL}: a gateway's URL has neither a user or password nor ? or #")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{URL}: a gateway's URL has printable ASCII characters only")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(f"{URL}: {url}: http:// would send the token in clear: use https://")


class GatewayClient(OperatorRequests):
    """A gateway, as `OperatorClient` is a daemon. May be called from any thread.

    Raises `ConfigError` for a URL or a token that cannot be used.
    """

    TIMEOUT_S = 30.0
    """For each request, on top of its own wait."""

    def __init__(self, url: str, tenant: str, environ: Mapping[str, str]) -> None:
        """The token is read from KVPOOL_GATEWAY_TOKEN, or the file that KVPOOL_GATEWAY_TOKEN_FILE names."""
        check_url(url)
        token = secret_of(TOKEN, environ) or ""
        if not is_printable(token):
            raise ConfigError(f"{url} needs a token: set {TOKEN}, or {TOKEN}_FILE")
        self.tenant = tenant
        self.where = url.rstrip("/")
        self._server = HttpServer(url, token)
        self.routing = Routing(self._ask, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that no request uses."""
        self._server.close()

    def stats(self) -> NodeStats:
        """As `Client.stats`, of the gateway's node."""
        return node_stats.decode(self._ask(client_wire.Stats()).data)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _ask(self, message: frame.Message, wait_s: float = 0.0) -> Any:
        return self._ask_node(message, "", wait_s=wait_s)

    def _ask_node(
        self, message: frame.Message, node: str, tenant: str = "", by: str = "", wait_s: float = 0.0
    ) -> Any:
        """by: the gateway tells the token's name instead."""
        command = COMMANDS[type(message)]
        query = urlencode({"tenant": tenant or self.tenant, "node": node, "wait_s": wait_s})
        # One that was cut off is sent again by the same key: a change is made once.
        headers = {"Idempotency-Key": secrets.token_hex(16)} if command.changes else {}
        body = msgspec.json.encode(to_json(message))
        answer = self._exchange(
            "POST", f"{command.path}?{query}", body, self.TIMEOUT_S + wait_s, headers
        )
        if answer.status != 200:
            raise self._error(answer, command.path)
        try:
            found = decode_json(answer.body, command.answer, "an answer of a kvpool gateway")
        except ProtocolError:
            raise self._no_gateway() from None
        if REQUEST_ID not in answer.headers:
            raise self._no_gateway()
        return frame.Done(found) if command.answer is int else frame.Bytes(answer.body)

    def _error(self, answer: Answer, path: str) -> KvpoolError:
        """What an answer other than 200 means."""
        status = answer.status
        if 300 <= status < 400:
            return ProtocolError(
                f"{self.where} redirects to another address, which is not followed: set {URL} to the gateway's own URL"
            )
        if answer.media != "application/problem+json":
            return self._no_gateway(status)
        try:
            problem = decode_json(answer.body, _Problem, "a problem")
        except ProtocolError:
            return self._no_gateway(status)
        text = f"{self.where}: {problem.detail}"
        if status == 401:
            return NotAuthenticated(f"{self.where} does not know this token: check {TOKEN}")
        if status == 403:
            return NotAuthenticated(text)
        if status in {404, 405} and not self._has_route(path):
            return InvalidRequest(
                f"the gateway of {self.where} is of another version than this command ({__version__}), which it does not "
                "know: upgrade it, or run the command on one of its nodes"
            )
        if status == 429:
            return LimitExceeded(text)
        error = from_code(problem.code, text)
        if type(error) is KvpoolError or isinstance(error, NotAuthenticated):
            return InvalidRequest(text)  # 502: its daemon does not let the gateway in
        return error

    def _has_route(self, path: str) -> bool:
        """Whether what was not found is not the route itself."""
        answer = self._exchange("GET", "/openapi.json", None, self.TIMEOUT_S, {})
        try:
            return path in decode_json(answer.body, _Described, "a description").paths
        except ProtocolError:
            return True

    def _no_gateway(self, status: int = 200) -> ProtocolError:
        return ProtocolError(
            f"the server of {self.where} is not a kvpool gateway (it answered {status}): check {URL}"
        )

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        headers: Mapping[str, str],
    ) -> Answer:
        """Raises `KvpoolError`."""
        try:
            return self._server.ask(method, path, body, timeout_s, headers)
        except TimeoutError as error:
            raise Unavailable(f"{self.where} {error}") from None
        except ssl.SSLCertVerificationError as error:
            raise NotAuthenticated(
                f"the certificate of {self.where} is not trusted ({error.verify_message}): name the file of its authority "
                "in SSL_CERT_FILE, and the host as in the certificate"
            ) from None
        except ssl.SSLError as error:
            raise ProtocolError(
                f"no TLS with {self.where} ({error.reason or error}): check whether its URL is https:// or http://"
            ) from None
        except http.client.IncompleteRead:
            raise Unavailable(
                f"{self.where} closed the connection in the middle of its answer"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
                raise self._no_gateway() from None
            raise Unavailable(
                f"no gateway answers at {self.where} ({error}): check {URL}, and that a daemon runs there with the setting "
                "http"
            ) from None


Operator = OperatorClient | GatewayClient
"""Whom a command asks."""


class _Problem(msgspec.Struct):
    detail: str
    code: str


class _Described(msgspec.Struct):
    paths: dict[str, Any]
