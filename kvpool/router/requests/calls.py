"""Calls to engines for one request: their bodies and time limits, and the answer to the client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.errors import KvpoolError, ProtocolError
from kvpool.router.config import RouterConfig
from kvpool.router.hashing import Prompt
from kvpool.router.http.bodies import SESSION, Body, Kind, prompt_only, segment, with_params
from kvpool.router.http.memory import Held, Memory
from kvpool.router.http.moving_limit import MovingLimit
from kvpool.router.http.session_hints import NO_HINT, SessionHint
from kvpool.router.http.sse import (
    DETAILS,
    EventStream,
    EventTooLong,
    NoEvent,
    cached_tokens,
    is_json,
    usage_of,
    with_cached,
)
from kvpool.router.http.tracing import Trace
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import (
    CUT,
    GARBAGE,
    GONE,
    REFUSAL_BYTES_MAX,
    REFUSAL_S,
    TOO_LARGE,
    Answer,
    EngineFailed,
    EngineRefused,
    Upstream,
)
from kvpool.scheduler.values import Order, Saves
from kvpool.telemetry.spans import CALLED_OFF, DECODE, GENERATE, PREFILL, Span

PREFILL_BYTES_MAX = 1 << 20
REPORT = {"kvpool": {"report": True}}
"""Of an engine with the plugin: that its answer says what was saved."""
JSON = "application/json"
SHOWN = 50


class Reply(Protocol):
    """The client's side. begun: whether any of an answer was sent. Raises `ClientGone` if it has disconnected."""

    begun: bool

    async def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None: ...
    async def begin(self, headers: Mapping[str, str]) -> None: ...
    async def write(self, data: bytes) -> None: ...
    async def end(self, data: bytes = b"") -> None: ...


class ClientGone(KvpoolError):
    """The client has disconnected, or does not read."""

    code = "client_gone"


@dataclass(slots=True, eq=False)
class Call:
    """One call to an engine. order: what it computes; None: it only answers. answers: whether it is the client's
    answer.

    expected_s: until it begins to answer. began_at: when it did. usage: the engine's token counts. saves: what it says
    of the prompt's blocks, None: nothing. events: parts of a streamed answer. failed: whether an error is one of them.
    at_client: whether it waits for the client. follows: whether it waits for a prompt that another engine computes.
    timer: for what is done if it does not begin. span: if
    the request is traced; its end is that of the task. task: its result is an error or None; None once that was read.
    """

    spec: EngineSpec
    order: Order | None
    answers: bool
    sent_at: float
    expected_s: float
    began_at: float = 0.0
    ended_at: float = 0.0
    usage: Mapping[str, Any] = field(default_factory=dict)
    saves: Saves | None = None
    events: int = 0
    failed: bool = False
    cancelled: bool = False
    at_client: bool = False
    follows: bool = False
    timer: asyncio.TimerHandle | None = None
    span: Span | None = None
    task: asyncio.Task[KvpoolError | None] | None = None

    @property
    def cached_tokens(self) -> int | None:
        return cached_tokens(dict(self.usage))

    @property
    def answer_tokens(self) -> int:
        """Of an answer that has begun, at least one: as the engine says, or the parts of its stream so far."""
        said = self.usage.get("completion_tokens", self.usage.get("output_tokens"))
        return said if type(said) is int and said > 0 else max(self.events, 1)

    @property
    def tokens(self) -> dict[str, Any]:
        """The engine's token counts, for explanations and spans."""
        usage = self.usage
        said = {
            name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage
        }
        if (cached := self.cached_tokens) is not None:
            said["cached_tokens"] = cached
        return said


class AnswerListener(Protocol):
    """Notified of an answer's progress at once: the client may disconnect before another task runs."""

    def answer_begun(self, call: Call) -> None:
        """Its first part has arrived; the client has nothing yet."""

    def answer_ended(self, call: Call) -> None:
        """The client has all of it."""

    async def prompt_cached(self, call: Call) -> int | None:
        """How many tokens of the prompt were not computed for this request, if others have computed some of it."""


