"""Numbers of nodes that tests make up: what a test does not care about is 0 or empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvpool.telemetry.node_stats import NodeStats

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge


def node_stats(**given: Any) -> NodeStats:
    """The statistics of a node, with these sections: plain values, or branches of the tree."""
    return msgspec.convert(msgspec.to_builtins(given), NodeStats)


def value_of(metric: Counter | Gauge) -> float:
    """What a metric of one series counts, as it is exposed."""
    (family,) = metric.collect()
    (value,) = (one.value for one in family.samples if not one.name.endswith("_created"))
    return float(value)
