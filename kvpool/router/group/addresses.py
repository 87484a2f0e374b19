"""Connections to the other routers: to every address of every configured name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from kvpool.errors import ProtocolError

log = logging.getLogger("kvpool.router")

CONNECT_S = 1.0
RETRY_S = 0.25
FAILURES_SAID = 20
RESOLVE_S = 2.0
ROUTERS_MAX = 64


class Target(NamedTuple):
    """One address of a configured router. url: with the address; host: the name for TLS and `Host`."""

    url: str
    host: str


@dataclass(eq=False, repr=False, slots=True)
class Addresses:
    """The addresses of routers, each with a task that keeps it connected."""

    _urls: Sequence[str]
    _connect: Callable[[Target, asyncio.Event], Awaitable[None]]
    """Connects until the connection ends; sets the event once the address was tried."""
    _found: dict[str, list[Target]] = field(default_factory=dict, init=False)
    """As last looked up."""
    _tasks: dict[Target, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _tried: dict[Target, asyncio.Event] = field(default_factory=dict, init=False)
    _resolving: asyncio.Task[None] | None = field(default=None, init=False)

    async def start(self) -> None:
        """Return once each address was tried, or after `CONNECT_S`."""
        await self._resolve()
        self._resolving = asyncio.create_task(self._keep_resolving(), name="find routers")
        waits = [asyncio.ensure_future(tried.wait()) for tried in self._tried.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=CONNECT_S)
            for wait in late:
                wait.cancel()

    async def close(self) -> None:
        """Disconnect all."""
        running = [] if self._resolving is None else [self._resolving]
        for task in (tasks := [*running, *self._tasks.values()]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_S)
            await self._resolve()

    async def _resolve(self) -> None:
        """Connect to every address of every configured name, and to no others."""
        await asyncio.gather(*map(self._look_up, self._urls))
        found = [target for url in self._urls for target in self._found.get(url, [])]
        wanted = dict.fromkeys(found[:ROUTERS_MAX])
        for target in self._tasks.keys() - wanted.keys():
            self._tasks.pop(target).cancel()
            self._tried.pop(target)
        for target in wanted.keys() - self._tasks.keys():
            self._tried[target] = asyncio.Event()
            self._tasks[target] = asyncio.create_task(self._keep(target), name=f"to {target.url}")

    async def _look_up(self, url: str) -> None:
        """Find the addresses of a router. Without an answer the earlier ones stay."""
        try:
            async with asyncio.timeout(CONNECT_S):
                self._found[url] = await targets_of(url)
        except (OSError, TimeoutError) as error:
            log.warning("the router %s is not found: %s", url, str(error) or "no answer")

    async def _keep(self, target: Target) -> None:
        """Keep an address connected until the task is cancelled."""
        tried, failures = self._tried[target], 0
        while True:
            try:
                await self._connect(target, tried)
                failures = 0
            except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
                failures += 1
                if failures == FAILURES_SAID:  # routers are started one after the other
                    said = str(error) or type(error).__name__
                    log.warning("the router at %s cannot be reached: %s", target.url, said)
            tried.set()
            await asyncio.sleep(RETRY_S)


async def targets_of(url: str) -> list[Target]:
    """Return all addresses of a router's URL. Raises `OSError`."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    targets = []
    for *_, place in found:
        address = str(place[0])
        host = f"[{address}]" if ":" in address else address
        targets.append(Target(f"{parts.scheme}://{host}:{port}", parts.netloc))
    return targets
