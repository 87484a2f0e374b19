"""What clients and operators want for the blocks of a prompt, by its text: told to the daemons that may have them.

The prompt's keys are those that a request with the same body would be routed by. The intent goes through the daemon of
this host, as this router's tenant of the pool, to the nodes of the engines that serve the model, or to those that are
named: to each once for every namespace and way of hashing that these engines have. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec

from kvpool.client import Client
from kvpool.errors import InvalidRequest, KvpoolError, Unavailable
from kvpool.router.daemon_link import DaemonLink
from kvpool.router.hashing import HashSpec, Prompt
from kvpool.router.http.bodies import BadRequest, Body
from kvpool.router.prompts.tokens import TokenizeRefused, UnknownModel
from kvpool.router.records.metrics import Metrics
from kvpool.router.requests.intake import TOKENIZE_S, Rejected
from kvpool.router.upstream.specs import EngineSpec
from kvpool.types import KEY_BYTES, Intent, IntentAnswer

TOGETHER, EACH = 8, 2
"""Intents in progress, of all and of one tenant; further ones are rejected. All others keep no operator from its own."""
THREADS = 8
"""That wait for nodes: so many silent ones hold nobody up."""
PLACES_MAX = 64
"""Nodes that are told of an intent, once for each namespace."""
ANSWERS_S = 8.0
"""For the answers of all nodes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An intent. hard: of a pin. for_s: how long to keep. dry_run: only answer. nodes: empty: those of the engines."""

    intent: Intent
    hard: bool = False
    for_s: float = 0.0
    dry_run: bool = False
    nodes: tuple[str, ...] = ()


class Catalog(Protocol):
    """The used interface of `EngineCatalog`."""

    @property
    def engines(self) -> Mapping[str, EngineSpec]: ...


class Prompts(Protocol):
    """The used interface of `prompts.Prompts`."""

    async def prompt(
        self,
        body: Mapping[str, Any],
        kind: str,
        *,
        deadline_s: float = ...,
        like: EngineSpec | None = ...,
    ) -> Prompt: ...


@dataclass(slots=True)
class _Way:
    """A namespace and a way of hashing that engines have. like: one of these engines. nodes: theirs, in their order."""

    like: EngineSpec
    nodes: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """Who is told of which blocks."""

    node: str
    namespace: bytes
    keys: bytes


@dataclass(eq=False, repr=False, slots=True)
class Intents:
    """See the module. link: to the daemon, of its own, since answers may take long; None: this host has none."""

    _catalog: Catalog
    _prompts: Prompts
    _link: DaemonLink | None
    _metrics: Metrics
    _asking: Counter[str] = field(default_factory=Counter, init=False)
    """By tenant."""

    def node_of(self, engine: str) -> str:
        """The node of an engine; empty: it is not known."""
        spec = self._catalog.engines.get(engine)
        return "" if spec is None else spec.node

    async def answer(
        self, tenant: str, body: Body, wanted: Wanted, limit_s: float
    ) -> dict[str, Any]:
        """Each node's answer, and why others gave none. tenant: who wants it; empty: an operator. limit_s: for all of it.

        Raises `BadRequest`.
        """
        if self._link is None:
            raise BadRequest(
                400, "this router has no daemon (daemon = false), and so no way to the pool's nodes"
            )
        if self._asking[tenant] >= EACH or (tenant and self._asking.total() >= TOGETHER):
            self._metrics.rejections.labels("intents").inc()
            raise Rejected(429, "too many intents are in progress", "intents", 1.0)
        self._asking[tenant] += 1
        try:
            return await self._answer(self._link, body, wanted, limit_s)
        finally:
            self._asking[tenant] -= 1
            self._asking += Counter()  # forgets those that have none

    async def _answer(
        self, link: DaemonLink, body: Body, wanted: Wanted, limit_s: float
    ) -> dict[str, Any]:
        now = asyncio.get_running_loop().time
        deadline = now() + limit_s
        ways, unreachable = self._ways(body.model, wanted.nodes)
        places: list[_Place] = []
        short: list[str] = []
        tokens = blocks = 0
        for (namespace, _), way in ways.items():
            prompt = await self._prompt(body, way.like, deadline - now())
            tokens, blocks = len(prompt.tokens), max(blocks, len(prompt.hashes))
            if prompt.hashes:
                packed = b"".join([each[-KEY_BYTES:] for each in prompt.hashes])
                places += [_Place(node, namespace, packed) for node in way.nodes]
            else:
                short += way.nodes
        if not blocks:
            raise BadRequest(
                400,
                "no block of this request is known here: it has less than one of tokens, several prompts, or media that "
                "no engine renders for routers",
            )
        told = {place.node for place in places}
        unreachable |= {
            node: "its blocks are longer than this prompt" for node in short if node not in told
        }
        for place in places[PLACES_MAX:]:
            unreachable[place.node] = f"only {PLACES_MAX} nodes are told at once: name this one"
        within_s = max(0.0, min(deadline - now(), ANSWERS_S))
        items = await self._ask_all(link, places[:PLACES_MAX], wanted, within_s, unreachable)
        for outcome in [item["outcome"] for item in items] + ["unreachable"] * len(unreachable):
            self._metrics.intents.labels(outcome).inc()
        return {
            "model": body.model,
            "prompt_tokens": tokens,
            "prompt_blocks": blocks,
            "items": items,
            "unreachable": unreachable,
        }

    def _ways(
        self, model: str, named: Sequence[str]
    ) -> tuple[dict[tuple[bytes, HashSpec], _Way], dict[str, str]]:
        """How engines of a model keep its blocks, and where; and which nodes are left out, with the reason.

        Raises `Rejected`.
        """
        ways: dict[tuple[bytes, HashSpec], _Way] = {}
        left_out: dict[str, str] = {}
        for spec in self._catalog.engines.values():
            if not spec.serves(model):
                continue
            if not spec.namespace or spec.hashing is None:
                left_out[spec.node or spec.name] = (
                    f"the namespace or the block hashes of engine {spec.name} are not known"
                )
                continue
            way = ways.setdefault((spec.namespace, spec.hashing), _Way(spec))
            if spec.node:
                way.nodes[spec.node] = None
            elif not named:
                left_out[spec.name] = f"the node of engine {spec.name} is not known"
        if not ways:
            why = "; ".join(left_out.values()) or f"no engine serves {model}"
            raise Rejected(503, f"the prompt's blocks cannot be named: {why}", "no_blocks", 1.0)
        if named:
            left_out.clear()
            for way in ways.values():
                way.nodes = dict.fromkeys(named)
        told = {node for way in ways.values() for node in way.nodes}
        return ways, {node: why for node, why in left_out.items() if node not in told}

    async def _prompt(self, body: Body, like: EngineSpec, limit_s: float) -> Prompt:
        """The prompt as these engines hash it. Raises `BadRequest`."""
        try:
            return await self._prompts.prompt(
                *(body.value, body.kind.prompts),
                deadline_s=max(0.0, min(TOKENIZE_S, limit_s)),
                like=like,
            )
        except TokenizeRefused as error:
            raise BadRequest(400, str(error)) from None
        except UnknownModel as error:
            raise BadRequest(404, str(error), type="NotFoundError", param="model") from None
        except Unavailable as error:
            raise Rejected(
                503, f"the prompt's tokens are not known: {error}", "not_tokenised", 1.0
            ) from None

    async def _ask_all(
        self,
        link: DaemonLink,
        places: Sequence[_Place],
        wanted: Wanted,
        within_s: float,
        unreachable: dict[str, str],
    ) -> list[dict[str, Any]]:
        """The answers that come in this time; `unreachable` gets the others' reasons."""
        begun: set[_Place] = set()
        asks = {
            asyncio.ensure_future(link.ask(partial(_intend, place, wanted, begun))): place
            for place in places
        }
        if not asks:
            return []
        try:
            await asyncio.wait(asks, timeout=within_s)
        finally:
            late = {ask for ask in asks if not ask.done()}
            for ask in late:
                ask.cancel()  # one that a thread has begun goes on; its answer is lost
            await asyncio.gather(*asks, return_exceptions=True)
        items = []
        failed: list[tuple[_Place, str]] = []
        refused: list[tuple[_Place, str]] = []
        for ask, place in asks.items():
            if ask in late:
                may = "it may still do it" if place in begun else "it was not asked"
                failed.append((place, f"no answer within {within_s:.3g} s: {may}"))
            elif isinstance(error := ask.exception(), InvalidRequest):
                refused.append((place, str(error)))
            elif isinstance(error, KvpoolError):
                failed.append((place, str(error)))
            else:
                answer = msgspec.to_builtins(ask.result())
                items.append({"node": place.node, "namespace": place.namespace.hex(), **answer})
        answered = {item["node"] for item in items}
        for place, why in failed:
            of = f"namespace {place.namespace.hex()}: " if place.node in answered else ""
            unreachable[place.node] = of + why
        for place, why in refused:
            # A node that answers for others of the namespaces does not have this one open.
            if place.node not in answered:
                unreachable.setdefault(place.node, why)
        return items


def _intend(place: _Place, wanted: Wanted, begun: set[_Place], client: Client) -> IntentAnswer:
    begun.add(place)
    return client.intents.declare_on(
        place.namespace,
        wanted.intent,
        place.keys,
        node=place.node,
        hard=wanted.hard,
        for_s=wanted.for_s,
        dry_run=wanted.dry_run,
    )
