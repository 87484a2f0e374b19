"""Numbers of nodes that tests make up: what a test does not care about is 0 or empty."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpool.telemetry.node_stats import NodeStats


def node_stats(**given: Any) -> NodeStats:
    """The statistics of a node, with these sections: plain values, or branches of the tree."""
    return msgspec.convert(msgspec.to_builtins(given), NodeStats)
