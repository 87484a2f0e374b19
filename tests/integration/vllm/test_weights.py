"""Weights that stay, and weights that change, of engines that share a pool."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

PROMPTS = (300, 200, 170)


@dataclass(frozen=True)
class Weights:
    """Two of the same model, in files of the same sizes, and what engines without a pool answer with either."""

    first: Path
    other: Path
    asked: list[list[int]]
    expected: dict[Path, list[list[int]]]


@pytest.fixture(scope="module")
def weights(kit: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    from safetensors.torch import load_file, save_file

    other = tmp_path_factory.mktemp("other") / "llama"
    shutil.copytree(llama, other)
    tensors = load_file(other / "model.safetensors")
    for name, tensor in tensors.items():
        if "v_proj" in name or "gate_proj" in name:
            tensors[name] = tensor.flip(0).contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    asked, expected = kit.prompts(31, PROMPTS), {}
    for model in (llama, other):
        with kit.run_engine(model) as engine:
            expected[model] = [output.tokens for output in engine.generate(asked)]
    assert expected[llama] != expected[other]
    return Weights(llama, other, asked, expected)


@pytest.fixture
def engine(kit: Any, weights: Weights, daemon: Any) -> Iterator[Any]:
    with kit.run_engine(weights.first, daemon) as running:
        yield running


def change(engine: Any, model: Path) -> None:
    """As reinforcement learning does: pause, empty all caches, change the weights, go on."""
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def test_changed_weights_never_meet_old_blocks_and_find_theirs_again(
    kit: Any, weights: Weights, daemon: Any, engine: Any
) -> None:
    first, other = weights.first, weights.other
    hits = [kit.hit(length) for length in PROMPTS]
    for turn, (model, cached) in enumerate(
        [(first, [0] * 3), (other, [0] * 3), (first, hits), (other, hits)]
    ):
        if turn:
            change(engine, model)
        outputs = engine.generate(weights.asked)
        assert [output.tokens for output in outputs] == weights.expected[model], turn
        assert [output.cached for output in outputs] == cached, turn
        engine.forget()
        assert [output.cached for output in engine.generate(weights.asked)] == hits
    assert engine.metric("resets") == 3
    assert engine.metric("new_weights") == 2
    assert engine.metric("failed_loads") == engine.metric("failed_saves") == 0
    engine.assert_nothing_held(daemon)


def test_sleep_keeps_everything(kit: Any, weights: Weights, daemon: Any, engine: Any) -> None:
    """vLLM's own calls. The CPU worker keeps its memory: that KV is unmapped is seen on GPUs only."""
    engine.generate(weights.asked)
    engine.drain()
    engine.core.sleep(1)
    assert engine.core.is_sleeping()
    engine.core.wake_up()
    outputs = engine.generate(weights.asked)
    assert [output.tokens for output in outputs] == weights.expected[weights.first]
    assert [output.cached for output in outputs] == [kit.hit(length) for length in PROMPTS]
    assert engine.metric("resets") == 1
    assert engine.metric("new_weights") == 0


def test_weights_reach_the_name_of_the_namespace(
    kit: Any, weights: Weights, daemon: Any, tmp_path: Path
) -> None:
    """The same path, sizes and configuration, other bytes: another namespace. A copy elsewhere is the same, if named."""
    copy = tmp_path / "copy"
    digests = []
    for source in (weights.first, weights.other, weights.first):
        shutil.copytree(source, copy, dirs_exist_ok=True)
        with kit.run_engine(copy, daemon, {"model": "m"}) as engine:
            digests.append(engine.namespace.digest)
    assert digests[0] == digests[2] != digests[1]


