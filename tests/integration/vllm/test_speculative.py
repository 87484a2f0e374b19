"""Speculative decoding: no rejected token is in a block that is saved, and the draft's own KV comes with the target's.

vLLM verifies every draft, so that answers do not show whether the draft's KV is right: what it drafts does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Oracle = Callable[..., list[list[int]]]

SHARED = 320
"""Tokens that prompts have in common: whole blocks, in each model."""


@dataclass(frozen=True)
class Drafting:
    """A way to draft. block: tokens of a block. new: of an answer. layers: the target's; the draft's is stored behind them."""

    kind: str
    config: dict[str, Any]
    block: int
    new: int
    layers: int = 4

    @property
    def options(self) -> dict[str, Any]:
        return {"speculative_config": self.config, "block_size": self.block}

    def hit(self, tokens: int) -> int:
        """What the pool gives of a prompt that it has whole: the draft's KV at the end of a block says what comes next."""
        return (tokens // self.block - 1) * self.block


def eagle(llama: Path, out: Path) -> Path:
    """A draft head of one layer for the llama. What it guesses is no good, which costs time only."""
    import torch
    from safetensors.torch import load_file, save_file

    out.mkdir()
    config = json.loads((llama / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = load_file(llama / "model.safetensors")
    first = "model.layers.0."
    layer = {
        "layers.0." + name[len(first) :]: tensor
        for name, tensor in tensors.items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    hidden = config["hidden_size"]
    fc = torch.cat([torch.eye(hidden), torch.eye(hidden)], 1).to(torch.bfloat16)
    save_file({**layer, "fc.weight": fc}, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(
    params=["eagle", "eagle3", "mtp", "mtp with latent attention"],
    ids=lambda name: name.replace(" ", "-"),
)
def drafting(request: pytest.FixtureRequest, kit: Any, llama: Path, tmp_path: Path) -> Drafting:
    if request.param == "eagle":
        head = eagle(llama, tmp_path / "head")
        config = {"method": "eagle", "num_speculative_tokens": 3, "model": str(head)}
        return Drafting("llama", config, kit.BLOCK, kit.NEW)
    if request.param == "eagle3":
        head = kit.TINY.make_eagle3(llama, tmp_path / "head")
        config = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(head)}
        return Drafting("llama", config, kit.BLOCK, kit.NEW)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    if request.param == "mtp":
        return Drafting("mimo", config, kit.BLOCK, kit.NEW)
    # vLLM's latent attention for CPUs is slow.
    return Drafting("deepseek", config, 16, 16)


@dataclass(frozen=True)
class Said:
    """Of a request: its answer, what the pool gave, and what was drafted, by the length of the answer before it."""

    tokens: list[int]
    cached: int
    drafts: dict[int, list[int]]


def ask(engine: Any, prompt: list[int], new: int) -> Said:
    """By itself, so that what it is computed with is the same in each engine."""
    with drafts_of(engine) as drafts:
        (output,) = engine.generate([prompt], new)
    return Said(output.tokens, output.cached, drafts)


@contextmanager
def drafts_of(engine: Any) -> Iterator[dict[int, list[int]]]:
    """What the engine's only request is given as drafts."""
    found: dict[int, list[int]] = {}
    scheduler = engine.scheduler
    take = scheduler.update_draft_token_ids

    def note(ids: Any) -> None:
        for request_id, tokens in zip(ids.req_ids, ids.draft_token_ids, strict=True):
            request = scheduler.requests.get(request_id)
            if request is not None and request.num_output_tokens:
                found[request.num_output_tokens] = list(tokens)
        take(ids)

    scheduler.update_draft_token_ids = note
    try:
        yield found
    finally:
        scheduler.update_draft_token_ids = take


def drafts_piece(layers: int) -> Callable[[int], slice]:
    """Of a slot's bytes, what is the draft layer's, after so many others."""
    return lambda nbytes: slice(nbytes * layers // (layers + 1), nbytes)


def test_drafts_are_those_of_computed_kv(
    kit: Any, models: Callable[[str], Path], tmp_path: Path, drafting: Drafting
) -> None:
    model, new = models(drafting.kind), drafting.new
    shared = kit.TINY.prompt(420, SHARED)
    mine, others = (shared + kit.TINY.prompt(420 + n, 80 + 13 * n) for n in (1, 2))
    with kit.run_engine(model, **drafting.options) as engine:
        expected = {0: ask(engine, mine, new)}
        assert engine.llm.reset_prefix_cache()
        expected[1] = ask(engine, others, new)
        assert all(each.drafts for each in expected.values())
    with kit.run_daemon(tmp_path) as daemon:
        with kit.run_engine(model, daemon, **drafting.options) as engine:
            assert ask(engine, mine, new) == expected[0]
            engine.assert_nothing_held(daemon)
        with kit.run_engine(model, daemon, **drafting.options) as engine:
            # The other prompt parts from the first one at the end of a block.
            found = ask(engine, others, new)
            assert found.cached == drafting.hit(SHARED)
            assert (found.tokens, found.drafts) == (expected[1].tokens, expected[1].drafts)
            engine.forget()
            found = ask(engine, mine, new)
            assert found.cached == drafting.hit(len(mine))
            assert (found.tokens, found.drafts) == (expected[0].tokens, expected[0].drafts)
            # The last block that both have is there as the first one wrote it: right for answers, not for all drafts.
            engine.forget()
            found = ask(engine, others, new)
            assert (found.cached, found.tokens) == (drafting.hit(len(others)), expected[1].tokens)
            # The answers' blocks too.
            engine.forget()
            longer = mine + expected[0].tokens
            assert ask(engine, longer, new).cached >= drafting.hit(len(longer) - 1)
            engine.forget()
            with kit.zeroed_store(engine, drafts_piece(drafting.layers)):
                found = ask(engine, mine, new)
            assert found.tokens == expected[0].tokens
            assert found.drafts != expected[0].drafts
            engine.assert_nothing_held(daemon)


def test_a_draft_model(kit: Any, llama: Path, tmp_path: Path, oracle: Oracle) -> None:
    """The model itself, so that all drafts are accepted."""
    options = {
        "speculative_config": {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            "model": str(llama),
        }
    }
    asked = kit.prompts(42, (400, 333))
    expected = oracle("llama", asked)
    with (
        kit.run_daemon(tmp_path) as daemon,
        kit.run_engine(llama, daemon, **options) as engine,
    ):
        for turn in range(2):
            outputs = engine.generate(asked)
            assert [output.tokens for output in outputs] == expected, turn
            hits = [kit.hit(len(each)) if turn else 0 for each in asked]
            assert [output.cached for output in outputs] == hits
            engine.forget()
        # The answers' blocks too.
        longer = [prompt + answer for prompt, answer in zip(asked, expected, strict=True)]
        for prompt, output in zip(longer, engine.generate(longer, 4), strict=True):
            assert output.cached >= kit.hit(len(prompt)) - kit.BLOCK
        (drafts,) = [m for m in engine.llm.get_metrics() if m.name.endswith("_num_drafts")]
        assert drafts.value > 0
        engine.assert_nothing_held(daemon)
