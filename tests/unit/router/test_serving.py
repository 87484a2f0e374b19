"""Requests over engines that fail in every way: each ends right or clearly, and leaves nothing behind."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from kvpool.errors import Unavailable
from kvpool.router.config import RouterConfig
from kvpool.router.http.bodies import BadRequest, Kind
from kvpool.router.http.memory import SMALL_BYTES
from kvpool.router.requests.active_requests import QUIET_S
from kvpool.router.requests.intake import Rejected
from kvpool.router.requests.intents import Wanted
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import TOO_LARGE, EngineFailed
from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.settings import Settings
from kvpool.scheduler.values import Role
from kvpool.types import Intent
from tests.support.scripted_engines import (
    ERROR,
    ERROR_EVENTS,
    FAULTS,
    REFUSED_EVENTS,
    Bench,
    Client,
    ScriptedAnswer,
    ScriptedIntents,
    answer_to,
    engine,
)
from tests.support.stats import value_of
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
    "retries_max": 2,
}
STREAM = {"prompt": "a question of some length, in one go", "stream": True}
WHOLE = {"prompt": "a question of some length, in one go"}
PREFILL, DECODE = Role.PREFILL, Role.DECODE


def run(
    work: Callable[[Bench], Awaitable[None]],
    *specs: EngineSpec,
    scheduler: Any = None,
    intents: ScriptedIntents | None = None,
    **config: Any,
) -> None:
    """work: on a router over these engines, of which nothing is left at the end."""
    given_settings = scheduler or Settings(retries_max=config.get("retries_max", 2))

    async def main() -> None:
        settled = RouterConfig(**{**CONFIG, **config})
        async with Bench(specs, settled, given_settings, intents=intents) as bench:
            await work(bench)
            assert not bench.left()

    virtually(main)


async def ask(bench: Bench, body: dict[str, Any], **more: Any) -> Client:
    client = Client()
    await bench.serving.serve(bench.incoming(body, **more), client)
    return client


def right(body: dict[str, Any]) -> bytes:
    return answer_to(body)


def errors_of(data: bytes) -> list[dict[str, Any]]:
    """Of the events of a stream."""
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    values = [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]
    return [value["error"] for value in values if "error" in value]


def engines_of(bench: Bench) -> list[str]:
    return [seen.engine for seen in bench.upstream.seen]


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_one_engine_serves_prompt_and_answer(body: dict[str, Any]) -> None:
    async def work(bench: Bench) -> None:
        client = await ask(bench, body, ident="me")
        assert client.data == right(body) and client.ended
        (seen,) = bench.upstream.seen
        assert seen.raw == bench.incoming(body).raw
        assert seen.headers["X-Request-Id"] == "me"
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "answered"

    run(work, engine("a"))


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_one_computes_and_another_decodes(body: dict[str, Any]) -> None:
    async def work(bench: Bench) -> None:
        client = await ask(bench, body)
        assert client.data == right(body) and client.ended
        prefill, decode = bench.upstream.seen
        assert (prefill.engine, decode.engine) == ("p", "d")
        assert prefill.path == "/v1/completions"
        assert bytes(prefill.body["prompt"]) == str(body["prompt"]).encode()
        assert prefill.body["max_tokens"] == 1
        assert decode.raw == bench.incoming(body).raw
        assert prefill.headers["traceparent"][:35] == decode.headers["traceparent"][:35]
        assert prefill.headers["traceparent"] != decode.headers["traceparent"]
        (looked,) = bench.known.looked
        assert len(looked.keys) == len(str(body["prompt"])) // 16

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_a_prompt_is_followed_where_it_is_decoded() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["p"] = asyncio.Event()
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), client))
        await until_async(lambda: len(bench.upstream.seen) == 2)
        bench.upstream.hold["p"].set()
        await task
        decode = next(seen for seen in bench.upstream.seen if seen.engine == "d")
        params = decode.body.pop("kv_transfer_params")["kvpool"]
        assert params["source"] == "node-p" and 0 < params["follow_s"] <= 60.0
        assert decode.body == msgspec.json.decode(bench.incoming(STREAM).raw)
        assert client.data == right(STREAM)

    run(work, engine("p", PREFILL), engine("d", DECODE, follows_max=4))


@pytest.mark.parametrize("body", [STREAM, WHOLE])
@pytest.mark.parametrize(("saved", "saving"), [(32, 0), (0, 32), (16, 0), (0, 16), (0, 0)])
def test_what_an_engine_did_not_save_is_forgotten_with_its_answer(
    body: dict[str, Any], saved: int, saving: int
) -> None:
    """And who decodes is not sent there to wait for it."""

    async def work(bench: Bench) -> None:
        said = {"saved_tokens": saved, "saving_tokens": saving, "saving_s": 0.0}
        bench.upstream.saves["p"] = said
        bench.upstream.hold["d"] = asyncio.Event()
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(body), client))
        await until_async(lambda: [seen.engine for seen in bench.upstream.open] == ["d"])
        (looked,) = bench.known.looked
        now = asyncio.get_running_loop().time()
        lengths = bench.index.match(looked.keys, now).lengths
        stored = (saved + saving) // 16
        assert lengths.pop("gpu:p") == 2
        assert set(lengths.values()) == ({stored} if stored else set())
        bench.upstream.hold["d"].set()
        await task
        assert client.data == right(body)
        (decode,) = [seen for seen in bench.upstream.seen if seen.engine == "d"]
        assert ("kv_transfer_params" in decode.body) == (saving > 0)

    p, d = engine("p", PREFILL), engine("d", DECODE, follows_max=4)
    run(work, p, d, scheduler=Settings(decode=DecodeRule(follow_below=0.0)))


@pytest.mark.parametrize("body", [STREAM, WHOLE])
@pytest.mark.parametrize("saved", [0, 16])
def test_an_engine_that_saves_nothing_is_not_followed_any_longer(
    body: dict[str, Any], saved: int
) -> None:
    async def work(bench: Bench) -> None:
        said = {"saved_tokens": saved, "saving_tokens": 0, "saving_s": None}
        bench.upstream.saves["p"] = said
        bench.upstream.hold["d"] = hold = asyncio.Event()
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(body), client))
        await until_async(lambda: [seen.engine for seen in bench.upstream.open] == ["d"])
        calls = 1 if saved else 2
        await until_async(lambda: engines_of(bench).count("d") == calls)
        hold.set()
        await task
        assert client.data == right(body)
        asked = [seen.body for seen in bench.upstream.seen if seen.engine == "d"]
        assert ["kv_transfer_params" in each for each in asked] == [True, False][:calls]

    run(work, engine("p", PREFILL), engine("d", DECODE, follows_max=4))


@pytest.mark.parametrize("fault", ["unreachable", "lost", "cut"])
def test_a_prefill_that_fails_is_done_by_another(fault: str) -> None:
    async def work(bench: Bench) -> None:
        for name in ("p1", "p2"):
            bench.upstream.faults[name] = deque([fault])
        client = await ask(bench, STREAM)
        assert client.data == right(STREAM)
        assert engines_of(bench)[-1] == "d"

    run(work, engine("p1", PREFILL), engine("p2", PREFILL), engine("d", DECODE))


@pytest.mark.parametrize("fault", ["unreachable", "lost", "comments"])
def test_an_answer_that_has_not_begun_comes_from_another(fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["d1"] = deque([fault])
        bench.upstream.faults["d2"] = deque([fault])
        client = await ask(bench, STREAM)
        assert client.data == right(STREAM) and client.ended
        assert engines_of(bench).count("p") == 1

    run(work, engine("p", PREFILL), engine("d1", DECODE), engine("d2", DECODE))


BOTH = engine("a"), engine("b")
DECODERS = engine("p", PREFILL), engine("a", DECODE), engine("b", DECODE)


@pytest.mark.parametrize("shape", [BOTH, DECODERS])
@pytest.mark.parametrize(
    ("fault", "body"), [("error", STREAM), ("error", WHOLE), ("error_event", STREAM)]
)
def test_an_answer_that_is_an_error_is_asked_of_another_engine(
    shape: tuple[EngineSpec, ...], fault: str, body: dict[str, Any]
) -> None:
    async def work(bench: Bench) -> None:
        for name in "ab":
            bench.upstream.faults[name] = deque([fault])
            first = bench.upstream.faults[name]
            client = await ask(bench, {**body, "seed": name})
            assert client.data == right({**body, "seed": name})
            first.clear()

    run(work, *shape, failures_max=1)


@pytest.mark.parametrize("shape", [BOTH, DECODERS])
@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_what_two_engines_answer_is_the_clients_and_blames_nobody(
    shape: tuple[EngineSpec, ...], body: dict[str, Any]
) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {name: deque(["error"] * 10) for name in "ab"}
        for seed in range(10):
            client = await ask(bench, {**body, "seed": seed})
            assert (client.status, client.data) == (500, ERROR)
            assert client.headers["Retry-After"] == "7"
        asked = [name for name in engines_of(bench) if name != "p"]
        assert asked.count("a") == asked.count("b") == 10
        assert all(row["state"] == "serving" for row in bench.roster.engines())

    run(work, *shape, failures_max=1)


def test_an_error_event_that_two_engines_answer_is_forwarded_as_it_is() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {name: deque(["error_event"]) for name in "ab"}
        client = await ask(bench, STREAM)
        assert (client.status, client.data) == (200, ERROR_EVENTS)
        assert client.headers["Content-Type"].startswith("text/event-stream")
        assert sorted(engines_of(bench)) == ["a", "b"]

    run(work, *BOTH, failures_max=1)


def test_without_another_engine_an_error_is_the_answer_at_once() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {"a": deque(["error"]), "p": deque([""])}
        client = await ask(bench, STREAM)
        assert (client.status, client.data) == (500, ERROR)
        assert engines_of(bench) == ["a"]

    run(work, engine("a"))


PREFILLERS = engine("p1", PREFILL), engine("p2", PREFILL), engine("d", DECODE)


def test_what_two_prefill_engines_answer_is_the_clients() -> None:
    """The decode engine does not compute what those are too busy for."""

    async def work(bench: Bench) -> None:
        bench.upstream.faults = {"p1": deque(["error"]), "p2": deque(["error"])}
        client = await ask(bench, STREAM)
        assert (client.status, client.data, client.headers["Retry-After"]) == (500, ERROR, "7")
        assert sorted(engines_of(bench)) == ["p1", "p2"]

    run(work, *PREFILLERS, failures_max=1)


def test_a_refused_part_of_a_prompt_is_no_answer_to_the_clients_body() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {"p1": deque(["refuse"]), "p2": deque(["refuse"])}
        client = await ask(bench, STREAM)
        assert client.data == right(STREAM)
        assert engines_of(bench)[1:] == ["d"]
        assert bench.upstream.seen[1].raw == bench.incoming(STREAM).raw

    run(work, *PREFILLERS, failures_max=1)


def test_what_another_engine_has_done_was_not_refused() -> None:
    async def work(bench: Bench) -> None:
        prefill = deque(["error"])
        bench.upstream.faults = {"p1": prefill, "p2": prefill}
        bench.upstream.faults |= {"d1": deque(["lost"] * 9), "d2": deque(["lost"] * 9)}
        with pytest.raises(Rejected) as caught:
            await ask(bench, STREAM)
        assert caught.value.status == 502
        assert sorted(engines_of(bench)) == ["d1", "d2", "p1", "p2"]

    run(work, *PREFILLERS[:2], engine("d1", DECODE), engine("d2", DECODE))


@pytest.mark.parametrize("shape", [BOTH, DECODERS])
@pytest.mark.parametrize("body", [STREAM, WHOLE])
@pytest.mark.parametrize("fault", ["hang", "exhausted", "lost", "401"])
def test_what_an_engine_has_answered_is_the_clients_however_another_one_fails(
    shape: tuple[EngineSpec, ...], body: dict[str, Any], fault: str
) -> None:
    async def work(bench: Bench) -> None:
        faults = deque(["error", *[fault] * 9])
        bench.upstream.faults = {"a": faults, "b": faults}
        client = await ask(bench, body)
        assert (client.status, client.data, client.headers["Retry-After"]) == (500, ERROR, "7")
        assert {"a", "b"} <= set(engines_of(bench))

    run(work, *shape)


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_an_engines_answer_does_not_wait_for_another_that_is_busy(body: dict[str, Any]) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold = {"a": asyncio.Event(), "b": asyncio.Event()}
        tasks = [asyncio.create_task(ask(bench, {**body, "seed": seed})) for seed in range(2)]
        await until_async(lambda: len(bench.upstream.open) == 2)
        free, busy = (seen.engine for seen in bench.upstream.open)
        bench.upstream.faults[free] = deque(["error"])
        bench.upstream.hold.pop(free).set()
        assert (await tasks[0]).data == right({**body, "seed": 0})
        before = asyncio.get_running_loop().time()
        client = await ask(bench, body)
        assert (client.status, client.data, client.headers["Retry-After"]) == (500, ERROR, "7")
        assert asyncio.get_running_loop().time() - before < 40.0
        assert engines_of(bench).count(busy) == 1
        bench.upstream.hold[busy].set()
        assert (await tasks[1]).data == right({**body, "seed": 1})

    small = {"capacity_tokens": 60}
    run(work, engine("a", **small), engine("b", **small), deadline_s=1000.0)


def test_an_error_event_is_an_answer_though_its_stream_stays_open() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {name: deque(["open_error_event"]) for name in "ab"}
        client = await ask(bench, STREAM)
        first = ERROR_EVENTS[: ERROR_EVENTS.index(b"\n\n") + 2]
        assert (client.status, client.data) == (200, first)
        assert asyncio.get_running_loop().time() < 10.0

    run(work, *BOTH, deadline_s=1000.0)


@pytest.mark.parametrize("fault", ["401", "307"])
def test_what_concerns_the_router_is_not_shown_as_the_clients_fault(fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {"a": deque([fault]), "b": deque([""])}
        assert (await ask(bench, STREAM)).data == right(STREAM)
        bench.upstream.faults = {"a": deque([fault] * 9), "b": deque([fault] * 9)}
        for seed in range(3):
            with pytest.raises(Rejected, match=f"HTTP {fault}") as caught:
                await ask(bench, {**STREAM, "seed": seed})
            assert caught.value.status == 502
        assert all(row["state"] == "serving" for row in bench.roster.engines())

    run(work, *BOTH, failures_max=1)


@pytest.mark.parametrize("body", [STREAM, WHOLE])
@pytest.mark.parametrize("slow", ["pq", "de"])
def test_a_slow_engine_is_waited_for(slow: str, body: dict[str, Any]) -> None:
    """However long it takes: its probes succeed."""

    async def work(bench: Bench) -> None:
        released = asyncio.Event()
        bench.upstream.hold = dict.fromkeys(slow, released)
        asyncio.get_running_loop().call_later(3000.0, released.set)
        client = await ask(bench, body)
        assert client.data == right(body)
        assert len(bench.upstream.seen) == 2, "nothing was begun anew"
        assert all(row["state"] == "serving" for row in bench.roster.engines())

    run(
        work,
        *(engine("p", PREFILL), engine("d", DECODE), engine("q", PREFILL), engine("e", DECODE)),
        deadline_s=3600.0,
        failures_max=1,
    )


def test_a_stream_may_pause_while_its_engine_is_alive() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque(["stall"])
        client = Client()
        await bench.serving.serve(bench.incoming(STREAM), client)
        (error,) = errors_of(client.data)
        assert error["code"] == 504, "only its deadline has ended it"

    run(work, engine("a"), deadline_s=1000.0)


def test_a_stream_whose_engine_is_silent_and_dead_ends_with_an_error() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque(["stall"])
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), client))
        await until_async(lambda: client.begun)
        bench.upstream.ill = {"a"}
        await task
        (error,) = errors_of(client.data)
        assert error["code"] == 502 and "its probes fail" in error["message"]
        assert client.ended

    run(work, engine("a"), deadline_s=1e6, probe_s=1.0, failures_max=2)


@pytest.mark.parametrize("body", [STREAM, WHOLE])
@pytest.mark.parametrize("where", ["p", "d"])
def test_calls_of_an_engine_whose_probes_fail_are_made_elsewhere(
    where: str, body: dict[str, Any]
) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold = {f"{where}{n}": asyncio.Event() for n in (1, 2)}
        task = asyncio.create_task(ask(bench, body))
        await until_async(lambda: any(s.engine in bench.upstream.hold for s in bench.upstream.open))
        (first,) = {seen.engine for seen in bench.upstream.open} & set(bench.upstream.hold)
        (other,) = set(bench.upstream.hold) - {first}
        bench.upstream.hold[other].set()
        bench.upstream.ill = {first}
        assert (await task).data == right(body)
        asked = [name for name in engines_of(bench) if name in bench.upstream.hold]
        assert asked == [first, other]

    specs = [
        engine(f"{kind}{n}", role) for kind, role in (("p", PREFILL), ("d", DECODE)) for n in (1, 2)
    ]
    run(work, *specs, deadline_s=1e6, probe_s=1.0, failures_max=2)


def test_a_request_whose_connections_are_lost_everywhere_blames_nobody() -> None:
    """However it varies: nobody serves it."""

    async def work(bench: Bench) -> None:
        for seed in range(10):
            bench.upstream.faults = {name: deque(["lost"] * 3) for name in "ab"}
            with pytest.raises(Rejected) as caught:
                await ask(bench, {**STREAM, "seed": seed})
            assert caught.value.status == 502
        assert len(bench.upstream.seen) == 30
        bench.upstream.faults = {}
        assert (await ask(bench, STREAM)).data == right(STREAM)
        assert all(row["state"] == "serving" for row in bench.roster.engines())

    run(work, *BOTH, failures_max=1)


@pytest.mark.parametrize("fault", ["lost", "unreachable"])
def test_an_engine_that_loses_what_another_one_serves_gets_no_more(fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque([fault] * 100)
        for number in range(40):
            body = {**STREAM, "prompt": f"{number}, which no engine has in its cache"}
            assert (await ask(bench, body)).data == right(body)
        assert engines_of(bench).count("a") == 3
        assert [row["state"] for row in bench.roster.engines()] == ["away", "serving"]

    run(work, *BOTH, failures_max=3)


def test_a_request_that_is_repeated_counts_once_against_an_engine() -> None:
    async def work(bench: Bench) -> None:
        for _ in range(10):
            bench.upstream.faults = {name: deque(["cut"]) for name in "ab"}
            client = await ask(bench, STREAM)
            assert len(errors_of(client.data)) == 1
        assert all(row["state"] == "serving" for row in bench.roster.engines())
        for seed in range(10):
            bench.upstream.faults = {name: deque(["cut"]) for name in "ab"}
            await rejection(ask(bench, {**STREAM, "seed": seed}))
        assert "away" in [row["state"] for row in bench.roster.engines()]

    run(work, *BOTH, failures_max=2)


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_what_an_engine_has_accepted_goes_on_while_others_requests_fail_there(
    body: dict[str, Any],
) -> None:
    """It gets no more requests, and is alive."""

    async def work(bench: Bench) -> None:
        bench.roster.drain("b")
        bench.upstream.hold["a"] = asyncio.Event()
        slow = asyncio.create_task(ask(bench, body))
        await until_async(lambda: len(bench.upstream.open) == 1)
        bench.roster.undrain("b")
        bench.roster.blame(["a"], 1)
        assert [row["state"] for row in bench.roster.engines()] == ["away", "serving"]
        assert (await ask(bench, STREAM)).data == right(STREAM)
        bench.upstream.hold["a"].set()
        assert (await slow).data == right(body)
        assert engines_of(bench) == ["a", "b"]
        await until_async(lambda: len(bench.health.passing()) == 2, "a probe ends its pause")
        assert [row["state"] for row in bench.roster.engines()] == ["serving", "serving"]

    run(work, *BOTH, failures_max=1)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("fault", ["lost", "unreachable"])
def test_a_request_is_retried_so_often_and_no_more(count: int, fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {name: deque([fault] * 99) for name in "abc"}
        with pytest.raises(Rejected) as caught:
            await ask(bench, STREAM)
        assert caught.value.status == 502
        assert len(bench.upstream.seen) == 3

    run(work, *[engine(name) for name in "abc"[:count]])


def test_a_call_counts_when_its_engine_leaves_too() -> None:
    """And comes again, each time."""

    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        task = asyncio.create_task(ask(bench, STREAM))
        for calls in range(1, 4):
            await until_async(lambda calls=calls: len(bench.upstream.seen) == calls)
            bench.health.change(bench.specs[0])
        with pytest.raises(Rejected) as caught:
            await task
        assert caught.value.status == 502
        assert len(bench.upstream.seen) == 3

    run(work, engine("a"))


def test_an_error_event_in_the_middle_is_forwarded_and_is_no_success() -> None:
    async def work(bench: Bench) -> None:
        served: list[str] = []
        bench.roster.served = served.append
        bench.upstream.faults["a"] = deque(["late_error_event"])
        client = await ask(bench, STREAM, ident="me")
        first = right(STREAM)[: right(STREAM).index(b"\n\n") + 2]
        assert client.data == first + ERROR_EVENTS and client.ended
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "broken_off"
        assert not served and not bench.recorder.tokens
        assert [row["state"] for row in bench.roster.engines()] == ["serving"]

    run(work, engine("a"), failures_max=1)


@pytest.mark.parametrize("fault", ["cut", "unfinished"])
def test_an_answer_that_breaks_off_ends_with_an_error(fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque([fault])
        client = await ask(bench, STREAM, ident="me")
        assert client.ended, "never silent"
        (error,) = errors_of(client.data)
        assert error["code"] == 502 and "engine a" in error["message"]
        assert b"[DONE]" not in client.data
        before = client.data[: client.data.index(b'data: {"error"')]
        assert before and right(STREAM).startswith(before)
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "broken_off"
        assert b'call_failures_total{engine="a"' in bench.metrics.text()

    run(work, engine("a"))


@pytest.mark.parametrize("fault", ["cut", "unfinished", "unreachable", "lost"])
def test_an_answer_in_one_piece_is_tried_again_whenever_it_fails(fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque([fault])
        bench.upstream.faults["b"] = deque([fault])
        body = {**WHOLE, "max_tokens": 1}
        client = await ask(bench, body)
        assert client.data == right(body)

    run(work, engine("a"), engine("b"))


def test_what_an_engine_refuses_is_the_engines_answer() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque(["refuse"])
        client = await ask(bench, STREAM)
        assert (client.status, client.data) == (400, b'{"error":"no"}')
        assert len(bench.upstream.seen) == 1

    run(work, engine("a"), engine("b", PREFILL))


def test_a_refusal_in_a_stream_is_the_engines_answer_too() -> None:
    async def work(bench: Bench) -> None:
        for name in ("a", "b"):
            bench.upstream.faults[name] = deque(["error_event_400"])
        client = await ask(bench, STREAM, ident="me")
        assert client.data == REFUSED_EVENTS and client.ended
        assert len(bench.upstream.seen) == 1
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "refused"

    run(work, engine("a"), engine("b"))


class Reader(Client):
    """A client that is slow to read a refusal."""

    bench: Bench

    async def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        assert not self.bench.left(), "it is not the engine's any more"
        await Client.send(self, status, body, headers)


def test_a_client_that_does_not_read_a_refusal_holds_no_engine() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque(["refuse"])
        client = Reader(stuck=True)
        client.bench = bench
        await bench.serving.serve(bench.incoming(STREAM, ident="me"), client)
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "client_left"

    run(work, engine("a"))


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_an_answer_that_is_too_large_is_the_clients_own_doing(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is asked for the same, and the engine is as good as it was."""
    asked = []

    @asynccontextmanager
    async def post(spec: EngineSpec, *_: object) -> AsyncIterator[None]:
        asked.append(spec.name)
        await asyncio.sleep(0)
        raise EngineFailed(spec.name, TOO_LARGE, "an answer above 7 bytes")
        yield

    async def work(bench: Bench) -> None:
        bench.upstream.ask = post  # type: ignore[assignment,method-assign]
        for at in range(3):
            with pytest.raises(Rejected) as caught:
                await ask(bench, {**body, "seed": at})
            assert caught.value.status == 502 and "above 7 bytes" in str(caught.value)
        with pytest.raises(Rejected) as caught:
            await bench.serving.pass_through(
                "/tokenize", bench.incoming(body).raw, "me", bench.serving.memory.hold()
            )
        assert caught.value.status == 502
        assert len(asked) == 4
        assert all(row["state"] == "serving" for row in bench.roster.engines())

    run(work, engine("a"), engine("b"), failures_max=1)


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_a_short_deadline_is_no_failure_of_an_engine(body: dict[str, Any]) -> None:
    async def late(bench: Bench, seed: int) -> int:
        with pytest.raises(Rejected) as caught:
            await ask(bench, {**body, "seed": seed}, deadline_s=0.02)
        return caught.value.status

    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        found = await asyncio.gather(*(late(bench, seed) for seed in range(20)))
        assert 504 in found and set(found) <= {429, 504}
        assert b"call_failures_total{" not in bench.metrics.text()
        assert [row["state"] for row in bench.roster.engines()] == ["serving"]

    run(work, engine("a"), failures_max=1)


