"""What is made of engines' reports of their memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool.router.engines.engine_usage import EVERY_S, SILENT_S, EngineUsage, OthersTokens, usages
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import EngineFailed
from kvpool.scheduler.values import Engine, Role

REPORT = b"""# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 5e-1
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""
LINE = b'vllm:kv_cache_usage_perc{engine="%d"} %s'


def test_the_shares_of_ranks_in_their_order() -> None:
    assert usages(REPORT) == (0.5, 0.25)
    assert usages(LINE % (0, b"1")) == (1.0,)
    # A server counts its own ranks from 0, and reports them by their numbers in the whole.
    assert usages(LINE % (5, b"0.5") + b"\n" + LINE % (4, b"0")) == (0.0, 0.5)
    assert usages(b'vllm:kv_cache_usage_perc{model_name="a,b",engine="7"} 0.5 1700000') == (0.5,)


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"<html>",
        LINE % (0, b"NaN"),
        LINE % (0, b"-0.1"),
        LINE % (0, b"1.5"),
        LINE % (0, b"half"),
        b'vllm:kv_cache_usage_perc{model_name="m"} 0.5',
        b'vllm:kv_cache_usage_perc{model_name=",engine=\\"0\\""} 0.5',
        b'other_vllm:kv_cache_usage_perc{engine="0"} 0.5',
        b"vllm:kv_cache_usage_perc{" * 10_000,
    ],
)
def test_what_says_nothing_of_memory(report: bytes) -> None:
    assert usages(report) == ()


def test_others_are_what_two_reports_show_beyond_the_own_requests() -> None:
    rule = OthersTokens()
    assert rule.told(1000, 200) == 0
    assert rule.told(1100, 200) == 800
    assert rule.told(700, 700) == 0
    assert rule.told(900, 100) == 0, "an own one may just have ended"
    assert rule.told(500, 100) == 400
    assert rule.silent() == 0
    assert rule.told(500, 100) == 0


class Server:
    """In place of `Upstream`. own: reservations change to this while the report is made."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self.engines = engines
        self.asked = 0
        self.report: bytes | EngineFailed = REPORT
        self.ends: dict[str, int] = {}

    async def get(self, engine: EngineSpec, path: str, within_s: float, bytes_max: int) -> bytes:
        assert (path, within_s) == ("/metrics", 2.0) and bytes_max > len(REPORT)
        self.asked += 1
        for name, tokens in self.ends.items():
            self.engines[name].context_tokens = tokens
        if isinstance(self.report, EngineFailed):
            raise self.report
        return self.report


def test_reports_are_compared_with_what_is_reserved() -> None:
    specs = [
        EngineSpec("http://h:1", rank, name=f"e{rank}", capacity_tokens=1000) for rank in (0, 1)
    ]
    engines = {s.name: Engine(s.name, "", Role.BOTH, "k", "", (), 1000) for s in specs}
    server: Any = Server(engines)
    told: dict[str, int] = {}
    now = 0.0
    usage = EngineUsage(server, engines.get, told.__setitem__, 2.0, lambda: now)

    async def look(after_s: float) -> dict[str, int]:
        nonlocal now
        now += after_s
        told.clear()
        await usage.look(specs)
        return dict(told)

    async def work() -> None:
        engines["e0"].context_tokens, engines["e0"].queued_tokens = 100, 50
        assert await look(0.0) == {"e0": 0, "e1": 0}
        assert await look(EVERY_S / 2) == {}, "not yet"
        assert await look(EVERY_S / 2) == {"e0": 350, "e1": 250}
        # An own request that ends meanwhile may be in the report.
        server.ends = {"e0": 0}
        assert await look(EVERY_S) == {"e0": 350, "e1": 250}
        engines["e0"].context_tokens = 600
        assert (await look(EVERY_S))["e0"] == 0
        server.report = EngineFailed("e0", "status", "HTTP 404")
        assert await look(EVERY_S) == {"e0": 0, "e1": 0}
        assert await look(EVERY_S) == {}, "a server without reports is seldom asked"
        server.report = REPORT
        assert await look(SILENT_S) == {"e0": 0, "e1": 0}
        # One that gets no requests has no books.
        del engines["e1"]
        assert set(await look(EVERY_S)) == {"e0"}
        usage.forget("e0")
        assert await look(0.0) == {"e0": 0}

    asyncio.run(work())
