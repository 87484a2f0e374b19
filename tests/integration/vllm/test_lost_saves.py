"""Prompts of which an engine saves hardly anything, decoded by another one that follows them.

Two real servers on nodes of their own behind a router. The one that computes prompts may pin a single block for its
saves, so that nearly all are dropped.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.test_router import (
    BENCH,
    LOADING,
    LONG_TOKENS,
    NEW,
    PATIENCE_S,
    ask_json,
    post,
    until_verified,
)

FOLLOW_S_LEAST = 5.0  # a router lets a decode engine follow a prompt for at least so long


@pytest.fixture(scope="module")
def servers(
    kit: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any, Any]]:
    """(URL of the router, the server that computes prompts, the one that decodes)"""
    folder = tmp_path_factory.mktemp("l")
    with ExitStack() as stack:
        nodes = stack.enter_context(kit.run_cluster(folder, 2))
        found = [
            stack.enter_context(BENCH.ApiServer(name, llama, folder, node.socket, role, **more))
            for name, node, role, more in (
                ("p", nodes[0], "prefill", {**LOADING, "pin_share": 1e-9}),
                ("d", nodes[1], "decode", LOADING),
            )
        ]
        for server in found:
            server.wait_ready()
        url = stack.enter_context(BENCH.router(folder, "router", nodes[0].socket))
        until_verified(url, 2)
        yield url, *found


def counted(server: Any, name: str) -> float:
    """A counter of the plugin."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    pattern = rf"^vllm:kvpool_{name}_total\{{.*\}} (\S+)$"
    return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def ask_whole(url: str, asked: list[int], ident: str) -> list[int]:
    """The tokens of an answer that is not streamed."""
    body = {
        "model": BENCH.SERVED_NAME,
        "prompt": asked,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = post(url, body)
    request.add_header("x-request-id", ident)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        value = json.load(answer)
    assert not value.get("kv_transfer_params"), "a client's answer has no report"
    return list(value["choices"][0]["token_ids"])


@pytest.mark.parametrize("streamed", [True, False])
def test_who_follows_does_not_wait_for_what_is_not_saved(
    kit: Any, servers: tuple[str, Any, Any], streamed: bool
) -> None:
    url, p, d = servers
    asked = kit.TINY.prompt(60 + streamed, LONG_TOKENS)
    names = "follows", "pull_wait_seconds"
    before = [counted(d, name) for name in names]
    dropped = counted(p, "dropped_saves")
    if streamed:
        through = BENCH.ask(url, asked, NEW)
    else:
        through = BENCH.Answer(0, 0, 0, ask_whole(url, asked, "lost"), 0)
        steps = ask_json(url, "/explain/lost")["steps"]
        *_, computed = (step for step in steps if step["what"] == "computed")
        assert computed["stored_tokens"] < LONG_TOKENS / 2
    follows, waited_s = (counted(d, name) - old for name, old in zip(names, before, strict=True))
    assert counted(p, "dropped_saves") > dropped
    assert follows == 1
    assert waited_s < FOLLOW_S_LEAST
    assert BENCH.ask(d.url, asked, NEW).same(through)
