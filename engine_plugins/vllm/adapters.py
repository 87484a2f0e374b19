"""What LoRA adapters contain: block hashes of the engine have their names and paths only.

An engine reads an adapter's files when a request needs it, later than the first request with it is seen here. Files that
change while the engine has the adapter mean that nobody can say which of the two it has read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

from kvpool.engine_plugins.vllm.weights import stored

log = logging.getLogger("kvpool.vllm")

KNOWN_MAX = 4096
CONFIG = "adapter_config.json"

Stamp = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """For the scheduler's thread: a few milliseconds for each new adapter, some microseconds for each request."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[Stamp, bytes]] = OrderedDict()

    def content(self, adapter: Any) -> bytes | None:
        """A digest of the files of an adapter, the engine's `LoRARequest`; empty without one.

        None: not known, since there are no files here or they have changed since the engine has the adapter.
        """
        if adapter is None:
            return b""
        number, name = adapter.lora_int_id, adapter.lora_name
        try:
            folder = _folder(adapter.lora_path)
            stamp = _stamp(folder)
            if number not in self._known:
                self._known[number] = stamp, _digest(folder)
        except (OSError, ValueError) as error:
            log.warning(
                "blocks of adapter %s are not shared, its files are not seen: %s", name, error
            )
            return None
        self._known.move_to_end(number)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        known, digest = self._known[number]
        if known != stamp:
            log.warning(
                "blocks of adapter %s are not shared: its files changed while it was loaded, load it again",
                name,
            )
            return None
        return digest


def _folder(path: str) -> Path:
    """Where the engine reads an adapter from. Raises `OSError` and `ValueError`."""
    local = Path(path).expanduser()
    if local.exists() or local.is_absolute():
        return local
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


def _stamp(folder: Path) -> Stamp:
    files = ((file.name, file.stat()) for file in sorted(folder.iterdir()))
    return tuple((name, at.st_size, at.st_mtime_ns, at.st_ino) for name, at in files)


def _digest(folder: Path) -> bytes:
    files = stored(str(folder))
    if not files:
        raise ValueError(f"there are no weights in {folder}")
    text = json.dumps(files).encode() + (folder / CONFIG).read_bytes()
    return hashlib.sha256(text).digest()
