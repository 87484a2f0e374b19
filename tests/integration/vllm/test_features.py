"""What vLLM does besides plain prompts and answers, each with the pool: see the table in docs/vllm.md."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Oracle = Callable[..., list[list[int]]]
NEW = 40


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8_kv(kit: Any, llama: Path, tmp_path: Path, oracle: Oracle, dtype: str) -> None:
    options = {"kv_cache_dtype": dtype, "dtype": "bfloat16"}
    asked = kit.prompts(43, (500, 210))
    try:
        expected = oracle("llama", asked, **options)
    except NotImplementedError as error:  # this processor lacks AVX-512
        pytest.skip(str(error))
    with kit.run_daemon(tmp_path) as daemon:
        with kit.run_engine(llama, daemon, **options) as engine:
            for _ in range(2):
                assert [output.tokens for output in engine.generate(asked)] == expected
                engine.forget()
            assert engine.metric("loaded_blocks") >= sum(map(kit.hit, (500, 210))) // kit.BLOCK
            first = engine.namespace.digest
        with kit.run_engine(llama, daemon, dtype="bfloat16") as engine:
            assert engine.namespace.digest != first
            assert [output.cached for output in engine.generate(asked)] == [0, 0]


def test_structured_output(kit: Any, tmp_path: Path, models: Callable[[str], Path]) -> None:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    model = models("llama")
    asked = kit.prompts(44, (300, 170))

    def ask(engine: Any) -> list[list[int]]:
        outputs = engine.llm.generate(
            [TokensPrompt(prompt_token_ids=each) for each in asked],
            SamplingParams(
                max_tokens=24,
                temperature=0,
                structured_outputs=StructuredOutputsParams(regex="[0-9 ]{10,20}"),
            ),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    with kit.run_engine(model) as engine:
        expected = ask(engine)
    with kit.run_daemon(tmp_path) as daemon, kit.run_engine(model, daemon) as engine:
        for _ in range(2):
            assert ask(engine) == expected
            engine.forget()
        assert engine.metric("hit_blocks") > 0
        engine.assert_nothing_held(daemon)


class Held:
    """Copies of one thread of the worker wait here."""

    def __init__(self, half: Any, name: str) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        copy = getattr(half, name)

        def hold(*arguments: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(60)
            return copy(*arguments)

        setattr(half, name, hold)


def add(engine: Any, name: str, prompt: list[int], new: int = NEW) -> None:
    from vllm import SamplingParams

    engine.llm.llm_engine.add_request(
        name,
        {"prompt_token_ids": prompt},
        SamplingParams(max_tokens=new, temperature=0, ignore_eos=True),
    )


def step(engine: Any) -> dict[str, list[int]]:
    """What requests say that end in this step, by name."""
    ended = [output for output in engine.llm.llm_engine.step() if output.finished]
    return {output.request_id: list(output.outputs[0].token_ids) for output in ended}


def until_idle(engine: Any) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        said |= step(engine)
    return said


@pytest.mark.parametrize("copies", ["_copy_in", "_save"])
def test_a_request_is_aborted_in_the_middle_of_its_copies(
    kit: Any, llama: Path, tmp_path: Path, oracle: Oracle, copies: str
) -> None:
    """Its blocks are nobody else's until the copies have ended: here others need all that there are."""
    asked = kit.prompts(45, (500, 480, 460))
    options = {"num_gpu_blocks_override": 40, "max_model_len": 640}
    expected = oracle("llama", asked, **options)
    with (
        kit.run_daemon(tmp_path) as daemon,
        kit.run_engine(llama, daemon, {"load_mode": "async"}, **options) as engine,
    ):
        core = engine.llm.llm_engine
        if copies == "_copy_in":
            engine.generate(asked[:1])
            engine.forget()
        held = Held(engine.worker, copies)
        add(engine, "aborted", asked[0])
        while not held.begun.is_set():
            core.step()
        core.abort_request(["aborted"])
        for number in (1, 2):
            add(engine, str(number), asked[number])
        for _ in range(30):
            core.step()
        held.go_on.set()
        said = until_idle(engine)
        assert [said["1"], said["2"]] == expected[1:]
        engine.assert_nothing_held(daemon)
        engine.forget()
        assert [output.tokens for output in engine.generate(asked)] == expected


def test_no_request_is_preempted_in_the_middle_of_its_saves(
    kit: Any, llama: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """The engine is short of blocks, and waits for the pins to be given back."""
    asked = kit.prompts(46, [150] * 6)
    options = {"num_gpu_blocks_override": 30, "max_model_len": 512}
    expected = oracle("llama", asked, 60, **options)
    with (
        kit.run_daemon(tmp_path) as daemon,
        kit.run_engine(llama, daemon, **options) as engine,
    ):
        held = Held(engine.worker, "_save")
        preempted = []
        preempt = engine.scheduler._preempt_request

        def count(*arguments: Any, **options: Any) -> None:
            preempted.append(held.go_on.is_set())
            preempt(*arguments, **options)

        engine.scheduler._preempt_request = count
        for number, prompt in enumerate(asked):
            add(engine, str(number), prompt, 60)
        said: dict[str, list[int]] = {}
        for _ in range(200):
            said |= step(engine)
        assert not preempted
        held.go_on.set()
        said |= until_idle(engine)
        assert [said[str(number)] for number in range(6)] == expected
        assert preempted
        engine.assert_nothing_held(daemon)
        engine.forget()
        assert [output.tokens for output in engine.generate(asked, 60)] == expected
