"""A model that sees pictures: a picture's tokens are all alike, and what is in it is in the blocks' hashes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BEFORE, BEHIND = 100, 250
"""Tokens of the prompt beside the picture; the first are less than what fits before it in whole blocks and one more."""
OPTIONS = {"mm_hasher_algorithm": "sha256"}  # the default needs blake3


@pytest.fixture(scope="module")
def idefics(models: Callable[[str], Path]) -> Path:
    return models("idefics")


@pytest.fixture(scope="module")
def text(kit: Any) -> tuple[list[int], list[int]]:
    """What stands before a picture, and behind it. Some tokens stand for pictures, and are left out."""
    words = [token for token in kit.TINY.prompt(49, 2 * (BEFORE + BEHIND)) if token < 500]
    return words[:BEFORE], words[BEFORE : BEFORE + BEHIND]


def picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 255, (100, 100, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def ask(kit: Any, engine: Any, text: tuple[list[int], list[int]], *pictures: int) -> Any:
    """The answer to a prompt with these pictures, one behind the other, and what of it was cached."""
    from vllm import SamplingParams, TokensPrompt

    before, behind = text
    prompt = TokensPrompt(
        prompt_token_ids=[*before, *[kit.TINY.PICTURE_TOKEN] * len(pictures), *behind]
    )
    if pictures:
        prompt["multi_modal_data"] = {"image": [picture(seed) for seed in pictures]}
    (output,) = engine.llm.generate(
        [prompt], SamplingParams(max_tokens=kit.NEW, temperature=0, ignore_eos=True), use_tqdm=False
    )
    tokens = len(before) + kit.TINY.PICTURE_TOKENS * len(pictures) + len(behind)
    assert len(output.prompt_token_ids) == tokens
    return kit.Output(list(output.outputs[0].token_ids), output.num_cached_tokens)


ASKED = ((1,), (2,), (1, 2), ())


@pytest.fixture(scope="module")
def expected(kit: Any, idefics: Path, text: tuple[list[int], list[int]]) -> list[list[int]]:
    """What an engine without a pool says of each of the pictures."""
    with kit.run_engine(idefics, **OPTIONS) as engine:
        answers = []
        for pictures in ASKED:
            answers.append(ask(kit, engine, text, *pictures).tokens)
            assert engine.llm.reset_prefix_cache()
    assert len({tuple(answer) for answer in answers}) == len(ASKED)
    return answers


@pytest.fixture(scope="module")
def pool(
    kit: Any,
    idefics: Path,
    text: tuple[list[int], list[int]],
    expected: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A daemon with what an engine has saved, which found in it only what stands before all pictures."""
    same = BEFORE // kit.BLOCK * kit.BLOCK
    with kit.run_daemon(tmp_path_factory.mktemp("d")) as daemon:
        with kit.run_engine(idefics, daemon, **OPTIONS) as engine:
            for pictures, answer, cached in zip(ASKED, expected, (0, same, 1, same), strict=True):
                engine.forget()
                found = ask(kit, engine, text, *pictures)
                assert found.tokens == answer
                # Two pictures begin with one that is known: the block that both are in is another all the same.
                assert found.cached == (same if cached else 0)
            engine.assert_nothing_held(daemon)
        yield daemon


def test_a_fresh_engine_finds_the_same_pictures(
    kit: Any, idefics: Path, text: tuple[list[int], list[int]], expected: list[list[int]], pool: Any
) -> None:
    with kit.run_engine(idefics, pool, **OPTIONS) as engine:
        for pictures, answer in zip(ASKED, expected, strict=True):
            engine.forget()
            found = ask(kit, engine, text, *pictures)
            assert found.tokens == answer
            tokens = BEFORE + kit.TINY.PICTURE_TOKENS * len(pictures) + BEHIND
            assert found.cached == kit.hit(tokens)
        engine.forget()
        # One that nobody has asked about is the same text up to it.
        assert ask(kit, engine, text, 3).cached == BEFORE // kit.BLOCK * kit.BLOCK
        engine.forget()
        with kit.zeroed_store(engine):
            assert ask(kit, engine, text, 1).tokens != expected[0]
        engine.assert_nothing_held(pool)


@pytest.mark.parametrize("how", ["settings", "files"])
def test_pictures_that_are_prepared_otherwise_are_others(
    kit: Any, idefics: Path, text: tuple[list[int], list[int]], pool: Any, tmp_path: Path, how: str
) -> None:
    """vLLM's hashes of pictures do not say what the engine makes of them before the model sees them."""
    options: dict[str, Any] = dict(OPTIONS)
    model, extra = idefics, {}
    if how == "settings":
        options["mm_processor_kwargs"] = {"image_std": [0.1, 0.1, 0.1]}
    else:
        model, extra = tmp_path / "model", {"model": str(idefics)}
        shutil.copytree(idefics, model)
        file = model / "processor_config.json"
        settings = json.loads(file.read_text())
        settings["image_processor"]["image_std"] = [0.1, 0.1, 0.1]
        file.write_text(json.dumps(settings))
    with kit.run_engine(model, **options) as engine:
        answer = ask(kit, engine, text, 1).tokens
    with kit.run_engine(model, pool, extra, **options) as engine:
        found = ask(kit, engine, text, 1)
        assert (found.tokens, found.cached) == (answer, 0)
