"""All requests in flight, and the scheduler between them and the engines.

A request is read, tokenised, looked up in the pool, and submitted; from then on its `Flight` does what the
scheduler orders. The scheduler is polled when something has happened, and when it asked for it. One event loop,
one thread; nothing here waits while others could be served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from kvpool.errors import Unavailable
from kvpool.router.bodies import BadRequest, Body, Kind, error_body, limited, parse
from kvpool.router.breaker import Breaker
from kvpool.router.config import RouterConfig
from kvpool.router.engines import EngineSpec, scheduled
from kvpool.router.explain import IN_FLIGHT, Account, Accounts, dry_run, rejection_of
from kvpool.router.flight import (
    Call,
    ClientGone,
    DeadlinePassed,
    EngineGone,
    Expired,
    Flight,
    GivenUp,
    Limits,
    Reply,
)
from kvpool.router.knowledge import Prompt
from kvpool.router.metrics import Metrics
from kvpool.router.sse import error_event
from kvpool.router.tokens import TokenizeRefused, UnknownModel
from kvpool.router.tracing import Trace
from kvpool.router.upstream import TOO_LARGE, EngineFailed, EngineRefused, Upstream
from kvpool.scheduler.estimates import Error
from kvpool.scheduler.roles import REBALANCE_S
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import DecodeOrder, Engine, Order, Rejection, Request, Role
from kvpool.spans import PREPARE, REQUEST, Span, Spans

log = logging.getLogger("kvpool.router")

TOKENIZE_S = 2.0
RETRY_AFTER_S_MAX = 600
POLL_AGAIN_S = 0.1
"""When the scheduler is polled again, after an error in it."""
DRAINING = "draining"


class Rejected(BadRequest):
    """A request that is not taken now. why: one word. retry_after_s: when it may be; None: not known."""

    def __init__(self, status: int, message: str, why: str, retry_after_s: float | None) -> None:
        super().__init__(status, message, type=why)
        self.why = why
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it came. priority, deadline_s, session: of its headers; None: it has none."""

    kind: Kind
    raw: bytes
    ident: str
    trace: Trace
    tenant: str
    priority_max: int
    priority: int | None = None
    deadline_s: float | None = None
    session: str | None = None


class Known(Protocol):
    """What is asked of `Knowledge`."""

    @property
    def engines(self) -> Mapping[str, EngineSpec]: ...
    async def prompt(
        self, body: Mapping[str, Any], kind: str, *, deadline_s: float = ...
    ) -> Prompt: ...
    async def look(self, prompt: Prompt, wait_s: float = ...) -> bool: ...
    async def verify(self, name: str) -> str: ...
    def stats(self) -> Mapping[str, Any]: ...


class Watched(Protocol):
    """What is asked of `Health`."""

    @property
    def breakers(self) -> Mapping[str, Breaker]: ...
    def spec(self, name: str) -> EngineSpec | None: ...
    def passing(self) -> list[EngineSpec]: ...
    def succeeded(self, name: str) -> None: ...
    def failed(self, name: str) -> None: ...


class Observer(Protocol):
    """Who learns from what calls took; `observing.py`."""

    def computed(self, flight: Flight, order: Order, call: Call) -> None: ...
    def answered(self, flight: Flight, call: Call, engine: Engine | None) -> None: ...
    def errors(self) -> Mapping[str, Mapping[str, Error]]: ...


