"""Weights that stay, and weights that change, of engines that share a pool."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

PROMPTS = (300, 200, 170)


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(31, PROMPTS)


@pytest.fixture(scope="module")
def other(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights, in files of the same sizes."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "llama"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "v_proj" in name or "gate_proj" in name:
            tensors[name] = tensor.flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(kit: Any, llama: Path, other: Path, asked: list[list[int]]) -> dict[Path, Any]:
    """What engines without a pool answer with either weights."""
    found = {}
    for model in (llama, other):
        with kit.run_engine(model) as engine:
            found[model] = [output.tokens for output in engine.generate(asked)]
    assert found[llama] != found[other]
    return found


@pytest.fixture
def engine(kit: Any, llama: Path, daemon: Any, expected: Any) -> Any:
    with kit.run_engine(llama, daemon) as running:
        yield running


def change(engine: Any, weights: Path) -> None:
    """As reinforcement learning does: pause, empty all caches, change the weights, go on."""
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})


def test_changed_weights_never_meet_old_blocks_and_find_theirs_again(
    kit: Any,
    llama: Path,
    other: Path,
    daemon: Any,
    engine: Any,
    asked: list[list[int]],
    expected: dict[Path, Any],
) -> None:
    hits = [kit.hit(length) for length in PROMPTS]
    for turn, (weights, cached) in enumerate(
        [(llama, [0] * 3), (other, [0] * 3), (llama, hits), (other, hits)]
    ):
        if turn:
            change(engine, weights)
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected[weights], turn
        assert [output.cached for output in outputs] == cached, turn
        engine.forget()
        assert [output.cached for output in engine.generate(asked)] == hits
    assert engine.metric("resets") == 3
    assert engine.metric("new_weights") == 2
    assert engine.metric("failed_loads") == engine.metric("failed_saves") == 0
    engine.assert_nothing_held(daemon)


def test_sleep_keeps_everything(
    kit: Any, daemon: Any, engine: Any, asked: list[list[int]], llama: Path, expected: Any
) -> None:
    """vLLM's own calls. The CPU worker keeps its memory: that KV is unmapped is seen on GPUs only."""
    engine.generate(asked)
    engine.drain()
    engine.core.sleep(1)
    assert engine.core.is_sleeping()
    engine.core.wake_up()
    outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected[llama]
    assert [output.cached for output in outputs] == [kit.hit(length) for length in PROMPTS]
    assert engine.metric("resets") == 1
    assert engine.metric("new_weights") == 0


def test_weights_reach_the_name_of_the_namespace(
    kit: Any, llama: Path, other: Path, daemon: Any, tmp_path: Path, expected: Any
) -> None:
    """The same path, sizes and configuration, other bytes: another namespace. A copy elsewhere is the same, if named."""
    copy = tmp_path / "copy"
    digests = []
    for source in (llama, other, llama):
        shutil.copytree(source, copy, dirs_exist_ok=True)
        with kit.run_engine(copy, daemon, {"model": "m"}) as engine:
            digests.append(engine.connector._scheduler._namespace.digest)
    assert digests[0] == digests[2] != digests[1]


def test_an_adapter_is_known_by_what_is_in_it(
    kit: Any, llama: Path, daemon: Any, tmp_path: Path, expected: Any
) -> None:
    """Another one under the same name and path, as after a training run that writes in place."""
    from safetensors.torch import load_file, save_file
    from vllm import SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    adapter = kit.TINY.make_adapter(tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    first = weights.read_bytes()
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
        tensors = load_file(weights)
        save_file(
            {name: each if "_A" in name else -each for name, each in tensors.items()}, weights
        )
        other, cached = ask(engine, 2)
        assert cached == 0
        assert ask(engine, 2) == (other, 0), (
            "the plugin does not know that vLLM's cache was emptied"
        )
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert ask(engine, 2) == (other, 0)
        assert ask(engine, 2) == (other, kit.hit(200))
        weights.write_bytes(first)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert ask(engine, 3) == (said, kit.hit(200))
    assert other != said


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
    kit: Any,
    llama: Path,
    other: Path,
    tmp_path: Path,
    asked: list[list[int]],
    expected: dict[Path, Any],
) -> None:
    hits = {number: kit.hit(length) for number, length in enumerate(PROMPTS)}

    def judge(answers: list[dict[str, Any]]) -> None:
        for said in answers:
            assert said["tokens"] == expected[Path(said["weights"])][said["prompt"]][:8]
            assert said["shut_out"] == 0

    def until_new(engine: Process) -> dict[str, Any]:
        """The first answer with the other weights."""
        for _ in range(1000):
            said = engine.answer()
            judge([said])
            if said["weights"] == str(other):
                return said
        raise AssertionError("the weights are not changed")

    with ExitStack() as stack:
        daemon = stack.enter_context(kit.run_daemon(tmp_path))
        first, second, third = (
            stack.enter_context(Process(llama, daemon.socket, asked)) for _ in range(3)
        )
        for engine in (first, second, third):
            judge(engine.round())
            warm = engine.round()
            judge(warm)
            assert [said["cached"] for said in warm] == [hits[said["prompt"]] for said in warm]
        first.tell(other)
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
        second.tell(other)
        said = until_new(second)
        assert said["cached"] == hits[said["prompt"]]
        for said in third.round():
            judge([said])
            assert said["weights"] == str(llama)
            assert said["cached"] == hits[said["prompt"]]
