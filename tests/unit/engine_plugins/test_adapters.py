"""What adapters contain, while files come, change and go."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.scheduler.adapters import KNOWN_MAX, Adapters
from tests.support.memory import longest


def adapter(folder: Path, number: int = 1, weights: bytes = b"w", config: str = "{}") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    return SimpleNamespace(lora_int_id=number, lora_name="name", lora_path=str(folder))


def test_content_is_what_counts(tmp_path: Path) -> None:
    known = Adapters()
    assert known.content(None) == b""
    one = known.content(adapter(tmp_path / "a"))
    assert one
    assert known.content(adapter(tmp_path / "b", 2)) == one
    assert known.content(adapter(tmp_path / "c", 3, weights=b"x")) not in (one, None)
    assert known.content(adapter(tmp_path / "d", 4, config='{"r": 8}')) not in (one, None)


def test_files_that_change_under_a_loaded_adapter_make_it_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = Adapters()
    first = adapter(tmp_path / "a")
    before = known.content(first)
    second = adapter(tmp_path / "a", 2, weights=b"x")
    os.utime(tmp_path / "a/adapter_model.bin", ns=(1, 1))
    assert known.content(first) is None
    assert not known.shares(first)
    assert "load it under a new name" in caplog.text
    assert known.content(second) is None, "the engine may have blocks of either"
    known.reset()
    assert known.content(second) not in (before, None)
    assert known.content(first) is None
    assert known.content(second) is None


def test_a_name_that_had_another_content_is_not_shared_until_a_reset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = Adapters()
    one = known.content(adapter(tmp_path / "a", 1))
    assert known.shares(adapter(tmp_path / "a", 2))
    assert known.content(adapter(tmp_path / "a", 2)) == one
    assert caplog.records == []
    other = adapter(tmp_path / "a", 3, weights=b"x")
    for _ in range(2):
        assert known.content(other) is None
    assert len(caplog.records) == 1
    # With its former content too: what was computed in between is not of that.
    back = adapter(tmp_path / "a", 4)
    assert known.content(back) is None
    assert not known.shares(back)
    # Another name or path is another in the engine's cache.
    assert known.content(adapter(tmp_path / "b", 5)) == one
    renamed = SimpleNamespace(lora_int_id=6, lora_name="another", lora_path=back.lora_path)
    assert known.content(renamed) == one
    known.reset()
    assert known.content(back) == one
    assert known.shares(back)
    assert known.shares(None)


class OfTwo(Adapters):
    """Knows two names at a time."""

    NAMES_MAX = 2


def test_of_too_many_names_the_last_are_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = OfTwo()
    several = [adapter(tmp_path / str(number), number) for number in range(3)]
    assert [bool(known.content(one)) for one in several] == [True, True, False]
    assert [known.shares(one) for one in several] == [True, True, False]
    assert "too many" in caplog.text


@pytest.mark.parametrize("missing", ["adapter_model.bin", "adapter_config.json", ""])
def test_without_files_nothing_is_known(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = adapter(tmp_path / "a")
    if missing:
        (tmp_path / "a" / missing).unlink()
    else:
        one.lora_path = str(tmp_path / "b")
    known = Adapters()
    assert known.content(one) is None
    assert "adapter name" in caplog.text
    adapter(tmp_path / "a")
    assert known.content(one) is None, "the engine may have computed with others"
    known.reset()
    assert bool(known.content(one)) == bool(missing)


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    known = Adapters()
    adapter(tmp_path / "a")
    for number in range(1, KNOWN_MAX + 3):
        one = SimpleNamespace(lora_int_id=number, lora_name="n", lora_path=str(tmp_path / "a"))
        assert known.content(one)
    assert longest(known) == KNOWN_MAX
