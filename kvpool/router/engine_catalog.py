"""The known engines, their models, and the contents of their caches.

Engines come from the configuration and from plugins' announcements, which the local daemon is asked
for every second. An engine whose announcement has disappeared stays while it answers: its node's daemon
may have ended.

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
from typing import Any, cast

import aiohttp
import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.errors import ConfigError, KvpoolError, ProtocolError, Unavailable
from kvpool.router.caches import Caches
from kvpool.router.daemon_link import DaemonLink
from kvpool.router.engine_calls import bearer, read
from kvpool.router.engine_hosts import LOOPBACK, EngineHosts
from kvpool.router.engines import (
    EngineSpec,
    differs,
    spec_of,
    with_models,
)
from kvpool.router.hash_check import MISMATCH, UNVERIFIED, VERIFIED, verify
from kvpool.router.hashing import HashSpec, salt_of
from kvpool.router.observations import assumed, refine
from kvpool.router.pool_view import PoolViews
from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.index import PrefixIndex

log = logging.getLogger("kvpool.router")

DISCOVER_S = 1.0
MODELS_S = 10.0
"""How often an engine is asked for its models: adapters come and go."""
MODELS_RETRY_S, VANISHED_S = 0.5, 2.0
"""The same for one that does not answer, or whose announcement has disappeared."""
ASK_S = 2.0
START_S = 2.0
"""How long `start` waits for engines, so that the first requests find some."""
MISSED_MAX = 3
"""An engine without announcement that failed to answer this often in a row is removed."""
VERIFY_TRIES = 3
ANSWER_BYTES_MAX = 1 << 20


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


_decode_models = JsonDecoder[_Models](_Models, "a list of models")


@dataclass(frozen=True, slots=True)
class Served:
    """Engines that serve a model. chosen: one with the most common hashing; None: none is known."""

    engines: Sequence[EngineSpec]
    kinds: frozenset[str]
    chosen: EngineSpec | None


@dataclass(slots=True, eq=False)
class _Known:
    """One engine. table: of the configuration. announced: by its plugin; None: never, or no longer.

    vanished: its announcement has disappeared, although the daemon answers.
    standing: of its hashes; doubted: announced hashes that were found wrong. missed: consecutive
    failures to answer. met: set once it has been asked for its models; ask: set to have it asked now.
    """

    spec: EngineSpec
    table: Mapping[str, Any] | None
    announced: Mapping[str, Any] | None
    cards: Sequence[Mapping[str, Any]] = ()
    vanished: bool = False
    standing: str = UNVERIFIED
    doubted: HashSpec | None = None
    verifying: asyncio.Lock = field(default_factory=asyncio.Lock)
    missed: int = 0
    met: asyncio.Event = field(default_factory=asyncio.Event)
    ask: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class EngineCatalog:
    """See the module.

    engines: tables of the configuration, with their fields' names. client: of the local daemon; None: the
    router runs without. session: for requests to engines. index, cluster: the scheduler's; kinds
    and nodes are maintained here.
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
        self._tables = {str(table["url"]).rstrip("/"): table for table in engines}
        self._daemon = daemon
        self._session = session
        self._pools = pools
        self._kinds = cast(dict[str, KindEstimates], cluster.kinds)
        self._joined, self._left, self._changed = joined, left, changed
        self._clock = clock
        self._api_key = api_key
        self._hosts = EngineHosts(LOOPBACK) if hosts is None else hosts
        self._known: dict[str, _Known] = {}  # by URL
        self._specs: dict[str, EngineSpec] = {}  # by name
        self._served: dict[str, Served] = {}  # by model, until engines change
        self._refused: dict[str, str] = {}  # by URL of the announcement: the reason
        self._caches = Caches(index, clock=clock, wall=wall, on_lag=on_lag)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start; engines that answer soon join now, others later."""
        self._begin(self._caches.run())
        for url in self._tables:
            self._meet(url, None)
        found = await self._discover()
        if self._daemon is not None:
            self._begin(self._keep_discovering())
        waits = [asyncio.ensure_future(known.met.wait()) for known in self._known.values()]
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
        tasks = [*self._tasks, *(k.task for k in self._known.values() if k.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            found = await daemon.ask(lambda client: client.engines())
        except KvpoolError:
            return False
        daemon.error = ""
        announced: dict[str, Mapping[str, Any]] = {}
        for each in found:
            # Ranks behind one URL are one engine here: only the first one's cache is followed.
            announced.setdefault(str(each["url"]).rstrip("/"), each)
        for url, record in announced.items():
            self._meet(url, record)
        self._refused = {url: reason for url, reason in self._refused.items() if url in announced}
        for url, known in list(self._known.items()):
            if url not in announced and known.announced is not None:
                self._miss(url, known)
        return True

    def _miss(self, url: str, known: _Known) -> None:
        """Its announcement has disappeared. Its own task finds out whether it still answers."""
        if not known.vanished:
            known.vanished = True
            known.missed = 0
            known.ask.set()
        elif known.missed < MISSED_MAX:
            return
        elif known.table is not None:
            self._meet(url, None)
        else:
            del self._known[url]
            del self._specs[known.spec.name]
            assert known.task is not None
            known.task.cancel()
            self._caches.forget(known.spec.name)
            self._served.clear()
            self._pools.keep(self._specs.values())
            log.info("engine %s has left", known.spec.name, extra={"engine": known.spec.name})
            self._left(known.spec.name)

    def _meet(self, url: str, announced: Mapping[str, Any] | None) -> None:
        """An engine is configured or announced with these properties."""
        known = self._known.get(url)
        table = self._tables.get(url)
        if known is not None:
            known.vanished = False
            if known.announced == announced:
                return
        if announced is not None and table is None and (reason := self._hosts.refusal(url)):
            self._refuse(url, reason)
            return
        try:
            spec = self._spec_of(url, announced, table)
        except ConfigError as error:
            self._refuse(url, str(error))
            return
        if known is None:
            taken = self._specs.get(spec.name)
            if taken is not None:
                self._refuse(url, f"one of the same name is at {taken.url}")
                return
            known = self._known[url] = _Known(spec, table, announced)
            self._add(known, spec)
            known.task = asyncio.get_running_loop().create_task(self._ask_models(known))
            log.info("engine %s has joined", spec.name, extra={"engine": spec.name})
            self._joined(known.spec)
        else:
            known.announced = announced
            self._change(known, with_models(spec, known.cards))

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

    def _refuse(self, url: str, reason: str) -> None:
        """An announcement is rejected; it is repeated every second."""
        if self._refused.get(url) != reason:
            self._refused[url] = reason
            log.error(
                "the announcement of engine %s is ignored: %s", url, reason, extra={"engine": url}
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

    async def _ask_models(self, known: _Known) -> None:
        """Ask an engine which models it serves, periodically."""
        while True:
            known.ask.clear()
            answered = await self._models(known)
            known.missed = 0 if answered else known.missed + 1
            known.met.set()
            pause_s = VANISHED_S if known.vanished else MODELS_S
            if known.missed or not known.cards:
                pause_s = MODELS_RETRY_S
            try:
                async with asyncio.timeout(pause_s):
                    await known.ask.wait()
            except TimeoutError:
                pass

    async def _models(self, known: _Known) -> bool:
        try:
            async with self._session.get(
                f"{known.spec.url}/v1/models",
                headers=self._headers(known.spec),
                timeout=aiohttp.ClientTimeout(total=ASK_S),
                allow_redirects=False,
            ) as answer:
                body = await read(answer, ANSWER_BYTES_MAX)
                if answer.status != 200:
                    return False
                cards = _decode_models(body).data
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        except ProtocolError:
            return False
        if cards != known.cards:
            known.cards = cards
            spec = self._spec_of(known.spec.url, known.announced, known.table)
            self._change(known, with_models(spec, cards))
        return True

    def _headers(self, spec: EngineSpec) -> dict[str, str]:
        return bearer(self._api_key(spec))

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
                engines,
                frozenset(spec.kind for spec in engines),
                max(known, key=lambda spec: ways[spec.hashing], default=None),
            )
        return served

    def answers(self, spec: EngineSpec) -> bool:
        """Whether the engine answered the last request for its models."""
        return not self._known[spec.url].missed

    # ---- hashes ------------------------------------------------------------------------------------

    async def verify(self, name: str) -> str:
        """Whether an engine's hashes equal those computed here: verified, mismatch, or unverified.

        Unverified: it publishes no events, or none arrived. After a mismatch its cache is ignored.
        Raises `Unavailable` if the engine fails, or has left.
        """
        spec = self._specs.get(name)
        known = None if spec is None else self._known.get(spec.url)
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
