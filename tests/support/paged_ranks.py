"""Ranks of an engine over paged KV that is made by hand: the plugin's worker halves without vLLM. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kvpool.engine_plugins.vllm.config import Codec, PluginConfig
from kvpool.engine_plugins.vllm.layout.pages import CHUNK_BYTES, HostPages
from kvpool.engine_plugins.vllm.naming import namespace
from kvpool.engine_plugins.vllm.plan import (
    GroupLoad,
    GroupRule,
    GroupSave,
    LoadJob,
    Opening,
    RankReport,
    SaveJob,
    StepPlan,
)
from kvpool.engine_plugins.vllm.worker.device import DevicePages, PinnedSegments
from kvpool.engine_plugins.vllm.worker.half import WorkerHalf
from kvpool.engine_plugins.vllm.worker.stored import stored_groups
from kvpool.types import NamespaceRecord
from tests.support.waiting import PATIENCE_S

ORDERS = {  # vLLM's names: layers, blocks, heads, tokens, content, outermost first
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass
class FullAttentionSpec:
    num_kv_heads: int
    dcp_sharded: bool = True
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    kv_quant_mode: int = 0
    block_size: int = 0


class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class Engine:
    """What an engine is made of. dtype of the KV: as wide as two bytes.

    model_heads: the KV heads that the model's configuration says; 0: those of the KV. projected: whether the layers'
    projections are seen.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    layout: str = "LBHNC"
    backend: str = "FLASH_ATTN"
    kernel_blocks: int = 1
    on_device: bool = False
    codec: Codec = Codec.NONE
    pieces: int = 0
    mla: bool = False
    slots: int | None = None
    model_heads: int = 0
    projected: bool = True