@dataclass(eq=False, repr=False, slots=True)
class Caller:
    """Calls engines for one request. Raises `EngineFailed`, `EngineRefused`, `ClientGone`, `NoRoom`, `Exhausted`.

    deadline: by the loop's clock; the caller ends all calls then. Until then a call goes on while its engine is alive,
    however long it takes. alive: whether the engine of this name is. hint: on its session, which is passed on to
    engines with the plugin.
    """

    _body: Body
    _prompt: Prompt | None
    _upstream: Upstream
    config: RouterConfig
    _trace: Trace
    _headers: Mapping[str, str]
    _random: Callable[[int], bytes]
    deadline: float
    _alive: Callable[[str], bool]
    _memory: Memory
    _hint: SessionHint = NO_HINT

    async def compute(self, call: Call, order: Order) -> None:
        """Compute the prompt up to a token; only the end of the answer matters."""
        body = self._body
        prompt = self._prompt
        # Engines of a known namespace have the plugin, which says what it saves.
        params: Mapping[str, object] | None = REPORT if call.spec.namespace else None
        if params is not None and order.last and self._hint.session:
            # The session waits, and ends, where it is answered.
            turn = SessionHint(self._hint.session, self._hint.agent)
            params = {**params, SESSION: turn.params()}
        if prompt is None or not body.segments:
            path, raw = body.kind.value, prompt_only(body, params)
        else:
            path, raw = Kind.COMPLETIONS.value, segment(body, prompt.tokens[: order.end], params)
        try:
            async with (
                self._while_alive(call),
                self._upstream.ask(call.spec, path, raw, self._headers_for_call(call)) as answer,
            ):
                data = await answer.whole(PREFILL_BYTES_MAX)
                call.usage = _usage(answer, data)
                if params is not None:
                    call.saves = _saves(data)
        except TimeoutError:
            raise _silent(call) from None

    async def answer(
        self,
        call: Call,
        params: Mapping[str, object] | None,
        reply: Reply,
        listener: AnswerListener,
    ) -> None:
        """The answer, to the client. params: for the engine's KV connector, beside the body's own."""
        path, raw = self._body.kind.value, self._raw_for(call.spec, params or {})
        limit = self._while_alive(call)
        passing = _Passing(call, reply, listener, limit)
        try:
            async with (
                limit,
                self._upstream.ask(call.spec, path, raw, self._headers_for_call(call)) as answer,
            ):
                if answer.streams:
                    with self._memory.hold() as held:
                        await self._stream(answer, passing, held)
                    return
                with self._memory.hold() as held:
                    await self._send(answer, passing, held)
        except TimeoutError:
            if call.at_client:
                raise ClientGone("the client does not read its answer") from None
            raise _silent(call) from None
        except EventTooLong as error:
            raise EngineFailed(call.spec.name, TOO_LARGE, str(error)) from None
        except NoEvent as error:
            raise EngineFailed(call.spec.name, GARBAGE, str(error)) from None

    def _raw_for(self, spec: EngineSpec, params: Mapping[str, object]) -> bytes:
        if spec.namespace and self._hint.session:
            params = {**params, SESSION: self._hint.params()}
        return with_params(self._body, params) if params else self._body.raw

    async def _send(self, answer: Answer, passing: _Passing, held: Held) -> None:
        """An answer that is not streamed arrives at once; the time of its first token is unknown."""
        call = passing.call
        data = await answer.whole(self.config.answer_bytes_max, held)
        if self._body.kind.generates or answer.content_type.startswith(JSON):
            call.usage = _usage(answer, data)
        data = await _mended(data, passing)
        passing.listener.answer_begun(call)
        call.at_client = True
        passing.limit.move(asyncio.get_running_loop().time() + self.config.client_stall_s)
        await passing.reply.send(200, data, answer.headers)
        passing.listener.answer_ended(call)

    async def _stream(self, answer: Answer, passing: _Passing, held: Held) -> None:
        call, reply, move = passing.call, passing.reply, passing.limit.move
        events = EventStream()
        time = asyncio.get_running_loop().time
        stall_s, client_stall_s = self.config.stall_s, self.config.client_stall_s
        last = b""
        while piece := await answer.piece():
            data = events.feed(piece)
            call.events = events.events
            if held.size or not data:
                held.resize(events.waiting)
            if data:
                if not call.began_at:
                    if events.failed:
                        status = _status_in(data)
                        data = await _refusal(data, answer, events, held)
                        raise EngineRefused(call.spec.name, status, data, answer.headers, 200)
                    passing.listener.answer_begun(call)
                    await reply.begin(answer.headers)
                data = await _mended(data, passing)
                call.at_client = True
                move(time() + client_stall_s)
                if events.done and answer.ended:
                    last = data
                    break
                await reply.write(data)
                call.at_client = False
            move(time() + stall_s)
        if not events.done and not events.failed:
            raise EngineFailed(call.spec.name, CUT, "the engine's answer ended early")
        call.usage, call.failed = events.usage, events.failed
        await reply.end(last)
        passing.listener.answer_ended(call)

    def _while_alive(self, call: Call) -> MovingLimit:
        def alive(engine: str) -> bool:
            return not call.at_client and self._alive(engine)

        return while_alive(alive, call.spec.name, self.config.stall_s)

    def _headers_for_call(self, call: Call) -> dict[str, str]:
        traced = self._trace.headers(self._random, call.span)
        return {**self._headers, "Content-Type": self._body.content_type, **traced}


