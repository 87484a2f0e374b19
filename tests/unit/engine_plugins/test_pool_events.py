"""The pool in an engine's KV events: what a thread watches, and which events come of it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

from kvpool.client import Presence
from kvpool.engine_plugins.vllm.pool_events import (
    EVENT_BLOCKS_MAX,
    Described,
    PoolEvents,
    Removed,
    StoredRun,
    runs,
)
from kvpool.engine_plugins.vllm.pool_watch import (
    AWAY_S,
    FRESH_S,
    HELD_BLOCKS,
    REFUSED_S,
    Change,
    PoolWatch,
)
from kvpool.errors import StaleEpoch
from kvpool.types import NamespaceRecord

RECORD = NamespaceRecord.simple("m", block_bytes=64, block_tokens=2)
OTHER = NamespaceRecord.simple("n", block_bytes=64, block_tokens=2)
NOWHERE, PEER, DISK, MEMORY = Presence


class Pool:
    """A daemon's answers. where: of a key and a part."""

    def __init__(self) -> None:
        self.where: dict[tuple[bytes, int], Presence] = {}
        self.available = True
        self.error: StaleEpoch | None = None
        self.opened: list[tuple[NamespaceRecord, int]] = []
        self.asked: list[int] = []

    def open(self, record: NamespaceRecord, *, generation: int) -> str:
        self.opened.append((record, generation))
        return "namespace"

    def present(self, ns: str, keys: list[bytes], *, part: int, wait_s: float) -> Any:
        assert wait_s == 0
        self.asked.append(len(keys))
        if self.error is not None:
            raise self.error
        found = [self.where.get((key, part), NOWHERE) if self.available else 0 for key in keys]
        return np.array(found, np.uint8)

    def close(self) -> None:
        pass


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(pool: Pool, clock: Clock, **settings: Any) -> PoolWatch[str]:
    found = PoolWatch[str](pool, clock=clock, **settings)  # type: ignore[arg-type]
    found.enter(RECORD, 3)
    return found


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def know(one: PoolWatch[str], *numbers: int, parts: tuple[int, ...] = (0,)) -> None:
    for number in numbers:
        one.know(number, key(number), parts, lambda number=number: f"b{number}")


def turns(
    one: PoolWatch[str], clock: Clock, seconds: float
) -> list[tuple[str, Presence, Presence]]:
    """What has changed after so many seconds of turns."""
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        one.turn()
    return [(change.label, change.before, change.now) for change in one.take()]


def test_blocks_that_come_and_go() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1, 2, 3)
    assert turns(one, clock, 0.1) == []
    pool.where = {(key(1), 0): MEMORY, (key(2), 0): DISK, (key(3), 0): PEER}
    assert turns(one, clock, 0.1) == [("b1", NOWHERE, MEMORY), ("b2", NOWHERE, DISK)]
    assert not one.changed
    del pool.where[key(1), 0]
    pool.where[key(2), 0] = MEMORY
    assert sorted(turns(one, clock, 6)) == [("b1", MEMORY, NOWHERE), ("b2", DISK, MEMORY)]
    assert pool.opened == [(RECORD, 3)]


def test_fresh_blocks_are_asked_for_at_every_turn() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock, round_s=1000.0)
    know(one, *range(50))
    turns(one, clock, FRESH_S - 0.2)
    assert min(pool.asked) == 50
    turns(one, clock, 1)
    pool.asked.clear()
    turns(one, clock, 5)
    assert max(pool.asked) == 1


def test_all_parts_are_needed() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1, parts=(0, 2))
    pool.where = {(key(1), 0): MEMORY, (key(1), 1): MEMORY}
    assert turns(one, clock, 1) == []
    pool.where[key(1), 2] = DISK
    assert turns(one, clock, 1) == [("b1", NOWHERE, DISK)]


def test_what_was_undone_meanwhile_is_not_told() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1)
    pool.where = {(key(1), 0): MEMORY}
    one.turn()
    assert one.changed
    pool.where.clear()
    assert turns(one, clock, 6) == []


def test_of_too_many_the_first_are_given_up() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock, most=2)
    pool.where = {(key(number), 0): MEMORY for number in range(9)}
    know(one, 1, 2)
    assert len(turns(one, clock, 1)) == 2
    know(one, 1)
    know(one, 3)
    assert turns(one, clock, 1) == [("b2", MEMORY, NOWHERE), ("b3", NOWHERE, MEMORY)]


