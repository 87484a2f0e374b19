"""A router without HTTP: real scheduler, health and requests over engines that follow a script.

What an engine answers is a function of the client's body, so that whoever answers, a right answer is known;
each call may be told to go wrong. Nothing here sleeps: faults that are about time wait for ever, and it is the
router's limits that end them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import msgspec

from kvpool.router.config import RouterConfig
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.engines.health import Health
from kvpool.router.group.group import Group, Operators
from kvpool.router.group.group_orders import GroupOrders
from kvpool.router.group.leader import Books
from kvpool.router.group.messages import PROTOCOL, Hello
from kvpool.router.group.questions import RouterQuestions
from kvpool.router.group.rows import stranger
from kvpool.router.hashing import HashSpec, Prompt
from kvpool.router.http.bodies import Body, Kind
from kvpool.router.http.isolation import Isolation
from kvpool.router.http.memory import Held
from kvpool.router.http.tracing import trace_of
from kvpool.router.orders import Orders
from kvpool.router.records.metrics import Metrics
from kvpool.router.records.observations import Measured
from kvpool.router.requests.calls import REPORT
from kvpool.router.requests.intake import Incoming, Intake
from kvpool.router.requests.intents import Wanted
from kvpool.router.requests.serving import Serving
from kvpool.router.requests.sessions import Sessions
from kvpool.router.upstream.specs import EngineSpec, gpu_holder, pool_holders
from kvpool.router.upstream.upstream import CUT, UNREACHABLE, EngineFailed, EngineRefused, Exhausted
from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.estimates import Error, KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.values import Engine, Order, Role

BLOCK_TOKENS = 16
MODEL = "tiny"
NAMESPACE = b"n" * 16
EVENTS = 4

BOOKS = (
    "prefills",
    "queued_tokens",
    "decodes",
    "context_tokens",
    "held_tokens",
    "follows",
    "blocks",
)

REFUSED_EVENTS = b'data: {"error":{"message":"no","code":400}}\n\ndata: [DONE]\n\n'

JSON = {"Content-Type": "application/json"}
ERROR = b'{"error":"dead"}'
ERROR_EVENTS = b'data: {"error":{"message":"dead","code":500}}\n\ndata: [DONE]\n\n'
FAULTS = (
    *("refuse", "error", "unreachable", "lost", "hang", "cut", "stall", "error_event"),
    *("unfinished", "late_error_event", "comments", "open_error_event"),
)
"""HTTP 400; HTTP 500; no connection; the connection is lost before the answer; no answer; broken off in the middle;
silent in the middle; an error as the first event; ended without its end; an error as the second event; broken off after
comments; an error as the first event, and its end in pieces of a stream that stays open. Besides, "error_event_400": the refusal of a request as the first event; "401" and "307"."""


NAMED_ENDS = {
    "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
}
"""The last events of streams whose events have names."""


def answer_to(body: Mapping[str, Any], path: str = "") -> bytes:
    """The right answer: some events, or one object."""
    text = msgspec.json.encode([body.get("prompt"), body.get("messages"), body.get("seed")])
    if body.get("stream") is not True:
        usage = {"prompt_tokens": 7, "completion_tokens": EVENTS}
        return msgspec.json.encode({"text": text.decode(), "usage": usage})
    if end := NAMED_ENDS.get(path):
        return b"".join(b"event: delta\n" + piece for piece in pieces_of(text)) + end
    return b"".join(pieces_of(text)) + b"data: [DONE]\n\n"


def pieces_of(text: bytes) -> list[bytes]:
    return [
        b"data: " + msgspec.json.encode({"n": n, "text": text.decode()}) + b"\n\n"
        for n in range(EVENTS)
    ]


@dataclass(slots=True, eq=False)
class Seen:
    """A call that an engine got."""

    engine: str
    path: str
    body: dict[str, Any]
    raw: bytes
    headers: Mapping[str, str]


class ScriptedAnswer:
    """Stands for `upstream.Answer`."""

    def __init__(self, engine: str, data: bytes, *, streams: bool, fault: str) -> None:
        self.engine = engine
        self.streams = streams
        kind = "text/event-stream; charset=utf-8" if streams else "application/json"
        self.headers = {"Content-Type": kind, "X-Request-Id": "of the engine"}
        self._fault = fault
        third = max(1, len(data) // 3)
        self._pieces = deque(data[at : at + third] for at in range(0, len(data), third))
        if fault == "unfinished":
            self._pieces = deque([data[: data.rfind(b"data: [DONE]") if streams else third]])
        elif fault in {"cut", "stall"}:
            self._pieces = deque([data[: 2 * third]])
        elif fault == "error_event" and streams:
            self._pieces = deque([ERROR_EVENTS])
        elif fault == "open_error_event" and streams:
            self._pieces = deque([ERROR_EVENTS[:-14], ERROR_EVENTS[-14:-7]])
        elif fault == "late_error_event" and streams:
            self._pieces = deque([data[: data.index(b"\n\n") + 2], ERROR_EVENTS])
        elif fault == "comments" and streams:
            self._pieces = deque([b": keep-alive\n\n"] * 3)
        elif fault == "error_event_400":
            self._pieces = deque([REFUSED_EVENTS])

    @property
    def content_type(self) -> str:
        return self.headers["Content-Type"]

    @property
    def ended(self) -> bool:
        return not self._pieces and not self._fault

    async def piece(self) -> bytes:
        if self._pieces:
            await asyncio.sleep(0)
            return self._pieces.popleft()
        if self._fault in {"cut", "comments"} or (self._fault == "unfinished" and not self.streams):
            raise EngineFailed(self.engine, CUT, "it broke off")
        if self._fault in {"stall", "open_error_event"}:
            await asyncio.Event().wait()
        return b""

    async def whole(self, bytes_max: int, held: Held | None = None) -> bytes:
        found = b""
        while piece := await self.piece():
            if held is not None:
                held.add(len(piece))
            found += piece
        assert len(found) <= bytes_max, "answers here are small"
        return found


class ScriptedUpstream:
    """Stands for `upstream.Upstream`. faults: of an engine's next calls, in order; "" for a good one. saves: what an
    engine's plugin reports of a prompt's blocks, if it is asked to.

    open: calls that have not ended. exhausted: whether probes cannot be sent.
    """

    def __init__(self) -> None:
        self.faults: dict[str, deque[str]] = {}
        self.saves: dict[str, Mapping[str, Any]] = {}
        self.ill: set[str] = set()
        self.seen: list[Seen] = []
        self.open: list[Seen] = []
        self.hold: dict[str, asyncio.Event] = {}
        self.probes = 0
        self.exhausted = False

    @asynccontextmanager
    async def ask(
        self, engine: EngineSpec, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[ScriptedAnswer]:
        json = headers.get("Content-Type", "application/json") == "application/json"
        value = msgspec.json.decode(body) if body and json else {}
        seen = Seen(engine.name, path, value, body, headers)
        self.seen.append(seen)
        self.open.append(seen)
        queue = self.faults.get(engine.name)
        fault = queue.popleft() if queue else ""
        try:
            await asyncio.sleep(0)
            if engine.name in self.hold:
                await self.hold[engine.name].wait()
            if fault == "unreachable":
                raise EngineFailed(engine.name, UNREACHABLE, "no connection")
            if fault == "error":
                raise EngineRefused(engine.name, 500, ERROR, JSON | {"Retry-After": "7"})
            if fault in {"401", "307"}:
                raise EngineRefused(engine.name, int(fault), b"the router's own business", JSON)
            if fault == "lost":
                raise EngineFailed(engine.name, CUT, "it closed the connection")
            if fault == "exhausted":
                raise Exhausted("no descriptors")
            if fault == "refuse":
                raise EngineRefused(engine.name, 400, b'{"error":"no"}', JSON)
            if fault == "hang":
                await asyncio.Event().wait()
            streams = value.get("stream") is True
            data = answer_to(value, path)
            if engine.name in self.saves and value.get("kv_transfer_params") == REPORT:
                params = {"kvpool": self.saves[engine.name]}
                data = data[:-1] + b',"kv_transfer_params":' + msgspec.json.encode(params) + b"}"
            yield ScriptedAnswer(engine.name, data, streams=streams, fault=fault)
        finally:
            self.open.remove(seen)

    async def get(self, engine: EngineSpec, path: str, within_s: float, bytes_max: int) -> bytes:
        self.probes += 1
        if self.exhausted:
            raise Exhausted("no descriptors")
        if engine.name in self.ill:
            raise EngineFailed(engine.name, "status", f"{path}: HTTP 503")
        return b""


class ScriptedKnowledge:
    """Stands for `EngineCatalog` and `Prompts`: a token a character. spec: how prompts say that they were hashed."""

    def __init__(self, engines: Sequence[EngineSpec]) -> None:
        self.engines = {spec.name: spec for spec in engines}
        self.refuses: Exception | None = None
        self.spec: HashSpec | None = None
        self.looked: list[Prompt] = []

    async def prompt(
        self, body: Mapping[str, Any], kind: str, *, deadline_s: float = 0.0
    ) -> Prompt:
        if self.refuses is not None:
            raise self.refuses
        text = body.get("prompt") if kind == "completions" else str(body.get("messages"))
        tokens = list(text.encode()) if isinstance(text, str) else []
        blocks = len(tokens) // BLOCK_TOKENS
        keys = [hash(bytes(tokens[: (n + 1) * BLOCK_TOKENS])) % 2**64 for n in range(blocks)]
        return Prompt(MODEL, tokens, [], keys, frozenset((MODEL,)), self.spec)

    async def look(self, prompt: Prompt, wait_s: float = 0.0) -> bool:
        self.looked.append(prompt)
        return True

    async def why(self, prompt: Prompt, engine: str) -> dict[str, Any] | None:
        return None

    async def verify(self, name: str) -> str:
        return "verified"

    def stats(self) -> Mapping[str, Any]:
        return {}


class ScriptedIntents:
    """Stands for `Intents`: accepts all. nodes: of engines. hold: until this it does not answer."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        self.nodes = nodes
        self.told: list[tuple[Body, Wanted, float]] = []
        self.hold: asyncio.Event | None = None

    def node_of(self, engine: str) -> str:
        return self.nodes.get(engine, "")

    async def answer(
        self, tenant: str, body: Body, wanted: Wanted, limit_s: float
    ) -> dict[str, Any]:
        self.told.append((body, wanted, limit_s))
        if self.hold is not None:
            await self.hold.wait()
        return {"prompt_blocks": 2, "items": [], "unreachable": {}}


