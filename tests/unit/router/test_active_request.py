"""One request alone: what it leaves in memory, and orders that come too late."""

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvpool.errors import KvpoolError
from kvpool.router.config import RouterConfig
from kvpool.router.http.bodies import Body, Kind, parse
from kvpool.router.http.memory import Memory
from kvpool.router.http.tracing import trace_of
from kvpool.router.orders import Forgotten, News
from kvpool.router.records.explain import Account
from kvpool.router.records.metrics import Metrics
from kvpool.router.records.observations import Measured
from kvpool.router.requests.active_request import FOLLOW_MORE_S, ActiveRequest
from kvpool.router.requests.calls import REPORT, Caller
from kvpool.router.requests.failures import DeadlinePassed, GivenUp
from kvpool.router.requests.request_notes import RequestNotes
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import EngineFailed, EngineRefused
from kvpool.scheduler.values import (
    DecodeEstimate,
    DecodeOrder,
    Engine,
    Estimate,
    Order,
    Request,
    Role,
    Saves,
)
from tests.support.scripted_engines import MODEL, Client, ScriptedAnswer, answer_to
from tests.support.virtual_time import virtually

RAW = b'{"model":"tiny","prompt":"a question"}'
BODY = parse(Kind.COMPLETIONS, RAW, [MODEL])
RIGHT = answer_to(BODY.value)
STREAMED = parse(Kind.COMPLETIONS, RAW[:-1] + b',"stream":true}', [MODEL])
REQUEST = Request(1, (), 1, 1, 0.0)


def engine(name: str) -> Engine:
    return Engine(name, f"node-{name}", Role.BOTH, MODEL, name, (), 100)


def order(name: str, *, whole: bool, follow: bool = False) -> Order:
    estimate = Estimate(engine(name), 0, 0, 0, None, 0.0, 0.0, 0.001, 0.0)
    return Order(REQUEST, estimate, 1, True, engine("d"), whole, follow)


class Orders:
    """Nothing is tried again. late: orders that are on their way when the request is taken back. then: the order when
    the prompt is computed.
    """

    def __init__(self) -> None:
        self.late: list[Order | DecodeOrder] = []
        self.then: DecodeOrder | None = None
        self.measured: list[Measured] = []
        self.active: weakref.ref[ActiveRequest] | None = None

    def computed(self, order: Order, measured: Measured | None = None) -> None:
        if measured is not None:
            self.measured.append(measured)
        if self.then is not None:
            self._tell(self.then)

    def failed(self, order: Order, *, elsewhere: bool = False) -> None:
        self._tell(Forgotten())

    def decode_failed(self, request: Request, engine: str, *, elsewhere: bool = False) -> None:
        self._tell(Forgotten())

    def answered(self, engine: str, tokens: int, took_s: float) -> None: ...

    def abandoned(self, request: Request) -> None:
        for each in self.late:
            self._tell(each)

    def _tell(self, news: News) -> None:
        active = None if self.active is None else self.active()
        assert active is not None
        active.tell(news)


class Roster:
    """All engines are there."""

    def __init__(self, namespace: bytes) -> None:
        self._namespace = namespace

    def spec(self, name: str) -> EngineSpec:
        return EngineSpec(url=f"http://{name}", name=name, model=MODEL, namespace=self._namespace)

    def engine(self, name: str) -> Engine:
        return engine(name)

    def succeeded(self, name: str) -> None: ...

    def failed(self, error: EngineFailed | EngineRefused) -> None: ...

    def blame(self, names: Iterable[str], request: int) -> None: ...