def test_many_changes_are_taken_a_few_at_a_time() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    pool.where = {(key(number), 0): MEMORY for number in range(9)}
    know(one, *range(9))
    one.turn()
    assert [len(one.take(4)) for _ in range(4)] == [4, 4, 1, 0]
    one.enter(OTHER)
    assert one.changed
    assert [len(one.take(4)) for _ in range(4)] == [4, 4, 1, 0]
    assert not one.changed


def test_another_namespace_begins_anew() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1)
    pool.where = {(key(1), 0): MEMORY}
    turns(one, clock, 1)
    one.enter(OTHER, 5)
    assert turns(one, clock, 6) == [("b1", MEMORY, NOWHERE)]
    know(one, 1)
    assert turns(one, clock, 1) == [("b1", NOWHERE, MEMORY)]
    assert pool.opened[-1] == (OTHER, 5)


def test_an_engine_that_leaves_and_comes_back() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1)
    pool.where = {(key(1), 0): MEMORY}
    turns(one, clock, 1)
    one.leave()
    assert turns(one, clock, 1) == [("b1", MEMORY, NOWHERE)]
    one.enter(RECORD)
    assert turns(one, clock, 1) == [("b1", NOWHERE, MEMORY)]


def test_readers_that_have_forgotten_are_told_again() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1, 2)
    pool.where = {(key(1), 0): MEMORY}
    turns(one, clock, 1)
    one.forget_told()
    assert turns(one, clock, 1) == [("b1", NOWHERE, MEMORY)]


def test_a_daemon_that_is_away() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1)
    pool.where = {(key(1), 0): MEMORY}
    turns(one, clock, 1)
    pool.available = False
    assert turns(one, clock, 1) == []  # it may be busy
    assert turns(one, clock, AWAY_S + REFUSED_S) == [("b1", MEMORY, NOWHERE)]
    pool.available = True
    assert turns(one, clock, 6) == [("b1", NOWHERE, MEMORY)]


def test_a_refusal_is_logged_once(caplog: Any) -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    know(one, 1)
    pool.error = StaleEpoch("the epoch has ended")
    turns(one, clock, 10)
    assert [record.message for record in caplog.records] == [
        "the pool's blocks are missing in this engine's KV events: the epoch has ended"
    ]
    assert len(pool.asked) <= 11


class Name:
    """Can be referred to weakly."""


def test_no_more_is_kept_while_the_daemon_is_away() -> None:
    pool, clock = Pool(), Clock()
    pool.available = False
    one = watch(pool, clock, most=8)
    names: weakref.WeakSet[Name] = weakref.WeakSet()
    for turn in range(50):
        for at in range(20):
            name = Name()
            names.add(name)
            one.know(name, key(turn * 20 + at), (0,), lambda: "b")
        del name
        clock.now += 0.1
        one.turn()
    gc.collect()
    assert len(names) == 8


def lines(call: Callable[[], object]) -> int:
    """How many lines of Python a call takes: its work, on however slow a machine."""
    counted = 0

    def trace(_: FrameType, what: str, __: Any) -> Any:
        nonlocal counted
        counted += what == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counted


