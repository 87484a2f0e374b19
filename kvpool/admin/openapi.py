"""OpenAPI 3.1 of the table of routes, from the structs that validate requests. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvpool import __version__
from kvpool.admin.routing import JSON, Route
from kvpool.admin.types import Problem

PROBLEM = "application/problem+json"
TEMPLATE = "#/components/schemas/{name}"
TEXTS = {
    400: "The request can never work as it stands.",
    401: "No token, or a wrong one.",
    403: "The token may not do this, or a page of another site asks.",
    404: "There is no such thing, or it is another tenant's.",
    408: "The body did not come in time.",
    409: "It does not fit with what there is.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The Host header names another host.",
    422: "The Idempotency-Key was used for another body.",
    429: "Too many requests, or a bound of the pool is reached.",
    500: "A bug.",
    502: "The daemon, or a router, does not let the gateway in, or speaks otherwise.",
    503: "The daemon, its cluster, or a router does not answer.",
    507: "Pins hold all the space that is needed.",
}
ALWAYS = (400, 403, 413, 421, 429, 500, 503)


def describe(table: Sequence[Route]) -> dict[str, Any]:
    """The document."""
    shown = [route for route in table if not route.hidden]
    bodies = [route.body for route in shown if route.body is not None]
    answers = [route.answer for route in shown if route.answer is not None]
    kinds = [Problem, *bodies, *answers]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=TEMPLATE)
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvpool",
            "version": __version__,
            "description": "What operators see of a kvpool cluster, and change in it. Times are seconds, "
            "keys and digests hex.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
        "tags": [{"name": tag} for tag in sorted({_tag(route) for route in shown})],
    }


def _operation(route: Route) -> dict[str, Any]:
    about = (route.do.__doc__ or "").strip()
    first, _, more = about.partition("\n")
    who = "no token" if route.role is None else f"role {route.role}"
    if route.whole:
        who += ", a token for all tenants"
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": first.rstrip(".")[:120],
        "description": "\n\n".join(filter(None, [first, _plain(more), f"Takes {who}."])),
        "tags": [_tag(route)],
        "parameters": _parameters(route),
        "responses": _responses(route),
    }
    if route.role is None:
        found["security"] = []
    if route.body is not None:
        found["requestBody"] = {
            "required": not route.body_optional,
            "content": {JSON: {"schema": _schema(route.body)}},
        }
    return found


def _parameters(route: Route) -> list[dict[str, Any]]:
    schema, parts = msgspec.json.schema_components([route.params], ref_template=TEMPLATE)
    known = parts[route.params.__name__]
    assert schema, "one was asked for"
    found = []
    for name, inner in known.get("properties", {}).items():
        in_path = name in route.in_path
        plain = {k: v for k, v in inner.items() if k != "description"}
        described = {
            "name": name,
            "in": "path" if in_path else "query",
            "required": in_path or name in known.get("required", ()),
            "schema": plain,
        }
        if text := inner.get("description"):
            described["description"] = text
        found.append(described)
    if route.changes:
        text = "The same key for the same change: it is made once, within ten minutes."
        found.append(_header("Idempotency-Key", text, "^[!-~]{1,128}$"))
    if route.media == "text/event-stream":
        text = "NODE:NUMBER of the last event that was seen."
        found.append(_header("Last-Event-ID", text, "^[!-~]{0,128}$"))
    return found


def _header(name: str, text: str, pattern: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": text,
        "schema": {"type": "string", "pattern": pattern},
    }


def _responses(route: Route) -> dict[str, Any]:
    content = {route.media: {"schema": _schema(str if route.answer is None else route.answer)}}
    content |= {media: {"schema": {"type": "string"}} for media in route.texts}
    good: dict[str, Any] = {"description": "As asked for.", "content": content}
    if route.status == 202:
        good["headers"] = {
            "Location": {"description": "Where it is looked at.", "schema": {"type": "string"}}
        }
    found = {str(route.status): good}
    for status in sorted({*ALWAYS, *_errors(route)}):
        problem: dict[str, Any] = {
            "description": TEXTS[status],
            "content": {PROBLEM: {"schema": _schema(Problem)}},
        }
        if status == 401:
            problem["headers"] = {
                "WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}
            }
        found[str(status)] = problem
    return found


def _schema(kind: Any) -> dict[str, Any]:
    """The schema of a type; of a struct a reference to it."""
    (found,), _ = msgspec.json.schema_components([kind], ref_template=TEMPLATE)
    return found


def _errors(route: Route) -> set[int]:
    found: set[int] = set()
    if route.role is not None:
        found |= {401, 502}
    if route.params.__struct_fields__ or route.body is not None or route.routers:
        found.add(404)
    if route.body is not None:
        found |= {408, 415}
    if route.changes:
        found |= {409, 422, 507}
    return found


def _tag(route: Route) -> str:
    parts = route.path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" else "gateway"


def _plain(text: str) -> str:
    return " ".join(text.split())
