"""The HTTP API: paths, authentication, headers, error bodies. Requests are processed in `requests.py`.

    POST   /v1/completions, /v1/chat/completions   answered by engines, streamed or not
    POST   the other paths of `Kind`               the same, whole by one engine; two of them take forms
    POST   /tokenize, /detokenize                  forwarded to one
    GET    /version                                the same
    GET    /v1/models, /health
    GET    /explain/ID, POST /explain              why a request went where; where one would go
    POST   /sessions/ID/end                        the client's session has no further turns
    POST   /intents                                what is wanted for the blocks of a request's prompt
    GET    /metrics, /engines                      operators only, as all below
    POST   /engines/NAME/drain, DELETE the same
    PUT    /engines/NAME/weight                    {"weight": 0.1}: a share of its possible requests

Errors have vLLM's format. The router adds one header to an answer, `x-kvpool-request-id`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NoReturn

import msgspec
from aiohttp import web

from kvpool.decoding import JsonDecoder, decode_json
from kvpool.errors import ProtocolError
from kvpool.net import names_loopback
from kvpool.router.config import RouterConfig, Secrets
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.group.group import PATH as GROUP_PATH
from kvpool.router.group.group import Group
from kvpool.router.http.bodies import BadRequest, Kind, error_body
from kvpool.router.http.memory import Held, NoRoom
from kvpool.router.http.session_hints import HEADERS as SESSION_HEADERS
from kvpool.router.http.session_hints import NAME_MAX
from kvpool.router.http.tracing import request_id, trace_of
from kvpool.router.http.turnstile import Turnstile
from kvpool.router.records.metrics import Metrics
from kvpool.router.requests.calls import ClientGone
from kvpool.router.requests.intake import Incoming, Rejected
from kvpool.router.requests.intents import PLACES_MAX, Wanted
from kvpool.router.requests.serving import RETRY_AFTER_S_MAX, Serving
from kvpool.types import Intent

log = logging.getLogger("kvpool.router")

LOADS = (
    "state",
    "breaker",
    "role",
    "prefills",
    "queued_tokens",
    "decodes",
    "context_tokens",
    "free_in_s",
)
"""What the router that schedules knows of an engine."""
REQUEST_ID = "x-kvpool-request-id"
PRIORITY = "x-kvpool-priority"
DEADLINE = "x-kvpool-deadline-s"
AS_TENANT = "x-kvpool-tenant"
SESSION = "x-session-id"
API_KEY = "x-api-key"
SESSION_CHARACTERS_MAX = 256
KEEP_MAX_S = 7 * 86_400.0
NODE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
HEADER_BYTES_MAX = 16 << 10
JSON = "application/json"
OPEN_PATHS = frozenset(("/health",))
OPERATOR = ""
TURN_REQUESTS = 16
"""Begun at one turn of the event loop: some 20 ms of work."""
_KINDS = {kind.value: kind for kind in Kind}
IDENT = web.RequestKey("ident", str)
TENANT = web.RequestKey("tenant", str)
HELD = web.RequestKey("held", Held)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Streamed(web.StreamResponse):
    """Its head leaves with the first piece."""

    _send_headers_immediately = False


class HttpReply:
    """The output of a request to its client. ended: all is sent. response: the handler's return value."""

    def __init__(self, request: web.Request, ident: str, closes: Callable[[], bool]) -> None:
        """closes: whether its connection ends with it."""
        self.begun = False
        self.ended = False
        self._request = request
        self._headers = {REQUEST_ID: ident}
        self._closes = closes
        self.response: web.StreamResponse | None = None

    async def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """An answer in one piece."""
        self.begun = True
        self.response = web.Response(status=status, body=body, headers={**headers, **self._headers})
        if self._closes():
            self.response.force_close()
        try:
            await self.response.prepare(self._request)
            await self.response.write_eof()
        except ConnectionError:
            raise ClientGone("the client has disconnected") from None
        self.ended = True

    async def begin(self, headers: Mapping[str, str]) -> None:
        self.begun = True
        self.response = _Streamed(headers={**headers, **self._headers})
        if self._closes():
            self.response.force_close()
        try:
            await self.response.prepare(self._request)
        except ConnectionError:
            raise ClientGone("the client has disconnected") from None

    async def write(self, data: bytes) -> None:
        """Returns when the client has read enough of what was written."""
        assert self.response is not None, "it has begun"
        try:
            await self.response.write(data)
        except ConnectionError:
            raise ClientGone("the client has disconnected") from None

    async def end(self, data: bytes = b"") -> None:
        """data: its last piece."""
        assert self.response is not None, "it has begun"
        try:
            await self.response.write_eof(data)
        except ConnectionError:
            raise ClientGone("the client has disconnected") from None
        self.ended = True


