"""Converts a received body, with its prompt's tokens and hashes, to a request for the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import xxhash

from kvpool.errors import Unavailable
from kvpool.router.config import RouterConfig
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.hashing import Prompt
from kvpool.router.http.bodies import BadRequest, Body, Kind, limited, parse, parsed_bytes
from kvpool.router.http.forms import parse_form
from kvpool.router.http.isolation import Isolation
from kvpool.router.http.memory import Held, Memory
from kvpool.router.http.session_hints import SessionHint, hint_of, session_name
from kvpool.router.http.tracing import Trace
from kvpool.router.prompts.tokens import TokenizeRefused, UnknownModel
from kvpool.router.records.explain import Account
from kvpool.router.upstream.specs import EngineSpec
from kvpool.scheduler.values import Request

TOKENIZE_S = 2.0
TOKEN_BYTES = 48
"""Of memory, for a token and its part of a block's hashes."""


class Rejected(BadRequest):
    """A request that is refused now. why: one word. retry_after_s: when to retry; None: not known."""

    def __init__(self, status: int, message: str, why: str, retry_after_s: float | None) -> None:
        super().__init__(status, message, type=why)
        self.why = why
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Incoming:
    """A received request. priority, deadline_s, session: from its headers; None: not given. content_type: of a form.

    hints: its headers that say something of its session. held: the memory that it holds, its raw body included.
    """

    kind: Kind
    raw: bytes
    ident: str
    trace: Trace
    tenant: str
    priority_max: int
    priority: int | None = None
    deadline_s: float | None = None
    session: str | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""
    held: Held = field(default_factory=lambda: Memory(sys.maxsize).hold())


class Prompts(Protocol):
    """The used interface of `prompts.Prompts`."""

    async def prompt(
        self, body: Mapping[str, Any], kind: str, *, deadline_s: float = ...
    ) -> Prompt: ...
    async def look(self, prompt: Prompt, wait_s: float = ...) -> bool: ...
    async def why(self, prompt: Prompt, engine: str) -> dict[str, Any] | None: ...


@dataclass(eq=False, repr=False, slots=True)
class Intake:
    """Reads requests. Event loop only; keeps none."""

    _config: RouterConfig
    _roster: EngineRoster
    _prompts: Prompts
    _clock: Callable[[], float]
    _isolation: Isolation | None = None
    _idents: count[int] = field(default_factory=count, init=False)

    async def read(
        self, incoming: Incoming, account: Account, limit_s: float
    ) -> tuple[Body, Prompt | None, Request, SessionHint]:
        """The request, and what is known of its prompt and of its session. Raises `BadRequest` and `NoRoom`."""
        body = await self.body(incoming)
        account.model = body.model
        prompt: Prompt | None = None
        try:
            if known_as := incoming.kind.prompts:
                prompt = await self._prompts.prompt(
                    body.value, known_as, deadline_s=min(TOKENIZE_S, limit_s)
                )
        except (TokenizeRefused, UnknownModel, Unavailable) as error:
            # Served whole: an engine tokenises it itself, or reports the error.
            account.note(self._clock(), "not tokenised", why=str(error))
        if prompt is not None:
            incoming.held.add(TOKEN_BYTES * len(prompt.tokens))
        if prompt is not None and prompt.keys:
            await self._prompts.look(prompt)
        if prompt is not None and not prompt.tokens:
            prompt = None
        tokens = body.tokens_guess if prompt is None else len(prompt.tokens)
        whole = body.whole or (prompt is None and body.segments)
        hint = self._hint(incoming, body)
        session = incoming.session or hint.session or body.session
        kinds, names = self._roster.models.among(body.model)
        now = self._clock()
        request = Request(
            ident=next(self._idents),
            keys=() if prompt is None else prompt.keys,
            tokens=max(tokens, 1),
            output_tokens=self._output_tokens(body, tokens),
            arrived_s=account.arrived_s,
            session=None if session is None else _session_key(incoming.tenant, body.model, session),
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
        if hint.session:
            account.facts |= {"session": hint.params(), "keep_s": hint.keep_s}
        return body, prompt, request, hint

    async def body(self, incoming: Incoming) -> Body:
        """The body as an engine would get it, kept apart from other tenants'. Raises `BadRequest` and `NoRoom`."""
        models = self._roster.models.names()
        if not models:
            raise Rejected(503, "no engine is available", "no_engine", self._config.probe_s)
        kind, raw = incoming.kind, incoming.raw
        if kind.is_form:
            body = await parse_form(kind, raw, incoming.content_type, models)
        else:
            incoming.held.add(parsed_bytes(raw))
            body = limited(parse(kind, raw, models), incoming.priority_max)
        return body if self._isolation is None else self._isolation.salted(body, incoming.tenant)

    @staticmethod
    def _hint(incoming: Incoming, body: Body) -> SessionHint:
        """By the name that daemons know the session by."""
        controls = b'"cache_control"' in incoming.raw
        hint = hint_of(incoming.hints, body.value, body.own_hint, controls=controls)
        if not body.is_turn:
            return SessionHint(bad=hint.bad)
        if not hint.session:
            return hint
        return replace(hint, session=session_name(incoming.tenant, hint.session))

    async def why(self, prompt: Prompt, engine: str) -> dict[str, Any] | None:
        """Why the engine's node could not provide more of a prompt; None: not known."""
        return await self._prompts.why(prompt, engine)

    def _output_tokens(self, body: Body, tokens: int) -> int:
        """The expected tokens; never more than the engine would generate."""
        most = self.answer_tokens(body, tokens)
        if body.output_tokens is None:
            expected = self._config.output_tokens
            return expected if most is None else min(expected, most)
        return body.output_tokens if most is None else most

    def answer_tokens(self, body: Body, tokens: int) -> int | None:
        """The most tokens that an engine generates for it; None: not known."""
        longest = self._roster.models.longest(body.model)
        if not longest:
            return body.output_tokens
        room = max(longest - tokens, 1)
        return room if body.output_tokens is None else min(body.output_tokens, room)

    @staticmethod
    def _priority(incoming: Incoming, body: Body) -> int:
        wanted = incoming.priority if incoming.priority is not None else body.priority or 0
        return max(-100, min(wanted, incoming.priority_max))

    def too_long(self, body: Body, prompt: Prompt | None, request: Request) -> EngineSpec | None:
        """The engine that refuses a prompt longer than the model: any engine that serves it."""
        longest = self._roster.models.longest(body.model)
        if prompt is None or not longest or request.tokens < longest:
            return None
        return self.any_for(body.model)

    def any_for(self, model: str) -> EngineSpec:
        """One that serves the model and gets requests."""
        found = self._roster.passing(model)
        if not found:
            raise Rejected(
                503, f"no engine is available for {model}", "no_engine", self._config.probe_s
            )
        return found[0]


def _session_key(*parts: object) -> str:
    """Of bounded length, and text that can be encoded, whatever a client calls its session."""
    said = "\0".join(map(str, parts))
    return xxhash.xxh3_128_hexdigest(said.encode(errors="surrogatepass"))
