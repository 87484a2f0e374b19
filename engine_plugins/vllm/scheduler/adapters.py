"""What LoRA adapters contain: block hashes of the engine have their names and paths only.

An engine reads an adapter's files when a request needs it, later than the first request with it is seen here. Files that
change while the engine has the adapter mean that nobody can say which of the two it has read.

The engine's own cache does not know contents: what it has computed with one it finds with the next of the same name and
path, until it is reset. Whatever may have been computed so is not shared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

from kvpool.engine_plugins.checkpoint import folder_of, stored

log = logging.getLogger("kvpool.vllm")

KNOWN_MAX = 4096
CONFIG = "adapter_config.json"

Stamp = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """For the scheduler's thread: a few milliseconds for each new adapter, some microseconds for each request."""

    NAMES_MAX = 65536
    """Names and paths between two resets; of more nothing is shared."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[Stamp, bytes]] = OrderedDict()
        self._first: dict[tuple[str, str], bytes | None] = {}

    def reset(self) -> None:
        """The engine's own cache is empty."""
        self._first.clear()

    def shares(self, adapter: Any) -> bool:
        """Whether the engine's blocks of that name and path are all of one content, as far as is known."""
        return adapter is None or self._first.get(_name(adapter)) is not None

    def content(self, adapter: Any) -> bytes | None:
        """A digest of the files of an adapter, the engine's `LoRARequest`; empty without one.

        None: not known, since there are no files here, they have changed since the engine has the adapter, or its name
        and path had another content, or an unknown one, since the last reset.
        """
        if adapter is None:
            return b""
        digest = self._content(adapter)
        name = _name(adapter)
        if name not in self._first:
            if len(self._first) >= self.NAMES_MAX:
                log.warning("blocks of adapter %s are not shared, there were too many", name[0])
                return None
            self._first[name] = digest
        first = self._first[name]
        if first is not None and digest != first:
            self._first[name] = None
            log.warning(
                "blocks of adapter %s are not shared until the engine's caches are reset or it has another name: it had "
                "other files, and the engine may have blocks of them",
                name[0],
            )
        return self._first[name]

    def _content(self, adapter: Any) -> bytes | None:
        number, name = adapter.lora_int_id, adapter.lora_name
        try:
            folder = folder_of(adapter.lora_path)
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
                "blocks of adapter %s are not shared: its files changed while it was loaded; load it under a new name",
                name,
            )
            return None
        return digest


def _name(adapter: Any) -> tuple[str, str]:
    """What the engine's block hashes have of an adapter."""
    return adapter.lora_name, adapter.lora_path


def _stamp(folder: Path) -> Stamp:
    files = ((file.name, file.stat()) for file in sorted(folder.iterdir()))
    return tuple((name, at.st_size, at.st_mtime_ns, at.st_ino) for name, at in files)


def _digest(folder: Path) -> bytes:
    files = stored(str(folder))
    if not files:
        raise ValueError(f"there are no weights in {folder}")
    text = json.dumps(files).encode() + (folder / CONFIG).read_bytes()
    return hashlib.sha256(text).digest()
