"""Engines, and routers' data: where requests went, and why."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from kvpool.admin.cluster_view import Answers, Cluster
from kvpool.admin.paging import listed
from kvpool.admin.problems import Refused, not_found
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import tenant_of
from kvpool.admin.tokens import Principal
from kvpool.admin.types import (
    Engine,
    EngineChanged,
    Explained,
    ExplainRequest,
    IntentInfo,
    IntentRequest,
    Listed,
    LookupInfo,
    LookupRequest,
    Nothing,
    OfEngine,
    OfRequest,
    PrefixOn,
    TenantPage,
    WeightRequest,
)
from kvpool.decoding import decode_json
from kvpool.errors import InvalidRequest, KvpoolError, NotAuthenticated, ProtocolError, Unavailable

ROUTER_S = 3.0
INTENT_S = 12.0  # for the answers of nodes
ANSWER_BYTES_MAX = 4 << 20
ANNOUNCED = ("url", "rank", "role", "model", "tenant", "namespace")
"""What an engine's announcement says of it, as it is shown."""


class NotThere(InvalidRequest):
    """The router does not know it."""

    code = "not_there"


class Routers:
    """Handlers, and requests to routers. Event loop only; `close` ends it.

    ca: the file of an authority for routers' certificates, beside the public ones; empty: none.
    """

    def __init__(self, cluster: Cluster, urls: list[str], token: str, ca: str) -> None:
        self._cluster = cluster
        self._ca = ca
        self._urls = urls
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ---- engines -----------------------------------------------------------------------------------

    @route("GET", "/v1/engines", "viewer")
    async def list_engines(self, call: Call, wanted: TenantPage) -> Listed[Engine]:
        """Engines that were announced to the cluster, or that a router knows."""
        tenant = tenant_of(call.who, wanted.tenant) if wanted.tenant else ""
        view = await self._cluster.view()
        told = await self._each(lambda url: self._get(url, "/engines"))
        found: dict[tuple[str, int | None], Engine] = {}
        for record in view.nodes:
            for engine in record.engines:
                if not (engine.tenant == tenant if tenant else call.who.sees(engine.tenant)):
                    continue
                host = engine.url.partition("://")[2]
                name = host if engine.rank is None else f"{host}-dp{engine.rank}"
                about = {each: getattr(engine, each) for each in ANNOUNCED}
                found[engine.url, engine.rank] = Engine(
                    name=name, node=record.node, routers={}, **about
                )
        for router, answer in sorted(told.nodes.items()):
            for row in _rows(answer):
                url, name = str(row.get("url", "")), str(row.get("name", ""))
                rank = said if type(said := row.get("rank")) is int else None
                known = found.get((url, rank))
                if known is None and call.who.whole and not tenant:
                    known = found[url, rank] = Engine(
                        name=name,
                        url=url,
                        rank=rank,
                        node=str(row.get("node", "")),
                        role=str(row.get("role", "")),
                        model=str((row.get("models") or [""])[0]),
                        tenant="",
                        namespace="",
                        routers={},
                    )
                if known is not None:
                    if known.name != name:
                        known = found[url, rank] = msgspec.structs.replace(known, name=name)
                    known.routers[router] = row
        return listed(found.values(), lambda e: f"{e.url} {e.name}", wanted, told.unreachable)

    @route("PUT", "/v1/engines/{name}/drain", "operator", whole=True, routers=True)
    async def drain_engine(self, _call: Call, wanted: OfEngine) -> EngineChanged:
        """Drain an engine: routers give it no new requests."""
        return await self._change(wanted.name, "POST", "drain")

    @route("DELETE", "/v1/engines/{name}/drain", "operator", whole=True, routers=True)
    async def undrain_engine(self, _call: Call, wanted: OfEngine) -> EngineChanged:
        """Cancel an engine's drain."""
        return await self._change(wanted.name, "DELETE", "drain")

    @route("PUT", "/v1/engines/{name}/weight", "operator", whole=True, routers=True)
    async def weigh_engine(
        self, _call: Call, wanted: OfEngine, body: WeightRequest
    ) -> EngineChanged:
        """Limit an engine to a share of its possible requests."""
        return await self._change(wanted.name, "PUT", "weight", {"weight": body.weight})

    async def _change(
        self, name: str, method: str, what: str, body: Mapping[str, Any] | None = None
    ) -> EngineChanged:
        path = f"/engines/{quote(name, safe='')}/{what}"
        told = await self._each(lambda url: self._ask(url, method, path, body), absent=NotThere)
        if not told.nodes and not told.unreachable:
            raise not_found(f"no router knows an engine {name!r}; GET /v1/engines lists them")
        return EngineChanged(name, sorted(told.nodes), told.unreachable)

    # ---- requests ----------------------------------------------------------------------------------

    @route("GET", "/v1/requests/{id}", "viewer", routers=True)
    async def get_request(self, call: Call, wanted: OfRequest) -> Explained:
        """How a request was routed, and why."""
        path = f"/explain/{quote(wanted.id, safe='')}"
        told = await self._each(lambda url: self._get(url, path), absent=NotThere)
        for router, account in sorted(told.nodes.items()):
            if _may_see(call.who, account):
                return Explained(router, account)
        if told.unreachable:
            raise Unavailable(_why(told.unreachable))
        raise not_found("no router knows this request, or it has expired")

    @route("POST", "/v1/explain", "viewer", whole=True, routers=True)
    async def explain(self, _call: Call, _: Nothing, body: ExplainRequest) -> Explained:
        """Where a request would go, and why."""
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "invalid", "give either prompt or messages")
        asked = {k: v for k, v in msgspec.to_builtins(body).items() if v is not None}
        router, answer = await self._first(asked)
        return Explained(router, answer)

    # ---- prompts -----------------------------------------------------------------------------------

    @route("POST", "/v1/prompts/lookup", "viewer", whole=True, routers=True)
    async def lookup(self, _call: Call, _: Nothing, body: LookupRequest) -> LookupInfo:
        """How much of a prompt each engine's node holds, from a router, which alone knows its hashes.

        By the keys of its blocks: `POST /v1/operator/prefixes`.
        """
        router, answer = await self._first(_request(body))
        candidates = answer.get("candidates")
        if not isinstance(candidates, list):
            raise Unavailable(f"router {router} returned no candidates: {answer.get('rejected')}")
        engines = await self._get(router, "/engines")
        nodes = {str(row.get("name")): str(row.get("node") or "") for row in _rows(engines)}
        items = []
        for each in candidates:
            engine = str(each["engine"])
            memory = int(each["cached_blocks"]) + int(each["loaded_blocks"])
            items.append(
                PrefixOn(nodes.get(engine, ""), memory, memory + int(each["pulled_blocks"]), engine)
            )
        items.sort(key=lambda each: (-each.memory_blocks, -each.blocks, each.engine))
        return LookupInfo(items, int(answer.get("prompt_blocks", 0)))

    @route("POST", "/v1/prompts/intents", "operator", whole=True, routers=True)
    async def intend(self, _call: Call, _: Nothing, body: IntentRequest) -> IntentInfo:
        """An intent for a prompt, which a router passes on to the nodes of the model's engines.

        It is for the router's own tenant of the pool. By keys, or for a session: `POST /v1/intents`.
        """
        asked = {
            "intent": body.intent,
            "request": _request(body),
            "nodes": [body.node] if body.node else [],
            "hard": body.hard,
            "for_s": body.for_s,
            "dry_run": body.dry_run,
        }
        router, answer = await self._first(asked, "/intents", INTENT_S)
        if not body.dry_run:
            self._cluster.changed()
        try:
            return msgspec.convert(answer, IntentInfo)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"router {router} answered an intent with: {error}") from None

    # ---- asking ------------------------------------------------------------------------------------

    async def _first(
        self, asked: Mapping[str, Any], path: str = "/explain", within_s: float = ROUTER_S
    ) -> tuple[str, dict[str, Any]]:
        """The first router that answers, in the order of the configuration."""
        if not self._urls:
            raise _no_routers()
        failed: dict[str, str] = {}
        for url in self._urls:
            try:
                return url, await self._ask(url, "POST", path, asked, within_s)
            except NotThere:
                raise not_found(f"router {url} does not serve this model") from None
            except Unavailable as error:
                failed[url] = str(error)
        raise Unavailable(_why(failed))

    async def _each(
        self,
        ask: Callable[[str], Awaitable[dict[str, Any]]],
        absent: type[KvpoolError] | None = None,
    ) -> Answers[dict[str, Any]]:
        """All routers at a time. absent: an answer that is none."""
        if not self._urls and absent is not None:
            raise _no_routers()
        found: Answers[dict[str, Any]] = Answers()

        async def one(url: str) -> None:
            try:
                found.nodes[url] = await ask(url)
            except KvpoolError as error:
                if absent is None or not isinstance(error, absent):
                    found.unreachable[url] = str(error)

        await asyncio.gather(*(one(url) for url in self._urls))
        return found

    async def _get(self, url: str, path: str) -> dict[str, Any]:
        return await self._ask(url, "GET", path)

    async def _ask(
        self,
        url: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        within_s: float = ROUTER_S,
    ) -> dict[str, Any]:
        """A router's answer, an object. Raises `KvpoolError`."""
        if self._session is None:
            context = ssl.create_default_context()
            if self._ca:
                context.load_verify_locations(self._ca)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=64, limit_per_host=16, ssl=context),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        raw = bytearray()
        try:
            async with self._session.request(
                method,
                f"{url}{path}",
                data=None if body is None else msgspec.json.encode(body),
                headers={**headers, "Content-Type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=within_s),
            ) as answer:
                async for piece in answer.content.iter_any():
                    raw += piece
                    if len(raw) > ANSWER_BYTES_MAX:
                        raise ProtocolError(f"the answer of router {url} is too large")
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(
                f"router {url} does not answer: {type(error).__name__} {error}".rstrip()
            ) from None
        return _checked(url, status, bytes(raw))


def _checked(url: str, status: int, raw: bytes) -> dict[str, Any]:
    if status in {401, 403}:
        raise NotAuthenticated(
            f"router {url} rejects this gateway's token: set router_token (KVPOOL_ROUTER_TOKEN)"
        )
    if status == 404:
        raise NotThere(f"router {url} does not know this request or engine")
    try:
        found = decode_json(raw, dict[str, Any], "an object")
    except ProtocolError:
        raise ProtocolError(f"router {url} answered {status}, without a JSON object") from None
    inner = found.get("error")
    text = str(inner.get("message", "") if isinstance(inner, dict) else "")[:500]
    if 400 <= status < 500 and status != 429:
        raise InvalidRequest(f"router {url}: {text}")
    if status >= 300:
        raise Unavailable(f"router {url} answered {status}: {text}")
    return found


def _request(body: LookupRequest) -> dict[str, Any]:
    """A request with this prompt, as an engine would get it. Raises `Refused`."""
    if [bool(body.prompt), bool(body.messages), bool(body.tokens)].count(True) != 1:
        raise Refused(400, "invalid", "give one of prompt, messages, tokens")
    asked: dict[str, Any] = {"model": body.model, "max_tokens": 1}
    if body.messages:
        return {**asked, "messages": body.messages}
    return {**asked, "prompt": body.prompt or body.tokens}


def _rows(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = answer.get("engines")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _may_see(who: Principal, account: Mapping[str, Any]) -> bool:
    tenant = account.get("tenant")
    return who.whole or (isinstance(tenant, str) and who.sees(tenant))


def _why(failed: Mapping[str, str]) -> str:
    return "; ".join(sorted(failed.values()))


def _no_routers() -> Refused:
    return Refused(
        404,
        "no_routers",
        "no router is configured for this gateway: set routers (--router http://HOST:8080)",
    )
