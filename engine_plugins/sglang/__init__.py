"""The SGLang plugin: a storage backend of HiCache (its third level) that keeps pages in the pool.

SGLang imports this package and takes `KvpoolHiCache` from it, which imports torch and SGLang only then:

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvpool", "interface_v1": 1,
        "module_path": "kvpool.engine_plugins.sglang", "class_name": "KvpoolHiCache"}'

    backend.py    what SGLang sees: `KvpoolHiCache`
    store.py      the pages of one host pool, in a namespace of their own; misses in place of errors
    pages.py      byte views of a host pool's pages
    facts.py      what must agree for bytes to be exchangeable; keys
    hits.py       which prefixes can be restored, from what is there of each pool (pure)
    config.py     extra_config, read once
"""

from __future__ import annotations

from typing import Any

CLASS = "KvpoolHiCache"


def __getattr__(name: str) -> Any:
    if name == CLASS:
        from kvpool.engine_plugins.sglang.backend import KvpoolHiCache

        return KvpoolHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