def test_when_a_prefill_is_refused_the_decode_engine_says_why() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {"p": deque(["refuse"]), "d": deque(["refuse"])}
        client = await ask(bench, STREAM)
        assert client.status == 400
        assert engines_of(bench) == ["p", "d"]
        assert bench.upstream.seen[1].raw == bench.incoming(STREAM).raw

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_a_prompt_that_is_too_long_is_the_engines_to_refuse() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["d"] = deque(["refuse"])
        client = await ask(bench, STREAM)
        assert client.status == 400 and len(bench.upstream.seen) == 1

    run(work, engine("d", max_len=20))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("where", ["before", "within"])
def test_the_deadline_ends_it(streams: bool, where: str) -> None:
    async def work(bench: Bench) -> None:
        fault = "hang" if where == "before" else "stall"
        bench.upstream.faults["a"] = deque([fault])
        begins = streams and where == "within"
        limit_s = 2.0 if begins else 0.05  # on a slow machine too the answer must begin within it
        incoming = bench.incoming({**WHOLE, "stream": streams}, deadline_s=limit_s, ident="me")
        client = Client()
        if begins:
            await bench.serving.serve(incoming, client)
            (error,) = errors_of(client.data)
            assert error["code"] == 504 and client.ended
        else:
            with pytest.raises(Rejected) as caught:
                await bench.serving.serve(incoming, client)
            assert caught.value.status == 504
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "deadline"

    run(work, engine("a"), stall_s=50.0)


