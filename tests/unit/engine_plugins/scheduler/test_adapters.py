"""Blocks of requests with an adapter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvpool.engine_plugins.vllm.plan import pack
from tests.unit.engine_plugins.scheduler.harness import TOKENS, Harness, tables

if TYPE_CHECKING:
    import pytest


def keys_in(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


def adapter_of(folder: Path, number: int, content: bytes) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    return SimpleNamespace(lora_int_id=number, lora_name="a", lora_path=str(folder))


def test_blocks_of_an_adapter_are_named_by_its_content(harness: Harness, tmp_path: Path) -> None:
    """Name, path and the engine's hashes are the same."""
    first = adapter_of(tmp_path / "a", 1, b"one")
    saved = harness.request("r", 4, adapter=first)
    plan = harness.step(saved, 4 * TOKENS, tables(4))
    (save,) = plan.saves[0].saves
    assert save.keys != pack(saved.block_hashes)
    assert len(set(keys_in(save.keys)) - set(keys_in(pack(saved.block_hashes)))) == 4
    harness.pool.commit(harness.pool.reserve(harness.ns, save.keys))
    harness.end(plan)
    found = (4 * TOKENS, True)
    same = harness.request("same", 4, adapter=first)
    assert harness.half.matched_tokens(same, 0) == found
    assert harness.half.matched_tokens(harness.request("none", 4), 0) == (0, False)
    for ended in (saved, same):
        harness.half.request_finished(ended, tables(4), completed=False)
    harness.reset()
    second = adapter_of(tmp_path / "a", 2, b"two")
    other = harness.request("other", 4, adapter=second)
    assert harness.half.matched_tokens(other, 0) == (0, False)
    # Loaded again with the first content.
    harness.half.request_finished(other, tables(4), completed=False)
    harness.reset()
    third = adapter_of(tmp_path / "a", 3, b"one")
    assert harness.half.matched_tokens(harness.request("again", 4, adapter=third), 0) == found


def test_blocks_of_an_adapter_whose_files_were_replaced_are_not_shared_until_a_reset(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded again under its name and path, it finds what the engine's own cache has of the files before."""
    first = harness.request("first", 4, adapter=adapter_of(tmp_path / "a", 1, b"one"))
    harness.end(harness.step(first, 2 * TOKENS, tables(4)))
    second = harness.request("second", 4, adapter=adapter_of(tmp_path / "a", 2, b"two"))
    assert "other files" in caplog.text
    assert harness.half.matched_tokens(second, 2 * TOKENS) == (0, False)
    second.num_computed_tokens = 2 * TOKENS
    assert harness.step(second, 2 * TOKENS, tables(4)).saves == []
    harness.half.request_finished(second, tables(4), completed=True)
    # What runs with the one before may find what was computed with this one.
    assert harness.step(first, 2 * TOKENS, tables(4)).saves == []
    harness.half.request_finished(first, tables(4), completed=True)
    assert not harness.half.has_work()
    harness.reset()
    third = harness.request("third", 4, adapter=adapter_of(tmp_path / "a", 3, b"two"))
    assert harness.step(third, 4 * TOKENS, tables(4)).saves != []


def test_a_request_that_waits_during_a_reset_counts_after_it(
    harness: Harness, tmp_path: Path
) -> None:
    """It computes with what the engine had loaded for it."""
    waits = harness.request("waits", 4, adapter=adapter_of(tmp_path / "a", 1, b"one"))
    harness.reset()
    second = harness.request("second", 4, adapter=adapter_of(tmp_path / "a", 2, b"two"))
    assert harness.step(second, 4 * TOKENS, tables(4)).saves == []
    assert harness.step(waits, 4 * TOKENS, tables(4)).saves == []


def test_blocks_of_an_unknown_adapter_are_not_shared(harness: Harness, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "a", 1, b"one")
    adapter.lora_path = str(tmp_path / "not here")
    request = harness.request("r", 4, adapter=adapter)
    harness.store(request.block_hashes)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    assert harness.step(request, 4 * TOKENS, tables(4)).saves == []
    harness.half.request_finished(request, tables(4), completed=True)
    assert "dropped_saves" not in harness.half.counters.take()
    assert not harness.half.has_work()
