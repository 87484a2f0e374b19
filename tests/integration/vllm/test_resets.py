"""Resets and sleep of an engine right after its answers, and while its saves are under way."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S

Oracle = Callable[..., list[list[int]]]
LENGTH = 320
NEW = 33
"""Tokens of an answer whose last step completes a block."""


class Copies:
    """The copies of an engine's saves: they wait until `go_on` is set."""

    def __init__(self, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

        def held(copy: Callable[..., None], *arguments: Any) -> None:
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
            copy(*arguments)

        kit.copies_through(monkeypatch, "to_slots", held)


def go_on_when_reused(engine: Any, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the copies go on once the engine waits for blocks of theirs that it computes into."""
    end_saves = engine.worker.end_saves

    def waits(reused: list[int]) -> None:
        if reused:
            copies.go_on.set()
        end_saves(reused)

    monkeypatch.setattr(engine.worker, "end_saves", waits)


@pytest.fixture
def copies(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    copies = Copies(kit, monkeypatch)
    yield copies
    copies.go_on.set()


@pytest.mark.parametrize(
    ("kind", "connector"), [("llama", False), ("llama", True), ("gemma", True)]
)
def test_a_reset_right_after_an_answer_succeeds(
    kit: Any,
    models: Callable[[str], Path],
    tmp_path: Path,
    oracle: Oracle,
    kind: str,
    connector: bool,
) -> None:
    """Of windows, the engine's cache does not have all blocks that are saved."""
    asked = kit.prompts(80, [LENGTH] * 3)
    expected = oracle(kind, asked, NEW)
    with kit.run_daemon(tmp_path) as daemon, kit.run_engine(models(kind), daemon) as engine:
        for prompt, tokens in zip(asked, expected, strict=True):
            (output,) = engine.generate([prompt], NEW)
            assert output.tokens == tokens
            assert engine.llm.reset_prefix_cache(reset_connector=connector)
        engine.drain()
        again = [engine.generate([prompt], NEW)[0] for prompt in asked]
        assert [output.tokens for output in again] == expected
        assert all(output.cached >= kit.hit(LENGTH) for output in again)
        assert engine.metric("failed_saves") == engine.metric("dropped_saves") == 0
        engine.assert_nothing_held(daemon)


def test_an_engine_sleeps_right_after_an_answer(
    kit: Any, llama: Path, daemon: Any, oracle: Oracle
) -> None:
    asked = kit.prompts(81, [LENGTH] * 2)
    expected = oracle("llama", asked, NEW)
    with kit.run_engine(llama, daemon) as engine:
        for level, prompt, tokens in zip((1, 2), asked, expected, strict=True):
            for cached in (0, kit.hit(LENGTH)):
                (output,) = engine.generate([prompt], NEW)
                assert (output.tokens, output.cached) == (tokens, cached)
                engine.core.sleep(level)
                assert engine.core.is_sleeping()
                engine.core.wake_up()
        assert engine.metric("failed_saves") == engine.metric("dropped_saves") == 0
        engine.assert_nothing_held(daemon)


@pytest.mark.parametrize("ends", ["in time", "too late"])
def test_a_block_is_not_overwritten_while_it_is_saved(
    kit: Any,
    llama: Path,
    tmp_path: Path,
    oracle: Oracle,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
) -> None:
    """The engine has few blocks, so that its next prompt is computed into those that it has just reset.

    A save that is in time is waited for. One that is too late is given up: it has read what the next prompt computed.
    """
    options = {"num_gpu_blocks_override": 16, "max_model_len": 448}
    asked = kit.prompts(82, [LENGTH] * 2)
    expected = oracle("llama", asked, NEW, **options)
    extra = {"request_timeout_s": 0.05} if ends == "too late" else {}
    with kit.run_daemon(tmp_path) as daemon:
        with kit.run_engine(llama, daemon, extra, **options) as engine:
            if ends == "in time":
                go_on_when_reused(engine, copies, monkeypatch)
            (first,) = engine.generate(asked[:1], NEW)
            assert copies.begun.wait(PATIENCE_S)
            assert engine.llm.reset_prefix_cache()
            (second,) = engine.generate(asked[1:], NEW)
            assert [first.tokens, second.tokens] == expected
            copies.go_on.set()
            engine.assert_nothing_held(daemon)
            assert (engine.metric("failed_saves") > 0) is (ends == "too late")
        with kit.run_engine(llama, daemon, **options) as engine:
            (output,) = engine.generate(asked[:1], NEW)
            assert output.tokens == expected[0]
            assert (output.cached > 0) is (ends == "in time")


def test_a_reset_preempts_requests_whose_blocks_are_saved(
    kit: Any,
    llama: Path,
    daemon: Any,
    oracle: Oracle,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import SamplingParams

    asked = kit.prompts(83, [LENGTH, 200])
    expected = oracle("llama", asked, NEW)
    with kit.run_engine(llama, daemon) as engine:
        go_on_when_reused(engine, copies, monkeypatch)
        core = engine.llm.llm_engine
        params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(asked):
            core.add_request(str(number), {"prompt_token_ids": prompt}, params)
        said: dict[str, list[int]] = {}
        while not copies.begun.is_set():
            core.step()
        assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    said[output.request_id] = list(output.outputs[0].token_ids)
        assert [said[str(number)] for number in range(2)] == expected
        engine.assert_nothing_held(daemon)
        engine.forget()
        outputs = engine.generate(asked, NEW)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [kit.hit(LENGTH), kit.hit(200)]
        engine.assert_nothing_held(daemon)


def test_an_aborted_requests_saves_stop_no_reset(
    kit: Any, llama: Path, daemon: Any, copies: Copies
) -> None:
    from vllm import SamplingParams

    with kit.run_engine(llama, daemon) as engine:
        core = engine.llm.llm_engine
        (prompt,) = kit.prompts(84, [LENGTH])
        core.add_request("a", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=NEW))
        while not copies.begun.is_set():
            core.step()
        core.abort_request(["a"])
        assert engine.llm.reset_prefix_cache()
        copies.go_on.set()
        engine.assert_nothing_held(daemon)
        (output,) = engine.generate([prompt], NEW)
        assert output.cached == kit.hit(LENGTH)


@pytest.mark.timeout(600)  # two processes load vLLM, on cores that others want too
def test_a_core_in_a_process_of_its_own(kit: Any, llama: Path, daemon: Any, oracle: Oracle) -> None:
    asked = kit.prompts(85, [LENGTH, 1921, 1922, LENGTH + 1])
    expected = [
        oracle("llama", [prompt], 2 * kit.BLOCK + 1 - len(prompt) % kit.BLOCK)[0]
        for prompt in asked
    ]
    program = Path(__file__).with_name("resets_engine.py")
    arguments = [str(llama), daemon.socket, json.dumps(asked)]
    ran = subprocess.run(
        [sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [line["said"] for line in lines] == [[tokens] * 3 for tokens in expected]
    assert [line["reset"] for line in lines] == [True] * 4
    assert [line["asleep"] for line in lines] == [True] * 4
    assert [line["cached"][-1] for line in lines] == [kit.hit(len(prompt)) for prompt in asked]