@pytest.mark.parametrize("held", ["p", "d"])
def test_a_client_that_leaves_is_forgotten_everywhere(held: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold[held] = asyncio.Event()
        task = asyncio.create_task(
            bench.serving.serve(bench.incoming(STREAM, ident="me"), Client())
        )
        await until_async(lambda: bool(any(seen.engine == held for seen in bench.upstream.open)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "client_left"

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        tasks = [
            asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), Client()))
            for _ in range(Settings().orders_max + 1)
        ]
        await until_async(lambda: bool(bench.scheduler.waiting))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(work, engine("a"))


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_a_client_that_does_not_read_is_given_up(body: dict[str, Any]) -> None:
    async def work(bench: Bench) -> None:
        client = Client(stuck=True)
        await bench.serving.serve(bench.incoming(body, ident="me"), client)
        account = bench.serving.accounts.get("me")
        assert account is not None and account.outcome == "client_left"

    run(work, engine("a"))


def test_an_engine_that_goes_gives_its_orders_back() -> None:
    """The prompt is computed by another; the one that hangs is called off."""

    async def work(bench: Bench) -> None:
        bench.upstream.hold = {"p1": asyncio.Event(), "p2": asyncio.Event()}
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), client))
        await until_async(lambda: bool(bench.upstream.open))
        first = bench.upstream.open[0].engine
        other = "p2" if first == "p1" else "p1"
        bench.upstream.hold[other].set()
        bench.health.remove(first)
        await task
        assert client.data == right(STREAM)
        assert engines_of(bench) == [first, other, "d"]

    run(
        work,
        engine("p1", PREFILL),
        engine("p2", PREFILL),
        engine("d", DECODE),
    )


