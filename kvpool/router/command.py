"""`kvpool router`: composes the parts, runs until a signal ends it, and then drains."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import random
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from kvpool import __version__
from kvpool.client import Client
from kvpool.config import secret_of
from kvpool.errors import ConfigError
from kvpool.http_listeners import HttpLimits, Listeners
from kvpool.net import raise_descriptor_limit
from kvpool.router.api import HEADER_BYTES_MAX, Api, Guard
from kvpool.router.config import EngineTable, RouterConfig, Secrets
from kvpool.router.daemon_link import DaemonLink
from kvpool.router.descriptors import connections_max, fitted
from kvpool.router.engines.engine_catalog import EngineCatalog
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.engines.engine_usage import EngineUsage
from kvpool.router.engines.health import Health
from kvpool.router.engines.pool_view import PoolViews
from kvpool.router.group.group import Group, Operators
from kvpool.router.group.group_orders import GroupOrders
from kvpool.router.group.leader import Books
from kvpool.router.group.messages import PROTOCOL, Hello
from kvpool.router.group.questions import RouterQuestions
from kvpool.router.group.rows import stranger
from kvpool.router.http.isolation import Isolation
from kvpool.router.orders import Orders
from kvpool.router.prompts.model_tokenizer import ModelTokenizer
from kvpool.router.prompts.own_tokenizers import OwnTokenizers
from kvpool.router.prompts.rendering import Renderer
from kvpool.router.prompts.tokens import Tokenizer
from kvpool.router.records.metrics import Metrics
from kvpool.router.records.observations import Observing, learned
from kvpool.router.records.record_file import RecordFile
from kvpool.router.records.recorder import Recorder
from kvpool.router.requests.intake import Intake
from kvpool.router.requests.intents import THREADS as INTENT_THREADS
from kvpool.router.requests.intents import Intents
from kvpool.router.requests.prompts import Prompts
from kvpool.router.requests.serving import Serving
from kvpool.router.requests.sessions import Sessions
from kvpool.router.upstream.engine_hosts import EngineHosts
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import Upstream, open_session
from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.roles import RoleRule
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.tenants import TenantRule
from kvpool.scheduler.values import Engine
from kvpool.signals import handle_ending
from kvpool.telemetry.otlp import Counts, Exporter, export_spans
from kvpool.telemetry.spans import TAKE_MAX, Batch, Spans

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("kvpool.router")

SERVICE = "kvpool-router"
CLIENT_TIMEOUT_S = 2.0
IDLE_S = 3630.0  # a connection without a request: longer than proxies keep theirs
CLOSE_S = 2.0
HEADERS_MAX = 128


def run(config: RouterConfig, secrets: Secrets, ready: Callable[[str, int], None]) -> None:
    """Serve until a signal of `kvpool.signals.ENDING`. ready: called with the URL and the number of engines once it serves."""
    descriptors = raise_descriptor_limit()
    fit = fitted(config, descriptors)
    if fit.requests_max < config.requests_max:
        log.warning(
            "%d open files, the limit of this process, are enough for %d requests at once, not requests_max = %d: "
            "raise it (ulimit -Hn, LimitNOFILE)",
            *(descriptors, fit.requests_max, config.requests_max),
        )
    config = fit
    uvloop.run(_run(config, secrets, ready))


class Router:
    """One router, from `start` to `close`. health, serving: for its caller."""

    health: Health
    serving: Serving

    def __init__(
        self, config: RouterConfig, secrets: Secrets, session: aiohttp.ClientSession
    ) -> None:
        clock = time.monotonic
        self._config = config
        self._metrics = metrics = Metrics()
        nodes: dict[str, str] = {}
        namespaces: dict[str, str] = {}
        cluster = Cluster({}, nodes, Traffic(), namespaces)
        index = PrefixIndex()
        pools = PoolViews(index, nodes, namespaces)

        def api_key(spec: EngineSpec) -> str:
            return secrets.api_key_of(spec.url)

        self._spans = Spans(time.time_ns, os.urandom)
        self._exporter = _exporter(config)
        self._exported = Counts()
        self._exported_before = Counts()  # as the metrics have it
        upstream = Upstream(session, api_key, config.connect_s)
        self._recorder = _recorder(config)
        self._client = _pool(config)
        self._daemon = None if self._client is None else DaemonLink(self._client)
        self.health = Health(
            upstream, config, clock, self._up, self._down, self._turned, self._look
        )
        self._catalog = self._make_catalog(session, index, pools, cluster, api_key)

        def pool_told(
            namespace: bytes, keys: Sequence[int], lengths: Mapping[str, tuple[int, ...]]
        ) -> None:
            self._group.told(namespace, keys, lengths)  # which is made last

        self._prompts = Prompts(
            self._catalog,
            self._daemon,
            Tokenizer(session, _tokenizers(config, metrics)),
            Renderer(session, clock),
            pools,
            clock,
            api_key,
            pool_told,
        )
        self._scheduler = scheduler = Scheduler(
            (), cluster, index, make_policy(config.policy), random.Random(), _settings(config)
        )
        observer = Observing(cluster)
        self._orders = Orders(scheduler, observer, metrics, clock)

        def engine_of(name: str) -> Engine:
            return scheduler.engines.get(name) or stranger(name)

        orders = GroupOrders(self._orders, engine_of, clock)
        self._roster = EngineRoster(
            scheduler, self._orders, self._catalog, self.health, metrics, clock
        )
        self._usage = EngineUsage(
            upstream,
            self._roster.engine,
            self._roster.used_by_others,
            config.probe_timeout_s,
            clock,
        )
        self._sessions = Sessions(self._daemon, metrics)
        self._intents_link = (
            None if self._client is None else DaemonLink(self._client, INTENT_THREADS)
        )
        self.serving = Serving(
            config,
            scheduler,
            orders,
            self._roster,
            Intake(config, self._roster, self._prompts, clock, _isolation(config, secrets)),
            upstream,
            observer,
            metrics,
            self._sessions,
            clock,
            os.urandom,
            self._spans if config.otlp else None,
            self._recorder,
            Intents(self._catalog, self._prompts, self._intents_link, metrics),
        )
        self._group = self._make_group(secrets, session, orders, pools, cluster, engine_of)
        self._listeners = Listeners(
            *(config.tls_cert, config.tls_key, _limits(config), "listen"),
            metrics.connections_dropped.inc,
            reuse_port=config.reuse_port,
        )
        self._app = self._make_api(secrets, cluster).application()
        self._tending: asyncio.Task[None] | None = None
        self._rebalancing: asyncio.Task[None] | None = None
        self._exporting: asyncio.Task[None] | None = None

    def _make_catalog(
        self,
        session: aiohttp.ClientSession,
        index: PrefixIndex,
        pools: PoolViews,
        cluster: Cluster,
        api_key: Callable[[EngineSpec], str],
    ) -> EngineCatalog:
        return EngineCatalog(
            engines=[_given(table) for table in self._config.engines],
            daemon=self._daemon,
            session=session,
            index=index,
            pools=pools,
            cluster=cluster,
            joined=self.health.add,
            left=self._left,
            changed=self.health.change,
            clock=time.monotonic,
            api_key=api_key,
            hosts=EngineHosts(self._config.announced_from),
            on_lag=self._metrics.engine_event_lag_seconds.observe,
        )

    def _make_group(
        self,
        secrets: Secrets,
        session: aiohttp.ClientSession,
        orders: GroupOrders,
        pools: PoolViews,
        cluster: Cluster,
        engine_of: Callable[[str], Engine],
    ) -> Group:
        """Connect the orders of this router with those of the others."""
        books = Books(
            orders=self._orders,
            among=self._roster.models.among,
            engine_of=engine_of,
            told=pools.told,
            blame=self.health.failed,
            praise=self.health.succeeded,
            clock=time.monotonic,
        )
        group = Group(
            Hello(PROTOCOL, os.urandom(8).hex(), time.time()),
            self._config.routers,
            orders,
            books,
            RouterQuestions(
                self._scheduler, cluster, self._roster, self.serving.accounts, time.monotonic
            ),
            session,
            secrets.token,
            _routers_tls(self._config),
            self._metrics,
            Operators(time.time),
        )
        self._roster.operated = group.operated
        self._roster.served = group.served
        self._roster.blamed = group.blamed
        self._roster.reached = group.reached
        return group

    def _make_api(self, secrets: Secrets, cluster: Cluster) -> Api:
        return Api(
            self._config,
            Guard(secrets),
            self.serving,
            self._roster,
            self._group,
            self._metrics,
            lambda: {**self._catalog.stats(), **self._prompts.stats(), "kinds": learned(cluster)},
            int(time.time()),
            self._listeners.trust,
            os.urandom,
        )

    # The engine catalog determines the probed engines, and their health the scheduler's.

    def _left(self, name: str) -> None:
        self.health.remove(name)
        self._roster.left(name)
        self._usage.forget(name)
        self._metrics.forget(name)

    async def _look(self, ranks: Sequence[EngineSpec]) -> None:
        """A router that is led has no books to compare with."""
        if not self._group.is_led:
            await self._usage.look(ranks)

    def _up(self, spec: EngineSpec) -> None:
        self._roster.engine_up(spec)

    def _down(self, spec: EngineSpec) -> None:
        self._roster.engine_down(spec)

    def _turned(self, spec: EngineSpec) -> None:
        self._roster.engine_turned(spec)

    async def start(self) -> str:
        """Listen, once each configured engine was probed, and the other routers are known. Returns the URL."""
        await self._catalog.start()
        await self.health.first_probes(self._config.probe_timeout_s)
        await self._group.start()
        rebalance = self._roster.rebalance(lambda: self._group.is_led)
        self._rebalancing = asyncio.create_task(rebalance, name="rebalance")
        if self._exporter is not None:
            export = export_spans(self._take_spans, self._exporter, self._exported)
            self._exporting = asyncio.create_task(export, name="export spans")
        url, *_ = await self._listeners.open(self._app, self._config.addresses)
        self._tending = asyncio.create_task(self._listeners.tend(), name="tend TLS files")
        return url

    def retire(self) -> None:
        """Other routers schedule for themselves from now on."""
        self._group.retire()

    async def hand_over(self) -> None:
        """With `reuse_port`, leave new connections to the other routers."""
        if self._config.reuse_port:
            await self._listeners.stop_accepting()

    async def close(self) -> None:
        """Cancels active requests."""
        await self._group.close()
        await self._listeners.close()
        for task in (self._rebalancing, self._tending):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.health.close()
        self._orders.close()
        await self._roster.close()
        await self.serving.close()
        await self._prompts.close()
        await self._catalog.close()
        await self._sessions.close()
        for link in (self._daemon, self._intents_link):
            if link is not None:
                link.close()
        if self._client is not None:
            self._client.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        await self._export_last()

    async def _take_spans(self, count: int) -> Batch:
        metrics, now, before = self._metrics, self._exported, self._exported_before
        metrics.spans.labels("exported").inc(now.exported - before.exported)
        metrics.spans.labels("lost").inc(now.lost - before.lost)
        metrics.spans.labels("dropped").inc(now.dropped - before.dropped)
        self._exported_before = replace(now)
        return self._spans.take(count)

    async def _export_last(self) -> None:
        """Export the spans of the last requests. One attempt."""
        if self._exporter is None or self._exporting is None:
            return
        self._exporting.cancel()
        await asyncio.gather(self._exporting, return_exceptions=True)
        if left := self._spans.take(TAKE_MAX).spans:
            await asyncio.to_thread(self._exporter.export, left)
        self._exporter.close()


def _spare_collections() -> None:
    """Objects from the start stay; and a full collection over a large index stops everything, so they are rare."""
    gc.collect()
    gc.freeze()
    # Nothing here should need a full collection; if it does, it comes after some millions of objects.
    gc.set_threshold(5_000, 10, 100)


def _limits(config: RouterConfig) -> HttpLimits:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HttpLimits(
        connections_max(config, descriptors), IDLE_S, CLOSE_S, HEADER_BYTES_MAX, HEADERS_MAX
    )


def _exporter(config: RouterConfig) -> Exporter | None:
    if not config.otlp:
        return None
    _, port = config.address
    return Exporter(config.otlp, SERVICE, f"{socket.gethostname()}:{port}", __version__)


def _recorder(config: RouterConfig) -> Recorder | None:
    """Raises `ConfigError`."""
    if not config.record:
        return None
    file = RecordFile(Path(config.record), config.record_file_bytes, config.record_files)
    file.open()
    return Recorder(
        file, block_tokens=config.record_block_tokens, random=os.urandom, clock=time.monotonic
    )


def _pool(config: RouterConfig) -> Client | None:
    """The daemon of this host; None without one."""
    if not config.daemon:
        return None
    return Client(
        config.socket,
        token=secret_of("KVPOOL_TOKEN"),
        operator_token=secret_of("KVPOOL_OPERATOR_TOKEN") or "",
        timeout_s=CLIENT_TIMEOUT_S,
    )


def _routers_tls(config: RouterConfig) -> ssl.SSLContext | None:
    """None: as the system has it. Raises `ConfigError`."""
    if not config.routers_ca:
        return None
    try:
        return ssl.create_default_context(cafile=config.routers_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"routers_ca: {config.routers_ca}: {error}") from None


def _given(table: EngineTable) -> dict[str, object]:
    """An engine's configured fields."""
    return {key: value for key, value in msgspec.structs.asdict(table).items() if value is not None}


