"""The vLLM plugin: a KV connector that saves blocks into the pool and loads them from it.

`register` is the `vllm.general_plugins` entry point. Importing this package imports neither vLLM nor
torch; vLLM imports `connector` when a configuration names `KvpoolConnector`.

    connector.py   what vLLM sees: a thin facade over the two halves, and its pickled messages
    scheduler.py   scheduler half: lookups, leases, pins; no I/O except the client's
    pulls.py       blocks of other nodes, asked for beside the engine's steps
    worker.py      worker half: copies between the paged KV and the pool's slots
    attachment.py  a rank's hold on the daemon's spare device memory
    events.py      where the engine tells of its own cache, for the daemon
    rank_lookups.py  lookups of engines whose ranks are on several nodes
    plan.py        messages between the halves; which blocks to load, save and pin (pure)
    shards.py      how blocks are cut into parts, whatever the ranks (pure)
    stored.py      what one rank stores of vLLM's layers
    layout.py      byte views of the paged KV, gather and scatter on the host
    device.py      the same through a side stream, for accelerators; device_copies.py, device_kernel.py: how
    namespace.py   what must agree for bytes to be exchangeable; refusals at start-up
    config.py      kv_connector_extra_config, read once
    metrics.py     counters through vLLM's own seam

    tier.py        for vLLM's own offloading: a tier of `TieringOffloadingSpec`; tier_*.py: its settings, namespace, jobs, and
                   what its threads ask of the pool
"""

from __future__ import annotations

from kvpool.engine_plugins.mooncake import install_if_asked

NAME = "KvpoolConnector"
MODULE = "kvpool.engine_plugins.vllm.connector"


def register() -> None:
    """Make `kv_connector="KvpoolConnector"` known to vLLM, and `mooncake.store` the pool's, if `KVPOOL_MOONCAKE` is 1.

    vLLM calls this in every process and again after a respawn, and refuses a second registration,
    so a name that is there already is left alone.
    """
    install_if_asked()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
