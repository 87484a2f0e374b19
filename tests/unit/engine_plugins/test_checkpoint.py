"""Which weights there are, of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvpool.engine_plugins import checkpoint
from kvpool.engine_plugins.checkpoint import stored


def safetensors(path: Path, tensors: Mapping[str, bytes | bytearray]) -> None:
    header, at = {}, 0
    for name, each in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(each)], "data_offsets": [at, at + len(each)]}
        at += len(each)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def test_a_copy_is_the_same_and_other_bytes_are_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tensors = {"x": bytes(1000), "y": bytes(range(256))}
    for folder in ("a", "b"):
        safetensors(tmp_path / folder / "model.safetensors", tensors)
    (tmp_path / "a" / "README.md").write_text("not weights")
    assert stored(str(tmp_path / "a")) == stored(str(tmp_path / "b"))
    safetensors(tmp_path / "b/model.safetensors", {**tensors, "y": bytes(256)})
    assert stored(str(tmp_path / "a")) != stored(str(tmp_path / "b"))
    assert stored(str(tmp_path / "a/model.safetensors")) == stored(str(tmp_path / "a"))


def test_of_a_large_file_each_tensor_is_looked_at(tmp_path: Path) -> None:
    size = 2 * checkpoint.PIECES_MAX * checkpoint.PIECE_BYTES // 4
    tensors = {str(i): bytes([i]) * size for i in range(4)}
    path = tmp_path / "m.safetensors"
    safetensors(path, tensors)
    before = stored(str(path))
    for name in tensors:
        safetensors(path, {**tensors, name: bytes([9]) * size})
        assert stored(str(path)) != before, name


@pytest.mark.parametrize("tensors", [2000, 4000])
def test_few_tensors_of_each_of_many_files_count(tmp_path: Path, tensors: int) -> None:
    """As a fine-tune of some layers changes them. There are more tensors than places, or fewer."""
    assert 4 * 2000 < checkpoint.SPOTS_MAX // 2 < 4 * 4000
    size, changed = 1100, 5
    was = {str(i): bytes(size) for i in range(tensors)}

    def write(tensors: dict[str, bytes]) -> None:
        for at in range(4):
            safetensors(tmp_path / f"m-{at}.safetensors", tensors)

    write(was)
    before = stored(str(tmp_path))
    write({**was, **{str(i): b"\1" * size for i in range(1, 1 + changed)}})
    after = stored(str(tmp_path))
    assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("at", ["beginning", "middle", "end"])
def test_a_tensor_is_looked_at_in_several_places(tmp_path: Path, at: str) -> None:
    size = 2 * checkpoint.PIECES_MAX * checkpoint.PIECE_BYTES
    path = tmp_path / "m.safetensors"
    content = bytearray(size)
    safetensors(path, {"x": content})
    before = stored(str(path))
    content[{"beginning": 0, "middle": size // 2, "end": size - 1}[at]] = 1
    safetensors(path, {"x": content})
    assert stored(str(path)) != before


def test_of_very_many_tensors_little_is_read_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PIECES_MAX", 1)
    monkeypatch.setattr(checkpoint, "SPOT_BYTES_MAX", 4 * 100 * checkpoint.SPOT_BYTES_MIN)
    path = tmp_path / "m.safetensors"
    tensors = {str(i): bytes(2000) for i in range(100)}
    safetensors(path, tensors)
    before = stored(str(path))
    seen = 0
    for at in range(0, 2000, 50):
        safetensors(path, {**tensors, "7": bytes(at) + b"\1" * 50 + bytes(1950 - at)})
        seen += stored(str(path)) != before
    assert 3 <= seen <= 12
    safetensors(path, dict.fromkeys(tensors, b"\x01" * 2000) | {"7": bytes(2000)})
    assert stored(str(path)) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        (9).to_bytes(8, "little") + b'{"a": [1]}',
        (4).to_bytes(8, "little") + b"null",
        (33).to_bytes(8, "little") + b'{"a": {"data_offsets": [-90, 10]}}',
    ],
)
def test_what_is_no_safetensors_file_is_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    before = stored(str(path))
    path.write_bytes(content + b"1")
    assert stored(str(path)) != before


def test_a_hub_id_has_no_files() -> None:
    assert stored("org/model-that-is-no-folder") is None
