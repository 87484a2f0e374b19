"""Requests of commands to routers over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kvpool.config import secret_of
from kvpool.errors import ClusterUnavailable, InvalidRequest, NotAuthenticated
from kvpool.http_client import HttpServer

TIMEOUT_S = 30.0
TOKEN = "KVPOOL_ROUTER_TOKEN"  # noqa: S105  (the variable's name)


class NoRouter(ClusterUnavailable):
    """Nobody listens there."""


class RouterHttp:
    """A router. Its token is read from KVPOOL_ROUTER_TOKEN.

    url: http://HOST:PORT. address: of HOST; by default that of its name.
    """

    def __init__(self, url: str, address: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidRequest(f"--router {url!r}: give a router's URL, http://127.0.0.1:8080")
        self._server = HttpServer(url, secret_of(TOKEN) or "", address)
        self.where = f"{self._server.url} at {address}" if address else self._server.url

    def ask(self, path: str, body: bytes | None = None, *, method: str = "") -> Any:
        """The answer's JSON; a body is posted. Raises `InvalidRequest`, `NotAuthenticated`, `ClusterUnavailable`."""
        method = method or ("GET" if body is None else "POST")
        try:
            answer = self._server.ask(method, path, body, TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            kind = NoRouter if isinstance(error, ConnectionRefusedError) else ClusterUnavailable
            raise kind(
                f"no router answers at {self.where} ({error}): start one with `kvpool router`, or name it "
                "with --router"
            ) from None
        finally:
            self._server.close()
        if answer.status in {401, 403}:
            raise NotAuthenticated(f"the router: {_said(answer.body)}; set {TOKEN}")
        if answer.status != 200:
            raise InvalidRequest(f"the router: {_said(answer.body)} ({answer.status})")
        try:
            return json.loads(answer.body)
        except ValueError:
            raise InvalidRequest(
                f"the server at {self.where} is not a kvpool router: it sent no JSON"
            ) from None


def routers_at(urls: Sequence[str]) -> list[RouterHttp]:
    """All routers to which these URLs lead: a name with several addresses is as many routers.

    Raises `ClusterUnavailable` for a name that leads nowhere.
    """
    found = []
    for url in urls:
        parts = urlsplit(url)
        RouterHttp(url)  # a URL at all
        try:
            places = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ClusterUnavailable(f"--router {url}: {error}") from None
        addresses = dict.fromkeys(str(place[4][0]) for place in places)
        found += [RouterHttp(url, address) for address in addresses]
    return found


def _said(body: bytes) -> str:
    """The message of a router's error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"
