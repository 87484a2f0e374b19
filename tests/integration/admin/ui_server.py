"""A stand-in for the gateway, for tests of the dashboard alone: its files, and answers that tests choose.

What the real one answers is tested in test_ui.py's second half; here all that the page may ever meet is to be had at once:
three nodes, an hour of history, jobs, hostile names, and a gateway that goes away.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

UI = Path(__file__).resolve().parents[3] / "kvpool" / "admin" / "ui"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TOKENS = {"v" * 20: "viewer", "o" * 20: "operator", "a" * 20: "admin"}
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
GIB = 1 << 30
NOW = 1_790_000_000.0
DIGESTS = ("4f663042e80677b7f801bafeb39e1fa9", "aa663042e80677b7f801bafeb39e1fa9")


def node(name: str, **more: Any) -> dict[str, Any]:
    found = {
        "node": name,
        "incarnation": f"{ord(name[0]):016x}",
        "state": "serving",
        "labels": {"zone": "eu-1"},
        "version": "0.1.0",
        "protocol": 7,
        "tiers": [
            {"name": "dram", "capacity_bytes": 64 * GIB, "used_bytes": 41 * GIB, "secondary_bytes": 3 * GIB},
            {"name": "ssd", "capacity_bytes": 1000 * GIB, "used_bytes": 220 * GIB, "secondary_bytes": 0},
        ],
        "transports": [
            {"url": f"tcp://10.0.0.{ord(name[0])}:7070", "metadata": "", "numa": -1, "rail": "", "net": ""}
        ],
        "drain": None,
        "drain_wanted": False,
        "engines": [{"url": "http://10.0.0.97:8000", "tenant": "default"}],
    }  # fmt: skip
    return found | more


def namespace(digest: str, model: str, blocks: int) -> dict[str, Any]:
    return {
        "digest": digest,
        "tenant": "default",
        "fields": {"model": model, "block_tokens": 16},
        "epoch": 0,
        "generation": 0,
        "settings": {
            "replicas": 1, "write": "", "ttl_s": 0.0, "ssd_codec": "",
            "dram_quota": 0, "ssd_quota": 0.5, "write_remote": "",
        },
        "part_bytes": [1 << 21],
        "nodes": {"a": {"blocks": [blocks], "held_bytes": blocks << 21, "quota_bytes": 0}},
        "unreachable": {},
    }  # fmt: skip


def sample(at_s: float, turn: int, nodes: tuple[str, ...]) -> dict[str, Any]:
    rates = {
        "put_bytes_s": 2e6 * (turn % 40),
        "read_bytes_s": 5e6 * (turn % 25),
        "pulled_bytes_s": 1e6,
        "hit_rate": 0.5 + (turn % 20) / 50,
        "tiers": {"dram": 41 * GIB},
    }
    return {"at_s": at_s, "nodes": dict.fromkeys(nodes, rates)}


def job(name: str, state: str, **more: Any) -> dict[str, Any]:
    found = {
        "job": name, "kind": "evict", "state": state, "dry_run": False, "tenant": "default", "by": "token ops",
        "seen": 30, "total": 120, "blocks": 20, "nbytes": 20 << 21, "kept": 1,
    } | more  # fmt: skip
    view = {**found, "node": "a", "age_s": 12.0, "took_s": 12.0, "error": ""}
    return {**found, "nodes": [view], "unreachable": {}}


ACCOUNT = {
    "request": "req-1", "model": "llama", "tenant": "default", "outcome": "done", "prompt_tokens": 1200,
    "steps": [
        {"at_s": 0.0004, "what": "order", "engine": "e0", "serves": "prompt and answer",
         "candidates": [
             {"engine": "e0", "cached_blocks": 60, "loaded_blocks": 10, "pulled_blocks": 0, "source": None,
              "waits_for_blocks": 0, "load_s": 0.004, "starts_s": 0.0, "prefill_s": 0.02, "ttft_s": 0.024, "cost": 0.024},
             {"engine": "e1", "cached_blocks": 0, "loaded_blocks": 0, "pulled_blocks": 70, "source": "a",
              "waits_for_blocks": 0, "load_s": 0.05, "starts_s": 0.1, "prefill_s": 0.3, "ttft_s": 0.45, "cost": 0.45}],
         "decode_candidates": [
             {"engine": "e0", "tpot_s": 0.011, "lacks_blocks": 0, "handover_s": 0.0, "fits": True, "cost": 0.011}]},
        {"at_s": 0.026, "what": "first token"},
    ],
}  # fmt: skip


MEMORY = {
    "tenant": "default", "nodes": 2, "unreachable": {},
    "curve": {
        "dram_bytes": 128 * GIB, "ssd_bytes": 2000 * GIB, "asked": 9e6, "hit": 0.412, "ceiling": 0.589,
        "error": 0.009, "samples": 8000, "skipped": 0,
        "points": [
            *({"times": times, "dram_bytes": int(128 * GIB * times), "hit": 0.589 * times / (times + 0.5)}
              for times in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)),
            {"times": None, "dram_bytes": None, "hit": 0.589},
        ],
    },
    "misses": {"never_stored": {"requests": 40, "blocks": 900}, "full": {"requests": 1, "blocks": 1},
               HOSTILE: {"requests": 2, "blocks": 5}},
}  # fmt: skip


class UiServer:
    """Answers by path; `answers` may be changed by a test. Requests that changed something are in `changes`."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.changes: list[tuple[str, str, Any]] = []
        self.asked: list[str] = []
        self.blocks_of: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.lost: set[str] = set()
        self.port = free_port()  # nobody else's while it is stopped
        self.reset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._ended = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """As it was at first."""
        spaces = [namespace(DIGESTS[0], "llama", 9000), namespace(DIGESTS[1], HOSTILE, 30)]
        replica = {"node": "a", "incarnation": "0" * 16, "tier": "dram", "parts": 1}
        self.lost = set()
        self.changes = []
        self.asked = []
        self.blocks_of = []
        self.events = [
            {
                "number": 1,
                "at_s": NOW,
                "node": "a",
                "kind": "node joined",
                "details": {"of": HOSTILE},
            },
            {
                "number": 2,
                "at_s": NOW + 1,
                "node": "b",
                "kind": "change",
                "details": {"by": "ops", "what": "evict"},
            },
        ]
        self.answers = {
            "cluster": {
                "cluster": "prod-eu", "node": "a", "standing": "member", "state": "serving", "states": {"serving": 3},
                "tiers": [], "versions": {"0.1.0": 3}, "namespaces": 2, "routers": 1,
            },
            "nodes": [
                node("a"),
                node("b", state="draining", drain_wanted=True, drain={
                    "phase": "copying", "blocks": 400, "blocks_total": 1000, "copied": 200, "copied_bytes": 200 << 21,
                    "failed": 0, "left": 0, "leases": 0}),
                node("c"),
            ],
            "namespaces": spaces,
            "tenants": [{"tenant": "default"}],
            "memory": MEMORY,
            "engines": [{
                "name": "10.0.0.97:8000", "url": "http://10.0.0.97:8000", "node": "a", "role": "both", "model": HOSTILE,
                "tenant": "default", "namespace": DIGESTS[0], "routers": {}}],
            "jobs": [job("evict-1", "running"), job("warm-2", "done", kind="warm", seen=120)],
            "audit": [{"number": 7, "at_s": NOW, "node": "a", "kind": "change",
                       "details": {"by": "token ops", "what": "drain", "of": "b"}}],
            "config": {"unreachable": {}, "nodes": {"a": [
                {"name": "memory", "value": 64 * GIB, "secret": False, "default": False, "changeable": False, "help": "DRAM", "form": "SIZE"},
                {"name": "cluster_secret", "value": True, "secret": True, "default": False, "changeable": False, "help": "", "form": "TEXT"},
                {"name": "ssd_flush_s", "value": 20.0, "secret": False, "default": True, "changeable": True, "help": HOSTILE, "form": "SECONDS"},
                {"name": "log_level", "value": "info", "secret": False, "default": False, "changeable": True, "help": "", "form": "debug|info"}]}},
            "operator/locate": [{"key": "0" * 32, "namespace": DIGESTS[0], "parts": 1, "replicas": [replica]}],
            "requests/req-1": {"router": "http://10.0.0.9:8080", "account": ACCOUNT},
            "hot?tenant": {
                "by": "tenant", "seconds": 60.0, "unreachable": {}, "items": [{"tenant": "default", "read_bytes_s": 5e7}]},
            "hot?prefix": {"by": "prefix", "seconds": 0.0, "unreachable": {}, "items": [
                {"tenant": "default", "namespace": digest, "key": f"{n:032x}", "blocks": 4 * n + 1, "reads": 90.0 - n}
                for n in range(9) for digest in DIGESTS]},
        }  # fmt: skip
        for number, digest in enumerate(DIGESTS):
            self.answers[f"namespaces/{digest}"] = spaces[number]
            self.answers[f"namespaces/{digest}/blocks"] = [
                {"node": "a", "tier": "dram", "key": f"{n:032x}", "namespace": digest, "parent": "", "depth": n,
                 "parts": 1, "bytes": 1 << 21, "pin": "none", "copy": False, "reused": False, "age_s": 3.0, "leases": 0}
                for n in range(250)
            ]  # fmt: skip

    # ---- answers -------------------------------------------------------------------------------------

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name") or "index.html"
        path = UI / name
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path, headers={"Content-Security-Policy": CSP})

    async def _api(self, request: web.Request) -> web.StreamResponse:
        role = TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        path = request.path.removeprefix("/v1/")
        if path == "hot":
            path = f"hot?{request.query['by']}"
        self.asked.append(path)
        if path.endswith("/blocks"):
            self.blocks_of.append(request.query.get("node", ""))
        if role is None:
            return problem(401, "Unauthorized", "This token is not known.")
        if path == "blocks":
            return web.json_response({"nodes": {"a": []}, "unreachable": {}})
        if path == "operator/locate":
            return web.json_response(self.answers[path])
        if request.method != "GET":
            body = await request.json() if request.can_read_body else None
            self.changes.append((request.method, path, body))
            if role == "viewer":
                return problem(403, "Forbidden", "A viewer changes nothing.")
        match path:
            case "me":
                return web.json_response({"name": f"the {role}", "role": role, "tenants": ["*"]})
            case "events":
                return await self._stream(request)
            case "history":
                seconds = float(request.query["seconds"])
                end = int(time.time() / 5) * 5
                names = tuple(each["node"] for each in self.answers["nodes"])
                samples = [
                    sample(at, at // 5, tuple(n for n in names if at < end - 20 or n not in self.lost))
                    for at in range(end - int(seconds) // 5 * 5, end + 1, 5)
                ]  # fmt: skip
                return web.json_response({"every_s": 5, "samples": samples})
            case "jobs" if request.method == "POST":
                name = f"evict-{len(self.answers['jobs']) + 1}"
                self.answers["jobs"].append(
                    job(name, "done", dry_run=body["dry_run"], seen=120, blocks=90, nbytes=90 << 21)
                )
                return web.json_response(self.answers["jobs"][-1], status=202)
        if request.method != "GET":
            return web.json_response(CHANGED.get(path, {}))
        if path.startswith("jobs/"):
            found: Any = next(
                (each for each in self.answers["jobs"] if each["job"] == path[5:]), None
            )
        elif path.startswith("nodes/") and " " in path:
            found = problem(400, "Bad Request", "a node is never called so")
        elif path.startswith("nodes/") and path.count("/") == 1:
            named = [each for each in self.answers["nodes"] if each["node"] == path[6:]]
            found = named and {"node": named[0], "uptime_s": 90_000.0, "sections": SECTIONS}
        else:
            found = self.answers.get(path)
        if isinstance(found, Callable):
            found = found()
        if isinstance(found, web.Response):
            return found
        if found is None or found == []:
            empty = path in self.answers
            return (
                listed([], request)
                if empty
                else problem(404, "Not found", f"There is no {path} here.")
            )
        return listed(found, request) if isinstance(found, list) else web.json_response(found)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        seen = request.headers.get("Last-Event-ID", "")
        wanted = {name for name in request.query.get("nodes", "").split(",") if name}
        first = (
            next(
                (n + 1 for n, e in enumerate(self.events) if f"{e['node']}:{e['number']}" == seen),
                0,
            )
            if seen
            else 0
        )
        while not self._ended.is_set():
            for event in self.events[first:]:
                if wanted and event["node"] not in wanted:
                    continue
                name = f"{event['node']}:{event['number']}"
                text = f"event: {event['kind']}\nid: {name}\ndata: {json.dumps(event)}\n\n"
                await response.write(text.encode())
            first = len(self.events)
            try:
                await asyncio.wait_for(self._ended.wait(), 0.05)
            except TimeoutError:
                pass
        return response

    # ---- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, again at the same port if it has been stopped."""
        ready: Future[None] = Future()
        threading.Thread(target=lambda: asyncio.run(self._run(ready)), daemon=True).start()
        ready.result(PATIENCE_S)

    def stop(self) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(PATIENCE_S)

    async def _run(self, ready: "Future[None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._ended = asyncio.Event()
        app = web.Application()
        app.router.add_get("/ui/{name:.*}", self._static)
        app.router.add_route("*", "/v1/{rest:.*}", self._api)
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        ready.set_result(None)
        await self._ended.wait()
        await runner.cleanup()


CHANGED = {
    "pins": {"nodes": {"a": 2}, "unreachable": {"b": "no answer"}},
    "config": {"nodes": {"a": 0, "b": 0}, "unreachable": {}},
}
SECTIONS = {
    "fetch": {
        "peers": [
            {"incarnation": "b" * 16, "node": "b", "url": "tcp://10.0.0.98:7070", "distance": "rack", "latency_ms": 0.3,
             "bytes_s": 2.1e9, "measured": True, "asked": 120, "failed": 0, "bytes": 4 << 30, "suspended_s": 0.0,
             "suspected": False, "last_error": ""},
            {"incarnation": "", "node": "ssd of this node", "url": "", "distance": "unknown", "latency_ms": 5.0,
             "bytes_s": 7e8, "measured": True, "asked": 90, "failed": 0, "bytes": 1 << 30, "suspended_s": 0.0,
             "suspected": False, "last_error": ""},
            {"incarnation": "c" * 16, "node": "c", "url": "tcp://10.0.0.99:7070", "distance": "zone", "latency_ms": 0.5,
             "bytes_s": 1e9, "measured": False, "asked": 3, "failed": 2, "bytes": 0, "suspended_s": 4.0,
             "suspected": True, "last_error": HOSTILE}],
    },
    "counters": {"committed": 10, "committed_bytes": 10 << 21},
    "gone": {},
    "tenants": {"default": {
        "segment_bytes": 64 * GIB, "blocks": 900,
        "secondary_bytes": 3 * GIB,
        "space": {"size": 64 * GIB, "slab_bytes": 1 << 20, "bytes_used": 44 * GIB, "bytes_unassigned": 1000 << 20,
                  "classes": [{"stride": 1 << 21, "slots_used": 900, "slots_free": 24}]},
        "namespaces": {DIGESTS[0]: {"fields": {"model": "llama"}, "epoch": 3, "blocks": [900], "misses": {
            "full": {"requests": 5, "blocks": 70}, "never_stored": {"requests": 6, "blocks": 80}}}},
        "waits": {"bounds": [0.001, 0.005], "counts": [3, 0, 1], "sum": 0.8}}},
}  # fmt: skip


def listed(items: list[Any], request: web.Request) -> web.Response:
    first, limit = int(request.query.get("cursor", 0)), int(request.query.get("limit", 100))
    after = first + limit
    return web.json_response(
        {
            "items": items[first:after],
            "next": str(after) if after < len(items) else None,
            "unreachable": {},
        }
    )


def problem(status: int, title: str, detail: str) -> web.Response:
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": "x", "instance": "1"}  # fmt: skip
    return web.json_response(body, status=status, content_type="application/problem+json")


@contextmanager
def ui_server() -> Iterator[UiServer]:
    server = UiServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