def _tokenizers(config: RouterConfig, metrics: Metrics) -> OwnTokenizers | None:
    """Of the configured models. Raises `ConfigError`."""
    if not config.models:
        return None
    folders = {table.tokenizer for table in config.models.values()}
    loaded = {folder: ModelTokenizer(folder) for folder in folders}

    def told(model: str, kind: str, used: bool) -> None:
        metrics.own_tokenizer.labels(model, kind).set(used)

    tokenizers = {name: loaded[table.tokenizer] for name, table in config.models.items()}
    return OwnTokenizers(tokenizers, random.random, told)


def _isolation(config: RouterConfig, secrets: Secrets) -> Isolation | None:
    if not config.isolate:
        return None
    regions = {name: tenant.region for name, tenant in config.tenants.items() if tenant.region}
    return Isolation(secrets.isolation, regions)


def _settings(config: RouterConfig) -> Settings:
    return Settings(
        queue_max=config.requests_max,
        ttft_slo_s=math.inf if config.ttft_slo_s is None else config.ttft_slo_s,
        tpot_slo_s=math.inf if config.tpot_slo_s is None else config.tpot_slo_s,
        retries_max=config.retries_max,
        roles=RoleRule(dwell_s=config.role_dwell_s, smooth_s=config.role_smooth_s),
        tenants=TenantRule({name: tenant.weight for name, tenant in config.tenants.items()}),
    )


async def _run(config: RouterConfig, secrets: Secrets, ready: Callable[[str, int], None]) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def told(_number: signal.Signals) -> None:
        (hurry if stop.is_set() else stop).set()

    handle_ending(asyncio.get_running_loop(), told)
    async with open_session() as session:
        router = Router(config, secrets, session)
        try:
            url = await router.start()
            ready(url, len(router.health.passing()))
            _spare_collections()
            await stop.wait()
            await router.hand_over()
            await _drain(router, config.drain_s, hurry)
        finally:
            await router.close()


async def _drain(router: Router, within_s: float, hurry: asyncio.Event) -> None:
    """Until the last request has ended, the time is over, or a second signal."""
    router.retire()
    drained = asyncio.create_task(router.serving.active.drained(within_s))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
    if not (drained.done() and drained.result()):
        log.warning("active requests are aborted")
    for task in (drained, hurried):
        task.cancel()
    await asyncio.gather(drained, hurried, return_exceptions=True)
