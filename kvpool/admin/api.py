"""The application: the path of every request and its answer. Handlers do the work.

guard        host, origin, token, rate         guard.py
role         of the route                      routing.py
parameters   and body, as structs              routing.py, types.py
key          of a change, if given             idempotency.py
handler      its answer, or an error           handlers/
problem      for errors                        problems.py
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from aiohttp import hdrs, web

from kvpool.admin.guard import Guard, check_host
from kvpool.admin.idempotency import Answer, Remembered, check_key
from kvpool.admin.problems import Refused, problem, refused
from kvpool.admin.routing import JSON, Call, Route, parse_body, parse_params
from kvpool.admin.scope import check_role, whole_only
from kvpool.admin.tokens import Principal
from kvpool.errors import KvpoolError
from kvpool.net import is_loopback

BODY_BYTES_MAX = 4 << 20
FIELD_BYTES_MAX = 8 << 10
HEADERS_MAX = 64
BODY_S = 10.0  # to come
STALL_S = 20.0  # to be read
UNDER_WAY_MAX = 256
OF_TOKEN_MAX = 64  # of these
REQUEST_ID = "x-request-id"
IDEMPOTENCY_KEY = "Idempotency-Key"
PROBLEM = "application/problem+json"
NOBODY = Principal("", "viewer", frozenset())
HEADERS = {
    "Server": "kvpool",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_IDENT = web.RequestKey("ident", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Api:
    """Builds the application. peer_uid: the user of a unix socket's connection; None: not a unix socket.

    trust: is told of each request that was authenticated.
    """

    guard: Guard
    remembered: Remembered
    peer_uid: Callable[[web.Request], int | None]
    trust: Callable[[web.BaseRequest], None]

    def __post_init__(self) -> None:
        self._under_way = 0
        self._of_token: Counter[str] = Counter()

    def application(self, routes: list[Route]) -> web.Application:
        app = web.Application(middlewares=[self._wrap], client_max_size=BODY_BYTES_MAX)
        for route in routes:
            app.router.add_route(route.method, route.path, self._handler(route))
        return app

    @web.middleware
    async def _wrap(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives each request its id, and errors their form."""
        said = request.headers.get(REQUEST_ID, "")
        ident = said if _REQUEST_ID.fullmatch(said) else secrets.token_hex(8)
        request[_IDENT] = ident
        try:
            if self._under_way >= UNDER_WAY_MAX:
                raise Refused(
                    503,
                    "limit",
                    f"{UNDER_WAY_MAX} requests are in progress, the limit",
                    {"Retry-After": "1"},
                )
            self._under_way += 1
            try:
                response = await handler(request)
            finally:
                self._under_way -= 1
        except Refused as error:
            response = _problem(error, ident)
        except KvpoolError as error:
            response = _problem(refused(error), ident)
        except web.HTTPException as error:
            response = _problem(_foreign(error), ident)
            if allow := error.headers.get("Allow"):
                response.headers["Allow"] = allow
        if not response.prepared:
            response.headers[REQUEST_ID] = ident
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            await _send(request, response)
        return response

    def _handler(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            who = self._admit(request, route)
            with self._one_of_token(who):
                return await self._take(route, request, who)

        return handle

    @contextmanager
    def _one_of_token(self, who: Principal) -> Iterator[None]:
        """The requests of one token, or of all without one, take a share of the places. Raises `Refused`."""
        if self._of_token[who.name] >= OF_TOKEN_MAX:
            why = f"{OF_TOKEN_MAX} requests of this token are in progress, the limit"
            raise Refused(429, "limit", why, {"Retry-After": "1"})
        self._of_token[who.name] += 1
        try:
            yield
        finally:
            self._of_token[who.name] -= 1
            if not self._of_token[who.name]:
                del self._of_token[who.name]

    async def _take(self, route: Route, request: web.Request, who: Principal) -> web.StreamResponse:
        """A request that has passed the guard."""
        call = Call(who, request[_IDENT], request, lambda: self.guard.admits_still(who))
        params = parse_params(route, request.match_info, cast(Any, request.query))
        raw = b""
        if route.body is not None:
            raw = await _body(request)
        elif request.can_read_body:
            # Not waited for: otherwise requests without a token could occupy all places.
            raise Refused(
                400, "invalid", "this request must not have a body", {"Connection": "close"}
            )
        key = request.headers.get(IDEMPOTENCY_KEY)
        if key is not None and route.changes:
            check_key(key)
        if key is None or not route.changes:
            return await self._answer(route, call, params, raw)
        scope = f"{who.name} {request.method} {request.path_qs}"

        async def make() -> Answer:
            try:
                response = await self._answer(route, call, params, raw)
            except (Refused, KvpoolError) as error:
                response = _problem(
                    error if isinstance(error, Refused) else refused(error), call.request
                )
            assert isinstance(response, web.Response), "changes are answered in one piece"
            kept = {k: v for k, v in response.headers.items() if k in {"Content-Type", "Location"}}
            return Answer(response.status, cast(bytes, response.body or b""), kept)

        answer = await self.remembered.once(scope, key, raw, make)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    def _admit(self, request: web.Request, route: Route) -> Principal:
        """Raises `Refused`."""
        uid = self.peer_uid(request)
        remote = request.remote or ""
        check_host(
            request.headers.get(hdrs.HOST, ""),
            request.headers.get(hdrs.ORIGIN, ""),
            loopback=uid is None and _is_loopback_address(request),
        )
        if route.role is None:
            return NOBODY
        who = self.guard.admit(
            "" if uid is not None else remote, uid, request.headers.get(hdrs.AUTHORIZATION, "")
        )
        self.trust(request)
        check_role(who, route.role)
        if route.whole:
            whole_only(who)
        return who

    async def _answer(
        self, route: Route, call: Call, params: msgspec.Struct, raw: bytes
    ) -> web.StreamResponse:
        arguments: list[Any] = [call, params]
        if route.body is not None:
            media = call.http.content_type
            if raw and media != JSON and not media.endswith("+json"):
                raise Refused(415, "not_json", f"the body must be {JSON}, not {media[:80]}")
            arguments.append(parse_body(route, raw))
        found = await route.do(*arguments)
        if isinstance(found, web.StreamResponse):
            return found
        response = web.Response(
            status=route.status, body=msgspec.json.encode(found), content_type=JSON
        )
        if route.status == 202:
            response.headers["Location"] = f"{route.path}/{found.job}"
        return response


def _is_loopback_address(request: web.Request) -> bool:
    """Whether the request came to an address of loopback."""
    transport = request.transport
    name = None if transport is None else transport.get_extra_info("sockname")
    return isinstance(name, tuple) and is_loopback(str(name[0]))


async def _body(request: web.Request) -> bytes:
    """Raises `Refused` for one that is too large, or does not come."""
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refused(
            408, "too_slow", f"the body did not arrive within {BODY_S:g} s", {"Connection": "close"}
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise Refused(
            400, "invalid", f"the body does not match its headers: {error}", {"Connection": "close"}
        ) from None


def _too_large() -> Refused:
    return Refused(
        413, "too_large", f"the body has more than {BODY_BYTES_MAX} bytes", {"Connection": "close"}
    )


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    """For so long as a client may take to read it."""
    try:
        async with asyncio.timeout(STALL_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client has left


def _problem(error: Refused, ident: str) -> web.Response:
    response = web.Response(
        status=error.status, body=msgspec.json.encode(problem(error, ident)), content_type=PROBLEM
    )
    response.headers.update(error.headers)
    return response


def _foreign(error: web.HTTPException) -> Refused:
    """What the HTTP library refuses."""
    match error.status:
        case 404:
            return Refused(404, "not_found", "no such path; GET /openapi.json lists the paths")
        case 405:
            return Refused(405, "method", "this path does not support this method")
        case 413:
            return _too_large()
        case status:
            return Refused(status, "invalid", error.reason)