def while_alive(alive: Callable[[str], bool], engine: str, stall_s: float) -> MovingLimit:
    """The limit of a wait for an engine: after a silence of `stall_s`, if the engine is not alive then."""

    def prolonged_s() -> float:
        return stall_s if alive(engine) else 0.0

    return MovingLimit(asyncio.get_running_loop().time() + stall_s, prolonged_s)


def span_of(call: Call, above: Span) -> Span | None:
    """The span of a call; None: its request is not traced."""
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


def end_span(span: Span, call: Call, task: asyncio.Task[KvpoolError | None]) -> None:
    """End a call's span with how the call ended."""
    if call.began_at:
        span.set(begins_s=call.began_at - call.sent_at)
    called_off = call.cancelled or task.cancelled()
    error = CALLED_OFF if called_off else str(task.result() or "")
    span.end(error, **call.tokens)


@dataclass(slots=True)
class _Passing:
    """An answer being forwarded."""

    call: Call
    reply: Reply
    listener: AnswerListener
    limit: MovingLimit


async def _refusal(data: bytes, answer: Answer, events: EventStream, held: Held) -> bytes:
    """Return these events with the rest of their stream, as far as it comes within `REFUSAL_S`."""
    with suppress(TimeoutError, EngineFailed, EventTooLong, NoEvent):
        async with asyncio.timeout(REFUSAL_S):
            while not events.done and len(data) + events.waiting < REFUSAL_BYTES_MAX:
                if not (piece := await answer.piece()):
                    break
                data += events.feed(piece)
                held.resize(len(data) + events.waiting)
    return data


async def _mended(data: bytes, passing: _Passing) -> bytes:
    """The same, with the tokens that were not computed in its usage.

    To the engine that answers, what another one has computed for this request is as cached as what was there before.
    """
    if DETAILS not in data:
        return data
    cached = await passing.listener.prompt_cached(passing.call)
    return data if cached is None else with_cached(data, cached)


def _usage(answer: Answer, data: bytes) -> dict[str, Any]:
    """The usage of a whole answer. Raises `EngineFailed` if it is no answer: an error page, or cut by a proxy."""
    usage = usage_of(data)
    if not usage and not is_json(data):
        message = f"its answer is not JSON but {answer.content_type[:SHOWN]}: {data[:SHOWN]!r}"
        raise EngineFailed(answer.engine, GARBAGE, message)
    return usage


def _saves(data: bytes) -> Saves | None:
    """What an engine's plugin says of the prompt's blocks (its `SaveReport`); None: nothing that is understood."""
    try:
        params = _decode_reported(data).kv_transfer_params
    except ProtocolError:
        return None
    if params is None or params.kvpool is None:
        return None
    said = params.kvpool
    return Saves(said.saved_tokens + said.saving_tokens, said.saving_tokens, said.saving_s)


def _silent(call: Call) -> EngineFailed:
    when = "stopped in the middle of its answer" if call.began_at else "did not begin to answer"
    return EngineFailed(call.spec.name, GONE, f"it {when}, and its probes fail")


def _status_in(data: bytes) -> int:
    """The status in an error event; 500 if there is none."""
    found = _ERROR_DATA.search(data)
    try:
        code = 500 if found is None else _decode_error(found[1]).error.code
    except ProtocolError:
        return 500
    return code if 400 <= code < 600 else 500


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _SaveReport(msgspec.Struct):
    saved_tokens: _Tokens
    saving_tokens: _Tokens
    saving_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] | None


class _Params(msgspec.Struct):
    kvpool: _SaveReport | None = None


class _Reported(msgspec.Struct):
    kv_transfer_params: _Params | None = None


_decode_reported = JsonDecoder[_Reported](_Reported, "an engine's report of its saves")


_ERROR_DATA = re.compile(rb'^data:(\s*\{\s*"error"\s*:.*)$', re.MULTILINE)


class _Error(msgspec.Struct):
    code: int


class _ErrorEvent(msgspec.Struct):
    error: _Error


_decode_error = JsonDecoder[_ErrorEvent](_ErrorEvent, "an error")
