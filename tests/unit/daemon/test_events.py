"""Features observe a daemon, and no fault of theirs is anybody else's."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.daemon.core.events import Came, Events, Gone, Matched, Named
from kvpool.telemetry.misses import Reason
from kvpool.types import PartSpec
from tests.unit.daemon.conftest import Pool

NAMESPACE: Any = object()


class Feature:
    """Keeps what it observes; `fails` makes an event of this kind a fault."""

    def __init__(self, fails: type | None = None) -> None:
        self.seen: list[Any] = []
        self.fails = fails

    def __call__(self, event: Any) -> None:
        if type(event) is self.fails:
            raise RuntimeError("a bug")
        self.seen.append(event)


def subscribed(events: Events, name: str, fails: type | None = None) -> Feature:
    feature = Feature(fails)
    events.subscribe(name, dict.fromkeys((Named, Matched, Came, Gone), feature))
    return feature


def test_a_fault_ends_the_subscription_of_its_feature_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = Events()
    first, faulty, last = (
        subscribed(events, name, fails)
        for name, fails in (("first", None), ("faulty", Matched), ("last", None))
    )
    emitted = [
        Named(NAMESPACE, b""),
        Matched(NAMESPACE, 2, 1),
        Named(NAMESPACE, b""),
        Matched(NAMESPACE, 3, 3),
    ]
    for event in emitted:
        events.emit(event)
    assert first.seen == last.seen == emitted
    assert faulty.seen == emitted[:1], "its other events neither: its state may be half a change"
    assert events.ended == {"faulty": 1}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "faulty" in record.getMessage()
    assert record.exc_info is not None


def each(name: str) -> Callable[[Feature], list[Any]]:
    return lambda feature: [event for event in feature.seen if type(event).__name__ == name]


def test_one_event_tells_of_all_blocks_of_a_call(make_pool: type[Pool]) -> None:
    pool = make_pool(slabs=2)
    feature = subscribed(pool.node.events, "feature")
    came, gone = each("Came"), each("Gone")
    pool.put(range(8))
    pool.node.settle()
    assert [len(event.blocks) for event in came(feature)] == [8]
    pool.put([20, 21, 22])
    (evicted,) = gone(feature)
    assert (len(evicted.keys), evicted.reason, evicted.evicted) == (3, Reason.FULL, True)
    assert evicted.tier.name == "dram"
    pool.node.removal.remove(pool.namespace, [pool.keys([20]), pool.keys([21])])
    removed = gone(feature)[-1]
    assert (len(removed.keys), removed.reason, removed.evicted) == (2, Reason.REMOVED, False)


def test_rules_go_on_after_a_fault_in_the_middle_of_an_eviction(make_pool: type[Pool]) -> None:
    pool = make_pool(slabs=2, parts=(PartSpec(1024),))
    subscribed(pool.node.events, "faulty", Gone)
    pool.put(range(8))
    for first in range(100, 180, 8):
        assert pool.put(range(first, first + 8)) == 8
        assert pool.here(range(first, first + 8)) == list(range(first, first + 8))
    assert pool.node.events.ended == {"faulty": 1}
    assert len(pool.namespace.tables[0].blocks) == 8
