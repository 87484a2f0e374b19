"""The dashboard's files, and the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
from aiohttp import web

from kvpool.admin.openapi import describe
from kvpool.admin.problems import not_found
from kvpool.admin.routing import Call, Route, route
from kvpool.admin.types import Given, Nothing

FILE_BYTES_MAX = 4 << 20
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
MEDIA = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*){0,4}")


class OfFile(Given, frozen=True):
    """A file of the dashboard."""

    path: str = ""


class Pages:
    """Handlers."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(str(files("kvpool.admin"))) / "ui"
        self._document = b"{}"

    def describe(self, table: Sequence[Route]) -> None:
        """The description for `/openapi.json`."""
        self._document = msgspec.json.encode(describe(table))

    @route("GET", "/openapi.json", "viewer", answer=dict)
    async def get_openapi(self, _call: Call, _: Nothing) -> web.Response:
        """This description."""
        return web.Response(body=self._document, content_type="application/json")

    @route("GET", "/ui", None, media="text/html", hidden=True)
    async def redirect_ui(self, _call: Call, _: Nothing) -> web.Response:
        """Redirects to the dashboard at /ui/."""
        return web.Response(status=308, headers={"Location": "/ui/"})

    @route("GET", "/", None, media="text/html", hidden=True)
    async def redirect_root(self, call: Call, _: Nothing) -> web.Response:
        """Redirects browsers to the dashboard; programs are told that there is nothing here."""
        if "text/html" not in call.http.headers.get("Accept", ""):
            raise not_found(
                "nothing is at /; GET /openapi.json lists the paths, /ui/ is the dashboard"
            )
        return web.Response(status=307, headers={"Location": "/ui/"})

    @route("GET", "/ui/{path:.*}", None, media="text/html", hidden=True)
    async def get_ui(self, _call: Call, wanted: OfFile) -> web.Response:
        """The dashboard. It asks for a token, and has none of its own."""
        name = wanted.path or "index.html"
        path = self._folder / name
        media = MEDIA.get(path.suffix)
        if media is None or not _PATH.fullmatch(name) or not path.is_file():
            raise not_found("no such page")
        if path.stat().st_size > FILE_BYTES_MAX:
            raise not_found("no page of that size")
        headers = {
            "Content-Type": media,
            "Content-Security-Policy": POLICY,
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        return web.Response(body=path.read_bytes(), headers=headers)
