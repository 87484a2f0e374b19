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
from collections.abc import Mapping

from kvpool.errors import KvpoolError
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.http.bodies import Body
from kvpool.router.orders import EngineGone, Expired, Forgotten, News, Ordering
from kvpool.router.records.observations import EVENTS_MIN, Measured
from kvpool.router.requests.calls import Call, Caller, Reply
from kvpool.router.requests.failures import DeadlinePassed, Failures, GivenUp
from kvpool.router.requests.request_notes import RequestNotes
from kvpool.router.requests.running_calls import Ended, RunningCalls
from kvpool.router.upstream.evidence import another_may_differ, for_client
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import GONE, TOO_LARGE, EngineFailed, EngineRefused
from kvpool.scheduler.decode import SLOWER_MAX
from kvpool.scheduler.values import DecodeOrder, Engine, Order, Request, Saves

FOLLOW_MORE_S = 5.0
"""A prompt is followed this much longer than `SLOWER_MAX` times its estimate, at most."""
ELSEWHERE_S = 30.0
"""The longest wait for an engine with room for a request that another engine has refused."""


class ActiveRequest:
    """See the module. `run` ends when all of it has ended: no calls to engines are left.

    caller: its calls; not shared between requests. ordered: whether any order was given for it.
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
        notes: RequestNotes,
    ) -> None:
        self.request = request
        self.model = body.model
        self.notes = notes
        self.ordered = False
        self._outstanding: list[Call] = []  # calls whose orders the scheduler counts as open
        self._complete = False  # whether the client has its complete answer
        self._caller = caller
        self._orders = orders
        self._roster = roster
        self._failures = Failures(roster, notes, body.raw)
        self._news: deque[News | Ended] = deque()
        self._bell = asyncio.Event()
        self._calls = RunningCalls(notes.span)
        self._direct = False
        self._reply: Reply

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
        else:
            self.notes.waits()
        try:
            async with asyncio.timeout_at(self._caller.deadline):
                while not self._complete:
                    if self._news:
                        self._handle(self._news.popleft())
                    else:
                        self._bell.clear()
                        waits_elsewhere = self._failures.refused and not any(self._calls)
                        async with asyncio.timeout(ELSEWHERE_S if waits_elsewhere else None):
                            await self._bell.wait()
        except TimeoutError:
            if self._complete:
                return  # at the same time
            raise self._failures.ending(
                DeadlinePassed("the request's deadline has passed"), begun=reply.begun
            ) from None
        except KvpoolError as error:
            # The frames of its traceback hold it, so no variable here may.
            raise self._failures.ending(error, begun=reply.begun).with_traceback(None) from None
        finally:
            self.notes.waited_in_vain()
            await self._calls.cancel_all()

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
                if not self._reply.begun:
                    raise GivenUp(self._failures.why)
            case Expired():
                raise DeadlinePassed("the request's deadline passed while it waited")

    def _ordered(self, order: Order) -> None:
        engine = order.estimate.engine
        self.notes.ordered(order)
        if self._reply.begun:
            # A decode engine that followed had all of it sooner.
            self._orders.computed(order)
            return
        spec = self._roster.spec(engine.name)
        if spec is None:
            self._failed_order(order, EngineFailed(engine.name, GONE, "it has just gone"))
            return
        call = Call(spec, order, order.whole, self.notes.clock(), order.estimate.ttft_s)
        self._outstanding.append(call)
        if order.whole:
            self._answer(call)
            if not self.notes.streams:
                loop = asyncio.get_running_loop()
                call.timer = loop.call_later(call.expected_s, self._computed, call)
            return
        self._calls.start(call, self.tell, self._caller.compute, order)
        if order.follow:
            self._follow(order)

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
        follow_s = min(self._caller.config.follow_s, left_s, long_s)
        call = Call(spec, None, True, self.notes.clock(), follow_s + order.estimate.ttft_s)
        call.follows = True
        self._answer(call, _following(order.estimate.engine, follow_s))

    def _decode_ordered(self, order: DecodeOrder) -> None:
        self.notes.account.decode_ordered(order, self.notes.clock())
        if self._reply.begun:
            return  # a scheduler that took over counted on an engine that it does not have
        spec = self._roster.spec(order.engine.name)
        if spec is None:
            error = EngineFailed(order.engine.name, GONE, "it has just gone")
            self._failed_decode(error)
            return
        expected_s = order.estimate.handover_s + order.estimate.tpot_s
        call = Call(spec, None, True, self.notes.clock(), expected_s)
        params = None
        if order.wait_s > 0:
            params = _following(order.computed_by, order.wait_s, computed=True)
        self._answer(call, params)

    def _answer_directly(self, spec: EngineSpec) -> None:
        """Get this engine's answer: it is expected to refuse."""
        self._direct = True
        self._answer(Call(spec, None, True, self.notes.clock(), 0.0))

    def _ended(self, call: Call) -> None:
        error = self._calls.take(call)
        if call.cancelled:
            return
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
        self.notes.note("refused", engine=call.spec.name, status=error.status)
        if not call.answers and self._reply.begun:
            self._skip(call)
            return
        before = self._failures.refused
        asked_elsewhere = before is not None and before[0].answers == call.answers
        if not another_may_differ(error.status):
            self._request_refused(call, error)
        elif self._direct or asked_elsewhere:
            self._roster.failed(error)
            raise error if for_client(error.status) else GivenUp(str(error))
        else:
            self._failures.refused = call, error
            self._failed(call, error)

    def _request_refused(self, call: Call, error: EngineRefused) -> None:
        """Raise this answer, which is about the request.

        An answer about a part of the prompt does not fit the client's own body: the decode engine gets that body.
        """
        decode = None if call.answers or call.order is None else call.order.decode
        spec = None if decode is None else self._roster.spec(decode.name)
        if spec is None:
            raise error
        self._failures.refused = None
        self._orders.abandoned(self.request)
        self._outstanding = []
        for other in self._calls:
            self._calls.cancel(other)
        self._answer_directly(spec)

    def _skip(self, call: Call) -> None:
        """It did not compute its part of the prompt, while the answer is under way."""
        assert call.order is not None, "what only computes has an order"
        self._outstanding.remove(call)
        self._orders.computed(call.order)

    def _computed(self, call: Call) -> None:
        """Report that the order of a call was carried out, unless that is reported.

        An answer shows it by its first token; one that is not streamed is taken to when that should have come.
        """
        if call not in self._outstanding:
            return
        assert call.order is not None, "what computes has an order"
        self._outstanding.remove(call)
        self.notes.computed(call)
        if not call.answers:
            self.notes.cached(call)
            self._failures.computed(call.spec.name)
        timed = not call.answers or self.notes.streams
        measured = Measured(call.sent_at, call.cached_tokens, timed, call.saves)
        self._orders.computed(call.order, measured)
        if call.order.last:
            self.notes.served(call.spec)
            for follower in [c for c in self._calls if c.follows and not c.began_at]:
                self._prompt_is_computed(follower, call.order, call.saves)

    def _prompt_is_computed(self, follower: Call, order: Order, saves: Saves | None) -> None:
        """Who follows it begins when the rest is saved, and hears itself of what is not. Unless nothing is saved there,
        or that was not heard: the beginning of an answer that is not streamed does not show.
        """
        if saves is not None and not saves.stored:
            self._stop_following(follower)
        elif self.notes.streams:
            usual_s = next((d.handover_s + d.tpot_s for d in order.decoders), 0.0)
            lost_s, loop = self.LOST_SAVE_S + SLOWER_MAX * usual_s, asyncio.get_running_loop()
            follower.timer = loop.call_later(lost_s, self._stop_following, follower)

    def _stop_following(self, call: Call) -> None:
        """All is computed, and some of it did not come: its save was lost. The engine computes that itself, at once."""
        if call.began_at or call.cancelled or call not in self._calls:
            return
        self._calls.cancel(call)
        self.notes.note("follow ended", engine=call.spec.name)
        self._answer(Call(call.spec, None, True, self.notes.clock(), call.expected_s))

    def _call_failed(self, call: Call, error: EngineFailed) -> None:
        if error.reason == TOO_LARGE:
            # As requested, and no fault of the engine.
            self.notes.note("failed", why=str(error))
            if call.answers or not self._reply.begun:
                raise GivenUp(str(error)) from None
            self._skip(call)
            return
        begun = self._reply.begun and call.answers
        self._failures.blame(error, begun=begun)
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

    def _failed_order(self, order: Order, error: EngineFailed | EngineRefused) -> None:
        """Its other orders on that engine are void, too."""
        name = order.estimate.engine.name
        for other in self._calls:
            if other in self._outstanding and other.spec.name == name:
                self._calls.cancel(other)
        self._outstanding = [c for c in self._outstanding if c.spec.name != name]
        self._failures.add(error)
        self._orders.failed(order, elsewhere=isinstance(error, EngineRefused))

    def _failed_decode(self, error: EngineFailed | EngineRefused) -> None:
        self._failures.add(error)
        refused = isinstance(error, EngineRefused)
        self._orders.decode_failed(self.request, error.engine, elsewhere=refused)

    def _engine_gone(self, name: str, again: bool) -> None:
        """The scheduler has its orders again. An answer that has begun may still be complete."""
        error = EngineFailed(name, GONE, "it gets no more requests")
        answering = False
        for call in [c for c in self._calls if c.spec.name == name and not c.cancelled]:
            if call.answers and self._reply.begun:
                continue
            answering = answering or (call.answers and call not in self._outstanding)
            self._calls.cancel(call)
        self._outstanding = [c for c in self._outstanding if c.spec.name != name]
        self.notes.note("engine gone", engine=name)
        if not again and not self._reply.begun:
            raise GivenUp(str(error))
        if answering:
            self._failed_decode(error)

    def _answer(self, call: Call, params: Mapping[str, object] | None = None) -> None:
        self._calls.start(call, self.tell, self._caller.answer, params, self._reply, self)

    def answer_begun(self, call: Call) -> None:
        """The client gets the first part of its answer, then the scheduler the event."""
        self.notes.begun(call)
        self._failures.answered(call.spec.name)
        asyncio.get_running_loop().call_soon(self._computed, call)

    def answer_ended(self, call: Call) -> None:
        """The client has all of it, and may disconnect before this task continues."""
        self._computed(call)
        self._complete = True
        if call.failed:
            self.notes.broken_off(call)
            return
        self._roster.succeeded(call.spec.name)
        took_s = self.notes.clock() - call.began_at
        if call.events >= EVENTS_MIN:
            self._orders.answered(call.spec.name, call.answer_tokens - 1, took_s)
        self.notes.answered(call, took_s)

    async def prompt_cached(self, call: Call) -> int | None:
        """See `AnswerListener`."""
        return await self.notes.prompt_cached(call, self._calls)


def _following(
    computes: Engine, follow_s: float, *, computed: bool = False
) -> Mapping[str, object]:
    """Return the hint for an engine that is to wait so long for the prompt's blocks from the one that computes them, or has."""
    hint: dict[str, object] = {"follow_s": follow_s, "source": computes.node}
    if computed:
        hint["computed"] = True
    return {"kvpool": hint}
