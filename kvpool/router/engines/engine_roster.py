"""Engines that get requests: known to the scheduler or not, with operators' drains and weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpool.router.engines.breaker import EngineBreaker
from kvpool.router.engines.hash_verification import HashVerification
from kvpool.router.engines.served_models import ServedModels
from kvpool.router.http.bodies import BadRequest
from kvpool.router.orders import Orders
from kvpool.router.records.metrics import Metrics
from kvpool.router.upstream.specs import EngineSpec, scheduled
from kvpool.router.upstream.upstream import GONE, EngineFailed, EngineRefused
from kvpool.scheduler.roles import REBALANCE_S
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import Engine, Role

log = logging.getLogger("kvpool.router")


class Catalog(Protocol):
    """The used interface of `EngineCatalog`."""

    @property
    def engines(self) -> Mapping[str, EngineSpec]: ...
    async def verify(self, name: str) -> str: ...


class EngineHealth(Protocol):
    """The used interface of `Health`."""

    @property
    def breakers(self) -> Mapping[str, EngineBreaker]: ...
    def spec(self, name: str) -> EngineSpec | None: ...
    def succeeded(self, name: str) -> None: ...
    def failed(self, name: str, request: Hashable) -> None: ...


@dataclass(eq=False, repr=False, slots=True)
class EngineRoster:
    """See the module. Event loop only. Engines are added and removed by `engine_up` and `engine_down`."""

    _scheduler: Scheduler
    _orders: Orders
    _catalog: Catalog
    _health: EngineHealth
    _metrics: Metrics
    _clock: Callable[[], float]
    _engines: dict[str, Engine] = field(default_factory=dict, init=False)
    """In the scheduler."""
    operated: Callable[[str, bool, float], None] = field(default=lambda *_: None, init=False)
    """Called when an operator has changed what an engine gets: its name, whether it drains, and its weight."""
    served: Callable[[str], None] = field(default=lambda _: None, init=False)
    """Called with the name of an engine that has served a request."""
    blamed: Callable[[str, int], None] = field(default=lambda *_: None, init=False)
    """Called with the name of an engine by whose fault a request has failed, and the request's digest."""
    reached: Callable[[], None] = field(default=lambda: None, init=False)
    """Called when an engine gets requests, or no more."""
    _drains: set[str] = field(default_factory=set, init=False)
    _weights: dict[str, float] = field(default_factory=dict, init=False)
    _verification: HashVerification = field(init=False)
    models: ServedModels = field(init=False)

    def __post_init__(self) -> None:
        catalog = self._catalog
        self._verification = HashVerification(catalog, self._metrics, self._clock)
        self.models = ServedModels(lambda: catalog.engines)

    def engine(self, name: str) -> Engine | None:
        """As known to the scheduler; None: it gets no requests."""
        return self._engines.get(name)

    def spec(self, name: str) -> EngineSpec | None:
        """The spec of an engine that is alive: its probes succeed."""
        return self._health.spec(name)

    def succeeded(self, name: str) -> None:
        """It has served a request."""
        self._health.succeeded(name)
        self.served(name)

    def failed(self, error: EngineFailed | EngineRefused) -> None:
        """A call has failed. That is for the metrics and the log, and blames nobody."""
        self._metrics.engine_call_failures.labels(error.engine, error.reason).inc()
        if error.reason != GONE:
            log.warning("%s", error)

    def blame(self, names: Iterable[str], request: int) -> None:
        """A request failed by these engines' fault. request: its digest."""
        for name in names:
            self._health.failed(name, request)
            self.blamed(name, request)

    def engine_up(self, spec: EngineSpec) -> None:
        """It is alive, and gets requests from now on."""
        engine = scheduled(spec)
        self._engines[spec.name] = engine
        self._orders.join(engine)
        self.reached()
        self._rest(spec.name)
        self._scheduler.weigh(spec.name, self._weights.get(spec.name, 1.0))
        if breaker := self._health.breakers.get(spec.name):
            self._metrics.breaks(spec.name, breaker.state)
        self._verification.begin(spec.name)

    def engine_down(self, spec: EngineSpec) -> None:
        """It is dead, or was removed: requests sent there that have not begun to be answered move elsewhere."""
        del self._engines[spec.name]
        self._verification.end(spec.name)
        self._orders.leave(spec.name)
        self.reached()
        if breaker := self._health.breakers.get(spec.name):
            self._metrics.breaks(spec.name, breaker.state)

    def engine_turned(self, spec: EngineSpec) -> None:
        """Its breaker has opened, or closed: it gets no new requests, or gets them again. What it has goes on."""
        self._rest(spec.name)
        self._orders.kick()
        self._metrics.breaks(spec.name, self._health.breakers[spec.name].state)

    def _rest(self, name: str) -> None:
        """Have the scheduler know whether an engine that is alive gets new requests."""
        if name in self._drains or not self._passes(name):
            self._scheduler.drain(name, self._clock())
        else:
            self._scheduler.undrain(name, self._clock())

    def _passes(self, name: str) -> bool:
        breaker = self._health.breakers.get(name)
        return breaker is not None and breaker.passes

    def passing(self, model: str) -> list[EngineSpec]:
        """Those that serve the model and get requests; draining ones only if there are no others."""
        found = [s for s in self.models.engines(model) if self._passes(s.name)]
        return [s for s in found if s.name not in self._drains] or found

    # Operators

    def drain(self, name: str) -> None:
        """It gets no new requests; active ones finish. Raises `BadRequest`."""
        self._operated(name, drains=True, weight=self._weights.get(name, 1.0))

    def used_by_others(self, name: str, tokens: int) -> None:
        """What it says of its memory is used by requests that were not sent from here."""
        engine = self._engines.get(name)
        if engine is not None and engine.others_tokens != tokens:
            self._scheduler.used_by_others(name, tokens)
            self._orders.kick()

    def left(self, name: str) -> None:
        """It was removed: one that comes to its place is another one, and not drained."""
        if name in self._drains:
            self._drains.discard(name)
            self.operated(name, False, self._weights.get(name, 1.0))

    def undrain(self, name: str) -> None:
        self._operated(name, drains=False, weight=self._weights.get(name, 1.0))

    def weigh(self, name: str, weight: float) -> None:
        """It gets at most this share of its possible requests, if others can serve them; 1: no limit.

        Raises `BadRequest`.
        """
        if not 0 <= weight <= 1:
            raise BadRequest(400, "a weight must be from 0 to 1", param="weight")
        self._operated(name, drains=name in self._drains, weight=weight)

    def _operated(self, name: str, *, drains: bool, weight: float) -> None:
        if name not in self._catalog.engines:
            raise BadRequest(404, f"there is no engine {name}", type="NotFoundError")
        self.operate(name, drains=drains, weight=weight)
        self.operated(name, drains, weight)

    def operate(self, name: str, *, drains: bool, weight: float) -> None:
        """As an operator has told this router or another one; of engines that may yet come, too."""
        self._weights[name] = weight
        (self._drains.add if drains else self._drains.discard)(name)
        if name in self._engines:
            self._rest(name)
            self._scheduler.weigh(name, weight)
        self._orders.kick()

    def engines(self) -> list[dict[str, Any]]:
        """Each engine's state, for display."""
        breakers = self._health.breakers
        rows = []
        for name, spec in self._catalog.engines.items():
            engine, breaker = self._engines.get(name), breakers.get(name)
            row: dict[str, Any] = {
                "name": name,
                "url": spec.url,
                "rank": spec.rank,
                "node": spec.node,
                "role": _role_name(spec.role if engine is None else engine.role),
                "kind": spec.kind,
                "models": list(dict.fromkeys((spec.model, *spec.models))),
                "breaker": None if breaker is None else breaker.state.value,
                "state": self._state(name, engine),
                "weight": self._weights.get(name, 1.0),
                "affinity": spec.hashing is not None,
            }
            if engine is not None:
                row |= {
                    "prefills": engine.prefills,
                    "queued_tokens": engine.queued_tokens,
                    "decodes": engine.decodes,
                    "context_tokens": engine.context_tokens,
                    "capacity_tokens": engine.capacity_tokens,
                    "others_tokens": engine.others_tokens,
                    "free_in_s": round(max(0.0, engine.free_at - self._clock()), 3),
                }
            rows.append(row)
        return rows

    def _state(self, name: str, engine: Engine | None) -> str:
        if engine is None or not self._passes(name):
            return "away"
        if name in self._drains:
            return "drained" if engine.idle else "draining"
        return "serving"

    @property
    def lacking(self) -> str:
        """Why no engine can serve requests now; empty if one can."""
        roles = Role(0)
        for engine in self._engines.values():
            if engine.name not in self._drains and self._passes(engine.name):
                roles |= engine.role
        if Role.DECODE not in roles:
            return "no decode engine is available"
        if Role.PREFILL not in roles:
            return "no prefill engine is available"
        return ""

    def refresh_metrics(self) -> None:
        """The state of each breaker, read on demand."""
        for name, breaker in self._health.breakers.items():
            self._metrics.breaks(name, breaker.state)

    async def rebalance(self, idle: Callable[[], bool]) -> None:
        """Change the roles of flexible engines with the load. Ends when it is cancelled. idle: another router decides."""
        while True:
            await asyncio.sleep(REBALANCE_S)
            if idle():
                continue
            change = self._scheduler.rebalance(self._clock())
            if change is not None:
                role = _role_name(change.role)
                log.info(
                    "the role of engine %s changes to %s",
                    change.engine.name,
                    role,
                    extra={"engine": change.engine.name},
                )
                self._orders.kick()

    async def close(self) -> None:
        """After the last request."""
        await self._verification.close()


def _role_name(role: Role) -> str:
    return "both" if role == Role.BOTH else str(role.name).lower()
