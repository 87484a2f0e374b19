"""One request in flight: it follows the scheduler's orders, tries again what fails, and passes the answer on.

All that concerns a request comes to it as news, one after the other: orders, ends of its calls to engines,
engines that are gone. So what it does next is decided in one place, and there is no order of events that two
tasks see differently.

    Order        → compute: the prompt up to a token; or answer: both, on one engine; or both at once, to follow
    DecodeOrder  → answer: the client's own body
    Ended        → a call has ended: tell the scheduler, or end
    EngineGone   → give up what has not begun to answer there
    Expired      → too late

Until the first byte of the answer has gone to the client, another engine may answer. After it, an engine's
failure ends the stream with an error event.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvpool.errors import KvpoolError
from kvpool.router.bodies import Body, prompt_only, segment, with_field
from kvpool.router.engines import EngineSpec
from kvpool.router.explain import Account
from kvpool.router.knowledge import Prompt
from kvpool.router.sse import EventStream, EventTooLong, cached_tokens, usage_of
from kvpool.router.tracing import Trace
from kvpool.router.upstream import TOO_LARGE, Answer, EngineFailed, EngineRefused, Upstream
from kvpool.scheduler.values import DecodeOrder, Order, Request
from kvpool.spans import DECODE, GENERATE, PREFILL, QUEUE, Span

COMPLETIONS_PATH = "/v1/completions"
PREFILL_BYTES_MAX = 1 << 20
SLOWER_MAX = 4.0
"""So many times what was expected of an engine, and `answer_s`, is taken for the time that it needs."""
CALLED_OFF = "called off"
TOKEN_S_MIN = 0.1
"""At least so long is expected of a token, where all of them come at once: engines differ, and learning takes time."""


class Reply(Protocol):
    """The client's side. begun: whether any of an answer was sent. Whoever is gone: `ClientGone`."""

    begun: bool

    async def send(self, status: int, body: bytes, content_type: str) -> None: ...
    async def begin(self, content_type: str) -> None: ...
    async def write(self, data: bytes) -> None: ...
    async def end(self) -> None: ...


class ClientGone(KvpoolError):
    """The client has left, or does not read."""

    code = "client_gone"


class DeadlinePassed(KvpoolError):
    """The request took longer than it may."""

    code = "deadline"


class GivenUp(KvpoolError):
    """No engine could do it. The message says what the last one said."""

    code = "given_up"


class Desk(Protocol):
    """What a flight asks of whoever runs the scheduler. Each call is for the flight's own request.

    skipped: the order is not carried out, since its answer is under way. failed, decode_failed: whether it will
    be tried again.
    """

    def spec(self, name: str) -> EngineSpec | None: ...
    def computed(self, flight: Flight, order: Order, call: Call) -> None: ...
    def skipped(self, flight: Flight, order: Order) -> None: ...
    def failed(self, flight: Flight, order: Order, error: EngineFailed) -> bool: ...
    def decode_failed(self, flight: Flight, engine: str, error: EngineFailed) -> bool: ...
    def unscheduled(self, flight: Flight) -> None: ...
    def begun(self, flight: Flight, call: Call) -> None: ...
    def answered(self, flight: Flight, call: Call) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and bytes; as `RouterConfig` has them."""

    answer_s: float
    stall_s: float
    client_stall_s: float
    follow_s: float
    answer_bytes_max: int


@dataclass(slots=True, eq=False)
class Call:
    """One call to an engine. order: what it computes; None: it only answers. answers: the client's answer is it.

    expected_s: until it begins to answer; token_s: then for each token. began_at: when it did. usage: what the
    engine said of tokens.
    events: parts of a streamed answer. span: where the request is traced; its end is that of the task. task: ends with what went wrong; None once that was looked at.
    """

    spec: EngineSpec
    order: Order | None
    answers: bool
    sent_at: float
    expected_s: float
    token_s: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0
    usage: Mapping[str, Any] = field(default_factory=dict)
    events: int = 0
    cancelled: bool = False
    presumed: asyncio.TimerHandle | None = None
    span: Span | None = None
    task: asyncio.Task[KvpoolError | None] | None = None

    @property
    def cached_tokens(self) -> int | None:
        return cached_tokens(dict(self.usage))


@dataclass(frozen=True, slots=True)
class Ended:
    """A call has ended by itself, well or not."""

    call: Call


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine left the scheduler, which gives other orders or (`again`) not."""

    engine: str
    again: bool


