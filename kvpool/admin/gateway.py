"""Puts the gateway's parts together."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from kvpool import __version__
from kvpool.admin.api import FIELD_BYTES_MAX, HEADERS_MAX, Api
from kvpool.admin.cluster_view import Cluster
from kvpool.admin.daemon_link import Daemon, Entrance
from kvpool.admin.event_feed import Events
from kvpool.admin.guard import Guard
from kvpool.admin.handlers.blocks import Blocks
from kvpool.admin.handlers.changes import Changing
from kvpool.admin.handlers.inventory import Looking
from kvpool.admin.handlers.monitoring import Dropped, Watching
from kvpool.admin.handlers.operator import Forwarding
from kvpool.admin.handlers.pages import Pages
from kvpool.admin.handlers.receipts import Accounting
from kvpool.admin.handlers.routers import Routers
from kvpool.admin.history import Sampler
from kvpool.admin.idempotency import Remembered
from kvpool.admin.routing import routes_of
from kvpool.admin.span_export import SERVICE, export_of
from kvpool.admin.tokens import Tokens
from kvpool.http_listeners import HttpLimits, Listeners, peer_uid
from kvpool.security.failed_logins import FailedLogins, Failures
from kvpool.telemetry.otlp import Counts, Exporter
from kvpool.wire import worker as worker_wire

log = logging.getLogger("kvpool.admin")

LIMITS = HttpLimits(
    connections=512, idle_s=15.0, close_s=2.0, field_bytes=FIELD_BYTES_MAX, headers=HEADERS_MAX
)


class Gateway:
    """One gateway, from `start` to `close`. Raises `ConfigError` for tokens that cannot be used.

    logins_failed: is told of users that could not prove who they are.
    """

    def __init__(
        self,
        start: worker_wire.GatewayStart,
        logins_failed: Callable[[Failures], object] = lambda _: None,
    ) -> None:
        clock = time.monotonic
        self._start = start
        entrance = Entrance(start.socket, start.tenant, start.token, start.operator_token)
        self._daemon = Daemon(entrance)
        cluster = Cluster(self._daemon, clock)
        tokens = Tokens(start.tokens_file, start.digest, clock, log.warning)
        failed = FailedLogins(
            logins_failed, lambda s, work: asyncio.get_running_loop().call_later(s, work)
        )
        guard = Guard(tokens, start.rate, os.getuid(), clock, failed.add)
        # Polls wait: they have connections of their own.
        self._listening = Daemon(entrance)
        self._events = Events(cluster, self._listening)
        self._sampler = Sampler(cluster, time.time)
        self._routers = Routers(cluster, list(start.routers), start.router_token, start.router_ca)
        looking, pages, dropped = Looking(cluster, len(start.routers)), Pages(), Dropped()
        # In the order of the description.
        handlers = (
            looking,
            Blocks(cluster),
            Accounting(cluster),
            Changing(cluster, looking),
            self._routers,
            Watching(cluster, self._events, self._sampler, dropped),
            pages,
        )
        table = [*routes_of(*handlers), *Forwarding(cluster).routes()]
        pages.describe(table)
        self._listeners = Listeners(start.tls_cert, start.tls_key, LIMITS, "http", dropped.add)
        api = Api(guard, Remembered(clock), peer_uid, self._listeners.trust)
        self._app = api.application(table)
        self._tasks: list[asyncio.Task[None]] = []
        self._exporter = (
            Exporter(start.otlp, SERVICE, start.node, __version__) if start.otlp else None
        )
        self._spans = Counts()

    async def start(self) -> list[str]:
        """Listen. The URLs. Raises `ConfigError`."""
        urls = await self._listeners.open(self._app, self._start.addresses, self._start.socket_mode)
        for work in (self._listeners.tend(), self._events.run(), self._sampler.run()):
            task = asyncio.create_task(work)
            task.add_done_callback(_crash_if_failed)
            self._tasks.append(task)
        if self._exporter is not None:
            export = export_of(self._daemon, self._exporter, self._spans)
            self._tasks.append(asyncio.create_task(export))
        return urls

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        if self._exporter is not None:
            self._exporter.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listeners.close()
        await self._routers.close()
        self._listening.close()
        self._daemon.close()


def _crash_if_failed(task: asyncio.Task[None]) -> None:
    """Work beside the requests has broken an invariant: the daemon starts another gateway."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the gateway is stopping", exc_info=error)
        os._exit(1)