class Recorder:
    """Stands for `Observing`."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.tokens: list[int] = []

    def computed(self, order: Order, measured: Measured) -> None:
        self.measured.append(measured)

    def answered(self, engine: Engine, tokens: int, took_s: float) -> None:
        self.tokens.append(tokens)

    def errors(self) -> Mapping[str, Mapping[str, Error]]:
        return {}


@dataclass(slots=True)
class Client:
    """Stands for the HTTP side: what a client has got. stuck: it does not read. hold: until this it reads no more."""

    begun: bool = False
    status: int = 0
    data: bytes = b""
    ended: bool = False
    stuck: bool = False
    hold: asyncio.Event | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    async def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        assert not self.begun, "an answer begins once"
        await self.begin(headers)
        self.status = status
        await self.write(body)
        self.ended = True

    async def begin(self, headers: Mapping[str, str]) -> None:
        assert not self.begun, "an answer begins once"
        self.begun, self.status, self.headers = True, 200, headers

    async def write(self, data: bytes) -> None:
        assert not self.ended, "nothing comes after the end"
        if self.stuck:
            await asyncio.Event().wait()
        self.data += data
        if self.hold is not None:
            await self.hold.wait()

    async def end(self, data: bytes = b"") -> None:
        if data:
            await self.write(data)
        self.ended = True


def estimates() -> KindEstimates:
    return KindEstimates(
        prefill=StepEstimate((0.001, 1e-6, 0.0)),
        decode=StepEstimate((0.001, 1e-6, 0.0)),
        loads={name: LoadEstimate(0.0001, 1e9) for name in ("dram", "ssd", "peer")},
        step_tokens=2048,
        block_tokens=BLOCK_TOKENS,
        block_bytes=1024,
    )


@dataclass(slots=True)
class Bench:
    """A router over engines. Use as an asynchronous context manager. recording: stands for a `recorder.Recorder`.
    intents: for `intents.Intents`.
    """

    specs: Sequence[EngineSpec]
    config: RouterConfig
    settings: Settings = field(default_factory=Settings)
    upstream: ScriptedUpstream = field(default_factory=ScriptedUpstream)
    recorder: Recorder = field(default_factory=Recorder)
    recording: Any = None
    intents: ScriptedIntents | None = None
    isolation: Isolation | None = None
    metrics: Metrics = field(default_factory=Metrics)
    index: PrefixIndex = field(init=False)
    scheduler: Scheduler = field(init=False)
    health: Health = field(init=False)
    orders: Orders = field(init=False)
    roster: EngineRoster = field(init=False)
    shared: GroupOrders = field(init=False)
    books: Books = field(init=False)
    group: Group = field(init=False)
    serving: Serving = field(init=False)
    known: ScriptedKnowledge = field(init=False)
    random: Random = field(default_factory=lambda: Random(0))

    async def __aenter__(self) -> Self:
        clock = asyncio.get_running_loop().time
        config = self.config
        self.index = index = PrefixIndex()
        nodes: dict[str, str] = {}
        for spec in self.specs:
            namespace = spec.namespace.hex()
            index.join(gpu_holder(spec), pool=False, namespace=namespace)
            for holder in pool_holders(spec.node, spec.namespace):
                if holder not in nodes:
                    index.join(holder, pool=True, namespace=namespace)
                    nodes[holder] = spec.node
        cluster = Cluster({MODEL: estimates()}, nodes, Traffic())
        self.known = ScriptedKnowledge(self.specs)
        self.scheduler = Scheduler(
            (), cluster, index, make_policy(config.policy), self.random, self.settings
        )
        self.health = Health(
            self.upstream,  # type: ignore[arg-type]
            config,
            clock,
            self._up,
            self._down,
            self._turned,
        )
        self.orders = Orders(self.scheduler, self.recorder, self.metrics, clock)
        self.roster = EngineRoster(
            self.scheduler, self.orders, self.known, self.health, self.metrics, clock
        )

        def engine_of(name: str) -> Engine:
            return self.scheduler.engines.get(name) or stranger(name)

        self.shared = GroupOrders(self.orders, engine_of, clock)
        self.books = Books(
            orders=self.orders,
            among=self.roster.models.among,
            engine_of=engine_of,
            told=lambda *_: None,
            blame=self.health.failed,
            praise=self.health.succeeded,
            clock=clock,
        )
        self.serving = Serving(
            config,
            self.scheduler,
            self.shared,
            self.roster,
            Intake(config, self.roster, self.known, clock, self.isolation),
            self.upstream,  # type: ignore[arg-type]
            self.recorder,
            self.metrics,
            Sessions(None, self.metrics),
            clock,
            self.random.randbytes,
            None,
            self.recording,
            self.intents,  # type: ignore[arg-type]
        )
        self.group = Group(
            Hello(PROTOCOL, self.random.randbytes(8).hex(), clock()),
            (),
            self.shared,
            self.books,
            RouterQuestions(self.scheduler, cluster, self.roster, self.serving.accounts, clock),
            None,  # type: ignore[arg-type]
            "",
            None,
            self.metrics,
            Operators(clock),
        )
        for spec in self.specs:
            self.health.add(spec)
        await self.health.first_probes(5.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.health.close()
        self.orders.close()
        await self.roster.close()

    def _up(self, spec: EngineSpec) -> None:
        self.roster.engine_up(spec)

    def _down(self, spec: EngineSpec) -> None:
        self.roster.engine_down(spec)

    def _turned(self, spec: EngineSpec) -> None:
        self.roster.engine_turned(spec)

    def incoming(
        self, body: Mapping[str, Any], kind: Kind = Kind.COMPLETIONS, **more: Any
    ) -> Incoming:
        random: Callable[[int], bytes] = self.random.randbytes
        raw = msgspec.json.encode({"model": MODEL, **body})
        settings: dict[str, Any] = {
            "ident": random(4).hex(),
            "trace": trace_of("", "", random),
            "tenant": "",
            "priority_max": 100,
            **more,
        }
        return Incoming(kind=kind, raw=raw, **settings)

    def left(self) -> dict[str, Any]:
        """What is left of requests anywhere; nothing, when all have ended."""
        found: dict[str, Any] = {
            f"{engine.name}.{name}": getattr(engine, name)
            for engine in self.scheduler.engines.values()
            for name in BOOKS
        }
        found["calls"] = [(seen.engine, seen.body) for seen in self.upstream.open]
        found["waiting"], found["parked"] = self.scheduler.waiting, self.scheduler.parked
        return {name: value for name, value in found.items() if value}


def engine(name: str, role: Role = Role.BOTH, **settings: Any) -> EngineSpec:
    given: dict[str, Any] = {"model": MODEL, "kind": MODEL, "node": f"node-{name}"}
    given |= {"block_bytes": 1024, "namespace": NAMESPACE, **settings}
    return EngineSpec(url=f"http://{name}", name=name, role=role, **given)
