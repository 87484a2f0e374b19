"""One active request: it follows the scheduler's orders, retries failures, and forwards the answer.

Everything that concerns a request reaches it as events, one after the other: orders, ends of its calls to
engines, engines that have left. So its next step is decided in one place, and all tasks see one order of events.

    Order        → compute: the prompt up to a token; or answer: both, on one engine; or both at once, to follow
    DecodeOrder  → answer: the client's own body
    Ended        → a call has ended: tell the scheduler, or end
    EngineGone   → cancel calls there that have not begun to answer
    Forgotten    → no other engine can serve it
    Expired      → too late

Until the first byte of the answer is sent to the client, another engine may answer. After it, an engine's
failure ends the stream with an error event. What a failed call is evidence of is decided in `evidence.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from kvpool.errors import KvpoolError
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.http.bodies import Body
from kvpool.router.http.memory import NoRoom
from kvpool.router.http.session_hints import NO_HINT, SessionHint
from kvpool.router.orders import EngineGone, Expired, Forgotten, News, Ordering
from kvpool.router.records.explain import Account
from kvpool.router.records.metrics import Metrics
from kvpool.router.records.observations import EVENTS_MIN, Measured
from kvpool.router.requests.calls import Call, Caller, Reply, end_span, span_of
from kvpool.router.upstream.evidence import Evidence, another_may_differ, for_client
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import GONE, TOO_LARGE, EngineFailed, EngineRefused, Exhausted
from kvpool.scheduler.decode import SLOWER_MAX
from kvpool.scheduler.values import DecodeOrder, Engine, Order, Request, Saves
from kvpool.telemetry.spans import QUEUE, Span

USAGE_S = 1.0
"""For what an engine says of the prompt that it has computed, once all of the answer is there."""
FOLLOW_MORE_S = 5.0
"""A prompt is followed this much longer than `SLOWER_MAX` times its estimate, at most."""
ELSEWHERE_S = 30.0
"""The longest wait for an engine with room for a request that another engine has refused."""


class DeadlinePassed(KvpoolError):
    """The request exceeded its deadline."""

    code = "deadline"


class GivenUp(KvpoolError):
    """No engine could serve it. The message is the last engine's."""

    code = "given_up"


@dataclass(frozen=True, slots=True)
class Ended:
    """A call has ended on its own, successfully or not."""

    call: Call


Work = Callable[..., Coroutine[Any, Any, None]]


