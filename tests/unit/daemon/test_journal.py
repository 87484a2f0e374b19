"""The last events of a node."""

import asyncio
import re

from kvpool.daemon.ops.event_log import (
    AUDIT,
    EVENTS_MAX,
    KINDS,
    LOGIN_FAILED,
    EventLog,
    membership_news,
)
from kvpool.placement.records import NodeRecord, NodeState, View, changed_nodes
from kvpool.types import EngineRecord
from tests.contract.suites.membership import entry


def test_events_are_numbered_and_the_last_ones_kept():
    journal = EventLog("a", lambda: 12.5)
    for number in range(EVENTS_MAX + 10):
        journal.note("tick", of=number)
    assert (journal.first, journal.last) == (11, EVENTS_MAX + 10)
    assert [e.number for e in journal.after(0, 3)] == [11, 12, 13]
    assert [e.number for e in journal.after(EVENTS_MAX + 8, 100)] == [
        EVENTS_MAX + 9,
        EVENTS_MAX + 10,
    ]
    assert journal.after(EVENTS_MAX + 10, 100) == []
    (event,) = journal.after(EVENTS_MAX + 9, 100)
    assert (event.at_s, event.node, event.kind) == (12.5, "a", "tick")
    assert event.details == {"of": EVENTS_MAX + 9}


def test_who_waits_is_woken_by_the_next_one():
    async def story():
        journal = EventLog("a", lambda: 0.0)
        waits = [asyncio.create_task(journal.wait(0, 30.0)) for _ in range(3)]
        await asyncio.sleep(0)
        journal.note("tick")
        await asyncio.gather(*waits)
        await journal.wait(0, 30.0)  # there is one already
        await journal.wait(1, 0.0)
        await journal.wait(1, 0.001)  # nothing comes: the time is over

    asyncio.run(story())


def record(name, incarnation, state=NodeState.SERVING, *engines):
    records = tuple(EngineRecord(url) for url in engines)
    return NodeRecord(name, incarnation * 16, state, engines=records)


def test_news_of_the_members():
    before = View(
        {"a": record("a", "1"), "b": record("b", "2"), "c": record("c", "3")},
        drains=frozenset({"c"}),
    )
    after = View(
        {
            "a": record("a", "4"),  # again, in another life
            "b": record("b", "2", NodeState.DRAINING, "http://b:1"),
            "d": record("d", "5"),
        },
        drains=frozenset({"b"}),
    )
    nodes = changed_nodes(before, after)
    told = sorted((kind, details["of"]) for kind, details in membership_news(before, after, nodes))
    assert told == [
        ("drain taken back", "c"),
        ("drain wanted", "b"),
        ("engine announced", "b"),
        ("node joined", "a"),
        ("node joined", "d"),
        ("node left", "a"),
        ("node left", "c"),
        ("node state", "b"),
    ]
    assert list(membership_news(after, after, changed_nodes(after, after))) == []


def test_a_namespace_that_was_deleted_is_news():
    known = {(one.tenant, one.digest): one for one in (entry("00"), entry("11"))}
    before, after = View(namespaces=known), View(namespaces={("t", "11"): known["t", "11"]})
    told = list(membership_news(before, after, []))
    assert told == [("namespace deleted", {"tenant": "t", "namespace": "00"})]
    assert list(membership_news(after, before, [])) == [], "who opens one is not"


def test_all_kinds_are_known(repo_root):
    """`kvpool events --kind` refuses others."""
    written = set()
    for path in sorted((repo_root / "kvpool" / "daemon").rglob("*.py")):
        text = path.read_text()
        written |= set(re.findall(r"(?:journal|events)\.note\(\s*\"([^\"]+)\"", text))
        written |= set(re.findall(r"^ +yield \"([^\"]+)\", \{", text, re.MULTILINE))
    assert len(written) > 8
    assert written <= set(KINDS)
    assert set(KINDS) - written <= {AUDIT, LOGIN_FAILED}