def test_an_engine_that_goes_before_its_answer_begins_gives_that_back_too() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold = {"d1": asyncio.Event(), "d2": asyncio.Event()}
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), client))
        await until_async(lambda: bool(any(seen.engine != "p" for seen in bench.upstream.open)))
        first = bench.upstream.open[0].engine
        other = "d2" if first == "d1" else "d1"
        bench.upstream.hold[other].set()
        bench.health.remove(first)
        await task
        assert client.data == right(STREAM)
        assert engines_of(bench) == ["p", first, other]

    run(work, engine("p", PREFILL), engine("d1", DECODE), engine("d2", DECODE))


def replace_poll(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, poll: Callable[[float], Any]
) -> None:
    """Ask this for orders in the place of the scheduler's poll."""
    monkeypatch.setattr(bench.scheduler, "poll", poll)


def test_an_engine_that_changes_before_its_order_is_looked_at_gets_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is another one of the same name at once, and gets the order anew if it gets it at all."""

    async def work(bench: Bench) -> None:
        poll = bench.scheduler.poll

        def poll_and_change(now: float) -> list[Any]:
            orders = poll(now)
            monkeypatch.undo()
            asyncio.get_running_loop().call_soon(bench.health.change, bench.specs[0])
            return [*orders]

        replace_poll(bench, monkeypatch, poll_and_change)
        assert (await ask(bench, STREAM)).data == right(STREAM)
        assert engines_of(bench) == ["a"]

    run(work, engine("a"))


@pytest.mark.parametrize("fault", ["refuse", "error", "lost", TOO_LARGE])
def test_a_prefill_that_fails_after_the_answer_has_begun_does_not_matter(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that follows answers before the prefill says how it ended, and breaks off later."""

    async def work(bench: Bench) -> None:
        answers = bench.upstream.ask

        @asynccontextmanager
        async def post(spec: EngineSpec, *args: Any) -> AsyncIterator[ScriptedAnswer]:
            async with answers(spec, *args) as answer:
                if spec.name == "p" and fault == TOO_LARGE:
                    raise EngineFailed(spec.name, fault, "an answer above 7 bytes")
                yield answer

        bench.upstream.ask = post  # type: ignore[assignment,method-assign]
        bench.upstream.hold["p"] = asyncio.Event()
        first = "" if fault == TOO_LARGE else fault
        bench.upstream.faults = {"p": deque([first]), "d": deque(["unfinished"])}
        bench.upstream.hold["d"] = asyncio.Event()
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), client))
        await until_async(lambda: len(bench.upstream.open) == 2)
        client.hold = asyncio.Event()
        bench.upstream.hold["d"].set()
        await until_async(lambda: bool(client.data))
        bench.upstream.hold["p"].set()
        await until_async(lambda: len(bench.upstream.open) == 1)
        client.hold.set()
        await task
        (error,) = errors_of(client.data)
        assert "engine d" in error["message"] and client.ended

    run(
        work,
        engine("p", PREFILL),
        engine("d", DECODE, follows_max=4),
        retries_max=0,
    )