def test_an_adapter_is_known_by_what_is_in_it(
    kit: Any, llama: Path, daemon: Any, tmp_path: Path
) -> None:
    """Another one under the same name and path, as after a training run that writes in place."""
    from safetensors.torch import load_file, save_file
    from vllm import SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    adapter = kit.TINY.make_adapter(tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    first = path.read_bytes()
    prompt = kit.prompts(37, (200,))[0]

    def ask(engine: Any, number: int) -> tuple[list[int], int]:
        (output,) = engine.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt)],
            SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
            lora_request=LoRARequest("a", number, str(adapter)),
            use_tqdm=False,
        )
        engine.forget()
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    options = {"enable_lora": True, "max_lora_rank": 8}
    with kit.run_engine(llama, daemon, **options) as engine:
        said, cached = ask(engine, 1)
        assert cached == 0
        assert ask(engine, 1) == (said, kit.hit(200))
        tensors = load_file(path)
        save_file({name: each if "_A" in name else -each for name, each in tensors.items()}, path)
        other, cached = ask(engine, 2)
        assert cached == 0
        assert ask(engine, 2) == (other, 0), (
            "the plugin does not know that vLLM's cache was emptied"
        )
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert ask(engine, 2) == (other, 0)
        assert ask(engine, 2) == (other, kit.hit(200))
        path.write_bytes(first)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert ask(engine, 3) == (said, kit.hit(200))
    assert other != said


def test_files_that_changed_since_name_no_weights_that_are_in_memory(
    kit: Any, weights: Weights, daemon: Any, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    shutil.copytree(weights.first, place)
    with kit.run_engine(place, daemon) as engine:
        engine.generate(weights.asked)
        engine.drain()
        (place / "model.safetensors").unlink()
        shutil.copy(weights.other / "model.safetensors", place)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        again = engine.generate(weights.asked)
        assert [each.cached for each in again] == [kit.hit(length) for length in PROMPTS]
    with kit.run_engine(place, daemon) as other:
        computed = other.generate(weights.asked)
    assert [each.cached for each in computed] == [0] * len(PROMPTS)
    assert [each.tokens for each in computed] == weights.expected[weights.other]


class Process:
    """An engine under load; see `weights_engine.py`."""

    def __init__(self, model: Path, socket: str, asked: list[list[int]]) -> None:
        program = Path(__file__).with_name("weights_engine.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(model), socket, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell("")
        assert self.process.stdout is not None
        self.process.stdout.read()
        assert self.process.wait(60) == 0

    def tell(self, weights: Path | str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{weights}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the engine has ended")

    def round(self) -> list[dict[str, Any]]:
        """An answer to each prompt."""
        return [self.answer() for _ in PROMPTS]


@pytest.mark.timeout(400)
def test_one_engine_of_three_changes_its_weights_under_load(
    kit: Any, weights: Weights, tmp_path: Path
) -> None:
    hits = {number: kit.hit(length) for number, length in enumerate(PROMPTS)}

    def judge(answers: list[dict[str, Any]]) -> None:
        for said in answers:
            answer = weights.expected[Path(said["weights"])][said["prompt"]]
            assert said["tokens"] == answer[:8]
            assert said["shut_out"] == 0

    def until_new(engine: Process) -> dict[str, Any]:
        """The first answer with the other weights."""
        for _ in range(1000):
            said = engine.answer()
            judge([said])
            if said["weights"] == str(weights.other):
                return said
        raise AssertionError("the weights are not changed")

    with ExitStack() as stack:
        daemon = stack.enter_context(kit.run_daemon(tmp_path))
        first, second, third = (
            stack.enter_context(Process(weights.first, daemon.socket, weights.asked))
            for _ in range(3)
        )
        for engine in (first, second, third):
            judge(engine.round())
            warm = engine.round()
            judge(warm)
            assert [said["cached"] for said in warm] == [hits[said["prompt"]] for said in warm]
        first.tell(weights.other)
        assert until_new(first)["cached"] == 0
        # The others find theirs as before, all the time, and the first one its own.
        for engine in (second, third):
            for said in [*engine.round(), *engine.round()]:
                judge([said])
                assert said["cached"] == hits[said["prompt"]]
        judge(first.round())
        again = first.round()
        judge(again)
        assert [said["cached"] for said in again] == [hits[said["prompt"]] for said in again]
        # Who follows finds what the first one has computed, at once.
        second.tell(weights.other)
        said = until_new(second)
        assert said["cached"] == hits[said["prompt"]]
        for said in third.round():
            judge([said])
            assert said["weights"] == str(weights.first)
            assert said["cached"] == hits[said["prompt"]]
