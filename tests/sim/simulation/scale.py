"""Sizes and limits as they fit a world of tiny nodes, for as long as it lives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpool.daemon.cluster import replication
from kvpool.daemon.fetch import (
    choices,
    fetcher,
    locate,
    plan,
    prefix_stream,
    prefix_stream_rules,
    transfers,
)
from kvpool.daemon.server import composition
from kvpool.daemon.tiers import (
    ssd_books,
    ssd_demote,
    ssd_index,
    ssd_read,
    ssd_restore,
    ssd_tier,
    ssd_write,
)
from kvpool.daemon.workers.turns import COPIES, PULLS, QUESTIONS, WAITS, TurnLimits
from kvpool.placement.key_groups import TAGS
from tests.sim.simulation.plan import Plan
from tests.support import embedded_directory

Constants = Sequence[tuple[Any, str, Any]]

# A million blocks spread over thousands of buckets; here are a few hundred.
ALWAYS: Constants = (
    (embedded_directory, "_BUCKETS_A_TAG", 1),
    (embedded_directory, "_BUCKETS", TAGS),
)
# No waits of minutes in a world that lives for one.
_DISKS: Constants = (
    (ssd_write, "WRITE_S", 1.0),
    (ssd_index, "FORGET_S", 1.0),
    (ssd_read, "SCRUB_S", 1.0),
    (ssd_write, "RETRY_S", (0.1, 1.0)),
    (ssd_tier, "TIDY_EVERY_S", 0.2),
    (ssd_demote, "CLOSED_S", 0.2),
)
# As few blocks at a time as there are few of them here, so that batches have several.
_SMALL_BATCHES: Constants = (
    (plan, "SLICE_BYTES", 256),
    (plan, "TOGETHER_BYTES", 1024),
    (choices, "SLICE_BYTES", 256),
    (locate, "LOOKUP_KEYS", 3),
    (prefix_stream_rules, "WINDOW_KEYS", 3),
    (prefix_stream, "FETCHES_MAX", 2),
    (replication, "OFFER_KEYS", 4),
    (replication, "WALK", 16),
    (ssd_restore, "SCAN_ENTRIES", 5),
    (ssd_demote, "BATCH_BLOCKS", 3),
    (ssd_demote, "LOOK_BLOCKS", 8),
)


def _low(limits: Mapping[str, int]) -> Constants:
    """See `plan.LIMITS`."""
    of: dict[str, tuple[Any, str]] = {
        "loads": (transfers, "LOADS_MAX"),
        "waiting": (transfers, "WAITING_MAX"),
        "order_bytes": (plan, "ORDER_BYTES"),
        "stream_leases": (prefix_stream, "KEPT_MAX"),
        "stream_questions": (prefix_stream, "QUESTIONS_PER_PEER_MAX"),
        "rounds": (fetcher, "ROUNDS_MAX"),
        "ssd_writes": (ssd_demote, "WRITES_MAX"),
        "ssd_queue": (ssd_demote, "QUEUE_MAX"),
        "wanted": (replication, "WANTED_MAX"),
    }
    found: list[tuple[Any, str, Any]] = [
        (*of[name], most) for name, most in limits.items() if name in of
    ]
    found.append((composition, "PULLS", pull_limits(limits)))
    found.append((transfers, "COPIES", copy_limits(limits)))
    return found


def pull_limits(limits: Mapping[str, int]) -> TurnLimits:
    return _turns(limits, "pulls", PULLS)


def copy_limits(limits: Mapping[str, int]) -> TurnLimits:
    return _turns(limits, "copies", COPIES)


def question_limits(limits: Mapping[str, int]) -> tuple[TurnLimits, TurnLimits]:
    """Of quick ones, and of those that wait at the peer."""
    return _turns(limits, "questions", QUESTIONS), _turns(limits, "waits", WAITS)


def _turns(limits: Mapping[str, int], name: str, usual: TurnLimits) -> TurnLimits:
    together = limits.get(name, usual.together)
    return TurnLimits(together, min(together, limits.get(f"{name}_each", usual.each)))


def transfer_threads(limits: Mapping[str, int]) -> int:
    """As many as control can have use of, or few more than one source may keep."""
    questions, waits = question_limits(limits)
    kinds = [
        pull_limits(limits),
        copy_limits(limits),
        questions,
        waits,
        waits,
    ]  # the last: operators'
    enough = sum(kind.together for kind in kinds)
    if "threads_beyond" not in limits:
        return enough
    return min(enough, sum(kind.each for kind in kinds) + limits["threads_beyond"])


def constants(plan: Plan) -> Constants:
    constants = [*(_SMALL_BATCHES if plan.small_batches else ()), *_low(plan.limits)]
    if plan.disks is not None:
        page = plan.disks.page
        constants += [*_DISKS, (ssd_books, "PAGE", page), (ssd_restore, "PAGE", page)]
    return constants


@contextlib.contextmanager
def scaled(constants: Constants) -> Iterator[None]:
    """Sizes as they fit a world of tiny nodes, for as long as it lives."""
    before = [(module, name, getattr(module, name)) for module, name, _ in constants]
    for module, name, value in constants:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
