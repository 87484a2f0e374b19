"""`kvpool drain --router`: has routers send engines no new requests, and waits for those that they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any
from urllib.parse import quote

from kvpool.cli.render.text import count
from kvpool.errors import ClusterUnavailable, InvalidRequest
from kvpool.router.client import NoRouter, RouterHttp

LOOK_S = 0.2
IDLE = frozenset(("drained", "away"))
"""States of an engine at a router that has no requests there."""


class EnginesDrain:
    """Drains engines at all of these routers: those of a node, and those of these URLs or names, with all their ranks.

    An address at which nobody listens has no router, and sends no requests.
    """

    def __init__(
        self,
        routers: Sequence[RouterHttp],
        node: str | None,
        engines: Collection[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._routers = list(routers)
        self._node = node
        self._engines = frozenset(each.rstrip("/") for each in engines)
        self._clock = clock
        self._sleep = sleep

    def begin(self) -> list[str]:
        """Say that they are drained; their names. Raises `ClusterUnavailable`, also if there is no router at all."""
        return self._tell("POST")

    def cancel(self) -> list[str]:
        """They get requests again; their names."""
        return self._tell("DELETE")

    def wait(self, timeout_s: float) -> tuple[str, bool]:
        """Until none has requests of these routers: what to tell the operator, and whether that is so."""
        deadline = self._clock() + timeout_s
        while True:
            try:
                busy = {row["name"] for router in self._routers for row in self._busy(router)}
                why = f"{count(len(busy), 'engine')} still had requests: {', '.join(sorted(busy))}"
            except ClusterUnavailable as error:
                busy, why = {""}, str(error)
            if not busy:
                return "no requests are left at the engines", True
            if self._clock() >= deadline:
                return f"after {timeout_s:g} s {why}", False
            self._sleep(LOOK_S)

    def _tell(self, method: str) -> list[str]:
        names: dict[str, None] = {}
        there = []
        for router in self._routers:
            try:
                rows = self._rows(router)
            except NoRouter:
                continue
            there.append(router)
            for row in rows:
                router.ask(f"/engines/{quote(row['name'], safe='')}/drain", method=method)
                names[row["name"]] = None
        if not there:
            tried = ", ".join(router.where for router in self._routers)
            raise ClusterUnavailable(f"no router answers at {tried}")
        self._routers = there
        return list(names)

    def _rows(self, router: RouterHttp) -> list[dict[str, Any]]:
        return [row for row in router.ask("/engines")["engines"] if self._wanted(row)]

    def _busy(self, router: RouterHttp) -> list[dict[str, Any]]:
        try:
            return [row for row in self._rows(router) if row["state"] not in IDLE]
        except NoRouter:
            return []  # it has ended

    def _wanted(self, row: dict[str, Any]) -> bool:
        return bool(self._node and row["node"] == self._node) or bool(
            self._engines & {row["name"], row["url"]}
        )


def check_wanted(node: str | None, engines: Collection[str], routers: Collection[str]) -> None:
    """Raises `InvalidRequest` for options that say nothing, or not enough."""
    if node is None and not engines:
        raise InvalidRequest("name the node to drain, or engines with --engine")
    if engines and not routers:
        raise InvalidRequest("--engine: engines are drained at routers: name these with --router")
