"""The plugin's counters through vLLM's own seam: `KVConnectorStats` and `KVConnectorPromMetrics`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvpool.engine_plugins.vllm.metrics import COUNTERS


@dataclass
class KvpoolStats(KVConnectorStats):
    """Sums since the last report, by counter name. Pickled from the ranks to the front end."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvpoolStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(amount, 6) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvpoolPromMetrics(KVConnectorPromMetrics):
    """One counter a name of `COUNTERS`, as `vllm:kvpool_<name>`, for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvpool_{name}", documentation=f"{text}.", labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if amount:
                self._counters[name][engine_idx].inc(amount)