class PagedRanks:
    """The ranks of an engine over paged KV of their own.

    pool: a client, or what stands for one. kv: the model's: (layers, blocks, heads, tokens, content).
    """

    def __init__(
        self,
        pool: Any,
        engine: Engine,
        kv: Any,
        *,
        name: str = "m",
        chunk_bytes: int = CHUNK_BYTES,
        rule: GroupRule = GroupRule(0),  # noqa: B008
    ) -> None:
        self.engine, self.pool = engine, pool
        self.layers, self.blocks, self.heads, *_ = kv.shape
        self._chunk_bytes = chunk_bytes
        self._step = 0
        self.memory: list[Any] = []
        self.groups = []
        self.reports = []
        self.halves = []
        config = PluginConfig(codec=engine.codec, layer_pieces=engine.pieces)
        rules = [rule]
        for rank in range(engine.tp * engine.pp):
            views = self._paged(self.share(kv, rank), rank)
            spec_type = MLAAttentionSpec if engine.mla else FullAttentionSpec
            spec = spec_type(max(1, self.heads // engine.tp), num_head_slots=engine.slots)
            cache = SimpleNamespace(
                num_blocks=self.blocks,
                kv_cache_groups=[SimpleNamespace(layer_names=list(views), kv_cache_spec=spec)],
            )
            parallel = SimpleNamespace(
                rank=rank,
                tensor_parallel_size=engine.tp,
                pipeline_parallel_size=engine.pp,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=engine.dcp,
                cp_kv_cache_interleave_size=1,
            )
            vllm = SimpleNamespace(
                parallel_config=parallel,
                model_config=SimpleNamespace(
                    get_total_num_kv_heads=lambda: engine.model_heads or self.heads
                ),
            )
            stored = stored_groups(
                vllm,
                cache,
                config,
                rules,
                views,
                lambda _: engine.backend,
                lambda _: self.heads if engine.projected else None,
            )
            self.groups.append(stored)
            self.reports.append(
                RankReport(
                    rank,
                    "cpu",
                    engine.layout,
                    "",
                    [group.layer_bytes() for group in stored],
                    {},
                    held=[group.held() for group in stored],
                )
            )
        parts = namespace.part_specs(rules, self.reports)
        self.record = NamespaceRecord({name: engine.codec}, parts)
        for rank, stored in enumerate(self.groups):
            self.halves.append(self._half(rank, stored))

    def _half(self, rank: int, stored: Any) -> WorkerHalf:
        segments = PinnedSegments(torch.device("cpu"))

        def make(rows: Any, step: int) -> Any:
            if self.engine.on_device:
                return DevicePages(rows, segments, self._chunk_bytes)
            return HostPages([each.numpy() for each in rows], self._chunk_bytes, step=step)

        firsts = namespace.first_parts([group.share.cut for group in stored])
        half = WorkerHalf(
            self.pool,
            self.reports[rank],
            lambda: [
                group.pages(first, make, lambda **_: None)
                for group, first in zip(stored, firsts, strict=True)
            ],
            block_errors=False,
            record_ready=lambda: None,
        )
        half.start_loads(StepPlan(opening=Opening(1, self.record, 0)))
        return half

    def share(self, kv: Any, rank: int) -> Any:
        """The KV of a rank's heads and layers."""
        engine = self.engine
        tensor_rank, stage = rank % engine.tp, rank // engine.tp
        first = tensor_rank * self.heads // engine.tp
        layers = self.layers // engine.pp
        return kv[stage * layers :][:layers, :, first : first + max(1, self.heads // engine.tp)]

    def _paged(self, own: Any, rank: int) -> dict[str, Any]:
        """The layers' tensors, logically (kernel blocks, heads, tokens, content), in the engine's layout."""
        engine = self.engine
        ratio = engine.kernel_blocks
        layers, blocks, heads, tokens, content = own.shape
        split = own.reshape(layers, blocks, heads, ratio, tokens // ratio, content)
        split = split.permute(0, 1, 3, 2, 4, 5).reshape(
            layers, blocks * ratio, heads, tokens // ratio, content
        )
        order = ORDERS[engine.layout]
        memory = split.permute(order).contiguous()
        self.memory.append(memory)
        views = memory.permute([order.index(axis) for axis in range(5)])
        first = rank // engine.tp * layers
        return {f"model.layers.{first + each}.attn": views[each] for each in range(layers)}

    def kv(self, rank: int) -> Any:
        """Back from the memory of a rank: (layers, blocks, heads, tokens, content)."""
        order = ORDERS[self.engine.layout]
        split = self.memory[rank].permute([order.index(axis) for axis in range(5)])
        ratio = self.engine.kernel_blocks
        layers, rows, heads, tokens, content = split.shape
        apart = split.reshape(layers, rows // ratio, ratio, heads, tokens, content)
        return apart.permute(0, 1, 3, 2, 4, 5).reshape(
            layers, rows // ratio, heads, ratio * tokens, content
        )

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """All ranks save these blocks."""
        self._step += 1
        save = GroupSave(0, b"".join(keys), list(blocks), None)
        for half in self.halves:
            half.start_saves(StepPlan(saves=[SaveJob(self._step, "s", 1, [save])]))
        self._ended("_saves")
        for half in self.halves:
            done = half.take_done()
            assert done is not None
            assert (done.saves, done.failed_saves) == ({self._step: 1}, set())

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """All ranks load so many of the last of these keys into the blocks, which must all be there."""
        lease = self.pool.acquire(self.pool.open(self.record), b"".join(keys))
        assert lease is not None
        assert lease.blocks == len(keys)
        groups = [GroupLoad(1, len(keys) - len(blocks), list(blocks))]
        for half in self.halves:
            half.start_loads(StepPlan(loads=[LoadJob(0, "r", lease.token, False, groups)]))
        self._ended("_loads")
        for half in self.halves:
            assert half.take_loads().failed_requests == set()
            half.take_done()
        self.pool.release(lease)

    def _ended(self, name: str) -> None:
        for half in self.halves:
            for future in getattr(half, name):
                future.result(PATIENCE_S)

    def close(self) -> None:
        for half in self.halves:
            half.close()
