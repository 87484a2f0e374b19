"""A real server with two data-parallel ranks behind its URL: the router knows both, and reaches the one it chose."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.test_router import BENCH, PATIENCE_S, ask_json, until, until_verified
from tests.support.servers.etcd import free_ports

PROMPT_TOKENS, NEW = 300, 4


@dataclass
class Served:
    """url: of the router."""

    url: str
    server: Any

    def from_own_cache(self) -> int:
        """Of all prompts so far, the tokens that were in the cache of the rank that got them, and not in the pool."""
        with urllib.request.urlopen(self.server.url + "/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        found = re.findall(
            r'^vllm:prompt_tokens_by_source_total\{.*"local_cache_hit".*\} (\S+)$',
            text,
            re.MULTILINE,
        )
        assert len(found) == 2, "one of each rank"
        return sum(int(float(value)) for value in found)


@pytest.fixture
def served(kit: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("dp")
    with (
        BENCH.daemon(folder) as socket,
        BENCH.ApiServer(
            *("e", llama, folder, socket, "both"), ranks=2, events_port=free_ports(4)
        ) as server,
    ):
        server.wait_ready()
        with BENCH.router(folder, "router", socket) as url:
            until_verified(url, 2)
            yield Served(url, server)


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_a_prefix_goes_to_the_rank_that_computed_it(served: Served, kit: Any) -> None:
    rows = ask_json(served.url, "/engines")["engines"]
    assert sorted((row["name"][-4:], row["rank"]) for row in rows) == [("-dp0", 0), ("-dp1", 1)]
    assert {row["url"] for row in rows} == {served.server.url}
    prompts = [kit.TINY.prompt(seed, PROMPT_TOKENS) for seed in range(1, 7)]
    first = [BENCH.ask(served.url, prompt, NEW) for prompt in prompts]
    assert [answer.cached_tokens for answer in first] == [0] * 6

    def heard() -> bool:
        engines = ask_json(served.url, "/engines")["knowledge"]["engines"]
        blocks = [each["events"]["blocks"] for each in engines.values()]
        return sum(blocks) >= 6 * (PROMPT_TOKENS // kit.BLOCK) and all(blocks)

    until(heard, "the router knows the caches of both ranks")
    before = served.from_own_cache()
    for prompt, answer in zip(prompts, first, strict=True):
        assert BENCH.ask(served.url, prompt, NEW).same(answer)
    # The other rank would have had them from the pool.
    assert served.from_own_cache() - before >= 6 * (kit.hit(PROMPT_TOKENS) - kit.BLOCK)