def test_the_scheduler_waits_for_a_few_blocks_only() -> None:
    """Whatever changes all of them: the thread looks at them, a few at a time."""
    count = 20 * HELD_BLOCKS
    pool, clock = Pool(), Clock()
    one = watch(pool, clock, round_s=0.1)
    pool.where = {(key(number), 0): MEMORY for number in range(count)}
    know(one, *range(count))

    def told() -> list[tuple[Presence, Presence]]:
        found = []
        for _ in range(count // HELD_BLOCKS):
            clock.now += 0.1
            one.turn()
            found += [(change.before, change.now) for change in one.take()]
        assert not one.changed
        return found

    assert told() == [(NOWHERE, MEMORY)] * count
    most = 20 * HELD_BLOCKS
    assert lines(one.forget_told) < 50
    assert lines(lambda: one.take(1)) < most
    assert told() == [(NOWHERE, MEMORY)] * (count - 1)
    assert lines(one.leave) < 50
    assert lines(lambda: one.take(1)) < most
    assert told() == [(MEMORY, NOWHERE)] * (count - 1)
    one.enter(RECORD)
    assert told() == [(NOWHERE, MEMORY)] * count
    assert lines(lambda: one.enter(OTHER)) < 100
    assert lines(lambda: one.take(1)) < most
    assert told() == [(MEMORY, NOWHERE)] * (count - 1)


def test_what_is_forgotten_is_not_told_to_be_gone() -> None:
    pool, clock = Pool(), Clock()
    one = watch(pool, clock)
    pool.where = {(key(number), 0): MEMORY for number in range(4)}
    know(one, *range(4))
    assert len(turns(one, clock, 1)) == 4
    one.enter(OTHER)
    know(one, 1)  # a block of that name was in the former namespace
    one.forget_told()
    assert turns(one, clock, 1) == [("b1", NOWHERE, MEMORY)]
    one.enter(RECORD)
    know(one, 1)
    assert turns(one, clock, 0.1) == [("b1", MEMORY, NOWHERE), ("b1", NOWHERE, MEMORY)]


# --- events


def block(number: int, parent: int | None, lora: str | None = None) -> Described:
    tokens = np.array([number, number], np.uint32).tobytes()
    return Described(key(number), None if parent is None else key(parent), tokens, None, lora)


def test_runs() -> None:
    changes = [
        Change(block(1, None), NOWHERE, MEMORY),
        Change(block(2, 1), NOWHERE, MEMORY),
        Change(block(3, 2), NOWHERE, DISK),
        Change(block(5, 4), NOWHERE, DISK),
        Change(block(6, 5, "l"), NOWHERE, DISK),
        Change(block(8, 7), MEMORY, DISK),
        Change(block(9, 8), MEMORY, NOWHERE),
        Change(block(10, 9), DISK, NOWHERE),
    ]
    found = runs(changes)
    assert found[:2] == [Removed("CPU", [key(8), key(9)]), Removed("STORAGE", [key(9), key(10)])]
    stored = [each for each in found[2:] if isinstance(each, StoredRun)]
    assert [(run.medium, [block.name for block in run.blocks]) for run in stored] == [
        ("CPU", [key(1), key(2)]),
        ("STORAGE", [key(1), key(2), key(3)]),
        ("STORAGE", [key(5)]),
        ("STORAGE", [key(6)]),
    ]
    assert stored[0].tokens == [1, 1, 2, 2]


def test_a_run_ends_at_some_length() -> None:
    many = [Change(block(at, at - 1), NOWHERE, MEMORY) for at in range(1, EVENT_BLOCKS_MAX + 2)]
    lengths = [len(run.blocks) for run in runs(many) if isinstance(run, StoredRun)]
    assert lengths == [EVENT_BLOCKS_MAX, 1] * 2


def test_blocks_are_described_as_the_engine_has_them() -> None:
    pool, clock = Pool(), Clock()
    one: PoolWatch[Described] = PoolWatch(pool, clock=clock)  # type: ignore[arg-type]
    one.enter(RECORD)
    asked: list[tuple[int, int]] = []

    def extra_of(_: Any, begin: int, end: int) -> tuple[str] | None:
        asked.append((begin, end))
        return ("salt",) if begin == 0 else None

    events = PoolEvents(one, 2, extra_of)
    names = [bytes([number]) * 32 for number in range(3)]
    request = SimpleNamespace(
        block_hashes=names,
        all_token_ids=[7, 8, 9, 10, 70_000, 12, 13],
        lora_request=SimpleNamespace(adapter_id=4, name="ad"),
    )
    events.know(request, [key(1)], 0)  # no parts are known yet
    events.use_parts([0])
    events.know(request, [key(1), key(2)], 0)
    events.know(request, [key(2), key(3)], 1)
    pool.where = {(key(number), 0): MEMORY for number in (1, 2, 3)}
    one.turn()
    own = object()
    run, below = events.take(own)
    assert isinstance(run, StoredRun)
    assert isinstance(below, StoredRun)
    assert (run.medium, below.medium, run.blocks) == ("CPU", "STORAGE", below.blocks)
    assert [each.name for each in run.blocks] == names
    assert [each.parent for each in run.blocks] == [None, *names[:2]]
    assert run.tokens == [7, 8, 9, 10, 70_000, 12]
    assert [each.extra for each in run.blocks] == [("salt",), None, None]
    assert {(each.lora_id, each.lora_name) for each in run.blocks} == {(4, "ad")}
    assert asked == [(0, 2), (2, 4), (4, 6)]
    assert events.take(own) == []
    assert (
        len(events.take(object())) == 2
    )  # the engine's cache was cleared, and with it what readers know