class Remover(Client):
    """A client at whose first byte the engine goes that answers."""

    bench: Bench

    async def write(self, data: bytes) -> None:
        if not self.data:
            self.bench.health.remove(self.bench.upstream.seen[0].engine)
        await Client.write(self, data)


def test_an_answer_that_has_begun_is_served_to_its_end_when_its_engine_goes() -> None:
    async def work(bench: Bench) -> None:
        client = Remover()
        client.bench = bench
        await bench.serving.serve(bench.incoming(STREAM, ident="me"), client)
        assert client.data == right(STREAM)
        account = bench.serving.accounts.get("me")
        assert account is not None
        assert [step["what"] for step in account.steps].count("order") == 1

    run(work, engine("a"), engine("b"))


def test_an_engine_that_drains_does_so_when_it_comes_back() -> None:
    async def work(bench: Bench) -> None:
        bench.roster.drain("a")
        bench.health.change(bench.specs[0])
        assert (await ask(bench, STREAM)).data == right(STREAM)
        assert engines_of(bench) == ["b"]

    run(work, engine("a"), engine("b"))


def test_a_drain_ends_with_its_engine() -> None:
    """What comes to its place is another engine: nobody would think of it."""

    async def work(bench: Bench) -> None:
        told: list[tuple[str, bool, float]] = []
        bench.roster.operated = lambda *said: told.append(said)
        bench.roster.weigh("a", 0.5)
        bench.roster.drain("a")
        bench.roster.left("a")
        bench.roster.left("b")
        assert told[1:] == [("a", True, 0.5), ("a", False, 0.5)]
        bench.health.change(bench.specs[0])
        assert [row["state"] for row in bench.roster.engines()] == ["serving", "serving"]

    run(work, engine("a"), engine("b"))


def test_an_engine_that_drains_gets_nothing_and_loses_nothing() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        bench.roster.drain("b")
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), client))
        await until_async(lambda: bool(bench.upstream.open))
        bench.roster.drain("a")
        bench.roster.undrain("b")
        states = {row["name"]: row["state"] for row in bench.roster.engines()}
        assert states == {"a": "draining", "b": "serving"}
        other = await ask(bench, STREAM)
        assert other.data == right(STREAM)
        bench.upstream.hold["a"].set()
        await task
        assert client.data == right(STREAM)
        assert engines_of(bench) == ["a", "b"]
        assert {row["name"]: row["state"] for row in bench.roster.engines()}["a"] == "drained"

    run(work, engine("a"), engine("b"))


def test_what_goes_to_any_engine_goes_to_none_that_drains_if_there_is_another() -> None:
    async def work(bench: Bench) -> None:
        raw = bench.incoming(WHOLE).raw
        for drained in ("a", "b"):
            bench.roster.drain(drained)
            assert (
                await bench.serving.pass_through(
                    "/tokenize", raw, "me", bench.serving.memory.hold()
                )
            )[0] == 200
            assert (await ask(bench, WHOLE)).data == right(WHOLE)
        # The second time there is no other.
        assert engines_of(bench) == ["b", "b", "a", "a"]

    run(work, engine("a", max_len=20), engine("b", max_len=20))


def test_without_engines_there_is_nobody_to_ask() -> None:
    async def work(bench: Bench) -> None:
        with pytest.raises(Rejected) as caught:
            await ask(bench, STREAM)
        assert (caught.value.status, caught.value.why) == (503, "no_engine")

    run(work)


def test_without_an_engine_that_decodes_too() -> None:
    async def work(bench: Bench) -> None:
        assert "no decode engine" in bench.serving.well
        with pytest.raises(Rejected) as caught:
            await ask(bench, STREAM)
        assert (caught.value.status, caught.value.why) == (503, "no_engine")

    run(work, engine("p", PREFILL))


def test_an_adapter_is_served_by_who_has_it() -> None:
    async def work(bench: Bench) -> None:
        prompts = [{"prompt": f"{number} things", "stream": True} for number in range(20)]
        asked = [ask(bench, {**prompt, "model": "adapter"}) for prompt in prompts]
        assert all(client.status == 200 for client in await asyncio.gather(*asked))
        assert engines_of(bench) == ["b"] * 20
        # Where all are fast, one engine may get them all: that one is held.
        bench.upstream.hold["b"] = asyncio.Event()
        plain = [asyncio.create_task(ask(bench, prompt)) for prompt in prompts]
        await asyncio.wait(plain, return_when=asyncio.FIRST_COMPLETED)
        assert "a" in engines_of(bench)[20:]
        bench.upstream.hold["b"].set()
        await asyncio.gather(*plain)

    run(work, engine("a"), engine("b", models=("tiny", "adapter")))


