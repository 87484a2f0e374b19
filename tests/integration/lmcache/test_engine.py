"""vLLM behind LMCache's servers on two nodes: what one engine computes, another one gets out of the pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("engine_process.py")
CHUNK = 64
LENGTHS = (600, 333, 150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token of its answers depends on the whole prompt's KV."""
    out = tmp_path_factory.mktemp("model") / "llama"
    subprocess.run(
        [sys.executable, str(ROOT / "bench/tiny_models.py"), "llama", str(out)], check=True
    )
    return out


@pytest.fixture
def answers(model: Path, tmp_path: Path) -> Callable[..., tuple[list[Any], list[int]]]:
    """Of a fresh engine: the tokens of each prompt's answer, and how many of the prompt's were not computed."""
    prompts = [
        [3 + (7 * number + 31 * place) % 500 for place in range(length)]
        for number, length in enumerate(LENGTHS)
    ]

    def ask(server: str | None) -> tuple[list[Any], list[int]]:
        told = {"model": str(model), "prompts": prompts, "server": server}
        log = tmp_path / "engine.log"
        with log.open("wb") as said:
            done = subprocess.run(
                [sys.executable, str(PROGRAM), json.dumps(told)],
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "HOME": str(tmp_path)},
                timeout=5 * PATIENCE_S,
                check=False,
            )
        assert done.returncode == 0, log.read_text()[-8000:]
        found = json.loads(done.stdout.decode().splitlines()[-1])
        return [tokens for tokens, _ in found], [cached for _, cached in found]

    return ask


def test_an_engine_on_another_node_gets_what_the_first_one_computed(
    start: Any, serve: Any, answers: Any
) -> None:
    first = start("--memory", "128MiB", "--listen", "tcp://127.0.0.1:0", name="a")
    url = first.ready.rsplit("peers at ", 1)[1].strip()
    second = start("--memory", "128MiB", "--peer", url, name="b")
    expected, _ = answers(None)

    here = serve(first)
    assert answers(here.rpc) == (expected, [0] * len(LENGTHS))
    until(here.idle, "all is stored")
    there = serve(second)
    whole = [length // CHUNK * CHUNK for length in LENGTHS]
    tokens, cached = answers(there.rpc)
    assert tokens == expected
    assert cached == whole
    assert second.stats().counters.pulled_blocks == sum(whole) // CHUNK

    # The control: without the pool's blocks nothing is loaded, so that what was loaded came from there.
    there.clear()
    for daemon in (first, second):
        with daemon.client() as client:
            assert client.evict() > 0
    assert answers(there.rpc) == (expected, [0] * len(LENGTHS))