class Serving:
    """See above. Answers requests by `serve`; engines come and go by `engine_up` and `engine_down`."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        scheduler: Scheduler,
        known: Known,
        watched: Watched,
        upstream: Upstream,
        observer: Observer,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[int], bytes] = os.urandom,
        spans: Spans | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._known = known
        self._watched = watched
        self._upstream = upstream
        self._observer = observer
        self._metrics = metrics
        self._clock = clock
        self._random = random
        self._spans = spans
        self._limits = Limits(
            answer_s=config.answer_s,
            stall_s=config.stall_s,
            client_stall_s=config.client_stall_s,
            follow_s=config.follow_s,
            answer_bytes_max=config.answer_bytes_max,
        )
        self.accounts = Accounts(config.decisions_max)
        self._idents = count()
        self._flights: dict[Hashable, Flight] = {}
        self._in_flight = 0
        self._reading = 0
        self._empty = asyncio.Event()
        self._engines: dict[str, Engine] = {}  # in the scheduler
        self._drains: set[str] = set()
        self._weights: dict[str, float] = {}
        self._polls = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._verifying: set[asyncio.Task[None]] = set()
        self.draining = False

    # Requests

    async def serve(self, incoming: Incoming, reply: Reply) -> None:
        """Answer one request. Whoever cancels this aborts it everywhere.

        Raises `BadRequest` as long as nothing was sent; after that an error is the end of the stream.
        """
        self._admit()
        self._in_flight += 1
        arrived_s = self._clock()
        account = Account(incoming.ident, "", incoming.tenant, arrived_s)
        self.accounts.add(account)
        span = self._span_of(incoming)
        outcome = "failed"
        try:
            outcome = await self._serve(incoming, reply, account, span)
        except asyncio.CancelledError:
            outcome = "client_left" if account.outcome == IN_FLIGHT else account.outcome
            raise
        except BadRequest as error:
            outcome = _outcome_of(error)
            raise
        finally:
            self._in_flight -= 1
            self._left()
            account.outcome = outcome
            account.note(self._clock(), outcome)
            if span is not None:
                span.end(outcome if outcome in _ERRORS else "", outcome=outcome)
            self._metrics.requests.labels(outcome).inc()
            log.info(
                "request %s: %s after %.3f s", incoming.ident, outcome, self._clock() - arrived_s
            )

    def _span_of(self, incoming: Incoming) -> Span | None:
        """Where it is traced, and traces are exported."""
        spans, trace = self._spans, incoming.trace
        if spans is None or not trace.chosen(self._config.trace_share):
            return None
        span = spans.start(trace.trace, trace.parent, REQUEST)
        span.set(request=incoming.ident, tenant=incoming.tenant)
        return span

    def _admit(self) -> None:
        """Before anything is parsed."""
        if self.draining:
            raise Rejected(503, "this router is shutting down", DRAINING, 1.0)
        if self._in_flight >= self._config.requests_max:
            raise self._too_many()

    def _too_many(self) -> Rejected:
        self._metrics.rejections.labels("requests_max").inc()
        return Rejected(429, "too many requests are in flight", "requests_max", 1.0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a body comes. So many may at a time as may be in flight. Raises `BadRequest`."""
        if self._reading >= self._config.requests_max:
            raise self._too_many()
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    async def _serve(
        self, incoming: Incoming, reply: Reply, account: Account, span: Span | None
    ) -> str:
        config = self._config
        loop = asyncio.get_running_loop()
        limit_s = min(incoming.deadline_s or config.deadline_s, config.deadline_s_max)
        deadline = loop.time() + limit_s
        prepare = None if span is None else span.child(PREPARE)
        try:
            body, prompt, request = await self._read(incoming, account, limit_s)
        finally:
            if prepare is not None:
                prepare.end()
        now = self._clock()
        if span is not None:
            span.set(model=body.model, prompt_tokens=request.tokens)
        self._metrics.prepared.observe(now - account.arrived_s)
        self._metrics.prompt_tokens.inc(request.tokens)
        direct = self._too_long(body, prompt, request)
        flight = Flight(
            request,
            body,
            prompt,
            desk=self,
            upstream=self._upstream,
            limits=self._limits,
            account=account,
            trace=incoming.trace,
            headers={"X-Request-Id": incoming.ident},
            random=self._random,
            clock=self._clock,
            deadline=deadline,
            answer_tokens=self._answer_tokens(body, request.tokens),
            span=span,
        )
        if direct is None and (rejection := self._scheduler.submit(request, now)) is not None:
            if rejection.code != "too_long":
                raise self._rejected(rejection, account)
            direct = self._any_for(body.model)
        ident = flight.request.ident
        self._flights[ident] = flight
        self.kick()
        try:
            try:
                await flight.run(reply, direct)
            finally:
                # Before anything more is said to a client that may be slow. Finished or not: orders that
                # nobody needs any more may be under way, or be on their way here.
                del self._flights[ident]
                self._scheduler.abandoned(ident, self._clock())
                self.kick()
            return "answered"
        except EngineRefused as refused:
            return await self._pass_refusal(refused, reply)
        except EngineFailed as error:
            self._note_failure(error)
            return await self._end_badly(error, reply, incoming.ident)
        except (GivenUp, DeadlinePassed) as error:
            return await self._end_badly(error, reply, incoming.ident)
        except ClientGone:
            return "client_left"

    async def pass_through(self, path: str, raw: bytes, ident: str) -> tuple[int, bytes, str]:
        """Have any engine of the body's model answer something small: status, body, type. Raises `BadRequest`."""
        self._admit()
        models = self.models()
        if not models:
            raise Rejected(503, "no engine is there", "no_engine", self._config.probe_s)
        model = parse(Kind.COMPLETIONS, raw, models).model
        found = self._passing(model)
        said = f"no engine for {model} is there"
        self._in_flight += 1
        try:
            for spec in found[: self._config.retries_max + 1]:
                try:
                    async with (
                        asyncio.timeout(self._config.answer_s),
                        self._upstream.post(spec, path, raw, {"X-Request-Id": ident}) as answer,
                    ):
                        body = await answer.whole(self._config.answer_bytes_max)
                        return 200, body, answer.content_type
                except EngineRefused as refused:
                    return refused.status, refused.body, refused.content_type
                except TimeoutError:
                    error = EngineFailed(spec.name, "timeout", f"{path}: no answer in time")
                except EngineFailed as failed:
                    error = failed
                said = str(error)
                if error.reason == TOO_LARGE:
                    raise Rejected(502, said, "engine_failed", None) from None
                self._note_failure(error)
        finally:
            self._in_flight -= 1
            self._left()
        raise Rejected(502 if found else 503, said, "no_engine", self._config.probe_s)

    async def _read(
        self, incoming: Incoming, account: Account, limit_s: float
    ) -> tuple[Body, Prompt | None, Request]:
        """What is asked for, and what is known of its prompt."""
        config = self._config
        models = self.models()
        if not models:
            raise Rejected(503, "no engine is there", "no_engine", config.probe_s)
        body = limited(parse(incoming.kind, incoming.raw, models), incoming.priority_max)
        account.model = body.model
        prompt: Prompt | None = None
        try:
            prompt = await self._known.prompt(
                body.value, body.kind.value.partition("/")[0], deadline_s=min(TOKENIZE_S, limit_s)
            )
        except (TokenizeRefused, UnknownModel, Unavailable) as error:
            # It is served whole: an engine tokenises it itself, or says what is wrong with it.
            account.note(self._clock(), "not tokenised", why=str(error))
        if prompt is not None and prompt.keys:
            await self._known.look(prompt)
        if prompt is not None and not prompt.tokens:
            prompt = None
        tokens = body.tokens_guess if prompt is None else len(prompt.tokens)
        whole = body.whole or (prompt is None and body.segments)
        session = incoming.session or body.session
        kinds, names = self._among(body.model)
        now = self._clock()
        request = Request(
            ident=next(self._idents),
            keys=() if prompt is None else prompt.keys,
            tokens=max(tokens, 1),
            output_tokens=self._output_tokens(body, tokens),
            arrived_s=account.arrived_s,
            session=None if session is None else (incoming.tenant, body.model, session),
            priority=self._priority(incoming, body),
            tenant=incoming.tenant,
            deadline_s=now + limit_s,
            kinds=kinds,
            engines=names,
            whole=whole,
            segments=body.segments and prompt is not None and bool(prompt.keys),
        )
        account.facts = {
            "prompt_tokens": request.tokens,
            "prompt_blocks": len(request.keys),
            "output_tokens_expected": request.output_tokens,
            "priority": request.priority,
            "deadline_s": limit_s,
            "whole": whole,
        }
        return body, prompt, request

    def _output_tokens(self, body: Body, tokens: int) -> int:
        """How many are expected; never more than the engine would generate."""
        most = self._answer_tokens(body, tokens)
        if body.output_tokens is None:
            expected = self._config.output_tokens
            return expected if most is None else min(expected, most)
        return body.output_tokens if most is None else most

    def _answer_tokens(self, body: Body, tokens: int) -> int | None:
        """The most that an engine generates for it; None: not known."""
        longest = max((s.max_len for s in self._serving(body.model)), default=0)
        if not longest:
            return body.output_tokens
        room = max(longest - tokens, 1)
        return room if body.output_tokens is None else min(body.output_tokens, room)

    @staticmethod
    def _priority(incoming: Incoming, body: Body) -> int:
        wanted = incoming.priority if incoming.priority is not None else body.priority or 0
        return max(-100, min(wanted, incoming.priority_max))

    def _too_long(self, body: Body, prompt: Prompt | None, request: Request) -> EngineSpec | None:
        """Who is to say that a prompt is longer than the model: any engine that serves it."""
        specs = self._serving(body.model)
        longest = max((s.max_len for s in specs), default=0)
        if prompt is None or not longest or request.tokens < longest:
            return None
        return self._any_for(body.model)

    async def _pass_refusal(self, refused: EngineRefused, reply: Reply) -> str:
        try:
            async with asyncio.timeout(self._config.client_stall_s):
                await reply.send(refused.status, refused.body, refused.content_type)
        except (TimeoutError, ClientGone):
            return "client_left"
        return "refused"

    async def _end_badly(
        self, error: GivenUp | DeadlinePassed | EngineFailed, reply: Reply, ident: str
    ) -> str:
        late = isinstance(error, DeadlinePassed)
        status, kind = (504, "deadline") if late else (502, "engine_failed")
        log.warning("request %s: %s", ident, error)
        if not reply.begun:
            raise Rejected(status, str(error), kind, None)
        try:
            async with asyncio.timeout(self._config.client_stall_s):
                await reply.write(error_event(error_body(status, str(error), kind)))
                await reply.end()
        except (TimeoutError, ClientGone):
            return "client_left"
        return "deadline" if late else "broken_off"

    def _rejected(self, rejection: Rejection, account: Account) -> Rejected:
        account.note(self._clock(), "rejected", **rejection_of(rejection))
        self._metrics.rejections.labels(rejection.code).inc()
        status = 503 if rejection.code == "no_engine" else 429
        wait_s = rejection.retry_after_s
        known = wait_s if math.isfinite(wait_s) else None
        return Rejected(status, rejection.reason, rejection.code, known)

    # What flights ask for

    def spec(self, name: str) -> EngineSpec | None:
        return self._watched.spec(name)

    def computed(self, flight: Flight, order: Order, call: Call) -> None:
        self._observer.computed(flight, order, call)
        if not call.answers:
            self._watched.succeeded(call.spec.name)
        self._scheduler.computed(order.outlook.engine, flight.request.ident, self._clock())
        self.kick()

    def skipped(self, flight: Flight, order: Order) -> None:
        self._scheduler.computed(order.outlook.engine, flight.request.ident, self._clock())
        self.kick()

    def failed(self, flight: Flight, order: Order, error: EngineFailed) -> bool:
        self._note_failure(error)
        again = self._scheduler.failed(order.outlook.engine, flight.request.ident, self._clock())
        self._metrics.retries.inc(again)
        self.kick()
        return again

    def decode_failed(self, flight: Flight, engine: str, error: EngineFailed) -> bool:
        self._note_failure(error)
        again = self._scheduler.decode_failed(flight.request.ident, self._clock())
        self._metrics.retries.inc(again)
        self.kick()
        return again

    def unscheduled(self, flight: Flight) -> None:
        self._scheduler.abandoned(flight.request.ident, self._clock())
        self.kick()

    def begun(self, flight: Flight, call: Call) -> None:
        self._metrics.ttft.observe(call.began_at - flight.account.arrived_s)

    def answered(self, flight: Flight, call: Call) -> None:
        self._watched.succeeded(call.spec.name)
        self._observer.answered(flight, call, self._engines.get(call.spec.name))
        if call.events > 1:
            took_s = self._clock() - call.began_at
            self._metrics.tpot.observe(took_s / (call.events - 1))

    def _note_failure(self, error: EngineFailed) -> None:
        self._metrics.failures.labels(error.engine, error.reason).inc()
        if error.reason != "gone":
            log.warning("%s", error)
            self._watched.failed(error.engine)

    # Orders

    def kick(self) -> None:
        """Poll the scheduler soon, once for all that happens until then."""
        if not self._polls:
            self._polls = True
            asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        self._polls = False
        now = self._clock()
        scheduler = self._scheduler
        wake_at = now + POLL_AGAIN_S
        try:
            for ident in scheduler.expired(now):
                self._flights[ident].tell(Expired())
            for order in scheduler.poll(now):
                flight = self._flights[order.request.ident]
                flight.tell(order)
                self._count(order, flight, now)
            wake_at = scheduler.wake_at()
        finally:
            # Whatever goes wrong with one request, the others are looked at again.
            self._wake(wake_at, now)

    def _wake(self, wake_at: float, now: float) -> None:
        if wake_at != self._alarm_at or self._alarm is None:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            self._alarm_at = wake_at
            if wake_at < math.inf:
                loop = asyncio.get_running_loop()
                self._alarm = loop.call_later(max(wake_at - now, 0.0), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._poll()

    def _count(self, order: Order | DecodeOrder, flight: Flight, now: float) -> None:
        metrics = self._metrics
        if isinstance(order, DecodeOrder):
            metrics.orders.labels(order.engine.name, "answer").inc()
            return
        outlook = order.outlook
        what = "prompt and answer" if order.whole else "prompt"
        metrics.orders.labels(outlook.engine.name, what).inc()
        if not flight.ordered:
            flight.ordered = True
            metrics.queued.observe(now - flight.account.arrived_s)
            keys = len(order.request.keys)
            if keys:
                metrics.cached_tokens.inc(outlook.cached * order.request.tokens / keys)

    # Engines

    def models(self) -> tuple[str, ...]:
        """All that engines serve, adapters included; of engines that are away, too."""
        found: dict[str, None] = {}
        for spec in self._known.engines.values():
            found.update(dict.fromkeys((spec.model, *spec.models)))
        found.pop("", None)
        return tuple(found)

    def model_lengths(self) -> dict[str, int]:
        """Each model with the longest prompt and answer that an engine takes; 0: not known."""
        return {m: max(s.max_len for s in self._serving(m)) for m in self.models()}

    def knowledge(self) -> Mapping[str, Any]:
        return self._known.stats()

    def engine_up(self, spec: EngineSpec) -> None:
        """It gets requests from now on."""
        now = self._clock()
        engine = scheduled(spec)
        self._engines[spec.name] = engine
        self._scheduler.join(engine, now)
        if spec.name in self._drains:
            self._scheduler.drain(spec.name, now)
        self._scheduler.weigh(spec.name, self._weights.get(spec.name, 1.0))
        if breaker := self._watched.breakers.get(spec.name):
            self._metrics.breaks(spec.name, breaker.state)
        task = asyncio.create_task(self._verify(spec.name), name=f"verify {spec.name}")
        self._verifying.add(task)
        task.add_done_callback(self._verifying.discard)
        self.kick()

    def engine_down(self, spec: EngineSpec) -> None:
        """It gets none any more; what was sent there and has not begun to be answered goes elsewhere."""
        for flight in self._flights.values():
            flight.settle()
        del self._engines[spec.name]
        left = self._scheduler.leave(spec.name, self._clock())
        if breaker := self._watched.breakers.get(spec.name):
            self._metrics.breaks(spec.name, breaker.state)
        for ident in {*left.queued, *left.decoding, *left.given_up}:
            self._flights[ident].tell(EngineGone(spec.name, ident not in left.given_up))
        self.kick()

    async def _verify(self, name: str) -> None:
        """Whether its hashes are what they are said to be. `Knowledge` logs it and draws the conclusions."""
        try:
            standing = await self._known.verify(name)
        except (Unavailable, EngineFailed) as error:
            log.warning("engine %s was not verified: %s", name, error)
            standing = "unverified"
        self._metrics.affinity.labels(name).set(standing == "verified")

    def _serving(self, model: str) -> list[EngineSpec]:
        engines = self._known.engines.values()
        return [s for s in engines if model == s.model or model in s.models]

    def _among(self, model: str) -> tuple[frozenset[str], frozenset[str] | None]:
        """The kinds of engines that serve it, and their names, if not all of these kinds do."""
        serving = self._serving(model)
        kinds = frozenset(spec.kind for spec in serving)
        alike = sum(spec.kind in kinds for spec in self._known.engines.values())
        names = frozenset(spec.name for spec in serving)
        return kinds, None if alike == len(serving) else names

    def _passing(self, model: str) -> list[EngineSpec]:
        """Those that serve the model and get requests; none that drain, unless there are no others."""
        found = [s for s in self._serving(model) if self._watched.spec(s.name) is not None]
        return [s for s in found if s.name not in self._drains] or found

    def _any_for(self, model: str) -> EngineSpec:
        """One that serves the model and gets requests."""
        found = self._passing(model)
        if not found:
            raise Rejected(
                503, f"no engine for {model} is there", "no_engine", self._config.probe_s
            )
        return found[0]

    # Operators

    def drain(self, name: str) -> None:
        """Nothing new goes there; what it has is served to its end. Raises `BadRequest`."""
        self._must_know(name)
        self._drains.add(name)
        if name in self._engines:
            self._scheduler.drain(name, self._clock())
        self.kick()

    def undrain(self, name: str) -> None:
        self._must_know(name)
        self._drains.discard(name)
        if name in self._engines:
            self._scheduler.undrain(name, self._clock())
        self.kick()

    def weigh(self, name: str, weight: float) -> None:
        """Of the requests that it could get it gets this share at most, where others can serve them; 1: no limit.

        Raises `BadRequest`.
        """
        self._must_know(name)
        if not 0 <= weight <= 1:
            raise BadRequest(400, "a weight is from 0 to 1", param="weight")
        self._weights[name] = weight
        if name in self._engines:
            self._scheduler.weigh(name, weight)
        self.kick()

    def _must_know(self, name: str) -> None:
        if name not in self._known.engines:
            raise BadRequest(404, f"no engine is called {name}", type="NotFoundError")

    def engines(self) -> list[dict[str, Any]]:
        """Of each engine how it is, for people."""
        breakers = self._watched.breakers
        rows = []
        for name, spec in self._known.engines.items():
            engine, breaker = self._engines.get(name), breakers.get(name)
            row: dict[str, Any] = {
                "name": name,
                "url": spec.url,
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
                    "free_in_s": round(max(0.0, engine.free_at - self._clock()), 3),
                }
            rows.append(row)
        return rows

    def _state(self, name: str, engine: Engine | None) -> str:
        if engine is None:
            return "away"
        if name in self._drains:
            return "drained" if self._scheduler.drained(name) else "draining"
        return "serving"

    async def explain(self, incoming: Incoming) -> dict[str, Any]:
        """What would be done with a request now. Raises `BadRequest`."""
        self._admit()
        self._in_flight += 1
        try:
            return await self._explain(incoming)
        finally:
            self._in_flight -= 1
            self._left()

    async def _explain(self, incoming: Incoming) -> dict[str, Any]:
        account = Account(incoming.ident, "", incoming.tenant, self._clock())
        limit_s = min(incoming.deadline_s or self._config.deadline_s, self._config.deadline_s_max)
        _, _, request = await self._read(incoming, account, limit_s)
        found = self._scheduler.explain(request, self._clock())
        return {"model": account.model, **account.facts, **dry_run(request, found)}

    # Running

    @property
    def well(self) -> str:
        """Empty, or why requests cannot be served."""
        if self.draining:
            return "shutting down"
        roles = Role(0)
        for engine in self._engines.values():
            if engine.name not in self._drains:
                roles |= engine.role
        if Role.DECODE not in roles:
            return "no engine that decodes is there"
        if Role.PREFILL not in roles:
            return "no engine that computes prompts is there"
        return ""

    def refresh_metrics(self) -> None:
        """Numbers that are read when somebody asks."""
        metrics = self._metrics
        metrics.in_flight.set(self._in_flight)
        metrics.waiting.set(self._scheduler.waiting)
        metrics.draining.set(self.draining)
        for name, breaker in self._watched.breakers.items():
            metrics.breaks(name, breaker.state)
        for kind, errors in self._observer.errors().items():
            for what, error in errors.items():
                if not error.count:
                    continue
                metrics.error_mean.labels(kind, what).set(error.mean)
                metrics.error_bias.labels(kind, what).set(error.bias)

    async def rebalance(self) -> None:
        """Engines that may change their role do, as the load has it. Ends when it is cancelled."""
        while True:
            await asyncio.sleep(REBALANCE_S)
            change = self._scheduler.rebalance(self._clock())
            if change is not None:
                role = _role_name(change.role)
                log.info("engine %s changes its role to %s", change.engine.name, role)
                self.kick()

    async def drained(self, within_s: float) -> bool:
        """Take no more requests, and wait for those in flight. Whether all have ended."""
        self.draining = True
        self._left()
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _left(self) -> None:
        if not self._in_flight and self.draining:
            self._empty.set()

    async def close(self) -> None:
        """After the last request."""
        if self._alarm is not None:
            self._alarm.cancel()
        for task in list(self._verifying):
            task.cancel()
        await asyncio.gather(*self._verifying, return_exceptions=True)


_ERRORS = frozenset(("failed", "deadline", "broken_off"))


def _role_name(role: Role) -> str:
    return "both" if role == Role.BOTH else str(role.name).lower()


def _outcome_of(error: BadRequest) -> str:
    if not isinstance(error, Rejected):
        return "refused"
    return {502: "failed", 504: "deadline"}.get(error.status, "rejected")