def test_an_error_in_a_poll_does_not_end_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bench: Bench) -> None:
        seen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: seen.append(what))
        real, errors = bench.scheduler.poll, [ValueError("once")]

        def poll(now: float) -> Any:
            if errors:
                raise errors.pop()
            return real(now)

        replace_poll(bench, monkeypatch, poll)
        client = await ask(bench, STREAM)
        assert client.data == right(STREAM)
        assert [type(what["exception"]) for what in seen] == [ValueError]

    run(work, engine("a"))


def test_an_error_with_one_order_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bench: Bench) -> None:
        seen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: seen.append(what))
        real, errors = bench.orders._count, [ValueError("once")]

        def count(order: Any, recipient: Any, now: float) -> None:
            real(order, recipient, now)
            if errors:
                assert len(bench.scheduler.engines) == 3
                raise errors.pop()

        monkeypatch.setattr(bench.orders, "_count", count)
        bodies = [{**STREAM, "seed": seed} for seed in range(3)]
        clients = await asyncio.gather(*(ask(bench, body) for body in bodies))
        assert [client.data for client in clients] == list(map(right, bodies))
        assert [type(what["exception"]) for what in seen] == [ValueError]

    run(work, *map(engine, "abc"))


def test_what_has_no_block_is_served() -> None:
    async def work(bench: Bench) -> None:
        client = await ask(bench, {"prompt": "short", "stream": True})
        assert client.data == right({"prompt": "short", "stream": True})

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_more_than_may_be_in_flight_are_turned_away() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        first = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), Client()))
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as caught:
            await ask(bench, STREAM)
        assert (caught.value.status, caught.value.why) == (429, "requests_max")
        assert caught.value.retry_after_s is not None
        bench.upstream.hold["a"].set()
        await first

    run(work, engine("a"), requests_max=1)


def test_a_full_queue_turns_away() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        tasks = [
            asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), Client()))
            for _ in range(30)
        ]
        await until_async(lambda: bool(any(task.done() for task in tasks)))
        bench.upstream.hold["a"].set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        turned = [error for error in found if isinstance(error, Rejected)]
        assert turned and all(e.status == 429 and e.why == "queue_full" for e in turned)
        assert sum(error is None for error in found) + len(turned) == 30

    run(work, engine("a"), scheduler=Settings(queue_max=2))


def test_a_router_that_ends_takes_nothing_new_and_finishes_the_rest() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        client = Client()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), client))
        await until_async(lambda: bool(bench.upstream.open))
        drained = asyncio.create_task(bench.serving.active.drained(20.0))
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as caught:
            await ask(bench, STREAM)
        assert caught.value.status == 503 and not drained.done()
        bench.upstream.hold["a"].set()
        await task
        assert client.data == right(STREAM)
        assert await drained

    run(work, engine("a"))


