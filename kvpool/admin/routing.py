"""How a route is declared, and what turns a request into its parameters. No I/O.

    @route("GET", "/v1/nodes/{node}", "viewer")
    async def get_node(self, call: Call, wanted: OfNode) -> NodeDetail:

The types of a handler are the parameters, the body and the answer. `openapi.py` describes it by these and by its
docstring.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import msgspec
from aiohttp import web

from kvpool.admin.problems import Refused
from kvpool.admin.tokens import Principal
from kvpool.admin.types import Nothing
from kvpool.decoding import decode_json
from kvpool.errors import ProtocolError
from kvpool.wire.command import Role

JSON = "application/json"
PATH_NAME = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Call:
    """One request. who: asks. request: its id. still: whether whoever asks would be let in now."""

    who: Principal
    request: str
    http: web.Request
    still: Callable[[], bool]

    @property
    def by(self) -> str:
        """On whose behalf, for the audit log."""
        return f"token {self.who.name}"


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, who may use them, and what goes in and out.

    do: called with the `Call`, the parameters (path and query are one struct) and, where there is one, the body. What
    it returns is the answer's body, or the whole response. role: None: no token is needed. whole: for tokens that are
    not limited to tenants. media: of the answer; texts: others, of plain text, in which it can be asked for.
    body_optional: none is the default one.
    """

    method: str
    path: str
    do: Callable[..., Awaitable[Any]]
    role: Role | None
    answer: Any
    params: type[msgspec.Struct] = Nothing
    body: type[msgspec.Struct] | None = None
    status: int = 200
    whole: bool = False
    media: str = JSON
    texts: tuple[str, ...] = ()
    body_optional: bool = False
    routers: bool = False
    hidden: bool = False

    @property
    def name(self) -> str:
        return self.do.__name__

    @property
    def in_path(self) -> tuple[str, ...]:
        return tuple(PATH_NAME.findall(self.path))

    @property
    def changes(self) -> bool:
        """Whether it may be asked for with an Idempotency-Key. Looking something up changes nothing."""
        return self.method != "GET" and self.role in {"operator", "admin"}


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def route(method: str, path: str, role: Role | None, **more: Any) -> Callable[[Handler], Handler]:
    """Declare a method of a class of handlers as the handler of a route. more: fields of `Route`."""

    def declare(do: Handler) -> Handler:
        vars(do)["route"] = {"method": method, "path": path, "role": role, **more}
        return do

    return declare


def routes_of(*handlers: object) -> Iterator[Route]:
    """The routes that these handlers declare, in the order of their declaration."""
    for each in handlers:
        for name, function in vars(type(each)).items():
            for declared in (vars(function)["route"],) if hasattr(function, "route") else ():
                yield _route(getattr(each, name), declared)


def _route(do: Callable[..., Awaitable[Any]], declared: dict[str, Any]) -> Route:
    hints = get_type_hints(do, include_extras=True)
    answer = hints.pop("return")
    if isinstance(answer, type) and issubclass(answer, web.StreamResponse):
        answer = None
    _, params, *body = hints.values()
    return Route(
        **{"answer": answer, "do": do, "params": params, "body": next(iter(body), None)} | declared
    )


def parse_params(route: Route, path: Mapping[str, str], query: Mapping[str, str]) -> msgspec.Struct:
    """Raises `Refused`. What a path names and cannot be is not found."""
    names = [name for name, _ in query.items()]  # `keys` has each once
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise Refused(400, "invalid", f"{', '.join(sorted(twice))}: given twice")
    known = {field.encode_name for field in msgspec.structs.fields(route.params)}
    unknown = [name for name in names if name not in known or name in path]
    if unknown:
        raise Refused(400, "invalid", f"there is no parameter {unknown[0]!r:.80}")
    try:
        return msgspec.convert({**query, **path}, type=route.params, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, "invalid", _in_words(error)) from None


def parse_body(route: Route, raw: bytes) -> msgspec.Struct:
    """Raises `Refused`."""
    assert route.body is not None, "only where there is one"
    if not raw.strip() and route.body_optional:
        return route.body()
    try:
        return decode_json(raw, route.body, "a valid body")
    except ProtocolError as error:
        raise Refused(400, "invalid", _in_words(error)) from None


def _in_words(error: Exception) -> str:
    return str(error)[:500]