@dataclass(frozen=True, slots=True)
class Expired:
    """The scheduler has forgotten the request: it waited too long."""


Work = Callable[..., Coroutine[Any, Any, None]]
News = Order | DecodeOrder | Ended | EngineGone | Expired


class Flight:
    """prompt: None: its tokens are not known. answer_tokens: of the longest answer that it may have; None: any.

    deadline: by the loop's clock. span: of the request, where it is traced. `run` ends when all of it has ended: nothing of it is left on any engine.
    """

    def __init__(
        self,
        request: Request,
        body: Body,
        prompt: Prompt | None,
        *,
        desk: Desk,
        upstream: Upstream,
        limits: Limits,
        account: Account,
        trace: Trace,
        headers: Mapping[str, str],
        random: Callable[[int], bytes],
        clock: Callable[[], float],
        deadline: float,
        answer_tokens: int | None,
        span: Span | None = None,
    ) -> None:
        self.request = request
        self.body = body
        self.account = account
        self.retries = 0
        self.ordered = False
        """Whether any order was given for it."""
        self._outstanding: list[Call] = []  # whose orders the scheduler counts as under way
        self._complete = False  # whether the client has all of its answer
        self._prompt = prompt
        self._desk = desk
        self._upstream = upstream
        self._limits = limits
        self._trace = trace
        self._headers = headers
        self._random = random
        self._clock = clock
        self._deadline = deadline
        self._answer_tokens = answer_tokens
        self._span = span
        self._queue: Span | None = None
        self._news: deque[News] = deque()
        self._bell = asyncio.Event()
        self._calls: list[Call] = []
        self._direct = False
        self._reply: Reply

    def tell(self, news: News) -> None:
        """Something that concerns it."""
        self._news.append(news)
        self._bell.set()

    def settle(self) -> None:
        """Have the scheduler know of answers that have begun, which it is told a moment later otherwise."""
        for call in [call for call in self._outstanding if call.began_at]:
            self._computed(call)

    async def run(self, reply: Reply, direct: EngineSpec | None = None) -> None:
        """Until the answer is with the client. direct: ask this engine, and nobody else.

        Raises `GivenUp`, `DeadlinePassed`, `ClientGone`, `EngineRefused`; none of its calls is left then.
        """
        self._reply = reply
        if direct is not None:
            self._answer_directly(direct)
        elif self._span is not None:
            self._queue = self._span.child(QUEUE)
        try:
            async with asyncio.timeout_at(self._deadline):
                while not self._complete:
                    if self._news:
                        self._handle(self._news.popleft())
                    else:
                        self._bell.clear()
                        await self._bell.wait()
        except TimeoutError:
            # No other wait here has a limit.
            if self._complete:
                return  # in the same moment
            raise DeadlinePassed("the request's deadline has passed") from None
        except KvpoolError as error:
            # The frames that it came through hold it.
            raise error.with_traceback(None) from None
        finally:
            if self._queue is not None:
                self._queue.end("no order was given")
            await self._abort(list(self._calls))

    def _handle(self, news: News) -> None:
        if self._direct and not isinstance(news, Ended):
            return  # the scheduler has forgotten the request: what it said before is void
        match news:
            case Order():
                self._ordered(news)
            case DecodeOrder():
                self._decode_ordered(news)
            case Ended():
                self._ended(news.call)
            case EngineGone():
                self._engine_gone(news.engine, news.again)
            case Expired():
                raise DeadlinePassed("the request's deadline passed while it waited")

    def _ordered(self, order: Order) -> None:
        now = self._clock()
        engine = order.outlook.engine
        self.account.ordered(order, now)
        if self._queue is not None and not self._queue.ended:
            self._first_ordered(self._queue, order)
        if self._reply.begun:
            # Whoever followed had all of it sooner.
            self._desk.skipped(self, order)
            return
        spec = self._desk.spec(engine.name)
        if spec is None:
            self._failed_order(order, EngineFailed(engine.name, "gone", "it has just gone"))
            return
        call = Call(spec, order, order.whole, now, order.outlook.ttft_s)
        call.token_s = next((each.tpot_s for each in order.decoders), 0.0)
        self._outstanding.append(call)
        if order.whole:
            self._start(call, self._answer, self.body.raw)
            if self.body.value.get("stream") is not True:
                loop = asyncio.get_running_loop()
                call.presumed = loop.call_later(call.expected_s, self._presumably_computed, call)
            return
        self._start(call, self._compute, order)
        if order.follow:
            self._follow(order)

    def _first_ordered(self, queue: Span, order: Order) -> None:
        queue.end()
        assert self._span is not None, "its wait is a part of it"
        each = self.request.tokens / max(len(self.request.keys), 1)
        self._span.set(
            cached_tokens_expected=int(order.outlook.cached * each),
            loaded_tokens_expected=int(order.outlook.loaded * each),
        )

    def _follow(self, order: Order) -> None:
        assert order.decode is not None, "who follows is named"
        spec = self._desk.spec(order.decode.name)
        if spec is None:
            error = EngineFailed(order.decode.name, "gone", "it has just gone")
            self._failed_decode(order.decode.name, error)
            return
        left_s = max(self._deadline - asyncio.get_running_loop().time(), 1.0)
        follow_s = min(self._limits.follow_s, left_s)
        params = {"kvpool": {"follow_s": follow_s, "source": order.outlook.engine.node}}
        call = Call(spec, None, True, self._clock(), follow_s + order.outlook.ttft_s)
        raw = with_field(self.body, "kv_transfer_params", params)
        self._start(call, self._answer, raw)

    def _decode_ordered(self, order: DecodeOrder) -> None:
        self.account.decode_ordered(order, self._clock())
        spec = self._desk.spec(order.engine.name)
        if spec is None:
            error = EngineFailed(order.engine.name, "gone", "it has just gone")
            self._failed_decode(order.engine.name, error)
            return
        expected_s = order.outlook.handover_s + order.outlook.tpot_s
        call = Call(spec, None, True, self._clock(), expected_s, order.outlook.tpot_s)
        self._start(call, self._answer, self.body.raw)

    def _answer_directly(self, spec: EngineSpec) -> None:
        """Let this engine say what it says: it is expected to refuse."""
        self._direct = True
        call = Call(spec, None, True, self._clock(), 0.0)
        self._start(call, self._answer, self.body.raw)

    def _ended(self, call: Call) -> None:
        self._calls.remove(call)
        assert call.task is not None, "it was started"
        # A call and its task must not hold each other: nobody collects what does.
        task, call.task = call.task, None
        if call.presumed is not None:
            call.presumed.cancel()
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
        elif isinstance(error, EngineRefused) and not call.answers:
            # The client's own body is refused for its own reason, by whoever is to answer.
            self.account.note(self._clock(), "refused", engine=call.spec.name, status=error.status)
            assert call.order is not None, "what only computes has an order"
            if self._reply.begun:
                self._skip(call)
                return
            self._desk.unscheduled(self)
            self._outstanding = []
            for other in self._calls:
                self._cancel(other)
            decode = call.order.decode
            spec = None if decode is None else self._desk.spec(decode.name)
            self._answer_directly(spec or call.spec)
        else:
            raise error

    def _skip(self, call: Call) -> None:
        """It did not compute its part of the prompt, whose answer is under way."""
        assert call.order is not None, "what only computes has an order"
        self._outstanding.remove(call)
        self._desk.skipped(self, call.order)

    def _computed(self, call: Call) -> None:
        assert call.order is not None, "what computes has an order"
        call.ended_at = self._clock()
        self._outstanding.remove(call)
        self.account.note(call.ended_at, "computed", engine=call.spec.name, **_said(call))
        self._desk.computed(self, call.order, call)

    def _call_failed(self, call: Call, error: EngineFailed) -> None:
        if error.reason == TOO_LARGE:
            # That is what was asked for, and no fault of the engine.
            self.account.note(self._clock(), "failed", why=str(error), again=False)
            if call.answers or not self._reply.begun:
                raise GivenUp(str(error)) from None
            self._skip(call)
            return
        if self._reply.begun and call.answers:
            raise error
        if self._direct:
            raise GivenUp(str(error)) from None
        if call in self._outstanding:
            assert call.order is not None, "what the scheduler waits for has an order"
            self._failed_order(call.order, error)
        elif call.answers:
            self._failed_decode(call.spec.name, error)

    def _failed_order(self, order: Order, error: EngineFailed) -> None:
        """Its other orders on that engine are void, too."""
        name = order.outlook.engine.name
        for other in self._calls:
            if other in self._outstanding and other.spec.name == name:
                self._cancel(other)
        self._outstanding = [c for c in self._outstanding if c.spec.name != name]
        self._retry(self._desk.failed(self, order, error), error)

    def _failed_decode(self, name: str, error: EngineFailed) -> None:
        self._retry(self._desk.decode_failed(self, name, error), error)

    def _retry(self, again: bool, error: EngineFailed) -> None:
        self.account.note(self._clock(), "failed", why=str(error), again=again)
        if not again and not self._reply.begun:
            raise GivenUp(str(error)) from None
        self.retries += 1

    def _engine_gone(self, name: str, again: bool) -> None:
        """The scheduler has its orders again. An answer that has begun may well be served to its end."""
        error = EngineFailed(name, "gone", "it gets no more requests")
        answering = False
        for call in [c for c in self._calls if c.spec.name == name and not c.cancelled]:
            if call.answers and self._reply.begun:
                continue
            answering = answering or (call.answers and call not in self._outstanding)
            self._cancel(call)
        self._outstanding = [c for c in self._outstanding if c.spec.name != name]
        self.account.note(self._clock(), "engine gone", engine=name)
        if not again and not self._reply.begun:
            raise GivenUp(str(error)) from None
        if answering:
            self._failed_decode(name, error)

    def _start(self, call: Call, work: Work, *args: Any) -> None:
        if self._span is not None:
            call.span = _span_of(call, self._span)
        call.task = asyncio.create_task(_outcome(work, call, *args))
        self._calls.append(call)
        if (span := call.span) is not None:
            # Before the news of it, which may be the end of the request.
            call.task.add_done_callback(lambda task: _end_span(span, call, task))
        call.task.add_done_callback(lambda _: self.tell(Ended(call)))

    def _cancel(self, call: Call) -> None:
        """Called off; its connection is closed when its task ends, which `run` waits for."""
        call.cancelled = True
        if call.presumed is not None:
            call.presumed.cancel()
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

    async def _compute(self, call: Call, order: Order) -> None:
        """The prompt up to a token; of the answer only the end matters."""
        body = self.body
        prompt = self._prompt
        if prompt is None or not body.segments:
            path, raw = f"/v1/{body.kind}", prompt_only(body)
        else:
            path, raw = COMPLETIONS_PATH, segment(body, prompt.tokens[: order.end])
        try:
            async with (
                asyncio.timeout(self._patience_s(call)),
                self._upstream.post(call.spec, path, raw, self._headers_for_call(call)) as answer,
            ):
                call.usage = usage_of(await answer.whole(PREFILL_BYTES_MAX))
        except TimeoutError:
            raise _late(call) from None

    async def _answer(self, call: Call, raw: bytes) -> None:
        """The answer, to the client."""
        path = f"/v1/{self.body.kind}"
        loop = asyncio.get_running_loop()
        late_at = loop.time() + self._patience_s(call)
        # At the deadline it is `run` that ends: the engine has done nothing wrong.
        timer = asyncio.timeout_at(late_at if late_at < self._deadline else None)
        passing = _Passing(call, timer)
        try:
            async with (
                timer,
                self._upstream.post(call.spec, path, raw, self._headers_for_call(call)) as answer,
            ):
                if answer.streams:
                    await self._stream(answer, passing)
                    return
                # What is not streamed comes when all of it is there; nothing tells of the first token.
                data = await answer.whole(self._limits.answer_bytes_max)
                call.usage = usage_of(data)
                self._begin(call)
                passing.at_client = True
                timer.reschedule(loop.time() + self._limits.client_stall_s)
                await self._reply.send(200, data, answer.content_type)
                self._end_well(call)
        except TimeoutError:
            if passing.at_client:
                raise ClientGone("the client does not read its answer") from None
            raise _late(call) from None
        except EventTooLong as error:
            raise EngineFailed(call.spec.name, TOO_LARGE, str(error)) from None

    async def _stream(self, answer: Answer, passing: _Passing) -> None:
        call, timer, reply = passing.call, passing.timer, self._reply
        events = EventStream()
        time = asyncio.get_running_loop().time
        stall_s, client_stall_s = self._limits.stall_s, self._limits.client_stall_s
        while piece := await answer.piece():
            if data := events.feed(piece):
                if not call.began_at:
                    if events.failed_at_once(data):
                        code, message = _error_in(data)
                        if code >= 500:
                            raise EngineFailed(call.spec.name, "error_event", message)
                    self._begin(call)
                    await reply.begin(answer.content_type)
                passing.at_client = True
                timer.reschedule(time() + client_stall_s)
                await reply.write(data)
                passing.at_client = False
            timer.reschedule(time() + stall_s)
        if not events.done:
            raise EngineFailed(call.spec.name, "cut", "its answer ended without its end")
        call.events, call.usage = events.events, events.usage
        await reply.end()
        self._end_well(call)

    def _end_well(self, call: Call) -> None:
        """The client has all of it, and may leave before anybody here looks again."""
        self._presumably_computed(call)
        self.account.note(self._clock(), "answered", engine=call.spec.name, **_said(call))
        self.account.outcome = "answered"
        self._desk.answered(self, call)
        self._complete = True

    def _begin(self, call: Call) -> None:
        """The first part of the answer has come. The client gets it first, and then the scheduler the news."""
        call.began_at = self._clock()
        self.account.note(call.began_at, "first token", engine=call.spec.name)
        if self._span is not None:
            ttft_s = call.began_at - self.account.arrived_s
            self._span.set(engine=call.spec.name, ttft_s=ttft_s)
        self._desk.begun(self, call)
        asyncio.get_running_loop().call_soon(self._presumably_computed, call)

    def _presumably_computed(self, call: Call) -> None:
        """By its first token, or because it should have come by now in an answer that is not streamed."""
        if call in self._outstanding:
            self._computed(call)

    def _patience_s(self, call: Call) -> float:
        """How long an engine may take to begin its answer. One that is not streamed begins with its end."""
        expected_s = call.expected_s
        if call.answers and self.body.value.get("stream") is not True:
            if self._answer_tokens is None:
                return math.inf
            expected_s += self._answer_tokens * max(call.token_s, TOKEN_S_MIN)
        return self._limits.answer_s + SLOWER_MAX * expected_s

    def _headers_for_call(self, call: Call) -> dict[str, str]:
        return {**self._headers, **self._trace.headers(self._random, call.span)}


