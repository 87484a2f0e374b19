"""The weights of a checkpoint on this machine, known by samples of their bytes.

The files are the same for engines of all shapes, and for all engines: no part of an engine is needed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.engine_plugins.facts import plain

PIECES_MAX = 2048
"""The most places at which files are read whose tensors are not known."""
PIECE_BYTES = 4096
SPOTS_PER_TENSOR, SPOTS_MAX = 4, 16384
"""Places at which one tensor is read, and all tensors together; with more tensors, one place each."""
SPOT_BYTES_MAX, SPOT_BYTES_MIN = 64 << 20, 64
"""Bytes read of all tensors together, and at one place."""
HEADER_BYTES_MAX = 100_000_000
SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
USUAL_FORMATS = frozenset(
    {
        "None",
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "runai_streamer",
        "layered",
    }
)
"""Formats, as vLLM and SGLang call them, in which both load the same files of a model's folder."""


def folder_of(path: str, revision: str | None = None) -> Path:
    """Return where an engine reads a model or an adapter from: the path itself, or the snapshot of a hub's repository.

    Raises `OSError` or `ValueError` if there is no snapshot on this machine.
    """
    local = Path(path).expanduser()
    if local.exists() or local.is_absolute():
        return local
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, local_files_only=True))


def source(load_format: Any, *given: Any) -> Any:
    """Return what says where weights come from, if other files than usual, or no files, are loaded; else None.

    given: what else the engine was told of it.
    """
    name = str(getattr(load_format, "value", load_format))
    return None if name in USUAL_FORMATS else [name, *map(plain, given)]


@dataclass
class _Listed:
    """A safetensors file's list of tensors: where in the file each lies."""

    header: bytes
    tensors: list[tuple[str, int, int]]


def stored(path: str) -> Any:
    """What tells the weights of a checkpoint from others: names, sizes, and some bytes of each tensor; None: no files.

    Small files are read as a whole. What is no safetensors file is read at places that are equally far from each other.
    """
    place = Path(path)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(each for each in place.iterdir() if each.suffix in SUFFIXES)
    else:
        return None
    listed = [_listed(file) if file.suffix == ".safetensors" else None for file in files]
    tensors = sum(len(each.tensors) for each in listed if each)
    pieces = max(1, PIECES_MAX // max(1, len(files)))
    return [
        [file.name, file.stat().st_size, _sampled(file, each, tensors, pieces)]
        for file, each in zip(files, listed, strict=True)
    ]


def _sampled(path: Path, listed: _Listed | None, tensors: int, pieces: int) -> str:
    """Digest of some bytes. tensors: of all files. pieces: how many are read of a file of which no tensors are known."""
    total = hashlib.sha256()
    size = path.stat().st_size
    length = PIECE_BYTES
    if size <= pieces * PIECE_BYTES:
        places = list(range(0, size, PIECE_BYTES))
    elif listed is None:
        places = [size * i // pieces for i in range(pieces)]
    else:
        spots = min(max(SPOTS_MAX // tensors, 1), SPOTS_PER_TENSOR)
        length = min(max(SPOT_BYTES_MAX // (tensors * spots), SPOT_BYTES_MIN), PIECE_BYTES)
        total.update(listed.header)
        places = sorted(at for each in listed.tensors for at in _spots(*each, spots, length))
    with path.open("rb", buffering=0) as file:
        for at in places:
            file.seek(at)
            total.update(file.read(length))
    return total.hexdigest()[:32]


def _spots(name: str, start: int, end: int, count: int, length: int) -> list[int]:
    """Where a tensor is looked at: a place that its name chooses, its middle, its beginning and its end."""
    last = max(start, end - length)
    chosen = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    spots = [start + chosen % (last - start + 1), (start + last) // 2, start, last]
    return spots[:count]


def _listed(path: Path) -> _Listed | None:
    """What tensors a safetensors file has; None: it does not say that as it should."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(path.stat().st_size, HEADER_BYTES_MAX):
            return None
        header = file.read(length)
    try:
        found = [
            (name, 8 + length + start, 8 + length + end)
            for name, each in json.loads(header).items()
            if name != "__metadata__"
            for start, end in [map(int, each["data_offsets"])]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = found and all(8 + length <= start <= end for _, start, end in found)
    return _Listed(header, found) if whole else None
