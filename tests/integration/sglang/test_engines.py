"""Engines of two nodes share prompts through the pool, and go on computing when it fails them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(500)

STEERED = {"module_path": "steered_hicache", "class_name": "SteeredHiCache"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, kit: ModuleType) -> Iterator[list[Any]]:
    with kit.run_cluster(tmp_path_factory.mktemp("c"), 2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kit: ModuleType) -> Path:
    """A model of this module's own, whose weights a test may replace."""
    return kit.TINY.make("llama", tmp_path_factory.mktemp("m") / "model")


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, kit: ModuleType, cluster: list[Any], model: Path
) -> Iterator[list[Any]]:
    folder = tmp_path_factory.mktemp("e")
    with (
        kit.run_engine(model, folder / "a", kit.backend_config(cluster[0].socket)) as first,
        kit.run_engine(
            model, folder / "b", kit.backend_config(cluster[1].socket, **STEERED)
        ) as second,
    ):
        for each in (first, second):
            each.ready()
        yield [first, second]


def stored(kit: ModuleType, node: Any, pages: int) -> None:
    kit.until(lambda: node.counters().committed >= pages, f"{pages} pages are in the pool")


LENGTHS = (700, 333, 450)


def test_engines_share_and_compute_what_the_pool_fails_to_give(
    kit: ModuleType, cluster: list[Any], engines: list[Any], tmp_path: Path
) -> None:
    first, second = engines
    prompts = [kit.TINY.prompt(seed, length) for seed, length in enumerate(LENGTHS)]

    # What nobody has computed is computed, and stored.
    computed = [first.generate(each) for each in prompts]
    assert [each.cached for each in computed] == [0, 0, 0]
    assert second.generate(kit.TINY.prompt(99, 200)).cached == 0
    stored(kit, cluster[0], sum(length // kit.PAGE for length in LENGTHS))
    kit.until(cluster[0].settled, "the directory knows what the node holds")

    # An engine on another node reads it.
    assert second.generate(prompts[0]) == kit.Answer(
        computed[0].tokens, cached=kit.hit(LENGTHS[0]), storage=kit.hit(LENGTHS[0])
    )

    # Its answer comes from what was read: with other bytes it is another one.
    (second.folder / "zero").touch()
    zeroed = second.generate(prompts[1])
    (second.folder / "zero").unlink()
    assert zeroed.storage == kit.hit(LENGTHS[1]) and zeroed.tokens != computed[1].tokens

    # The daemon dies while pages are read.
    (second.folder / "hold").touch()
    second.send(prompt=prompts[2], new=kit.NEW)
    kit.until((second.folder / "reading").exists, "the engine reads")
    os.kill(cluster[1].pid, signal.SIGKILL)
    (second.folder / "hold").unlink()
    assert kit.Answer(**second.receive()) == kit.Answer(computed[2].tokens, cached=0, storage=0)
    assert second.generate(kit.TINY.prompt(98, 300)).cached == 0
    assert second.log.read_text().count("is not used") == 1

    # Another one in its place is used.
    seeds = iter(range(1000, 2000))

    def used() -> bool:
        asked = kit.TINY.prompt(next(seeds), 300)
        before = second.generate(asked)
        second.flush()
        after = second.generate(asked)
        assert after.tokens == before.tokens
        return bool(after.storage == kit.hit(300))

    with kit.run_daemon(tmp_path, socket=cluster[1].socket):
        kit.until(used, "the engine uses the new daemon")
    assert second.log.read_text().count("is used again") == 1


def test_other_weights_under_the_same_path_are_not_mistaken_for_the_old_ones(
    kit: ModuleType, cluster: list[Any], engines: list[Any], model: Path, tmp_path: Path
) -> None:
    """An engine is started after the files of its model were replaced, by others of the same shapes."""
    asked = kit.TINY.prompt(50, LENGTHS[0])
    pages = cluster[0].counters().committed + LENGTHS[0] // kit.PAGE
    old = engines[0].generate(asked)
    stored(kit, cluster[0], pages)
    reweighed(model / "model.safetensors")
    with kit.run_engine(model, tmp_path / "new", kit.backend_config(cluster[0].socket)) as engine:
        engine.ready()
        new = engine.generate(asked)
    assert new.storage == 0 and new.tokens != old.tokens


def reweighed(file: Path) -> None:
    """Replace a file's tables by others of as large numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    tensors = {
        name: (torch.randn(each.shape) * each.float().std()).to(each.dtype)
        if each.dim() == 2
        else each
        for name, each in load_file(file).items()
    }
    file.unlink()  # an engine that runs may have mapped it
    save_file(tensors, file, metadata={"format": "pt"})
