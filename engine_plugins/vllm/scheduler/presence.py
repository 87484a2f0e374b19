"""Announces this engine's address to routers through the daemon, periodically.

A restarted daemon knows no engines until they announce themselves, and an engine that is not announced gets
no requests. So a thread repeats the announcement every few seconds.

Takes vLLM's configuration without importing vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvpool.complaint import Complaint
from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.events import reachable
from kvpool.engine_plugins.vllm.plan import GroupRule
from kvpool.errors import KvpoolError
from kvpool.types import EngineRecord, PartKind

log = logging.getLogger("kvpool.vllm")

EVERY_S = 2.0


def engine_record(
    vllm_config: Any,
    config: PluginConfig,
    rules: Sequence[GroupRule],
    *,
    hash_tokens: int,
    none_hash: bytes,
    blocks: int,
) -> EngineRecord | None:
    """The announcement of this engine for routers; None: it has no URL, and is not announced.

    hash_tokens: of a block of the chain. none_hash: the start of the chain. blocks: of the engine's cache.
    """
    if not config.url:
        return None
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    served = model.served_model_name or model.model
    # One block is for nobody. States take few.
    own_tokens = (blocks - 1) * hash_tokens // max(1, sum(not rule.state for rule in rules))
    events = reachable(
        vllm_config.kv_events_config, parallel.data_parallel_index, urlsplit(config.url).hostname
    )
    return EngineRecord(
        config.url.rstrip("/"),
        role=str(config.engine_role),
        model=served if isinstance(served, str) else served[0],
        events=events.endpoint,
        replay=events.replay,
        topic=events.topic,
        groups=whole_groups(rules),
        hash_algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
        none_hash=none_hash.hex(),
        block_tokens=hash_tokens,
        capacity_tokens=own_tokens,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        steps_at_once=parallel.pipeline_parallel_size,
        max_len=model.max_model_len,
        follows_max=config.follows_max if config.pull_wait_s else 0,
        rank=rank_at_url(parallel, str(vllm_config.kv_transfer_config.engine_id)),
    )


def rank_at_url(parallel: Any, engine_id: str) -> int | None:
    """The number by which the server at the URL knows this data-parallel rank; None: it has the URL to itself.

    A server with the ranks of its own node only counts them from 0. To an engine core of a dense model vLLM says
    that it is alone, but for its index, and the end of its id.
    """
    index = int(parallel.data_parallel_index)
    alone = parallel.data_parallel_size == 1 and not engine_id.endswith(f"_dp{index}")
    if alone or parallel.data_parallel_external_lb:
        return None
    if parallel.data_parallel_hybrid_lb:
        return int(parallel.data_parallel_rank_local)
    return index


def whole_groups(rules: Sequence[GroupRule]) -> tuple[int, ...]:
    """The groups that hold every block of a prefix which the engine can use.

    Of a sliding window only the end is needed, and its older blocks are the first to go: they say nothing. Groups
    of larger blocks tell of each of those once, by the last key.
    """
    return tuple(rule.group for rule in rules if rule.kind is PartKind.FULL and rule.stride == 1)


class Presence:
    """Repeats an announcement until `end`. announce: whatever it raises of ours is logged, once."""

    def __init__(self, announce: Callable[[], object], every_s: float = EVERY_S) -> None:
        self._announce = announce
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-presence", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Idempotent. Returns once the last announcement is made."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        complaint = Complaint(log, "this engine is not announced to routers")
        while True:
            try:
                self._announce()
                complaint.worked()
            except KvpoolError as error:
                complaint.failed(str(error), error)
            if self._ended.wait(self._every_s):
                return
