"""Asks routers over HTTP, for commands."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kvpool.errors import ClusterUnavailable, InvalidRequest, NotAuthenticated

TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 16 << 20
TOKEN = "KVPOOL_ROUTER_TOKEN"  # noqa: S105  (the variable's name)


class NoRouter(ClusterUnavailable):
    """Nobody listens there."""


class RouterHttp:
    """A router's HTTP. url: http://HOST:PORT. token: the operator's; empty: none.

    address: where to find HOST; empty: anywhere that its name leads.
    """

    def __init__(self, url: str, token: str, address: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidRequest(f"--router {url!r}: give a router's URL, http://127.0.0.1:8080")
        self.url = url.rstrip("/")
        self.where = f"{self.url} at {address}" if address else self.url
        self._token = token
        self._path = parts.path.rstrip("/")
        self._address = address or parts.hostname
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._tls is None else 443)

    def ask(self, path: str, body: bytes | None = None, *, method: str = "") -> Any:
        """The answer's JSON; a body is posted. Raises `InvalidRequest`, `NotAuthenticated`, `ClusterUnavailable`."""
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = _Connection(self._host, self._port, self._address, self._tls)
        try:
            connection.request(
                method or ("GET" if body is None else "POST"), self._path + path, body, headers
            )
            answer = connection.getresponse()
            said = answer.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            kind = NoRouter if isinstance(error, ConnectionRefusedError) else ClusterUnavailable
            raise kind(
                f"no router answers at {self.where} ({error}): start one with `kvpool router`, or name it with --router"
            ) from None
        finally:
            connection.close()
        if answer.status in {401, 403}:
            raise NotAuthenticated(f"the router: {_said(said)}; set {TOKEN}")
        if answer.status != 200:
            raise InvalidRequest(f"the router: {_said(said)} ({answer.status})")
        try:
            return json.loads(said)
        except ValueError:
            raise InvalidRequest(
                f"the server at {self.where} is not a kvpool router: it sent no JSON"
            ) from None


def routers_at(urls: Sequence[str], token: str) -> list[RouterHttp]:
    """All routers to which these URLs lead: a name with several addresses is as many routers.

    Raises `ClusterUnavailable` for a name that leads nowhere.
    """
    found = []
    for url in urls:
        parts = urlsplit(url)
        RouterHttp(url, token)  # a URL at all
        try:
            places = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ClusterUnavailable(f"--router {url}: {error}") from None
        addresses = dict.fromkeys(str(place[4][0]) for place in places)
        found += [RouterHttp(url, token, address) for address in addresses]
    return found


class _Connection(http.client.HTTPConnection):
    """To one address of a host. tls: its certificate is checked against the host's name."""

    def __init__(self, host: str, port: int, address: str, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=TIMEOUT_S)
        self._address = address
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)


def _said(body: bytes) -> str:
    """The message of a router's error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"
