"""Requests from their arrival to their end.

A request is read, tokenised, looked up in the pool, and submitted; from then on its `ActiveRequest` follows the
scheduler's orders. One event loop, one thread; nothing here blocks the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import xxhash

from kvpool.decoding import decode_json
from kvpool.errors import KvpoolError
from kvpool.router.config import RouterConfig
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.hashing import Prompt
from kvpool.router.http.bodies import BadRequest, Kind, error_body, parse, parsed_bytes
from kvpool.router.http.memory import Held, Memory, NoRoom
from kvpool.router.http.sse import error_event
from kvpool.router.orders import Ordering
from kvpool.router.records.explain import IN_FLIGHT, Account, Accounts, dry_run, rejection_of
from kvpool.router.records.metrics import Metrics
from kvpool.router.records.miss_notes import MissNotes
from kvpool.router.records.observations import Observer
from kvpool.router.records.recorder import EndedRequest, Recorder
from kvpool.router.requests.active_request import ActiveRequest
from kvpool.router.requests.active_requests import ActiveRequests
from kvpool.router.requests.calls import Caller, ClientGone, Reply, while_alive
from kvpool.router.requests.failures import DeadlinePassed, GivenUp
from kvpool.router.requests.intake import Incoming, Intake, Rejected
from kvpool.router.requests.intents import Intents, Wanted
from kvpool.router.requests.request_notes import RequestNotes
from kvpool.router.requests.sessions import Sessions
from kvpool.router.upstream.evidence import Evidence, another_may_differ, for_client
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import (
    GONE,
    TOO_LARGE,
    EngineFailed,
    EngineRefused,
    Exhausted,
    Upstream,
)
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import Rejection, Request
from kvpool.telemetry.spans import PREPARE, REQUEST, Span, Spans
from kvpool.types import Intent

log = logging.getLogger("kvpool.router")

RETRY_AFTER_S_MAX = 600


Elsewhere = Callable[[Request, str], Awaitable[bytes]]


async def _here(_request: Request, _model: str) -> bytes:
    return b""


@dataclass(eq=False, repr=False, slots=True)
class Serving:
    """See above. Answers requests by `serve`."""

    _config: RouterConfig
    _scheduler: Scheduler
    _orders: Ordering
    _roster: EngineRoster
    _intake: Intake
    _upstream: Upstream
    _observer: Observer
    _metrics: Metrics
    sessions: Sessions
    _clock: Callable[[], float]
    _random: Callable[[int], bytes]
    _spans: Spans | None = None
    _recorder: Recorder | None = None
    """None: nothing is recorded."""
    _intents: Intents | None = None
    """None: nobody is told of them."""
    _recorded: dict[str, int] = field(default_factory=dict, init=False)
    """As the metrics have it."""
    memory: Memory = field(init=False)
    accounts: Accounts = field(init=False)
    _miss_notes: MissNotes = field(init=False)
    active: ActiveRequests = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self._config.memory_bytes_max)
        self.accounts = Accounts(self._config.decisions_max)
        self._miss_notes = MissNotes(self._intake.why, self._clock)
        self.active = ActiveRequests(self._config, self._metrics)

    # Requests

    async def serve(self, incoming: Incoming, reply: Reply) -> None:
        """Answer one request. Cancelling this aborts it everywhere.

        Raises `BadRequest` until something was sent; after that an error ends the stream.
        """
        with self.active.one():
            arrived_s = self._clock()
            account = Account(incoming.ident, "", incoming.tenant, arrived_s)
            self.accounts.add(account)
            span = self._span_of(incoming)
            outcome = "failed"
            read = _Read()
            try:
                outcome = await self._serve(incoming, reply, account, span, read)
            except asyncio.CancelledError:
                outcome = "client_left" if account.outcome == IN_FLIGHT else account.outcome
                raise
            except BadRequest as error:
                outcome = _outcome_of(error)
                raise
            finally:
                account.outcome = outcome
                account.note(self._clock(), outcome)
                if span is not None:
                    span.end(outcome if outcome in _ERRORS else "", outcome=outcome)
                self._metrics.requests.labels(outcome).inc()
                if self._recorder is not None:
                    self._recorder.add(self._ended(account, read, outcome))
                if read.active is not None and read.prompt is not None:
                    notes = read.active.notes
                    self._miss_notes.ended(
                        account, read.prompt, notes.cached_at, notes.cached_tokens
                    )
                log.info(
                    "request %s: %s after %.3f s",
                    incoming.ident,
                    outcome,
                    self._clock() - arrived_s,
                    extra={"request": incoming.ident},
                )

    def _ended(self, account: Account, read: _Read, outcome: str) -> EndedRequest:
        """What is recorded of a request: nothing that it says, and names only to be hashed."""
        ended = EndedRequest(
            account.arrived_s, self._clock(), outcome, account.model, tenant=account.tenant
        )
        active, prompt = read.active, read.prompt
        if active is None:
            return ended
        request, notes = active.request, active.notes
        answering = notes.answering
        tokens = request.tokens
        if prompt is None and answering is not None:
            said = answering.usage.get("prompt_tokens", answering.usage.get("input_tokens"))
            tokens = said if type(said) is int and said > 0 else tokens
        hashing = None if prompt is None else prompt.spec
        return replace(
            ended,
            tokens=tokens,
            output_tokens=0 if answering is None else answering.answer_tokens,
            keys=() if prompt is None else prompt.keys,
            block_tokens=0 if hashing is None else hashing.block_tokens,
            ttft_s=notes.ttft_s,
            cached=notes.cached_tokens,
            priority=request.priority,
            session="" if request.session is None else str(request.session),
            agent=read.agent,
        )

    def _span_of(self, incoming: Incoming) -> Span | None:
        """If it is traced, and traces are exported."""
        spans, trace = self._spans, incoming.trace
        if spans is None or not trace.chosen(self._config.trace_share):
            return None
        span = spans.start(trace.trace, trace.parent, REQUEST)
        span.set(request=incoming.ident, tenant=incoming.tenant)
        return span

    async def _serve(
        self, incoming: Incoming, reply: Reply, account: Account, span: Span | None, read: _Read
    ) -> str:
        limit_s = self._limit_s(incoming)
        deadline = asyncio.get_running_loop().time() + limit_s
        prepare = None if span is None else span.child(PREPARE)
        try:
            body, prompt, request, hint = await self._intake.read(incoming, account, limit_s)
        except NoRoom as error:
            raise self.active.no_room(error) from None
        finally:
            if prepare is not None:
                prepare.end()
        now = self._clock()
        if span is not None:
            span.set(model=body.model, prompt_tokens=request.tokens)
        self._metrics.prepare_seconds.observe(now - account.arrived_s)
        self._metrics.prompt_tokens.inc(request.tokens)
        self.sessions.noticed(hint)
        direct = self._intake.too_long(body, prompt, request)
        active = ActiveRequest(
            request,
            body,
            caller=Caller(
                body,
                prompt,
                self._upstream,
                self._config,
                incoming.trace,
                {"X-Request-Id": incoming.ident},
                self._random,
                deadline,
                self._alive,
                self.memory,
                hint,
            ),
            orders=self._orders,
            roster=self._roster,
            notes=RequestNotes(
                account,
                span,
                body.streams,
                self._clock,
                self._metrics,
                partial(self.sessions.answered, incoming.tenant, hint),
            ),
        )
        read.active, read.prompt, read.agent = active, prompt, hint.agent
        try:
            try:
                rejection = None if direct is not None else await self._submit(active)
                if rejection is not None:
                    if rejection.code != "too_long":
                        raise self._rejected(rejection, account)
                    direct = self._intake.any_for(body.model)
                await active.run(reply, direct)
            finally:
                # Before anything more is sent to a client that may be slow.
                self._orders.remove(request)
            return account.outcome
        except EngineRefused as refused:
            return await self._pass_refusal(refused, reply)
        except (EngineFailed, GivenUp, DeadlinePassed, NoRoom, Exhausted) as error:
            return await self._end_badly(error, reply, incoming)
        except ClientGone:
            return "client_left"

    def _limit_s(self, incoming: Incoming) -> float:
        config = self._config
        return min(incoming.deadline_s or config.deadline_s, config.deadline_s_max)

    def _alive(self, engine: str) -> bool:
        return self._roster.spec(engine) is not None

    async def _submit(self, active: ActiveRequest) -> Rejection | None:
        """Raises `DeadlinePassed`."""
        try:
            return await self._orders.submit(active)
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed before it was accepted") from None

    async def pass_through(
        self, path: str, raw: bytes, ident: str, held: Held
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Have any engine of the body's model answer a small request: status, body, headers. Raises `BadRequest`.

        Without a body it is a GET, for any engine. held: the memory of the body and of its answer.
        """
        with self.active.one():
            models = self._roster.models.names()
            if not models:
                raise Rejected(503, "no engine is available", "no_engine", self._config.probe_s)
            try:
                held.add(parsed_bytes(raw))
            except NoRoom as full:
                raise self.active.no_room(full) from None
            model = parse(Kind.COMPLETIONS, raw, models).model if raw else models[0]
            found = self._roster.passing(model)
            said = f"no engine is available for {model}"
            ended: KvpoolError | None = None
            evidence = Evidence()
            refusal: EngineRefused | None = None
            digest = xxhash.xxh3_64_intdigest(raw)
            deadline = asyncio.get_running_loop().time() + self._config.deadline_s
            for spec in found[: self._config.retries_max + 1]:
                try:
                    answer = await self._forwarded(spec, path, raw, ident, held, deadline)
                    self._roster.blame(evidence.answered(spec.name), digest)
                    return answer
                except EngineRefused as refused:
                    last = refusal is not None or not another_may_differ(refused.status)
                    said = str(refused)
                    if refusal is None or for_client(refused.status):
                        refusal = refused
                    if last:
                        break
                    self._roster.failed(refused)
                except (NoRoom, Exhausted, DeadlinePassed) as error:
                    ended = error.with_traceback(None)
                    break
                except EngineFailed as error:
                    said = str(error)
                    if error.reason == TOO_LARGE:
                        ended = error.with_traceback(None)
                        break
                    self._roster.failed(error)
                    self._roster.blame(evidence.failed(error, begun=False), digest)
            if refusal is not None and for_client(refusal.status):
                return refusal.status, refusal.body, refusal.headers
            if ended is not None:
                raise self._failure_of(ended)
            raise Rejected(502 if found else 503, said, "no_engine", self._config.probe_s)

    async def _forwarded(
        self, spec: EngineSpec, path: str, raw: bytes, ident: str, held: Held, deadline: float
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """An engine's answer to a small request. Raises `DeadlinePassed`, and `EngineFailed` if the engine is found dead."""
        limit = asyncio.timeout_at(deadline)
        try:
            async with (
                limit,
                while_alive(self._alive, spec.name, self._config.stall_s),
                self._upstream.ask(spec, path, raw, {"X-Request-Id": ident}) as answer,
            ):
                body = await answer.whole(self._config.answer_bytes_max, held)
                return 200, body, answer.headers
        except TimeoutError:
            if limit.expired():
                raise DeadlinePassed(f"{path}: no answer in time") from None
            why = f"{path}: it did not answer, and its probes fail"
            raise EngineFailed(spec.name, GONE, why) from None

    async def _pass_refusal(self, refused: EngineRefused, reply: Reply) -> str:
        try:
            async with asyncio.timeout(self._config.client_stall_s):
                await reply.send(refused.sent_status, refused.body, refused.headers)
        except (TimeoutError, ClientGone):
            return "client_left"
        return "refused" if refused.status < 500 else "failed"

    async def _end_badly(
        self,
        error: GivenUp | DeadlinePassed | EngineFailed | NoRoom | Exhausted,
        reply: Reply,
        incoming: Incoming,
    ) -> str:
        ended = self._failure_of(error)
        log.warning("request %s: %s", incoming.ident, error, extra={"request": incoming.ident})
        if not reply.begun:
            raise ended
        try:
            async with asyncio.timeout(self._config.client_stall_s):
                said = error_body(ended.status, str(error), ended.why, kind=incoming.kind)
                named = "error" if not incoming.kind.has_tokens else ""
                await reply.write(error_event(said, named))
                await reply.end()
        except (TimeoutError, ClientGone):
            return "client_left"
        return "deadline" if isinstance(error, DeadlinePassed) else "broken_off"

    def _failure_of(self, error: KvpoolError) -> Rejected:
        """Return the router's own answer to a request that ended with this error."""
        if isinstance(error, NoRoom):
            return self.active.no_room(error)
        if isinstance(error, Exhausted):
            self._metrics.rejections.labels("exhausted").inc()
            return Rejected(503, str(error), "exhausted", 1.0)
        late = isinstance(error, DeadlinePassed)
        status, why = (504, "deadline") if late else (502, "engine_failed")
        return Rejected(status, str(error), why, None)

    def _rejected(self, rejection: Rejection, account: Account) -> Rejected:
        account.note(self._clock(), "rejected", **rejection_of(rejection))
        self._metrics.rejections.labels(rejection.code).inc()
        status = 503 if rejection.code == "no_engine" else 429
        wait_s = rejection.retry_after_s
        known = wait_s if math.isfinite(wait_s) else None
        return Rejected(status, rejection.reason, rejection.code, known)

    async def explain(self, incoming: Incoming, elsewhere: Elsewhere = _here) -> dict[str, Any]:
        """How a request would be routed now. elsewhere: what another router says to that, in JSON; empty: this one
        schedules. Raises `BadRequest`.
        """
        with self.active.one():
            return await self._explain(incoming, elsewhere)

    async def _explain(self, incoming: Incoming, elsewhere: Elsewhere) -> dict[str, Any]:
        account = Account(incoming.ident, "", incoming.tenant, self._clock())
        limit_s = self._limit_s(incoming)
        try:
            _, prompt, request, _ = await self._intake.read(incoming, account, limit_s)
        except NoRoom as error:
            raise self.active.no_room(error) from None
        said = await elsewhere(request, account.model)
        if said:
            shown = decode_json(said, dict[str, Any], "an explanation")
        else:
            shown = dry_run(request, self._scheduler.explain(request, self._clock()))
        if prompt is not None and isinstance(engine := shown.get("engine"), str):
            shown["missing"] = await self._intake.why(prompt, engine)
        return {"model": account.model, **account.facts, **shown}

    async def intend(
        self, incoming: Incoming, wanted: Wanted, elsewhere: Elsewhere = _here
    ) -> dict[str, Any]:
        """Have nodes told what is wanted for the blocks of a request's prompt, and return their answers.

        A prompt that is to be prefetched goes to the node to which the request would go now, unless nodes are named.
        elsewhere: as in `explain`. Raises `BadRequest`.
        """
        if self._intents is None:
            raise BadRequest(400, "this router passes no intents on")
        with self.active.one():
            if wanted.intent is Intent.PREFETCH and not wanted.nodes:
                wanted = replace(wanted, nodes=(await self._node_for(incoming, elsewhere),))
            try:
                body = await self._intake.body(incoming)
            except NoRoom as error:
                raise self.active.no_room(error) from None
            limit_s = self._limit_s(incoming)
            return await self._intents.answer(incoming.tenant, body, wanted, limit_s)

    async def _node_for(self, incoming: Incoming, elsewhere: Elsewhere) -> str:
        """Raises `BadRequest`."""
        assert self._intents is not None
        shown = await self._explain(incoming, elsewhere)
        engine = shown.get("engine")
        if node := self._intents.node_of(engine) if isinstance(engine, str) else "":
            return node
        raise Rejected(
            503,
            "no node can be chosen now: name the node into whose memory the prompt is brought",
            "no_node",
            self._config.probe_s,
        )

    # Running

    @property
    def well(self) -> str:
        """Empty, or why requests cannot be served."""
        return "shutting down" if self.active.draining else self._roster.lacking

    def refresh_metrics(self) -> None:
        """Numbers that are read on demand."""
        metrics = self._metrics
        metrics.active_requests.set(self.active.count)
        metrics.requests_waiting.set(self._scheduler.waiting)
        metrics.draining.set(self.active.draining)
        metrics.held_bytes.set(self.memory.held)
        if self._recorder is not None:
            now, before = self._recorder.counts(), self._recorded
            for outcome, count in now.items():
                metrics.recorded_requests.labels(outcome).inc(count - before.get(outcome, 0))
            self._recorded = now
        self._roster.refresh_metrics()
        metrics.engines_required.clear()  # of kinds that have left
        for kind, loads in self._scheduler.balance.required(self._clock()).items():
            for role, load in loads._asdict().items():
                metrics.engines_required.labels(kind, role).set(load)
        for kind, errors in self._observer.errors().items():
            for estimate, error in errors.items():
                if not error.count:
                    continue
                metrics.estimate_error_ratio.labels(kind, estimate).set(error.mean)
                metrics.estimate_bias_ratio.labels(kind, estimate).set(error.bias)

    async def close(self) -> None:
        """End what runs for requests that have ended."""
        await self._miss_notes.close()


@dataclass(slots=True)
class _Read:
    """What is known of a request once it was read: for its recording."""

    active: ActiveRequest | None = None
    prompt: Prompt | None = None
    agent: str = ""


_ERRORS = frozenset(("failed", "deadline", "broken_off"))


def _outcome_of(error: BadRequest) -> str:
    if not isinstance(error, Rejected):
        return "refused"
    return {502: "failed", 504: "deadline"}.get(error.status, "rejected")