class Upstream:
    """Answers right, but for engines that do otherwise: fail, refuse, hang; or hang once.

    reports: what their plugin says of a prompt's blocks, when it is asked to.
    """

    def __init__(self, **otherwise: str) -> None:
        self.otherwise = otherwise
        self.reports: dict[str, Any] = {}
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.called = asyncio.Event()

    @asynccontextmanager
    async def ask(
        self, spec: EngineSpec, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[ScriptedAnswer]:
        self.asked.append(spec.name)
        value = msgspec.json.decode(body)
        self.bodies.append(value)
        self.called.set()
        await asyncio.sleep(0)
        how = self.otherwise.get(spec.name)
        if how == "fail":
            raise EngineFailed(spec.name, "connect", "no connection")
        if how == "refuse":
            raise EngineRefused(spec.name, 400, b"{}", {})
        if how == "error":
            raise EngineRefused(spec.name, 500, b"{}", {})
        if how == "hang once":
            del self.otherwise[spec.name]
        if how in {"hang", "hang once"}:
            await asyncio.Event().wait()
        streams = value.get("stream") is True
        data = answer_to(value)
        if value.get("kv_transfer_params") == REPORT and spec.name in self.reports:
            said = {"kv_transfer_params": {"kvpool": self.reports[spec.name]}}
            data = msgspec.json.encode({**msgspec.json.decode(data), **said})
        yield ScriptedAnswer(spec.name, data, streams=streams, fault="")


def active_of(
    orders: Orders,
    upstream: Upstream,
    within_s: float = 20.0,
    body: Body = BODY,
    namespace: bytes = b"",
) -> ActiveRequest:
    loop = asyncio.get_running_loop()
    caller = Caller(
        body,
        None,
        upstream,
        RouterConfig(stall_s=0.01, client_stall_s=30.0, follow_s=30.0, answer_bytes_max=1 << 20),
        trace_of("", "", random.Random(0).randbytes),
        {},
        random.Random(0).randbytes,
        loop.time() + within_s,
        lambda _: True,
        Memory(1 << 20),
    )
    active = ActiveRequest(
        REQUEST,
        body,
        caller=caller,
        orders=orders,
        roster=Roster(namespace),
        notes=RequestNotes(Account("me", MODEL, "", 0.0), None, body.streams, loop.time, Metrics()),
    )
    orders.active = weakref.ref(active)
    return active


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("how", "whole", "within_s", "ends"),
    [
        ("", True, 20.0, None),
        ("fail", True, 20.0, GivenUp),
        ("fail", False, 20.0, GivenUp),
        ("refuse", True, 20.0, EngineRefused),
        ("refuse", False, 20.0, None),
        ("error", True, 20.0, EngineRefused),
        ("error", False, 20.0, EngineRefused),
        ("hang", True, 0.001, DeadlinePassed),
        ("hang", False, 0.001, DeadlinePassed),
    ],
)
def test_however_it_ends_nothing_of_it_waits_for_the_collector(
    how: str, whole: bool, within_s: float, ends: type[KvpoolError] | None
) -> None:
    async def serve() -> Callable[[], object]:
        active = active_of(Orders(), Upstream(a=how, d=how if how == "error" else ""), within_s)
        active.tell(order("a", whole=whole))
        if ends is None:
            await active.run(Client())
        else:
            with pytest.raises(ends) as caught:
                await active.run(Client())
            del caught
        return weakref.ref(active)

    async def main() -> None:
        left = await serve()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert left() is None

    virtually(main)


@pytest.mark.usefixtures("uncollected")
def test_nor_does_one_whose_client_leaves() -> None:
    async def main() -> None:
        upstream = Upstream(a="hang")
        active = active_of(Orders(), upstream)
        left = weakref.ref(active)
        active.tell(order("a", whole=False))
        task = asyncio.create_task(active.run(Client()))
        del active
        await upstream.called.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task
        await asyncio.sleep(0)
        assert left() is None

    virtually(main)


def test_a_refused_part_is_the_answer_while_no_engine_is_to_decode() -> None:
    async def main() -> None:
        upstream = Upstream(p="refuse")
        active = active_of(Orders(), upstream)
        active.tell(replace(order("p", whole=False), decode=None))
        with pytest.raises(EngineRefused):
            await active.run(Client())
        assert upstream.asked == ["p"]

    virtually(main)


def test_an_order_that_comes_after_the_request_was_taken_back_is_not_followed() -> None:
    """Its prompt was refused, and who is to decode says why: one answer, not two."""

    async def main() -> None:
        orders, upstream = Orders(), Upstream(p="refuse")
        estimate = DecodeEstimate(engine("e"), 0.001, 0, 0.0, True, 0.0)
        orders.late = [
            order("e", whole=True),
            DecodeOrder(REQUEST, engine("e"), engine("e"), estimate),
        ]
        active = active_of(orders, upstream)
        active.tell(order("p", whole=False))
        client = Client()
        await active.run(client)
        assert client.data == RIGHT
        assert upstream.asked == ["p", "d"]

    virtually(main)