def _span_of(call: Call, above: Span) -> Span | None:
    if call.order is None:
        name = DECODE
    else:
        name = GENERATE if call.order.whole else PREFILL
    span = above.child(name)
    if span is not None:
        span.set(engine=call.spec.name, node=call.spec.node, expected_s=call.expected_s)
        if call.order is not None:
            span.set(up_to_token=call.order.end)
    return span


def _end_span(span: Span, call: Call, task: asyncio.Task[KvpoolError | None]) -> None:
    if call.began_at:
        span.set(begins_s=call.began_at - call.sent_at)
    called_off = call.cancelled or task.cancelled()
    error = CALLED_OFF if called_off else str(task.result() or "")
    span.end(error, **_said(call))


async def _outcome(work: Work, *args: Any) -> KvpoolError | None:
    """What went wrong, without the frames it came through: they hold the task whose outcome it is.

    Of one that is called off nobody asks.
    """
    try:
        await work(*args)
    except KvpoolError as error:
        error.__context__ = None
        return error.with_traceback(None)
    except asyncio.CancelledError:
        return None
    return None


@dataclass(slots=True)
class _Passing:
    """An answer on its way. at_client: whether it is the client that is waited for."""

    call: Call
    timer: asyncio.Timeout
    at_client: bool = False


def _late(call: Call) -> EngineFailed:
    if call.began_at:
        return EngineFailed(call.spec.name, "stalled", "it stopped in the middle of its answer")
    return EngineFailed(call.spec.name, "timeout", "it did not begin to answer in time")


def _error_in(data: bytes) -> tuple[int, str]:
    """Of the event that an answer begins with: below 500 it is about the request, and the client's to see."""
    line = data.partition(b"\n")[0].removeprefix(b"data:")
    try:
        error = msgspec.json.decode(line, type=_ErrorEvent).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 500, "it answered with an error"
    return error.code, error.message[:500]


class _Error(msgspec.Struct):
    message: str
    code: int


class _ErrorEvent(msgspec.Struct):
    error: _Error


def _said(call: Call) -> dict[str, Any]:
    """Of tokens, for whoever asks later."""
    usage = call.usage
    said = {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage}
    if (cached := call.cached_tokens) is not None:
        said["cached_tokens"] = cached
    return said
