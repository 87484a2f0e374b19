"""The HTTP gateway as its daemon sees it: a process that is started, configured, and kept running.

It is `python -m kvpool.admin`, and nothing of it is imported here. It uses the daemon's control socket, like
an operator; the control channel carries its settings, and the channel's end ends it. The daemon
does not depend on it: it does not wait for it to start, and continues without it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.config import HTTP_UNIX, DaemonConfig
from kvpool.daemon.workers.supervisor import START_S, Worker, WorkerSupervisor
from kvpool.decoding import decode_json
from kvpool.errors import ConfigError, ProtocolError
from kvpool.security.failed_logins import Failures
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

log = logging.getLogger("kvpool.daemon")

TOKEN_FILE = "http.token"  # noqa: S105  (a name)
TOKEN_BYTES = 32
TOKEN_CHARACTERS_MIN = 32


class GatewayWorker(Worker):
    """One life of the gateway."""

    module = "kvpool.admin"
    kind = "gateway"
    decode = worker_wire.decode_gateway

    def __init__(
        self,
        start: worker_wire.GatewayStart,
        logins_failed: Callable[[Failures], None],
        answers: Callable[[list[str]], None],
    ) -> None:
        super().__init__()
        self._tell = answers
        self._start = start
        self._logins_failed = logins_failed

    def _received(self, request: int, message: Any) -> None:
        if isinstance(message, worker_wire.LoginsFailed):
            self._logins_failed(message.failures)
        else:
            super()._received(request, message)

    async def _prepare(self) -> None:
        answer = await self._ask(self._start, START_S)
        if not isinstance(answer, frame.Bytes):
            raise ProtocolError(f"the gateway's first message is a {type(answer).__name__}")
        urls = decode_json(answer.data, list[str], "a list of addresses")
        log.info("the HTTP gateway listens at %s", ", ".join(urls))
        self._tell(urls)


class Gateway:
    """Keeps the gateway running, if one is configured. Event loop only.

    logins_failed: is told of users that could not prove who they are. answers: is told of its addresses the first
    time that it listens there.
    """

    def __init__(
        self,
        config: DaemonConfig,
        logins_failed: Callable[[Failures], None] = lambda _: None,
        answers: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        """Raises `ConfigError` if its token cannot be stored."""
        self._config = config
        digest = ""
        if config.http and not config.http_tokens:
            digest = hashlib.sha256(own_token(token_path(config)).encode()).hexdigest()
        self._start = _start_message(config, digest)
        self._first_answers: Callable[[list[str]], None] | None = answers
        self._supervisor = WorkerSupervisor(
            lambda: GatewayWorker(self._start, logins_failed, self._tell)
        )

    async def run(self) -> None:
        """Start it, retrying until it succeeds, without making others wait."""
        if self._config.http or self._config.otlp:
            await self._supervisor.insist("the HTTP gateway")

    def _tell(self, urls: list[str]) -> None:
        if urls and self._first_answers is not None:
            self._first_answers(urls)
            self._first_answers = None

    async def stop(self) -> None:
        await self._supervisor.stop()


def token_path(config: DaemonConfig) -> Path:
    """Path of the token that the daemon creates."""
    return Path(config.socket).parent / TOKEN_FILE


def own_token(path: Path) -> str:
    """The token in this file, created if missing. It survives the daemon, so that its users can continue.

    Raises `ConfigError` if other users can access the file.
    """
    fresh = secrets.token_urlsafe(TOKEN_BYTES)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, f"{fresh}\n".encode())
        finally:
            os.close(file)
        try:
            os.link(beside, path)  # atomically, and only if there is none
        except FileExistsError:
            return _known_token(path)
        finally:
            os.unlink(beside)
    except OSError as error:
        raise ConfigError(
            f"http: the gateway's token cannot be stored in {path}: {error.strerror}. Set http_tokens to a token "
            "file, or choose another path for the socket"
        ) from None
    return fresh


def _known_token(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        text = os.read(fd, 4096).decode(errors="replace").strip()
    finally:
        os.close(fd)
    private = found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not (private and stat.S_ISREG(found.st_mode) and len(text) >= TOKEN_CHARACTERS_MIN):
        raise ConfigError(
            f"http: {path} is not a token file readable only by this user: delete it, and the daemon creates a new "
            "one"
        )
    return text


def _start_message(config: DaemonConfig, digest: str) -> worker_wire.GatewayStart:
    tenant = config.all_tenants()[0]
    return worker_wire.GatewayStart(
        addresses=[
            HTTP_UNIX + os.path.abspath(address.removeprefix(HTTP_UNIX))
            if address.startswith(HTTP_UNIX)
            else address
            for address in config.http
        ],
        socket=os.path.abspath(config.operators_at()),
        socket_mode=config.socket_mode,
        tenant=tenant.name,
        token=tenant.token,
        operator_token=config.operator_token,
        tokens_file=os.path.abspath(config.http_tokens) if config.http_tokens else "",
        digest=digest,
        rate=config.http_rate,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        routers=list(config.routers),
        router_token=config.router_token,
        otlp=config.otlp,
        node=config.node,
        router_ca=config.router_ca or config.tls_ca,
    )