@pytest.mark.parametrize("lost", [True, False])
def test_who_follows_computes_what_was_lost_when_the_prompt_is_done(lost: bool) -> None:
    """A save was dropped: nobody waits for it until the follow's own end, and no engine is blamed."""

    async def main() -> None:
        upstream = Upstream(d="hang once") if lost else Upstream()
        active = active_of(Orders(), upstream, body=STREAMED)
        active.LOST_SAVE_S = 0.01 if lost else 30.0
        active.tell(order("p", whole=False, follow=True))
        client = Client()
        await active.run(client)
        assert client.data == answer_to(STREAMED.value)
        bodies = [b for b, name in zip(upstream.bodies, upstream.asked, strict=True) if name == "d"]
        followed = bodies[0].pop("kv_transfer_params")["kvpool"]
        assert followed["source"] == "node-p"
        assert 0 < followed["follow_s"] <= FOLLOW_MORE_S + 1.0
        assert bodies == [STREAMED.value] * (2 if lost else 1)

    virtually(main)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("report", ["nothing", "a part", "none", "bad"])
def test_nobody_follows_an_engine_that_saves_nothing(streams: bool, report: str) -> None:
    """It is asked anew at once. What is saved in part comes, and who follows hears of the rest."""

    async def main() -> None:
        upstream = Upstream(d="hang once" if report == "nothing" else "")
        upstream.reports["p"] = {
            "nothing": {"saved_tokens": 0, "saving_tokens": 0, "saving_s": None},
            "a part": {"saved_tokens": 16, "saving_tokens": 0, "saving_s": None},
            "none": None,
            "bad": {"saved_tokens": -1},
        }[report]
        body = STREAMED if streams else BODY
        active = active_of(Orders(), upstream, body=body, namespace=b"n" * 16)
        active.tell(order("p", whole=False, follow=True))
        client = Client()
        await active.run(client)
        assert client.data == answer_to(body.value)
        assert upstream.asked.count("d") == (2 if report == "nothing" else 1)
        prefill = upstream.bodies[upstream.asked.index("p")]
        assert prefill["kv_transfer_params"] == REPORT
        assert "kv_transfer_params" not in upstream.bodies[-1] or report != "nothing"

    virtually(main)


def test_what_an_engine_says_of_its_saves_reaches_the_scheduler() -> None:
    async def main() -> None:
        orders, upstream = Orders(), Upstream()
        upstream.reports["p"] = {"saved_tokens": 32, "saving_tokens": 16, "saving_s": 0.5}
        estimate = DecodeEstimate(engine("d"), 0.001, 0, 0.0, True, 0.0)
        orders.then = DecodeOrder(REQUEST, engine("d"), engine("p"), estimate)
        active = active_of(orders, upstream, namespace=b"n" * 16)
        active.tell(order("p", whole=False))
        await active.run(Client())
        assert [each.saves for each in orders.measured] == [Saves(48, 16, 0.5)]

    virtually(main)


@pytest.mark.parametrize("wait_s", [0.0, 0.25])
def test_who_decodes_waits_for_what_is_still_being_saved(wait_s: float) -> None:
    """An engine says that a prompt is computed before all of it is in the pool."""

    async def main() -> None:
        orders, upstream = Orders(), Upstream()
        estimate = DecodeEstimate(engine("d"), 0.001, 0, 0.0, True, 0.0)
        orders.then = DecodeOrder(REQUEST, engine("d"), engine("p"), estimate, wait_s=wait_s)
        active = active_of(orders, upstream)
        active.tell(order("p", whole=False))
        await active.run(Client())
        assert upstream.asked == ["p", "d"]
        wait = {"kvpool": {"follow_s": wait_s, "source": "node-p", "computed": True}}
        expected = {"kv_transfer_params": wait} if wait_s else {}
        assert upstream.bodies[1] == msgspec.json.decode(RAW) | expected

    virtually(main)
