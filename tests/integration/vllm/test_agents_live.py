"""Turns of sessions through a router to two real servers beside one small pool: right answers, and what is known of them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.test_router import BENCH

MEMORY = "16MiB"  # some 128 blocks
SESSIONS, TURNS, BEGUN, MORE = 3, 3, 10, 4  # the last two: blocks
NEW = 8  # tokens of an answer, which fill no block
SETTINGS = {"lookup_timeout_s": 30.0, "request_timeout_s": 30.0, "prefill_tokens_per_s": 1.0}

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_sessions_are_served_rightly_and_known(
    kit: Any, llama: Path, tmp_path: Path, oracle: Callable[..., list[list[int]]]
) -> None:
    def prompt(session: int, turn: int) -> list[int]:
        blocks = kit.TINY.prompt(100 + session, (BEGUN + TURNS * MORE) * kit.BLOCK)
        return list(blocks[: (BEGUN + turn * MORE) * kit.BLOCK])

    turns = [(session, turn) for turn in range(TURNS) for session in range(SESSIONS)]
    right = oracle("llama", [prompt(*each) for each in turns], NEW)
    with ExitStack() as stack:
        daemon = stack.enter_context(kit.run_daemon(tmp_path, memory=MEMORY))
        flags = ("--dtype", "float32", "--num-gpu-blocks-override", "140")
        servers = [
            stack.enter_context(
                BENCH.ApiServer(name, llama, tmp_path, daemon.socket, "both", *flags, **SETTINGS)
            )
            for name in "ab"
        ]
        for server in servers:
            server.wait_ready()
        url = stack.enter_context(BENCH.router(tmp_path, "router", daemon.socket))

        def get(path: str) -> Any:
            with urllib.request.urlopen(url + path, timeout=kit.PATIENCE_S) as answer:
                return json.load(answer)

        kit.until(
            lambda: [one["state"] for one in get("/engines")["engines"]] == ["serving"] * 2,
            "the router reaches both",
        )
        for (session, turn), expected in zip(turns, right, strict=True):
            told: dict[str, Any] = {"id": f"chat-{session}"}
            if (session, turn) == (0, TURNS - 1):
                told = {"id": "chat-0", "end": True}
            more = {"kv_transfer_params": {"kvpool_session": told}}
            assert BENCH.ask(url, prompt(session, turn), NEW, more).tokens == expected

        def known() -> dict[str, int]:
            command = (sys.executable, "-m", "kvpool.cli", "sessions", "list", "--json")
            done = subprocess.run(
                [*command, "--socket", daemon.socket], capture_output=True, text=True, check=True
            )
            return {one["session"]: one["turns"] for one in json.loads(done.stdout)["sessions"]}

        kit.until(lambda: known() == {"chat-1": TURNS, "chat-2": TURNS}, "the others go on")
        kit.until(lambda: daemon.counters().expended > 0, "the end of the first one")
