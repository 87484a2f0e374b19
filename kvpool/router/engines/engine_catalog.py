"""The known engines, their models, and the contents of their caches.

Engines come from the configuration and from plugins' announcements, which the local daemon is asked
for every second. An engine whose announcement has disappeared stays while it answers: its node's daemon
may have ended. Data-parallel ranks behind one URL are engines of their own, with one server.

Cache contents come from KV events (`caches.py`). A restarted router has the events
replayed, and routes meanwhile.

Block hashes must be the engine's own, and are compared with them (`hash_check.py`). If they differ the engine's
cache is ignored, and an error is logged: otherwise it would look like a cache without hits.

Keys of the index are the last 8 bytes of a hash, as in events, salted by model: models may
share a tokeniser and so their hashes.

Event loop only; the daemon is called in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kvpool.errors import ConfigError, KvpoolError, Unavailable
from kvpool.placement.records import LinkRecord
from kvpool.router.daemon_link import DaemonLink
from kvpool.router.engines.caches import Caches
from kvpool.router.engines.engine_server import EngineServer
from kvpool.router.engines.hash_check import MISMATCH, UNVERIFIED, VERIFIED, verify
from kvpool.router.engines.pool_view import PoolViews
from kvpool.router.hashing import HashSpec, salt_of
from kvpool.router.records.observations import assumed, refine
from kvpool.router.upstream.engine_calls import bearer
from kvpool.router.upstream.engine_hosts import LOOPBACK, EngineHosts
from kvpool.router.upstream.specs import (
    EngineSpec,
    Place,
    by_rank,
    differs,
    of_rank,
    spec_of,
    with_models,
)
from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.index import PrefixIndex

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("kvpool.router")

DISCOVER_S = 1.0
START_S = 2.0
"""How long `start` waits for engines, so that the first requests find some."""
MISSED_MAX = 3
"""An engine without announcement that failed to answer this often in a row is removed."""
UNHEARD_MAX = 5
"""A rank that was missing this often in a row, while others of its server are announced, is removed: a restarted
daemon hears of all within 2 s."""
VERIFY_TRIES = 3


@dataclass(frozen=True, slots=True)
class Served:
    """Engines that serve a model, one of each server. chosen: one with the most common hashing; None: none is known."""

    engines: Sequence[EngineSpec]
    kinds: frozenset[str]
    chosen: EngineSpec | None


@dataclass(slots=True, eq=False)
class _Known:
    """One engine. table: of the configuration. announced: by its plugin; None: never, or no longer.

    server: it, and further ranks of it. vanished: how often in a row its announcement was missing, although the
    daemon answers. standing: of its hashes; doubted: announced hashes that were found wrong.
    """

    spec: EngineSpec
    server: EngineServer
    table: Mapping[str, Any] | None
    announced: Mapping[str, Any] | None
    vanished: int = 0
    standing: str = UNVERIFIED
    doubted: HashSpec | None = None
    verifying: asyncio.Lock = field(default_factory=asyncio.Lock)


class EngineCatalog:
    """See the module.

    engines: tables of the configuration, with their fields' names. client: of the local daemon; None: the
    router runs without. session: for requests to engines. index, cluster: the scheduler's; kinds,
    nodes and links are maintained here.
    joined, left, changed: called with new engines, with the names of removed ones, and with
    those whose scheduler properties have changed. on_lag: called with the seconds from an event to the
    index, by the wall clocks of both machines. api_key: of an engine. hosts: where announced ones may be; None: on
    this machine.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Mapping[str, Any]],
        daemon: DaemonLink | None,
        session: aiohttp.ClientSession,
        index: PrefixIndex,
        pools: PoolViews,
        cluster: Cluster,
        joined: Callable[[EngineSpec], None],
        left: Callable[[str], None],
        changed: Callable[[EngineSpec], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        api_key: Callable[[EngineSpec], str] = lambda _: "",
        hosts: EngineHosts | None = None,
        on_lag: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._tables = {
            Place(str(each["url"]).rstrip("/"), each.get("rank")): each
            for table in engines
            for each in by_rank(table)
        }
        self._daemon = daemon
        self._session = session
        self._pools = pools
        self._kinds = cast(dict[str, KindEstimates], cluster.kinds)
        self._links = cluster.links
        self._joined, self._left, self._changed = joined, left, changed
        self._clock = clock
        self._api_key = api_key
        self._hosts = EngineHosts(LOOPBACK) if hosts is None else hosts
        self._known: dict[Place, _Known] = {}
        self._servers: dict[str, EngineServer] = {}  # by URL
        self._specs: dict[str, EngineSpec] = {}  # by name
        self._served: dict[str, Served] = {}  # by model, until engines change
        self._refused: dict[Place, str] = {}  # announcements, with the reason
        self._caches = Caches(index, clock=clock, wall=wall, on_lag=on_lag)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start; engines that answer soon join now, others later."""
        self._begin(self._caches.run())
        for place in self._tables:
            self._meet(place, None)
        found = await self._discover()
        if self._daemon is not None:
            self._begin(self._keep_discovering())
        waits = [asyncio.ensure_future(server.met.wait()) for server in self._servers.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=START_S)
            for wait in late:
                wait.cancel()
        if self._daemon is not None and not found:
            log.warning(
                "no daemon: only configured engines are used, and the pool's contents are unknown: %s",
                self._daemon.error,
            )

    async def close(self) -> None:
        """End all that runs here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers.values():
            await server.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # the loop's handler reports it: a bug

    # ---- engines -----------------------------------------------------------------------------------

    @property
    def engines(self) -> Mapping[str, EngineSpec]:
        """By name."""
        return self._specs

    async def _keep_discovering(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_S)
            await self._discover()

    async def _discover(self) -> bool:
        """Ask the daemon for the engines; returns whether it answers."""
        daemon = self._daemon
        if daemon is None:
            return False
        try:
            found = await daemon.ask(lambda client: client.routing.engines())
        except KvpoolError:
            return False
        daemon.error = ""
        announced: dict[Place, Mapping[str, Any]] = {}
        measured: dict[str, tuple[str, list[LinkRecord]]] = {}
        for each in found:
            # Apart from the engine: it changes, and is of its node.
            host, links = each.pop("host", ""), each.pop("links", ())
            if each["node"] not in measured:  # the first of a node has its links
                measured[each["node"]] = host, msgspec.convert(links, list[LinkRecord])
            url, rank = str(each["url"]).rstrip("/"), each.get("rank")
            announced.setdefault(Place(url, rank), each)
        self._links.told(measured)
        ranked = {place.url for place in announced if place.rank is not None}
        for url in ranked:
            announced.pop(Place(url), None)
        for place, record in announced.items():
            self._meet(place, record)
        self._refused = {place: why for place, why in self._refused.items() if place in announced}
        for place, known in list(self._known.items()):
            if place not in announced and known.announced is not None:
                self._miss(place, known, others=place.url in ranked)
        return True

    def _miss(self, place: Place, known: _Known, *, others: bool) -> None:
        """Its announcement has disappeared. Whether its server still answers is found out.

        others: ranks of the same server are announced.
        """
        known.vanished += 1
        if known.vanished == 1 and not known.server.doubted:
            known.server.doubt()
        if known.vanished == 1 or not (
            known.server.missed >= MISSED_MAX or (others and known.vanished >= UNHEARD_MAX)
        ):
            return
        if place in self._tables:
            self._meet(place, None)
            return
        self._forget(place)
        whole = Place(place.url)
        if whole in self._tables and place.url not in self._servers:
            self._meet(whole, None)

    def _forget(self, place: Place) -> None:
        """An engine has left."""
        known = self._known.pop(place)
        name = known.spec.name
        del self._specs[name]
        if not any(other.server is known.server for other in self._known.values()):
            del self._servers[place.url]
            known.server.end()
        self._caches.forget(name)
        self._served.clear()
        self._pools.keep(self._specs.values())
        log.info("engine %s has left", name, extra={"engine": name})
        self._left(name)

    def _table(self, place: Place) -> Mapping[str, Any] | None:
        """Its configuration: as the rank that it is, or as one of its server. Raises `ConfigError`."""
        table = self._tables.get(place)
        if table is None and place.rank is not None:
            whole = self._tables.get(Place(place.url))
            return None if whole is None else of_rank(whole, place.rank)
        return table

    def _meet(self, place: Place, announced: Mapping[str, Any] | None) -> None:
        """An engine is configured or announced with these properties."""
        known = self._known.get(place)
        if known is not None:
            known.vanished = 0
            known.server.doubted = any(
                other.vanished and other.server is known.server for other in self._known.values()
            )
            if known.announced == announced:
                return
        try:
            table = self._table(place)
        except ConfigError as error:
            self._refuse(place, str(error))
            return
        if announced is not None and table is None and (reason := self._hosts.refusal(place.url)):
            self._refuse(place, reason)
            return
        try:
            spec = self._spec_of(place.url, announced, table)
        except ConfigError as error:
            self._refuse(place, str(error))
            return
        if known is None:
            if not self._makes_room(place):
                return
            taken = self._specs.get(spec.name)
            if taken is not None:
                self._refuse(place, f"one of the same name is at {taken.url}")
                return
            server = self._servers.get(place.url)
            if server is None:
                server = self._serve(spec)
            known = self._known[place] = _Known(spec, server, table, announced)
            self._add(known, with_models(spec, server.cards))
            log.info("engine %s has joined", spec.name, extra={"engine": spec.name})
            self._joined(known.spec)
        else:
            known.announced = announced
            self._change(known, with_models(spec, known.server.cards))

    def _makes_room(self, place: Place) -> bool:
        """Whether an engine may be added here. A server is one engine, or one for each rank: what it was before leaves.

        What is configured by rank stays so.
        """
        before = [
            other
            for other in self._known
            if other.url == place.url and (other.rank is None) != (place.rank is None)
        ]
        if any(other.rank is not None and other in self._tables for other in before):
            self._refuse(place, "its ranks are configured, and it announces none")
            return False
        for other in before:
            self._forget(other)
        return True

    def _serve(self, spec: EngineSpec) -> EngineServer:
        url = spec.url
        server = self._servers[url] = EngineServer(
            url, self._session, lambda: bearer(self._api_key(spec)), lambda: self._told(url)
        )
        server.begin()
        return server

    def _told(self, url: str) -> None:
        """A server has told of its models."""
        for known in list(self._known.values()):
            if known.spec.url == url:
                spec = self._spec_of(url, known.announced, known.table)
                self._change(known, with_models(spec, known.server.cards))

    def _spec_of(
        self, url: str, announced: Mapping[str, Any] | None, table: Mapping[str, Any] | None
    ) -> EngineSpec:
        """As `spec_of`. Announced addresses of events, too, are connected to only where engines may be."""
        spec = spec_of(url, announced=announced, table=table)
        for name in ("events", "replay"):
            endpoint = getattr(spec, name)
            if not endpoint.startswith("tcp://") or (table is not None and table.get(name)):
                continue
            if reason := self._hosts.refusal(endpoint):
                log.warning(
                    "the events of engine %s are not read from %s: %s",
                    *(spec.name, endpoint, reason),
                    extra={"engine": spec.name},
                )
                return replace(spec, events="", replay="")
        return spec

    def _refuse(self, place: Place, reason: str) -> None:
        """An announcement is rejected; it is repeated every second."""
        if self._refused.get(place) != reason:
            self._refused[place] = reason
            log.error(
                "the announcement of engine %s is ignored: %s",
                *(place.url, reason),
                extra={"engine": place.url},
            )

    def _change(self, known: _Known, spec: EngineSpec) -> None:
        """Its current properties. Hashes found wrong are dropped."""
        if spec.hashing is not None and spec.hashing == known.doubted:
            spec = replace(spec, hashing=None)
        old = known.spec
        if spec == old:
            return
        if (spec.hashing, spec.events) != (old.hashing, old.events) and known.doubted is None:
            known.standing = UNVERIFIED
        self._add(known, spec)
        if differs(old, spec):
            self._changed(spec)

    def _add(self, known: _Known, spec: EngineSpec) -> None:
        """Update the index and the scheduler's cluster, without the engine's own answer."""
        known.spec = self._specs[spec.name] = spec
        self._served.clear()
        if (estimates := self._kinds.get(spec.kind)) is not None:
            refine(estimates, spec)
        else:
            self._kinds[spec.kind] = assumed(spec)
        self._pools.keep(self._specs.values())
        salt = 0 if spec.hashing is None else salt_of(spec.model, spec.hashing)
        try:
            self._caches.follow(spec, salt)
        except ConfigError as error:
            log.warning(
                "the cache contents of engine %s cannot be read: %s",
                spec.name,
                error,
                extra={"engine": spec.name},
            )

    def _headers(self, spec: EngineSpec) -> dict[str, str]:
        return {**bearer(self._api_key(spec)), **spec.rank_header}

    def serving(self, model: str) -> Served | None:
        """The engines that serve a model; None: none."""
        served = self._served.get(model)
        if served is None:
            engines = [spec for spec in self._specs.values() if spec.serves(model)]
            if not engines:
                return None
            known = [spec for spec in engines if spec.hashing is not None]
            ways = Counter(spec.hashing for spec in known)
            served = self._served[model] = Served(
                list({spec.url: spec for spec in engines}.values()),
                frozenset(spec.kind for spec in engines),
                max(known, key=lambda spec: ways[spec.hashing], default=None),
            )
        return served

    def answers(self, spec: EngineSpec) -> bool:
        """Whether the engine answered the last request for its models."""
        return not self._servers[spec.url].missed

    # ---- hashes ------------------------------------------------------------------------------------

    async def verify(self, name: str) -> str:
        """Whether an engine's hashes equal those computed here: verified, mismatch, or unverified.

        Unverified: it publishes no events, or none arrived. After a mismatch its cache is ignored.
        Raises `Unavailable` if the engine fails, or has left.
        """
        spec = self._specs.get(name)
        known = None if spec is None else self._known.get(spec.place)
        if known is None:
            raise Unavailable(f"there is no engine {name}")
        async with known.verifying:
            for _ in range(VERIFY_TRIES):
                spec, hashing, feed = known.spec, known.spec.hashing, self._caches.feed(name)
                if known.standing != UNVERIFIED or hashing is None or feed is None:
                    return known.standing
                found = await verify(
                    spec,
                    hashing,
                    feed,
                    session=self._session,
                    clock=self._clock,
                    headers=self._headers(spec),
                )
                if known.spec.hashing == hashing and self._caches.feed(name) is feed:
                    break  # otherwise it has changed, or no events arrived
            else:
                return known.standing
            known.standing = found
            if found == MISMATCH:
                known.doubted = hashing
                log.error(
                    "engine %s does not hash blocks as announced or configured (%s, %d tokens a block, chain from "
                    "%s): its cache is ignored. Compare --prefix-caching-hash-algo, --block-size and PYTHONHASHSEED "
                    "of the engine",
                    *(name, hashing.algorithm, hashing.block_tokens),
                    hashing.none_hash.hex()[:16],
                )
                self._change(known, known.spec)
            elif found == VERIFIED:
                log.info("engine %s hashes blocks as expected", name, extra={"engine": name})
            return found

    # ---- for operators -----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain values. daemon: whether the local daemon answers; None: there is none."""
        daemon = self._daemon
        caches = self._caches.stats()
        return {
            "daemon": None if daemon is None else not daemon.error,
            "daemon_error": "" if daemon is None else daemon.error,
            "lag_p50_s": caches["lag_p50_s"],
            "lag_p99_s": caches["lag_p99_s"],
            "engines": {
                known.spec.name: {
                    "url": known.spec.url,
                    "rank": known.spec.rank,
                    "node": known.spec.node,
                    "models": list(known.spec.models),
                    "hashes": known.standing,
                    "announced": known.announced is not None and not known.vanished,
                    "configured": known.table is not None,
                    "events": caches["engines"].get(known.spec.name),
                }
                for known in self._known.values()
            },
        }