class Guard:
    """Authentication. Tokens are compared as digests, so timing reveals nothing about them."""

    def __init__(self, secrets: Secrets) -> None:
        tokens = dict(secrets.tenants)
        if secrets.token:
            tokens[secrets.token] = OPERATOR
        self._tenants = {_digest(token): tenant for token, tenant in tokens.items()}

    def tenant(self, request: web.Request) -> str:
        """The caller's tenant, or `OPERATOR`. Raises `BadRequest`."""
        if not self._tenants:
            # Without tokens it listens on loopback only. A web page is not local, and may use a host
            # name of its own that leads here.
            if "Origin" in request.headers or not names_loopback(request.headers.get("Host", "")):
                raise BadRequest(
                    403,
                    "without a token only requests from this machine, to localhost and not from a web page, are "
                    "allowed",
                    type="PermissionError",
                )
            return OPERATOR
        said = request.headers.get("Authorization", "")
        if not said and (key := request.headers.get(API_KEY)):  # as clients of `/v1/messages` do
            said = f"Bearer {key}"
        scheme, _, token = said.partition(" ")
        tenant = self._tenants.get(_digest(token.strip()))
        if scheme.lower() != "bearer" or tenant is None:
            raise BadRequest(
                401, "Authorization: Bearer TOKEN is missing or wrong", type="AuthenticationError"
            )
        return tenant


