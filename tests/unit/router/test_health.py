"""Who gets requests, by probes of servers and failures of engines."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvpool.router.config import RouterConfig
from kvpool.router.engines.health import Health
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import EngineFailed
from tests.support.waiting import PATIENCE_S, until_async

CONFIG = RouterConfig(
    failures_max=2,
    backoff_s=1000.0,
    backoff_s_max=1000.0,
    probe_s=0.0,
    probe_timeout_s=PATIENCE_S,
)
RANKS = [EngineSpec("http://h:1", rank, name=f"h-dp{rank}") for rank in range(3)]


class Server:
    """In place of `Upstream`: a probe is answered when the test says how."""

    def __init__(self) -> None:
        self.probes: list[tuple[EngineSpec, asyncio.Future[None]]] = []

    async def get(self, engine: EngineSpec, *_: Any) -> bytes:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.probes.append((engine, answer))
        await answer
        return b""

    async def answer(self, number: int, *, well: bool = True) -> None:
        """The probe of this number, once it has come."""
        await until_async(lambda: len(self.probes) == number, "the probe")
        engine, answer = self.probes[-1]
        if well:
            answer.set_result(None)
        else:
            answer.set_exception(EngineFailed(engine.name, "timeout", "no answer"))


def run(check: Callable[[Server, Health, list[str]], Awaitable[None]]) -> None:
    async def go() -> None:
        server, said = Server(), list[str]()
        health = Health(
            server,  # type: ignore[arg-type]
            CONFIG,
            asyncio.get_running_loop().time,
            lambda spec: said.append(f"up {spec.name}"),
            lambda spec: said.append(f"down {spec.name}"),
            lambda spec: said.append(f"turned {spec.name}"),
        )
        try:
            await check(server, health, said)
        finally:
            await health.close()

    asyncio.run(go())


def test_one_probe_is_for_all_ranks_of_a_server() -> None:
    async def check(server: Server, health: Health, said: list[str]) -> None:
        for spec in RANKS:
            health.add(spec)
        await server.answer(1)
        await until_async(lambda: len(said) == 3, "all get requests")
        assert said == ["up h-dp0", "up h-dp1", "up h-dp2"]
        await server.answer(2, well=False)
        await server.answer(3, well=False)
        await until_async(lambda: len(said) == 6, "none gets any")
        assert said[3:] == ["down h-dp0", "down h-dp1", "down h-dp2"]
        assert len(server.probes) == 3

    run(check)


def test_a_rank_that_fails_requests_pauses_alone() -> None:
    async def check(server: Server, health: Health, said: list[str]) -> None:
        for spec in RANKS:
            health.add(spec)
        await server.answer(1)
        await until_async(lambda: len(said) == 3, "all get requests")
        health.failed("h-dp1", 1)
        health.failed("h-dp1", 1)
        assert said[3:] == [], "it is the same request"
        health.failed("h-dp1", 2)
        assert said[3:] == ["turned h-dp1"]
        await server.answer(2)
        await server.answer(3)
        await until_async(lambda: len(server.probes) == 4, "all are probed on")
        assert said[3:] == ["turned h-dp1"]
        assert health.spec("h-dp1") == RANKS[1], "it is alive"
        assert [spec.name for spec in health.passing()] == ["h-dp0", "h-dp2"]
        await server.answer(4, well=False)
        await server.answer(5, well=False)
        await until_async(lambda: len(said) == 7, "all are dead")
        assert said[4:] == ["down h-dp0", "down h-dp1", "down h-dp2"]
        assert health.spec("h-dp1") is None

    run(check)


def test_a_rank_may_come_later_and_leave_before_the_others() -> None:
    async def check(server: Server, health: Health, said: list[str]) -> None:
        health.add(RANKS[0])
        await until_async(lambda: server.probes, "the first is probed")
        health.add(RANKS[1])
        await server.answer(1)
        await until_async(lambda: said == ["up h-dp0"], "it gets requests")
        await server.answer(2)
        await until_async(lambda: "up h-dp1" in said, "the other too")
        health.remove("h-dp0")
        assert said[-1] == "down h-dp0"
        await server.answer(3)
        await until_async(lambda: len(server.probes) == 4, "the rest is probed on")
        health.remove("h-dp1")
        assert not health.breakers

    run(check)


def test_an_engine_that_does_not_answer_at_first_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The router is ready without it, and says nothing else of it."""

    async def check(server: Server, health: Health, said: list[str]) -> None:
        health.add(RANKS[0])
        await server.answer(1, well=False)
        await health.first_probes(PATIENCE_S)
        assert not said

    with caplog.at_level("WARNING"):
        run(check)
    (record,) = caplog.records
    assert "engine h-dp0 receives no requests before it answers: " in record.getMessage()
    assert "no answer" in record.getMessage()
