"""The LMCache plugin: an L2 adapter of its multi-process server that keeps objects in the pool.

Engines behind that server (vLLM, SGLang, TensorRT-LLM) share the pool without knowing it. LMCache's server loads the
adapter with `--l2-adapter '{"type": "plugin", "module_path": "kvpool.engine_plugins.lmcache", "class_name":
"KvpoolL2Adapter", "adapter_params": {}}'`. Importing this package imports neither LMCache nor torch; asking it for
the two classes does.

    adapter.py   what LMCache sees: its interface, carried out through `kvpool.client`
    objects.py   its keys and layouts as block keys and namespaces (pure)
    holds.py     which leases keep looked-up objects, for whom (no I/O)
    tasks.py     bounded threads, and results that wait to be fetched
    settings.py  `adapter_params`, read once
"""

from __future__ import annotations

from typing import Any

_CLASSES = ("KvpoolL2Adapter", "KvpoolL2AdapterConfig")


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool.engine_plugins.lmcache import adapter

    return getattr(adapter, name)