@dataclass(eq=False, repr=False, slots=True)
class Api:
    """Builds the application."""

    _config: RouterConfig
    _guard: Guard
    _serving: Serving
    _roster: EngineRoster
    _group: Group
    _metrics: Metrics
    _knowledge: Callable[[], Mapping[str, Any]]
    """The catalogs of engines and prompts, as plain values."""
    _started_at: int
    """Seconds since 1970."""
    _trust: Callable[[web.BaseRequest], None]
    """Is told of each request that was authenticated."""
    _random: Callable[[int], bytes] = os.urandom
    _turnstile: Turnstile = field(default_factory=lambda: Turnstile(TURN_REQUESTS), init=False)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._wrap])
        app.add_routes(
            [
                *(web.post(kind.value, partial(self._serve, kind)) for kind in Kind),
                web.post("/tokenize", self._forward),
                web.post("/detokenize", self._forward),
                web.get("/version", self._forward),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.get("/engines", self._engines),
                web.get(GROUP_PATH, self._follow),
                web.post("/engines/{name}/drain", self._drain),
                web.delete("/engines/{name}/drain", self._undrain),
                web.put("/engines/{name}/weight", self._weigh),
                web.get("/explain/{ident}", self._explain),
                web.post("/explain", self._dry_run),
                web.post("/sessions/{session:.+}/end", self._end_session),
                web.post("/intents", self._intend),
            ]
        )
        return app

    @web.middleware
    async def _wrap(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives each request its id and its tenant, and counts its memory until it has ended."""
        request[IDENT] = request_id(request.headers.get("x-request-id", ""), self._random)
        with self._serving.memory.hold() as held:
            request[HELD] = held
            return await self._answer(request, handler)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer; errors in their format."""
        try:
            if request.path not in OPEN_PATHS:
                request[TENANT] = self._guard.tenant(request)
                self._trust(request)
            response = await handler(request)
        except BadRequest as error:
            response = _refusal(error, request.path)
        except web.HTTPException as error:
            kind = "NotFoundError" if error.status == 404 else "BadRequestError"
            refused = BadRequest(error.status, error.reason, type=kind)
            response = _refusal(refused, request.path)
            if allow := error.headers.get("Allow"):
                response.headers["Allow"] = allow
        except ClientGone:
            # Nobody reads it.
            response = web.Response(status=499)
        if not response.prepared:
            response.headers[REQUEST_ID] = request[IDENT]
            if self._serving.active.draining:
                # So that its client connects to another router.
                response.force_close()
            await self._send(request, response)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse) -> None:
        """As long as a client may take to read it."""
        try:
            async with asyncio.timeout(self._config.client_stall_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            _hang_up(request)
        except ConnectionError:
            pass  # the client has left

    async def _serve(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        await self._turnstile.enter()
        incoming = await self._incoming(request, kind)
        reply = HttpReply(request, incoming.ident, lambda: self._serving.active.draining)
        await self._serving.serve(incoming, reply)
        if reply.response is None or not reply.ended:
            _hang_up(request)
            raise ClientGone("the client has disconnected")
        return reply.response

    async def _incoming(self, request: web.Request, kind: Kind) -> Incoming:
        headers, tenant = request.headers, request[TENANT]
        config = self._config
        table = config.tenants.get(tenant)
        return Incoming(
            kind=kind,
            raw=await self._body(request),
            ident=request[IDENT],
            trace=trace_of(
                headers.get("traceparent", ""), headers.get("tracestate", ""), self._random
            ),
            tenant=tenant,
            priority_max=config.priority_max if table is None else table.priority_max,
            priority=_whole(headers.get(PRIORITY), PRIORITY),
            deadline_s=_seconds(headers.get(DEADLINE), DEADLINE),
            session=_session(headers.get(SESSION)),
            hints={name: headers[name] for name in SESSION_HEADERS if name in headers},
            held=request[HELD],
            content_type=headers.get("Content-Type", ""),
        )

    async def _body(self, request: web.Request) -> bytes:
        """Raises `BadRequest` for one that is too large, for which there is no room, or that does not arrive."""
        most, content = self._config.body_bytes_max, request.content
        if (request.content_length or 0) > most:
            raise _too_large(most)
        try:
            with self._serving.active.reading():
                if content.is_eof():  # it came with its head
                    if len(whole := content.read_nowait()) > most:
                        raise _too_large(most)
                    request[HELD].add(len(whole))
                    return whole
                async with asyncio.timeout(self._config.client_stall_s):
                    body = bytearray()
                    while piece := await content.readany():
                        if len(body) + len(piece) > most:
                            raise _too_large(most)
                        request[HELD].add(len(piece))
                        body += piece
                    return bytes(body)
        except NoRoom as error:
            raise self._serving.active.no_room(error) from None
        except TimeoutError:
            raise BadRequest(408, "the body did not arrive in time") from None
        except web.RequestPayloadError as error:
            raise BadRequest(400, f"the body does not match its headers: {error}") from None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        raw = b"" if request.method == "GET" else await self._body(request) or b"{}"
        status, body, headers = await self._serving.pass_through(
            request.path, raw, request[IDENT], request[HELD]
        )
        return web.Response(status=status, body=body, headers=headers)

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        rows = [
            {
                "id": name,
                "object": "model",
                "created": self._started_at,
                "owned_by": "kvpool",
                "parent": self._roster.models.parent(name),
                "max_model_len": longest or None,
            }
            for name, longest in self._roster.models.lengths().items()
        ]
        return _json({"object": "list", "data": rows})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        why = self._serving.well
        return _json({"status": why or "ok"}, status=503 if why else 200)

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        _operators_only(request)
        self._serving.refresh_metrics()
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.text(), headers=headers)

    async def _engines(self, request: web.Request) -> web.StreamResponse:
        _operators_only(request)
        shown = await self._engine_rows()
        knowledge = dict(self._knowledge())
        if said := await self._group.ask_leader("kinds"):
            knowledge["kinds"] = decode_json(said, dict[str, Any], "kinds of engines")
        return _json({**shown, "group": self._group.plain(), "knowledge": knowledge})

    async def _engine_rows(self) -> dict[str, Any]:
        """With the loads that the router knows which schedules."""
        rows = self._roster.engines()
        if said := await self._group.ask_leader("engines"):
            loads = {row["name"]: row for row in decode_json(said, list[dict[str, Any]], "engines")}
            for row in rows:
                there = loads.get(row["name"], {})
                row |= {name: there[name] for name in LOADS if name in there}
        return {"engines": rows}

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        _operators_only(request)
        return await self._group.serve(request)

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        _operators_only(request)
        self._roster.drain(request.match_info["name"])
        return _json(await self._engine_rows())

    async def _undrain(self, request: web.Request) -> web.StreamResponse:
        _operators_only(request)
        self._roster.undrain(request.match_info["name"])
        return _json(await self._engine_rows())

    async def _weigh(self, request: web.Request) -> web.StreamResponse:
        _operators_only(request)
        try:
            weight = decode_json(await self._body(request), _Weight, "a weight").weight
        except ProtocolError as error:
            raise BadRequest(400, f'the body must be {{"weight": 0.5}}: {error}') from None
        self._roster.weigh(request.match_info["name"], weight)
        return _json(await self._engine_rows())

    async def _explain(self, request: web.Request) -> web.StreamResponse:
        tenant = request[TENANT]
        ident, whose = request.match_info["ident"], None if tenant == OPERATOR else tenant
        account = self._serving.accounts.get(ident, whose)
        if account is not None:
            return _json(account.plain(whose))
        if said := await self._group.ask_all("account", ident, whose):
            return web.Response(body=said, content_type=JSON)
        raise BadRequest(404, "this request is unknown, or has expired", type="NotFoundError")

    async def _end_session(self, request: web.Request) -> web.StreamResponse:
        session = request.match_info["session"]
        if len(session) > NAME_MAX or not session.isprintable():
            raise BadRequest(
                400, f"a session's name is at most {NAME_MAX} printable characters", param="session"
            )
        if not self._serving.sessions.end(request[TENANT], session):
            raise BadRequest(
                404,
                "this router has not served this session, or has forgotten it; a request of the session can also say that "
                "it is the last one",
                type="NotFoundError",
            )
        return _json({"session": session, "ended": True})

    async def _dry_run(self, request: web.Request) -> web.StreamResponse:
        # It reveals what is cached, by any sender.
        _operators_only(request)
        incoming = await self._incoming(request, Kind.COMPLETIONS)
        if (tenant := request.headers.get(AS_TENANT)) is not None:
            incoming = replace(incoming, tenant=tenant)
        if b'"messages"' in incoming.raw:
            incoming = replace(incoming, kind=Kind.CHAT)
        return _json(await self._serving.explain(incoming, self._group.explained))

    async def _intend(self, request: web.Request) -> web.StreamResponse:
        incoming = await self._incoming(request, Kind.COMPLETIONS)
        said, kind = parse_intent(incoming.raw)
        tenant = incoming.tenant
        if tenant == OPERATOR:
            tenant = request.headers.get(AS_TENANT, OPERATOR)
        else:
            self._check_may_intend(tenant, said)
        wanted = Wanted(said.intent, said.hard, said.for_s, said.dry_run, tuple(said.nodes))
        incoming = replace(incoming, kind=kind, raw=bytes(said.request), tenant=tenant)
        found = await self._serving.intend(incoming, wanted, self._group.explained)
        if not wanted.dry_run:
            log.info(
                "request %s: %s for %d blocks of a prompt of %s",
                *(incoming.ident, wanted.intent, found["prompt_blocks"], tenant or "no tenant"),
                extra={"request": incoming.ident},
            )
        return _json(found)

    def _check_may_intend(self, tenant: str, said: IntentBody) -> None:
        """Raises `BadRequest`. What is held counts in the pool's quotas, which tenants of a router have in common."""
        table = self._config.tenants.get(tenant)
        if table is None or said.intent not in table.intents:
            raise BadRequest(
                403,
                f"this tenant may not {said.intent} blocks: its table names no such intents",
                type="PermissionError",
            )
        if said.hard:
            raise BadRequest(
                403, "a hard pin requires the operator's token", type="PermissionError"
            )


class IntentBody(msgspec.Struct, forbid_unknown_fields=True):
    """request: a body; path: where it would be sent, by default a chat if it has messages, else a completion."""

    intent: Intent
    request: msgspec.Raw
    path: str = ""
    nodes: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=NODE_PATTERN)]],
        msgspec.Meta(max_length=PLACES_MAX),
    ] = []
    hard: bool = False
    for_s: Annotated[float, msgspec.Meta(ge=0, le=KEEP_MAX_S)] = 0.0
    dry_run: bool = False