def test_a_router_does_not_wait_for_ever_when_it_ends() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        task = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), Client()))
        await until_async(lambda: bool(bench.upstream.open))
        assert not await bench.serving.active.drained(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(work, engine("a"))


def test_with_a_shared_port_it_finishes_what_comes_on_open_connections() -> None:
    async def work(bench: Bench) -> None:
        drained = asyncio.create_task(bench.serving.active.drained(50.0))
        await asyncio.sleep(0)
        assert (await ask(bench, STREAM)).data == right(STREAM)
        assert bench.serving.well == "shutting down" and not drained.done()
        bench.upstream.hold["a"] = asyncio.Event()
        last = asyncio.create_task(ask(bench, WHOLE))
        await until_async(lambda: bool(bench.upstream.open))
        _, waits = await asyncio.wait({drained}, timeout=2 * QUIET_S)
        assert waits, "a request is under way"
        bench.upstream.hold["a"].set()
        assert (await last).data == right(WHOLE)
        assert await drained

    run(work, engine("a"), reuse_port=True)


@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_what_the_router_lacks_is_no_failure_of_an_engine(body: dict[str, Any]) -> None:
    async def work(bench: Bench) -> None:
        for _ in range(3):
            bench.upstream.faults["a"] = deque(["exhausted"])
            with pytest.raises(Rejected) as caught:
                await ask(bench, body)
            assert (caught.value.status, caught.value.why) == (503, "exhausted")
            assert caught.value.retry_after_s == 1.0
        assert (await ask(bench, body)).data == right(body)
        assert b'rejections_total{code="exhausted"} 3.0' in bench.metrics.text()
        bench.upstream.faults["a"] = deque(["exhausted"])
        raw, held = bench.incoming(WHOLE).raw, bench.serving.memory.hold()
        with pytest.raises(Rejected) as caught:
            await bench.serving.pass_through("/tokenize", raw, "me", held)
        assert caught.value.status == 503
        assert len(bench.health.passing()) == 1

    run(work, engine("a"), failures_max=1)


def test_probes_that_cannot_be_sent_say_nothing() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.exhausted = True
        before = bench.upstream.probes
        await until_async(lambda: bench.upstream.probes >= before + 5)
        assert len(bench.health.passing()) == 1
        bench.upstream.exhausted = False
        bench.upstream.ill = {"a"}
        await until_async(lambda: not bench.health.passing())

    run(work, engine("a"), failures_max=2, probe_s=0.01)


def test_a_body_for_which_there_is_no_room_is_refused_at_once() -> None:
    async def work(bench: Bench) -> None:
        large = {"prompt": "x" * 2 * SMALL_BYTES}
        with bench.serving.memory.hold() as held:
            with pytest.raises(Rejected, match="1000") as caught:
                await ask(bench, large, held=held)
            assert (caught.value.status, caught.value.why) == (429, "memory")
            with pytest.raises(Rejected):
                await bench.serving.explain(bench.incoming(large, held=held))
            raw = bench.incoming(large).raw
            with pytest.raises(Rejected):
                await bench.serving.pass_through("/tokenize", raw, "me", held)
        assert not bench.upstream.seen
        assert b'rejections_total{code="memory"} 3.0' in bench.metrics.text()
        assert (await ask(bench, WHOLE)).data == right(WHOLE)

    run(work, engine("a"), memory_bytes_max=1000)


def test_an_answer_for_which_there_is_no_room_is_refused_and_tried_nowhere_else() -> None:
    async def work(bench: Bench) -> None:
        large = {"prompt": ["x" * 2 * SMALL_BYTES]}  # its answer repeats it
        with pytest.raises(Rejected) as caught:
            await ask(bench, large)
        assert (caught.value.status, caught.value.why) == (429, "memory")
        assert len(engines_of(bench)) == 1
        assert len(bench.health.passing()) == 2
        assert bench.serving.memory.held == 0

    run(work, engine("a"), engine("b"), memory_bytes_max=1000, failures_max=1)


@pytest.mark.parametrize(
    "body", [{"prompt": ["x", "y"]}, {"prompt": "x", "echo": True}, {"prompt": "x", "suffix": "y"}]
)
def test_what_one_engine_must_serve_goes_to_one_that_decodes(body: dict[str, Any]) -> None:
    async def work(bench: Bench) -> None:
        client = await ask(bench, body)
        assert client.data == right(body)
        assert engines_of(bench) == ["d"]

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_what_cannot_be_tokenised_goes_to_one_that_decodes() -> None:
    async def work(bench: Bench) -> None:
        bench.known.refuses = Unavailable("nobody tokenises")
        client = await ask(bench, STREAM)
        assert client.data == right(STREAM)
        assert engines_of(bench) == ["d"]

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_images_are_computed_by_the_clients_own_body() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    body = {"messages": [{"role": "user", "content": [image]}], "stream": True}

    async def work(bench: Bench) -> None:
        client = await ask(bench, body, kind=Kind.CHAT)
        assert client.data == right(body)
        prefill, decode = bench.upstream.seen
        assert prefill.path == decode.path == "/v1/chat/completions"
        assert prefill.body["messages"] == body["messages"]
        assert prefill.body["max_tokens"] == 1 and prefill.body["stream"] is False
        assert decode.raw == bench.incoming(body).raw

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_priority_is_bounded_by_what_the_tenant_may() -> None:
    async def work(bench: Bench) -> None:
        for wanted, most, found in ((7, 5, 5), (-7, 5, -7), (None, 0, 0)):
            await ask(
                bench, {**STREAM, "priority": -9}, ident="me", priority=wanted, priority_max=most
            )
            account = bench.serving.accounts.get("me")
            assert account is not None and account.facts["priority"] == found

    run(work, engine("a"))


def test_a_dry_run_sends_nothing() -> None:
    async def work(bench: Bench) -> None:
        found = await bench.serving.explain(bench.incoming(STREAM))
        assert found["engine"] == "p"
        assert found["decode_candidates"][0]["engine"] == "d"
        assert not bench.upstream.seen
        msgspec.json.encode(found)

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_dry_runs_are_admitted_as_requests_are() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.hold["a"] = asyncio.Event()
        first = asyncio.create_task(bench.serving.serve(bench.incoming(STREAM), Client()))
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as caught:
            await bench.serving.explain(bench.incoming(STREAM))
        assert caught.value.why == "requests_max"
        bench.upstream.hold["a"].set()
        await first
        assert (await bench.serving.explain(bench.incoming(STREAM)))["engine"] == "a"

    run(work, engine("a"), requests_max=1)


PREFETCH = Wanted(Intent.PREFETCH)


def test_a_prompt_is_prefetched_to_the_node_to_which_its_request_would_go() -> None:
    intents = ScriptedIntents({"p": "node-p", "d": "node-d", "far": "node-far"})

    async def elsewhere(request: Any, model: str) -> bytes:
        return b'{"engine": "far"}'

    async def work(bench: Bench) -> None:
        assert (await bench.serving.explain(bench.incoming(WHOLE)))["engine"] == "p"
        for wanted, nodes in (
            (PREFETCH, ("node-p",)),
            (replace(PREFETCH, dry_run=True), ("node-p",)),
            (replace(PREFETCH, nodes=("x", "y")), ("x", "y")),
            (Wanted(Intent.KEEP, for_s=1.0), ()),
        ):
            await bench.serving.intend(bench.incoming(WHOLE), wanted)
            body, told, limit_s = intents.told.pop()
            assert body.value["prompt"] == WHOLE["prompt"] and told == replace(wanted, nodes=nodes)
            assert limit_s == CONFIG["deadline_s"]
        await bench.serving.intend(bench.incoming(WHOLE, deadline_s=3.0), PREFETCH, elsewhere)
        _, told, limit_s = intents.told.pop()
        assert (told.nodes, limit_s) == (("node-far",), 3.0), "another router schedules"
        assert not bench.upstream.seen

    run(work, engine("p", PREFILL), engine("d", DECODE), intents=intents)


def test_what_can_be_prefetched_nowhere_is_told() -> None:
    intents = ScriptedIntents({})

    async def work(bench: Bench) -> None:
        for saying in (b"", b'{"rejected": "full"}', b'{"engine": null}', b'{"engine": 7}'):

            async def elsewhere(request: Any, model: str, saying: bytes = saying) -> bytes:
                return saying

            with pytest.raises(Rejected) as caught:
                await bench.serving.intend(bench.incoming(WHOLE), PREFETCH, elsewhere)
            assert (caught.value.status, caught.value.why) == (503, "no_node")
        assert not intents.told
        named = replace(PREFETCH, nodes=("x",))
        await bench.serving.intend(bench.incoming(WHOLE), named)
        assert len(intents.told) == 1

    run(work, engine("a"), intents=intents)


def test_intents_are_admitted_as_requests_are() -> None:
    intents = ScriptedIntents({})
    wanted = Wanted(Intent.PIN)

    async def work(bench: Bench) -> None:
        intents.hold = asyncio.Event()
        first = asyncio.create_task(bench.serving.intend(bench.incoming(WHOLE), wanted))
        await until_async(lambda: len(intents.told) == 1)
        with pytest.raises(Rejected) as caught:
            await bench.serving.intend(bench.incoming(WHOLE), wanted)
        assert caught.value.why == "requests_max"
        drained = asyncio.create_task(bench.serving.active.drained(30.0))
        intents.hold.set()
        await first
        assert await drained
        with pytest.raises(Rejected, match="shutting down"):
            await bench.serving.intend(bench.incoming(WHOLE), wanted)
        assert len(intents.told) == 1

    run(work, engine("a"), intents=intents, requests_max=1)


def test_an_intent_for_a_body_without_room_is_refused() -> None:
    intents = ScriptedIntents({"a": "node-a"})

    async def work(bench: Bench) -> None:
        large = {"prompt": "x" * (SMALL_BYTES * 4)}
        for wanted in (PREFETCH, Wanted(Intent.PIN)):
            with bench.serving.memory.hold() as held, pytest.raises(Rejected) as caught:
                await bench.serving.intend(bench.incoming(large, held=held), wanted)
            assert (caught.value.status, caught.value.why) == (429, "memory")
        assert not intents.told and not bench.serving.memory.held

    run(work, engine("a"), intents=intents, memory_bytes_max=SMALL_BYTES)


def test_a_router_without_intents_says_so() -> None:
    async def work(bench: Bench) -> None:
        with pytest.raises(BadRequest, match="passes no intents on"):
            await bench.serving.intend(bench.incoming(WHOLE), Wanted(Intent.PIN))

    run(work, engine("a"))


def test_what_is_passed_through_is_tried_elsewhere() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults["a"] = deque(["error"])
        raw = bench.incoming(WHOLE).raw
        status, body, _ = await bench.serving.pass_through(
            "/tokenize", raw, "me", bench.serving.memory.hold()
        )
        assert (status, body) == (200, right(WHOLE))
        assert engines_of(bench) == ["a", "b"]
        bench.upstream.faults["a"] = deque(["refuse"])
        assert (
            await bench.serving.pass_through("/tokenize", raw, "me", bench.serving.memory.hold())
        )[0] == 400
        with pytest.raises(BadRequest):
            await bench.serving.pass_through("/tokenize", b"[]", "me", bench.serving.memory.hold())

    run(work, engine("a"), engine("b"))


def test_an_error_that_is_passed_through_is_the_engines_answer_and_blames_nobody() -> None:
    async def work(bench: Bench) -> None:
        raw, held = bench.incoming(WHOLE).raw, bench.serving.memory.hold()
        for fault, status in (("error", 500), ("refuse", 400)):
            bench.upstream.faults = {name: deque([fault]) for name in "abc"}
            found = await bench.serving.pass_through("/tokenize", raw, "me", held)
            assert found[0] == status
        assert engines_of(bench) == ["a", "b", "a"]
        for fault in ("401", "lost"):
            bench.upstream.faults = {name: deque([fault] * 3) for name in "abc"}
            with pytest.raises(Rejected) as caught:
                await bench.serving.pass_through("/tokenize", raw, "me", held)
            assert caught.value.status == 502
        assert len(bench.health.passing()) == 3

    run(work, *map(engine, "abc"), failures_max=1)


@pytest.mark.parametrize("fault", ["hang", "exhausted", "lost", "401"])
def test_an_error_that_is_passed_through_outlives_what_another_engine_does(fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {"a": deque(["error"]), "b": deque([fault])}
        raw, held = bench.incoming(WHOLE).raw, bench.serving.memory.hold()
        status, body, headers = await bench.serving.pass_through("/tokenize", raw, "me", held)
        assert (status, body, headers["Retry-After"]) == (500, ERROR, "7")
        assert engines_of(bench) == ["a", "b"]

    run(work, *BOTH)


def test_what_is_passed_through_waits_for_an_engine_while_it_is_alive() -> None:
    async def work(bench: Bench) -> None:
        raw, held = bench.incoming(WHOLE).raw, bench.serving.memory.hold()
        bench.upstream.hold["a"] = asyncio.Event()
        asyncio.get_running_loop().call_later(100.0, bench.upstream.hold["a"].set)
        found = await bench.serving.pass_through("/tokenize", raw, "me", held)
        assert (found[0], engines_of(bench)) == (200, ["a"])
        bench.upstream.hold["a"] = asyncio.Event()
        task = asyncio.create_task(bench.serving.pass_through("/tokenize", raw, "me", held))
        await until_async(lambda: len(bench.upstream.open) == 1)
        bench.upstream.ill = {"a"}
        assert ((await task)[0], engines_of(bench)) == (200, ["a", "a", "b"])
        bench.upstream.hold["b"] = asyncio.Event()
        with pytest.raises(Rejected) as caught:
            await bench.serving.pass_through("/tokenize", raw, "me", held)
        assert caught.value.status == 504

    run(work, *BOTH, deadline_s=1000.0, probe_s=1.0, failures_max=2)


SHAPES = [
    (engine("a"), engine("b")),
    (engine("p1", PREFILL), engine("p2", PREFILL), engine("d1", DECODE), engine("d2", DECODE)),
    (engine("p1", PREFILL), engine("p2"), engine("d", DECODE, follows_max=2)),
]
SOME_FAULTS = st.lists(st.sampled_from(["", *FAULTS]), max_size=4)


async def rejection(work: Awaitable[object]) -> Rejected | None:
    try:
        await work
    except Rejected as error:
        return error
    return None


@settings(max_examples=60)
@given(
    st.sampled_from(SHAPES),
    st.lists(SOME_FAULTS, min_size=4, max_size=4),
    st.lists(st.tuples(st.booleans(), st.integers(0, 60)), min_size=1, max_size=6),
    st.sampled_from([2, 1000]),
)
def test_whatever_fails_each_request_ends_right_or_clearly(
    shape: tuple[EngineSpec, ...],
    faults: list[list[str]],
    wanted: list[tuple[bool, int]],
    failures_max: int,
) -> None:
    async def one(bench: Bench, streams: bool, length: int, seed: int) -> None:
        body = {"prompt": "x" * length, "stream": streams, "seed": seed}
        client = Client()
        rejected = await rejection(bench.serving.serve(bench.incoming(body), client))
        if rejected is not None:
            assert rejected.status in {502, 503, 504}
            assert not client.begun
            return
        assert client.ended
        if client.status == 400:
            assert client.data == b'{"error":"no"}'
        elif client.status == 500:
            assert client.data == ERROR
        elif client.data != right(body):
            assert streams
            errors = errors_of(client.data)
            assert len(errors) == 1
            before = client.data[: client.data.index(b'data: {"error"')]
            assert right(body).startswith(before)
            own = client.data.endswith(ERROR_EVENTS)  # the engine's own
            assert client.data.endswith(b"\n\n") and (b"[DONE]" in client.data) == own

    async def work(bench: Bench) -> None:
        bench.upstream.faults = {
            spec.name: deque(some) for spec, some in zip(shape, faults, strict=False)
        }
        await asyncio.gather(*(one(bench, s, n, seed) for seed, (s, n) in enumerate(wanted)))

    short = {"stall_s": 0.005, "client_stall_s": 0.05, "deadline_s": 1.0}
    run(work, *shape, **short, failures_max=failures_max)


TURN = {"prompt_cache_key": "chat", "metadata": {"agent_id": "sub"}}
TOLD = {"id": "t/chat", "agent": "sub", "shared": True}


def told_of(seen: Any) -> Any:
    return (seen.body.get("kv_transfer_params") or {}).get("kvpool_session")


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_engines_with_the_plugin_hear_of_a_session(body: dict[str, Any]) -> None:
    async def work(bench: Bench) -> None:
        client = await ask(bench, {**body, **TURN}, tenant="t", ident="me")
        assert client.ended
        (seen,) = bench.upstream.seen
        assert told_of(seen) == TOLD
        assert {**seen.body, "kv_transfer_params": 0} == {
            "model": "tiny",
            **body,
            **TURN,
            "kv_transfer_params": 0,
        }
        account = bench.serving.accounts.get("me")
        assert account is not None and account.facts["session"] == TOLD

    run(work, engine("a"))


def test_engines_without_the_plugin_hear_nothing_of_it() -> None:
    async def work(bench: Bench) -> None:
        own = {"kv_transfer_params": {"kvpool_session": {"id": "chat"}}}
        client = await ask(bench, {**WHOLE, **TURN, **own})
        assert client.ended
        (seen,) = bench.upstream.seen
        assert seen.body["kv_transfer_params"] is None

    run(work, engine("a", namespace=b""))


def test_who_computes_hears_of_the_session_and_who_answers_of_all() -> None:
    async def work(bench: Bench) -> None:
        own = {"kv_transfer_params": {"kvpool_session": {"id": "chat", "end": True}}}
        client = await ask(bench, {**STREAM, **own}, session="header")
        assert client.ended
        *computed, decode = bench.upstream.seen
        assert [told_of(seen) for seen in computed] == [{"id": "chat"}]
        assert told_of(decode) == {"id": "chat", "end": True}

    run(work, engine("p", PREFILL), engine("d", DECODE))


def test_another_engine_hears_of_the_session_when_one_fails() -> None:
    async def work(bench: Bench) -> None:
        bench.upstream.faults = {name: deque(["error"]) for name in "ab"}
        bench.upstream.faults["b"].clear()
        client = await ask(bench, {**STREAM, **TURN}, tenant="t")
        assert client.ended
        assert [told_of(seen) for seen in bench.upstream.seen] == [TOLD] * len(bench.upstream.seen)

    run(work, engine("a"), engine("b"))


def test_bad_hints_are_counted_and_cost_nothing() -> None:
    async def work(bench: Bench) -> None:
        own = {"kv_transfer_params": {"kvpool_session": {"id": "x" * 1_000_000, "agent": 7}}}
        client = await ask(bench, {**WHOLE, **own, "metadata": 7}, hints={"x-session-id": "a\tb"})
        assert client.ended
        (seen,) = bench.upstream.seen
        assert seen.body["kv_transfer_params"] is None
        assert value_of(bench.metrics.session_hints_ignored) == 4
        assert value_of(bench.metrics.session_requests) == 0

    run(work, engine("a"))
