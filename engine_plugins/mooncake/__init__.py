"""`mooncake.store` over the pool, for programs that import it: they run as they are.

    KVPOOL_MOONCAKE=1 KVPOOL_SOCKET=... vllm serve ... (with vLLM's own MooncakeStoreConnector)

Programs without plugins call `install()` before they import `mooncake.store`. docs/mooncake.md lists the methods and
what differs.

    store.py     MooncakeDistributedStore: arguments, codes and conventions
    batches.py   calls about any number of text keys; ranges.py: about ranges of objects, and their sessions
    objects.py   objects of any size over blocks: reader.py, writer.py; heads.py: the large ones
    labels.py    what their blocks are made of; blocks.py: how these are leased and stored
    spaces.py    the namespaces that they are in; catalog.py: which there are
    pieces.py    copies from and to addresses
    values.py    configurations, descriptors, buffers; codes.py: the return codes
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

VARIABLE = "KVPOOL_MOONCAKE"
_MODULE = "mooncake.store"


def install() -> ModuleType:
    """Make `import mooncake.store` give this facade, in this process. Returns the module. Idempotent.

    The rest of an installed `mooncake` package, such as `mooncake.engine`, stays as it is. Raises `RuntimeError` if
    another `mooncake.store` has been imported already: its users hold on to it.
    """
    from kvpool.engine_plugins.mooncake import facade

    present = sys.modules.get(_MODULE)
    if present is facade:
        return facade
    if present is not None:
        raise RuntimeError(
            "mooncake.store was imported before kvpool could take its place: install it earlier"
        )
    there = importlib.util.find_spec("mooncake") is not None
    sys.modules[_MODULE] = facade  # before the package, whose first lines may import it
    if there:
        package = importlib.import_module("mooncake")
    else:
        package = ModuleType("mooncake", "Only `mooncake.store`, over kvpool.")
        package.__path__ = []
        sys.modules["mooncake"] = package
    package.store = facade  # type: ignore[attr-defined]
    return facade


def install_if_asked() -> None:
    """`install`, if `KVPOOL_MOONCAKE` is 1: what the plugins of engines call, in every process of theirs."""
    if os.environ.get(VARIABLE) == "1":
        install()
