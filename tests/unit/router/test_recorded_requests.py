"""What a router records of each way in which a request ends."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvpool.errors import KvpoolError, Unavailable
from kvpool.router.config import RouterConfig
from kvpool.router.hashing import HashSpec
from kvpool.router.http.bodies import Kind
from kvpool.router.records.metrics import RECORD_OUTCOMES
from kvpool.router.records.recorder import EndedRequest
from kvpool.router.upstream.specs import EngineSpec
from kvpool.scheduler.settings import Settings
from kvpool.scheduler.values import Role
from tests.support.scripted_engines import BLOCK_TOKENS, EVENTS, Bench, Client, engine
from tests.support.virtual_time import virtually
from tests.support.waiting import until_async

CONFIG: dict[str, Any] = {
    "stall_s": 0.5,
    "client_stall_s": 0.5,
    "deadline_s": 20.0,
    "probe_s": 50.0,
    "backoff_s": 50.0,
    "backoff_s_max": 50.0,
    "failures_max": 1000,
    "retries_max": 1,
}
TEXT = "a question of some length, in one go"
STREAM = {"prompt": TEXT, "stream": True}
WHOLE = {"prompt": TEXT}
SPEC = HashSpec(BLOCK_TOKENS, "sha256_cbor", b"none")


class Kept:
    """Stands for a `Recorder`."""

    def __init__(self) -> None:
        self.requests: list[EndedRequest] = []

    def add(self, request: EndedRequest) -> None:
        self.requests.append(request)

    def counts(self) -> dict[str, int]:
        return dict.fromkeys(RECORD_OUTCOMES, 0) | {"written": len(self.requests)}


def recorded(
    work: Callable[[Bench], Awaitable[object]],
    *specs: EngineSpec,
    scheduler: Settings | None = None,
    **config: Any,
) -> EndedRequest:
    """The one request of this work."""
    kept = Kept()

    async def main() -> None:
        made = RouterConfig(**CONFIG | config)
        async with Bench(specs, made, scheduler or Settings(), recording=kept) as bench:
            bench.known.spec = SPEC
            await work(bench)
            bench.serving.refresh_metrics()
            bench.serving.refresh_metrics()
            text = bench.metrics.text().decode()
            assert 'kvpool_router_recorded_requests_total{outcome="written"} 1.0' in text

    virtually(main)
    (request,) = kept.requests
    assert request.arrived_s <= request.ended_s
    return request


async def ask(
    bench: Bench, body: dict[str, Any], client: Client | None = None, **more: Any
) -> None:
    await bench.serving.serve(bench.incoming(body, **more), client or Client())


def failing(body: dict[str, Any], *faults: str, **more: Any) -> Callable[[Bench], Awaitable[None]]:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque(faults)
        try:
            await ask(bench, body, **more)
        except KvpoolError:
            pass

    return work


def test_an_answer_in_one_piece() -> None:
    found = recorded(lambda bench: ask(bench, WHOLE, tenant="t", priority=3), engine("a"))
    assert (found.outcome, found.model, found.tenant, found.priority) == (
        "answered",
        "tiny",
        "t",
        3,
    )
    assert (found.tokens, found.output_tokens) == (len(TEXT), EVENTS)
    assert (len(found.keys), found.block_tokens) == (len(TEXT) // BLOCK_TOKENS, BLOCK_TOKENS)
    assert found.ttft_s is None, "it is not known"
    assert not found.session
    assert not found.agent


def test_a_stream_by_two_engines() -> None:
    found = recorded(
        lambda bench: ask(bench, STREAM, session="s"),
        engine("p", Role.PREFILL),
        engine("d", Role.DECODE),
    )
    assert found.outcome == "answered"
    assert found.ttft_s is not None
    assert 0 <= found.ttft_s <= found.ended_s - found.arrived_s
    assert found.output_tokens == EVENTS + 1, "its engine does not say how many: its events"
    assert found.session
    assert found.session != "s", "as the router knows it"


def test_sessions_are_those_of_the_router() -> None:
    """The same one is the same, of another tenant another."""
    sessions = [
        recorded(lambda bench, of=of: ask(bench, STREAM, **of), engine("a")).session
        for of in ({"session": "s"}, {"session": "s"}, {"session": "s", "tenant": "t"})
    ]
    assert sessions[0] == sessions[1] != sessions[2]


@pytest.mark.parametrize(
    ("faults", "body", "outcome", "output_tokens"),
    [
        (("refuse",), STREAM, "refused", 0),
        (("lost",) * 3, STREAM, "failed", 0),
        (("error",), STREAM, "failed", 0),
        (("error",), WHOLE, "failed", 0),
        (("cut",), STREAM, "broken_off", 2),
        (("stall",), STREAM, "deadline", 2),
        (("late_error_event",), STREAM, "broken_off", 3),
    ],
)
def test_one_that_fails(
    faults: tuple[str, ...], body: dict[str, Any], outcome: str, output_tokens: int
) -> None:
    found = recorded(failing(body, *faults), engine("a"))
    assert (found.outcome, found.output_tokens) == (outcome, output_tokens)
    assert found.tokens == len(TEXT)


def test_one_that_is_too_late() -> None:
    found = recorded(failing(STREAM, "hang", deadline_s=0.05), engine("a"))
    assert (found.outcome, found.output_tokens, found.ttft_s) == ("deadline", 0, None)


def test_one_that_the_router_rejects() -> None:
    """The demand was there: a plan for more engines counts it."""
    found = recorded(failing(STREAM), engine("a"), scheduler=Settings(ttft_slo_s=1e-9))
    assert (found.outcome, found.output_tokens) == ("rejected", 0)
    assert found.tokens == len(TEXT)


def test_one_that_is_no_request() -> None:
    found = recorded(failing({"model": "unknown"}), engine("a"))
    assert (found.outcome, found.tokens, found.keys) == ("refused", 0, ())


def test_one_whose_client_leaves() -> None:
    async def work(bench: Bench) -> None:
        client = Client(hold=asyncio.Event())
        task = asyncio.create_task(ask(bench, STREAM, client))
        await until_async(lambda: bool(client.data))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    found = recorded(work, engine("a"), client_stall_s=50.0)
    assert found.outcome == "client_left"
    assert 1 <= found.output_tokens < EVENTS
    assert found.ttft_s is not None


def test_one_whose_tokens_the_engine_alone_knows() -> None:
    async def work(bench: Bench) -> None:
        bench.known.refuses = Unavailable("no engine tokenises")
        await ask(bench, WHOLE)

    found = recorded(work, engine("a"))
    assert (found.outcome, found.tokens, found.block_tokens) == ("answered", 7, 0)


def test_one_of_another_kind() -> None:
    found = recorded(lambda bench: ask(bench, {"input": TEXT}, kind=Kind.EMBEDDINGS), engine("a"))
    assert (found.outcome, found.keys, found.block_tokens) == ("answered", (), 0)


def test_without_a_recorder_nothing_is_made() -> None:
    async def main() -> None:
        async with Bench([engine("a")], RouterConfig(**CONFIG)) as bench:
            await ask(bench, STREAM)
            bench.serving.refresh_metrics()
            text = bench.metrics.text().decode()
            assert 'kvpool_router_recorded_requests_total{outcome="written"} 0.0' in text

    virtually(main)
