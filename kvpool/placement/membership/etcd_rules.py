"""Rules for this node's record in etcd: who may have its name, and how soon a change of it is written. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from kvpool.errors import ConfigError, ProtocolError
from kvpool.placement.distance import APART
from kvpool.placement.membership.admission import incarnation_taken, name_taken, same_address
from kvpool.placement.membership.etcd_mirror import decode_node
from kvpool.placement.records import LinkRecord, NodeRecord, NodeState
from kvpool.telemetry.cluster_stats import DrainProgress

USE_S = 5.0  # a node's use of its tiers, and what it measured, is written at most that often,
SMALL_USE_S = 60.0  # and that often, when it has changed by less than
SMALL_USE = 1 / 64  # of the tier
LATENCY_APART = 2.0  # times, by a link's latency; by less than `APART`, by its bandwidth
PROGRESS_S = 0.5  # the progress of a drain is written at most that often
WRITES_S = 10.0  # and of all nodes together at most so many a second are written of either


def replaceable(holder: Any, user: Any | None, record: NodeRecord) -> NodeRecord | None:
    """The record under this node's name, if its owner is known to be dead: it has left, or this node holds its
    address.

    holder, user: the key-values under this node's name and incarnation.
    """
    if user is not None and user.value != record.node.encode():
        return None
    try:
        old = decode_node(holder.value, record.node)
    except ProtocolError:
        return None
    return old if old.state is NodeState.GONE or same_address(old, record) else None


def clash(record: NodeRecord, holder: Any | None, user: Any | None) -> ConfigError:
    """The error when this node's name or incarnation did not become free."""
    if holder is None:
        other = "" if user is None else user.value.decode(errors="replace")
        return incarnation_taken(record, other)
    try:
        old = decode_node(holder.value, record.node)
    except ProtocolError as error:
        return ConfigError(
            f"the name {record.node!r} is taken by a record that cannot be read ({error}): choose "
            "another --node, or delete it from etcd"
        )
    return name_taken(old)


def hold_s(written: NodeRecord, wanted: NodeRecord) -> float:
    """How long after the last write a record may wait. Every write is read by all nodes, and stays in etcd's
    history for long, so what only goes up and down is not written each time; infinite: they are equal.
    """
    if wanted == written:
        return math.inf
    if _without_use(wanted) != _without_use(written):
        return 0.0
    if wanted.drain != written.drain:
        return PROGRESS_S
    if _links_differ(written.links, wanted.links):
        return USE_S
    for old, new in zip(written.tiers, wanted.tiers, strict=True):
        least = max(1, new.capacity_bytes * SMALL_USE)
        for before, now in (
            (old.used_bytes, new.used_bytes),
            (old.secondary_bytes, new.secondary_bytes),
        ):
            if abs(now - before) >= least:
                return USE_S
    return SMALL_USE_S


def _links_differ(written: Iterable[LinkRecord], wanted: Iterable[LinkRecord]) -> bool:
    """Whether they say something else about pulls, and not only what moves with every few of them."""
    before, now = (
        {(link.distance, link.node): link for link in each} for each in (written, wanted)
    )
    if before.keys() != now.keys():
        return True
    return any(
        _times_apart(old.bytes_s, now[key].bytes_s, APART)
        or _times_apart(old.latency_s, now[key].latency_s, LATENCY_APART)
        for key, old in before.items()
    )


def _times_apart(one: float, other: float, times: float) -> bool:
    return max(one, other) >= times * min(one, other)


def spread_s(nodes: Iterable[NodeRecord], wanted: NodeRecord) -> float:
    """How long it may wait at least, so that the writes of all these nodes are not too many.

    Those of drains are counted apart: few nodes drain at a time, and somebody watches them.
    """
    draining = wanted.drain is not None
    return sum(1 for node in nodes if (node.drain is not None) == draining) / WRITES_S


def _without_use(record: NodeRecord) -> NodeRecord:
    """Without what changes all the time. The phase of a drain does not."""
    tiers = tuple(
        msgspec.structs.replace(tier, used_bytes=0, secondary_bytes=0) for tier in record.tiers
    )
    drain = None if record.drain is None else DrainProgress(record.drain.phase)
    return msgspec.structs.replace(record, tiers=tiers, drain=drain, links=())