class ActiveRequest:
    """See the module. `run` ends when all of it has ended: no calls to engines are left.

    caller: its calls; not shared between requests. ordered: whether any order was given for it. span: of the
    request, if it is traced. ttft_s: None: the time of its first token is not known. cached_tokens: of the prompt, as the
    engine `cached_at` said, which computed its beginning; None: it did not. answering: the call whose answer the client gets.
    session, agent: as daemons know them; empty: it names none. turn_answered: is told when a client has its answer: the
    nodes of the engines with the plugin that served it.
    """

    LOST_SAVE_S = 2.0
    """In addition to `SLOWER_MAX` times the handover: a request that follows and has not begun so long after the prompt
    was computed lacks blocks that will not come. If its engine was only busy, the request loses its turn there.
    """

    def __init__(
        self,
        request: Request,
        body: Body,
        *,
        caller: Caller,
        orders: Ordering,
        roster: EngineRoster,
        metrics: Metrics,
        account: Account,
        clock: Callable[[], float],
        span: Span | None = None,
        hint: SessionHint = NO_HINT,
        turn_answered: Callable[[frozenset[str]], None] = lambda _: None,
    ) -> None:
        self.session, self.agent = hint.session, hint.agent
        self.request = request
        self.body = body
        self.account = account
        self.ordered = False
        self.ttft_s: float | None = None
        self.cached_tokens: int | None = None
        self.cached_at = ""
        self.answering: Call | None = None
        self._outstanding: list[Call] = []  # calls whose orders the scheduler counts as open
        self._complete = False  # whether the client has its complete answer
        self._caller = caller
        self._orders = orders
        self._roster = roster
        self._metrics = metrics
        self._clock = clock
        self._span = span
        self._turn_answered = turn_answered
        self._nodes: set[str] = set()  # where it was served
        self._queue: Span | None = None
        self._why = ""  # its last call failed
        self._evidence = Evidence()
        self._refused: tuple[Call, EngineRefused] | None = None  # while another engine is asked
        self._news: deque[News | Ended] = deque()
        self._bell = asyncio.Event()
        self._calls: list[Call] = []
        self._direct = False
        self._reply: Reply

    @property
    def model(self) -> str:
        return self.body.model

    def tell(self, news: News | Ended) -> None:
        """An event for the request."""
        self._news.append(news)
        self._bell.set()

    def settle(self) -> None:
        """Report begun answers to the scheduler at once, not a moment later."""
        for call in [call for call in self._outstanding if call.began_at]:
            self._computed(call)

    async def run(self, reply: Reply, direct: EngineSpec | None = None) -> None:
        """Until the answer is with the client. direct: ask only this engine.

        Raises `GivenUp`, `DeadlinePassed`, `ClientGone`, `EngineFailed`, `EngineRefused`, `NoRoom`, `Exhausted`; no calls
        are left then.
        """
        self._reply = reply
        if direct is not None:
            self._answer_directly(direct)
        elif self._span is not None:
            self._queue = self._span.child(QUEUE)
        try:
            async with asyncio.timeout_at(self._caller.deadline):
                while not self._complete:
                    if self._news:
                        self._handle(self._news.popleft())
                    else:
                        self._bell.clear()
                        waits_elsewhere = self._refused is not None and not self._calls
                        async with asyncio.timeout(ELSEWHERE_S if waits_elsewhere else None):
                            await self._bell.wait()
        except TimeoutError:
            if self._complete:
                return  # at the same time
            raise self._ending(DeadlinePassed("the request's deadline has passed")) from None
        except KvpoolError as error:
            # The frames of its traceback hold it.
            raise self._ending(error).with_traceback(None) from None
        finally:
            if self._queue is not None:
                self._queue.end("no order was given")
            await self._abort(list(self._calls))

    def _ending(self, error: KvpoolError) -> KvpoolError:
        """Return the error that ends the request: a kept refusal rather than one that says less."""
        # A raised error holds this request by its frames, so the request must not hold the error.
        kept, self._refused = self._refused, None
        if kept is None or self._reply.begun or not for_client(kept[1].status):
            return error
        says_less = isinstance(error, GivenUp | DeadlinePassed | NoRoom | Exhausted)
        return kept[1] if says_less else error

    def _handle(self, news: News | Ended) -> None:
        if self._direct and not isinstance(news, Ended):
            return  # the scheduler has forgotten the request: its earlier orders are void
        match news:
            case Order():
                self._ordered(news)
            case DecodeOrder():
                self._decode_ordered(news)
            case Ended():
                self._ended(news.call)
            case EngineGone():
                self._engine_gone(news.engine, news.again)
            case Forgotten():
                self._forgotten()
            case Expired():
                raise DeadlinePassed("the request's deadline passed while it waited")

    def _ordered(self, order: Order) -> None:
        now = self._clock()
        engine = order.estimate.engine
        self.account.ordered(order, now)
        if self._queue is not None and not self._queue.ended:
            self._first_ordered(self._queue, order)
        if self._reply.begun:
            # A decode engine that followed had all of it sooner.
            self._orders.computed(order)
            return
        spec = self._roster.spec(engine.name)
        if spec is None:
            self._failed_order(order, EngineFailed(engine.name, GONE, "it has just gone"))
            return
        call = Call(spec, order, order.whole, now, order.estimate.ttft_s)
        self._outstanding.append(call)
        if order.whole:
            self._answer(call)
            if not self.body.streams:
                loop = asyncio.get_running_loop()
                call.timer = loop.call_later(call.expected_s, self._presumably_computed, call)
            return
        self._start(call, self._caller.compute, order)
        if order.follow:
            self._follow(order)

    def _first_ordered(self, queue: Span, order: Order) -> None:
        queue.end()
        assert self._span is not None, "its wait is a part of it"
        each = self.request.tokens / max(len(self.request.keys), 1)
        self._span.set(
            cached_tokens_expected=int(order.estimate.cached * each),
            loaded_tokens_expected=int(order.estimate.loaded * each),
        )

    def _follow(self, order: Order) -> None:
        assert order.decode is not None, "who follows is named"
        spec = self._roster.spec(order.decode.name)
        if spec is None:
            error = EngineFailed(order.decode.name, GONE, "it has just gone")
            self._failed_decode(error)
            return
        left_s = max(self._caller.deadline - asyncio.get_running_loop().time(), 1.0)
        # Its rest takes no longer a token than this order, which is for a part of it.
        all_s = order.estimate.ttft_s * order.request.tokens / order.end
        long_s = SLOWER_MAX * all_s + FOLLOW_MORE_S
        follow_s = min(self._caller.limits.follow_s, left_s, long_s)
        call = Call(spec, None, True, self._clock(), follow_s + order.estimate.ttft_s)
        call.follows = True
        self._answer(call, self._following(order.estimate.engine, follow_s))

    def _following(
        self, computes: Engine, follow_s: float, *, computed: bool = False
    ) -> Mapping[str, object]:
        """For an engine that is to wait so long for the prompt's blocks from the one that computes them, or has."""
        hint: dict[str, object] = {"follow_s": follow_s, "source": computes.node}
        if computed:
            hint["computed"] = True
        return {"kvpool": hint}

    def _decode_ordered(self, order: DecodeOrder) -> None:
        self.account.decode_ordered(order, self._clock())
        if self._reply.begun:
            return  # a scheduler that took over counted on an engine that it does not have
        spec = self._roster.spec(order.engine.name)
        if spec is None:
            error = EngineFailed(order.engine.name, GONE, "it has just gone")
            self._failed_decode(error)
            return
        expected_s = order.estimate.handover_s + order.estimate.tpot_s
        call = Call(spec, None, True, self._clock(), expected_s)
        params = None
        if order.wait_s > 0:
            params = self._following(order.computed_by, order.wait_s, computed=True)
        self._answer(call, params)

    def _answer_directly(self, spec: EngineSpec) -> None:
        """Get this engine's answer: it is expected to refuse."""
        self._direct = True
        self._answer(Call(spec, None, True, self._clock(), 0.0))

    def _ended(self, call: Call) -> None:
        self._calls.remove(call)
        assert call.task is not None, "it was started"
        # A call and its task must not refer to each other: such cycles are not collected.
        task, call.task = call.task, None
        if call.timer is not None:
            call.timer.cancel()
        if call.cancelled:
            return
        error = task.result()
        if error is None:
            if not call.answers:
                self._computed(call)
                return
            assert self._complete, "it was answered"
        elif isinstance(error, EngineFailed):
            self._call_failed(call, error)
        elif isinstance(error, EngineRefused):
            self._call_refused(call, error)
        else:
            raise error

    def _call_refused(self, call: Call, error: EngineRefused) -> None:
        """Request the work from another engine, once, if that may answer otherwise; else give the client this answer."""
        self.account.note(self._clock(), "refused", engine=call.spec.name, status=error.status)
        if not call.answers and self._reply.begun:
            self._skip(call)
            return
        before = self._refused
        asked_elsewhere = before is not None and before[0].answers == call.answers
        if not another_may_differ(error.status):
            self._request_refused(call, error)
        elif self._direct or asked_elsewhere:
            self._roster.failed(error)
            raise error if for_client(error.status) else GivenUp(str(error))
        else:
            self._refused = call, error
            self._failed(call, error)

    def _request_refused(self, call: Call, error: EngineRefused) -> None:
        """Raise this answer, which is about the request.

        An answer about a part of the prompt does not fit the client's own body: the decode engine gets that body.
        """
        decode = None if call.answers or call.order is None else call.order.decode
        spec = None if decode is None else self._roster.spec(decode.name)
        if spec is None:
            raise error
        self._refused = None
        self._orders.abandoned(self.request)
        self._outstanding = []
        for other in self._calls:
            self._cancel(other)
        self._answer_directly(spec)

    def _skip(self, call: Call) -> None:
        """It did not compute its part of the prompt, while the answer is under way."""
        assert call.order is not None, "what only computes has an order"
        self._outstanding.remove(call)
        self._orders.computed(call.order)

    def _computed(self, call: Call) -> None:
        assert call.order is not None, "what computes has an order"
        call.ended_at = self._clock()
        self._outstanding.remove(call)
        saves = call.saves
        stored = {} if saves is None else {"stored_tokens": saves.stored}
        self.account.note(call.ended_at, "computed", engine=call.spec.name, **call.tokens, **stored)
        if not call.answers:
            if self._refused is not None and not self._refused[0].answers:
                self._refused = None  # this engine has done what another one refused
            self._note_cached(call)
            self._roster.succeeded(call.spec.name)
            self._blame(self._evidence.answered(call.spec.name))
        timed = not call.answers or self.body.streams
        measured = Measured(call.sent_at, call.cached_tokens, timed, saves)
        self._orders.computed(call.order, measured)
        if call.order.last:
            self._served(call.spec)
            for follower in [c for c in self._calls if c.follows and not c.began_at]:
                self._prompt_is_computed(follower, call.order, saves)

    def _prompt_is_computed(self, follower: Call, order: Order, saves: Saves | None) -> None:
        """Who follows it begins when the rest is saved, and hears itself of what is not. Unless nothing is saved there,
        or that was not heard: the beginning of an answer that is not streamed does not show.
        """
        if saves is not None and not saves.stored:
            self._stop_following(follower)
        elif self.body.streams:
            usual_s = next((d.handover_s + d.tpot_s for d in order.decoders), 0.0)
            lost_s, loop = self.LOST_SAVE_S + SLOWER_MAX * usual_s, asyncio.get_running_loop()
            follower.timer = loop.call_later(lost_s, self._stop_following, follower)

    def _stop_following(self, call: Call) -> None:
        """All is computed, and some of it did not come: its save was lost. The engine computes that itself, at once."""
        if call.began_at or call.cancelled or call not in self._calls:
            return
        self._cancel(call)
        self.account.note(self._clock(), "follow ended", engine=call.spec.name)
        self._answer(Call(call.spec, None, True, self._clock(), call.expected_s))

    def _call_failed(self, call: Call, error: EngineFailed) -> None:
        if error.reason == TOO_LARGE:
            # As requested, and no fault of the engine.
            self.account.note(self._clock(), "failed", why=str(error))
            if call.answers or not self._reply.begun:
                raise GivenUp(str(error)) from None
            self._skip(call)
            return
        begun = self._reply.begun and call.answers
        self._blame(self._evidence.failed(error, begun=begun))
        if begun or self._direct:
            self._roster.failed(error)
            raise error
        self._failed(call, error)

    def _failed(self, call: Call, error: EngineFailed | EngineRefused) -> None:
        """Have another engine do it."""
        if call in self._outstanding:
            assert call.order is not None, "what the scheduler waits for has an order"
            self._failed_order(call.order, error)
        elif call.answers:
            self._failed_decode(error)

    def _forgotten(self) -> None:
        if not self._reply.begun:
            raise GivenUp(self._why)

    def _failed_order(self, order: Order, error: EngineFailed | EngineRefused) -> None:
        """Its other orders on that engine are void, too."""
        name = order.estimate.engine.name
        for other in self._calls:
            if other in self._outstanding and other.spec.name == name:
                self._cancel(other)
        self._outstanding = [c for c in self._outstanding if c.spec.name != name]
        self._failure(error)
        self._orders.failed(order, elsewhere=isinstance(error, EngineRefused))

    def _failed_decode(self, error: EngineFailed | EngineRefused) -> None:
        self._failure(error)
        refused = isinstance(error, EngineRefused)
        self._orders.decode_failed(self.request, error.engine, elsewhere=refused)

    def _failure(self, error: EngineFailed | EngineRefused) -> None:
        self._roster.failed(error)
        self.account.note(self._clock(), "failed", why=str(error))
        self._why = str(error)

    def _blame(self, engines: Collection[str]) -> None:
        if engines:
            self._roster.blame(engines, xxhash.xxh3_64_intdigest(self.body.raw))

    def _engine_gone(self, name: str, again: bool) -> None:
        """The scheduler has its orders again. An answer that has begun may still be complete."""
        error = EngineFailed(name, GONE, "it gets no more requests")
        answering = False
        for call in [c for c in self._calls if c.spec.name == name and not c.cancelled]:
            if call.answers and self._reply.begun:
                continue
            answering = answering or (call.answers and call not in self._outstanding)
            self._cancel(call)
        self._outstanding = [c for c in self._outstanding if c.spec.name != name]
        self.account.note(self._clock(), "engine gone", engine=name)
        if not again and not self._reply.begun:
            raise GivenUp(str(error))
        if answering:
            self._failed_decode(error)

    def _answer(self, call: Call, params: Mapping[str, object] | None = None) -> None:
        self._start(call, self._caller.answer, params, self._reply, self)

    def _start(self, call: Call, work: Work, *args: Any) -> None:
        if self._span is not None:
            call.span = span_of(call, self._span)
        call.task = asyncio.create_task(_outcome(work, call, *args))
        self._calls.append(call)
        if (span := call.span) is not None:
            # Before the event, which may end the request.
            call.task.add_done_callback(lambda task: end_span(span, call, task))
        call.task.add_done_callback(lambda _: self.tell(Ended(call)))

    def _cancel(self, call: Call) -> None:
        """Cancelled; its connection is closed when its task ends, which `run` waits for."""
        call.cancelled = True
        if call.timer is not None:
            call.timer.cancel()
        assert call.task is not None, "it was started"
        call.task.cancel()

    async def _abort(self, calls: list[Call]) -> None:
        for call in calls:
            self._cancel(call)
        await asyncio.gather(
            *(call.task for call in calls if call.task is not None), return_exceptions=True
        )
        for call in calls:
            call.task = None

    def answer_begun(self, call: Call) -> None:
        """The client gets the first part of its answer, then the scheduler the event."""
        call.began_at = self._clock()
        self.account.note(call.began_at, "first token", engine=call.spec.name)
        self._blame(self._evidence.answered(call.spec.name))
        ttft_s = call.began_at - self.account.arrived_s
        self.answering = call
        if self.body.streams:
            self.ttft_s = ttft_s
        if self._span is not None:
            self._span.set(engine=call.spec.name, ttft_s=ttft_s)
        self._metrics.time_to_first_token_seconds.observe(ttft_s)
        asyncio.get_running_loop().call_soon(self._presumably_computed, call)

    def answer_ended(self, call: Call) -> None:
        """The client has all of it, and may disconnect before this task continues."""
        self._presumably_computed(call)
        self._complete = True
        if call.failed:
            self.account.note(self._clock(), "failed", engine=call.spec.name, why="an error event")
            self.account.outcome = "broken_off"
            return
        self.account.note(self._clock(), "answered", engine=call.spec.name, **call.tokens)
        self.account.outcome = "answered"
        if call.order is not None:
            self._note_cached(call)
        name = call.spec.name
        self._roster.succeeded(name)
        took_s = self._clock() - call.began_at
        if call.events >= EVENTS_MIN:
            self._orders.answered(name, call.answer_tokens - 1, took_s)
        if call.events > 1:
            self._metrics.time_per_output_token_seconds.observe(took_s / (call.events - 1))
        self._served(call.spec)
        self._turn_answered(frozenset(self._nodes))

    def _served(self, spec: EngineSpec) -> None:
        if spec.namespace and spec.node:
            self._nodes.add(spec.node)

    def _note_cached(self, call: Call) -> None:
        """What the first engine says that computed a part of the prompt: others find that part cached."""
        if self.cached_tokens is None:
            self.cached_tokens, self.cached_at = call.cached_tokens, call.spec.name

    async def prompt_cached(self, call: Call) -> int | None:
        """See `AnswerListener`. An engine that follows may be done before the other's answer is here."""
        if self.cached_tokens is None:
            computing = [c for c in self._calls if not (c.answers or c.cancelled or c is call)]
            tasks = [c.task for c in computing if c.task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=USAGE_S)
            said = [c.cached_tokens for c in computing if c.cached_tokens is not None]
            return said[0] if said else None
        return self.cached_tokens

    def _presumably_computed(self, call: Call) -> None:
        """By its first token, or by the time it should have come, in an answer that is not streamed."""
        if call in self._outstanding:
            self._computed(call)


async def _outcome(work: Work, *args: Any) -> KvpoolError | None:
    """The error, without its traceback: the frames refer to the task whose result it is.

    Not read if it was cancelled.
    """
    try:
        await work(*args)
    except KvpoolError as error:
        error.__context__ = None
        return error.with_traceback(None)
    except asyncio.CancelledError:
        return None
    return None