class _Shape(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()


_decode_intent = JsonDecoder[IntentBody](
    IntentBody, 'an intent such as {"intent": "keep", "for_s": 900, "request": {…}}'
)
_decode_shape = JsonDecoder[_Shape](_Shape, "a request, a JSON object")


def parse_intent(raw: bytes) -> tuple[IntentBody, Kind]:
    """The body of an intent, and what its request is. Raises `BadRequest`."""
    try:
        said = _decode_intent(raw)
        kind = _kind_of(said)
    except ProtocolError as error:
        raise BadRequest(400, str(error)) from None
    if (said.intent is Intent.KEEP) != (said.for_s > 0):
        raise BadRequest(400, "for_s belongs to keep, and to nothing else", param="for_s")
    if said.hard and said.intent is not Intent.PIN:
        raise BadRequest(400, "only a pin can be hard", param="hard")
    return said, kind


def _kind_of(said: IntentBody) -> Kind:
    """Raises `BadRequest` and `ProtocolError`."""
    if not said.path:
        chat = bytes(_decode_shape(said.request).messages) not in {b"", b"null"}
        return Kind.CHAT if chat else Kind.COMPLETIONS
    kind = _KINDS.get(said.path)
    if kind is None or not kind.prompts:
        raise BadRequest(
            400,
            f"a path is one of {', '.join(k for k in Kind if k.prompts)}, not {said.path!r:.100}",
            param="path",
        )
    return kind


class _Weight(msgspec.Struct, forbid_unknown_fields=True):
    weight: float


def _too_large(most: int) -> BadRequest:
    return BadRequest(413, f"the body has more than {most} bytes")


def _hang_up(request: web.Request) -> None:
    """For a client that does not read: its remaining bytes are dropped."""
    if request.transport is not None:
        request.transport.abort()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _operators_only(request: web.Request) -> None:
    if request[TENANT] != OPERATOR:
        raise BadRequest(403, "this requires the operator's token", type="PermissionError")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), headers={"Content-Type": JSON}
    )


def _refusal(error: BadRequest, path: str) -> web.Response:
    kind = _KINDS.get(path)
    body = error_body(error.status, str(error), error.type, error.param, kind)
    headers = {"Content-Type": JSON}
    if isinstance(error, Rejected) and error.retry_after_s is not None:
        seconds = min(max(1, math.ceil(error.retry_after_s)), RETRY_AFTER_S_MAX)
        headers["Retry-After"] = str(seconds)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"
    return web.Response(status=error.status, body=body, headers=headers)


def _whole(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        _bad(name)
    return number


def _seconds(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        _bad(name)
    if not 0 < seconds < math.inf:
        _bad(name)
    return seconds


def _bad(name: str) -> NoReturn:
    raise BadRequest(400, f"{name} is not a valid number", param=name)


def _session(text: str | None) -> str | None:
    return text[:SESSION_CHARACTERS_MAX] if text else None
