"""The rules of membership on etcd that need no etcd: the mirror, the lease, what is worth a write."""

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("grpc")

from kvpool.errors import Unavailable
from kvpool.placement.etcd import rpc_pb2 as rpc
from kvpool.placement.etcd.settings import CALL_S, EtcdSettings
from kvpool.placement.membership.base import Standing
from kvpool.placement.membership.etcd import EtcdMembership, suspended_s
from kvpool.placement.membership.etcd_lease import LeaseWatch, keep_lease
from kvpool.placement.membership.etcd_mirror import Mirror, Paths
from kvpool.placement.membership.etcd_rules import (
    PROGRESS_S,
    SMALL_USE_S,
    USE_S,
    WRITES_S,
    hold_s,
    spread_s,
)
from kvpool.placement.records import (
    LinkRecord,
    NamespaceClock,
    NamespaceSettings,
    NodeState,
    TierRecord,
    TransportRecord,
    changed_nodes,
    encode_record,
)
from kvpool.telemetry.cluster_stats import DrainProgress
from tests.contract.suites.membership import entry, record
from tests.support.virtual_time import virtually

PATHS = Paths("c")
NAMES = "ab"


def kv(key: bytes, value: bytes, revision: int, lease: int = 0) -> Any:
    return rpc.KeyValue(key=key, value=value, mod_revision=revision, lease=lease)


def put_event(key: bytes, value: bytes, revision: int) -> Any:
    return rpc.Event(type=rpc.Event.PUT, kv=kv(key, value, revision))


def delete_event(key: bytes, revision: int) -> Any:
    return rpc.Event(type=rpc.Event.DELETE, kv=rpc.KeyValue(key=key, mod_revision=revision))


# ---- the mirror -----------------------------------------------------------------------------------------


class Store:
    """A plain etcd: a dict, a revision, a history."""

    def __init__(self) -> None:
        self.revision = 1
        self.keys: dict[bytes, Any] = {}
        self.history: list[Any] = []

    def put(self, key: bytes, value: bytes) -> int:
        self.revision += 1
        self.keys[key] = kv(key, value, self.revision)
        self.history.append(put_event(key, value, self.revision))
        return self.revision

    def delete(self, key: bytes) -> int | None:
        if self.keys.pop(key, None) is None:
            return None
        self.revision += 1
        self.history.append(delete_event(key, self.revision))
        return self.revision


commands = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "delete", "drain", "undrain", "epoch", "own join", "own join", "own delete",
             "late answer", "late answer", "deliver", "deliver", "read all"]
        ),
        st.sampled_from(NAMES),
        st.integers(1, 5),
    ),
    min_size=30,
    max_size=60,
)  # fmt: skip


class Reader:
    """A mirror of a store whose watch lags, beside what must be known by then: the newest of each key
    that was delivered or that our own answers told.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.mirror = Mirror(PATHS)
        self.mirror.reset([], 1, 0.0)
        self.seen = 0
        self.newest: dict[bytes, tuple[int, bytes | None]] = {}
        self.delivered = 1
        self.unanswered: list[tuple[int, bytes, bytes | None]] = []

    def deliver(self, count: int) -> None:
        events = self.store.history[self.seen : self.seen + count]
        if events:
            self.seen += len(events)
            self.delivered = events[-1].kv.mod_revision
            for event in events:
                put = event.type == rpc.Event.PUT
                self._learn(event.kv.mod_revision, event.kv.key, event.kv.value if put else None)
            self.mirror.changed(events, self.delivered, 0.0)

    def answer(self) -> None:
        """The answer to our oldest write arrives."""
        if self.unanswered:
            revision, key, value = self.unanswered.pop(0)
            if revision > self.delivered:
                self._learn(revision, key, value)
            puts, deletes = ({}, [key]) if value is None else ({key: value}, [])
            self.mirror.wrote(revision, puts, deletes)

    def read_all(self) -> None:
        self.mirror.reset(self.store.keys.values(), self.store.revision, 0.0)
        self.seen, self.delivered = len(self.store.history), self.store.revision
        self.newest = {key: (kv.mod_revision, kv.value) for key, kv in self.store.keys.items()}

    def _learn(self, revision: int, key: bytes, value: bytes | None) -> None:
        if revision >= self.newest.get(key, (0, None))[0]:
            self.newest[key] = (revision, value)

    def check(self) -> None:
        view = self.mirror.view
        known = {key: value for key, (_, value) in self.newest.items() if value is not None}
        assert {PATHS.node(n): encode_record(r) for n, r in view.nodes.items()} == {
            key: value for key, value in known.items() if b"/nodes/" in key
        }
        assert {PATHS.drain(n) for n in view.drains} == {key for key in known if b"/drains/" in key}
        assert {PATHS.namespace("t", "00"): encode_record(e) for e in view.namespaces.values()} == {
            key: value for key, value in known.items() if b"/namespaces/" in key
        }


@settings(max_examples=300)
@given(commands)
def test_a_mirror_knows_the_newest_of_all_it_was_told(steps: list[tuple[str, str, int]]) -> None:
    """Changes arrive late and in bunches; answers to our own writes before the watch has them, or after."""
    store = Store()
    reader = Reader(store)
    epoch = 0
    for command, name, count in steps:
        before = reader.mirror.view
        match command:
            case "join" | "own join":
                value = encode_record(record(name))
                revision = store.put(PATHS.node(name), value)
                if command == "own join":
                    reader.unanswered.append((revision, PATHS.node(name), value))
            case "delete":
                store.delete(PATHS.node(name))
            case "drain":
                store.put(PATHS.drain(name), b"")
            case "undrain" | "own delete":
                deleted = store.delete(PATHS.drain(name))
                if command == "own delete" and deleted is not None:
                    reader.unanswered.append((deleted, PATHS.drain(name), None))
            case "epoch":
                epoch += 1
                store.put(PATHS.namespace("t", "00"), encode_record(entry("00", epoch=epoch)))
            case "deliver":
                reader.deliver(count)
            case "late answer":
                reader.answer()
            case _:
                reader.read_all()
        reader.check()
        after = reader.mirror.view
        assert after.revision == before.revision + (after is not before)
    reader.deliver(len(store.history))
    reader.check()
    known = {key: value for key, (_, value) in reader.newest.items() if value is not None}
    assert known == {key: kv.value for key, kv in store.keys.items()}


def with_nodes(*names: str) -> Mirror:
    mirror = Mirror(PATHS)
    mirror.reset([kv(PATHS.node(n), encode_record(record(n)), 5) for n in names], 5, 0.0)
    return mirror


def test_a_lease_that_ends_while_connected_counts_at_once() -> None:
    mirror = with_nodes("a", "b")
    assert mirror.changed([delete_event(PATHS.node("a"), 6)], 6, 0.0)
    assert set(mirror.view.nodes) == {"b"}
    assert mirror.next_tick is None


@pytest.mark.parametrize("how", ["events", "read"])
def test_after_an_outage_the_missing_have_time_to_come_back(how: str) -> None:
    mirror = with_nodes("a", "b", "c", "d")
    mirror.forgive(10.0)
    good_bye = msgspec.structs.replace(record("d"), state=NodeState.GONE)
    if how == "events":
        events = [delete_event(PATHS.node(n), 6) for n in ("a", "b", "c")]
        events.append(put_event(PATHS.node("d"), encode_record(good_bye), 6))
        mirror.changed(events, 6, 3.0)
    else:
        mirror.reset([kv(PATHS.node("d"), encode_record(good_bye), 6)], 6, 3.0)
    assert set(mirror.view.nodes) == {"a", "b", "c"}, "who says good-bye is not waited for"
    assert mirror.next_tick == 10.0
    back = record("b")
    mirror.changed([put_event(PATHS.node("b"), encode_record(back), 7)], 7, 5.0)
    assert not mirror.tick(9.9)
    assert mirror.tick(10.0)
    assert mirror.view.nodes == {"b": back}
    assert mirror.next_tick is None
    mirror.changed([delete_event(PATHS.node("b"), 8)], 8, 10.0)
    assert mirror.view.nodes == {}, "and from then on, leases count again"


def test_a_view_shares_what_has_not_changed_with_the_one_before() -> None:
    """Whoever compares two views by identity finds what has changed, and no more."""
    mirror = with_nodes("a", "b")
    mirror.changed([put_event(PATHS.namespace("t", "00"), encode_record(entry("00")), 6)], 6, 0.0)
    before = mirror.view
    assert mirror.view is before
    again = before.nodes["a"]
    assert not mirror.changed([put_event(PATHS.node("a"), encode_record(again), 7)], 7, 0.0)
    assert mirror.view is before, "a record that is written as it was is no change"
    full = msgspec.structs.replace(before.nodes["b"], tiers=(TierRecord("dram", 9, 9),))
    assert mirror.changed([put_event(PATHS.node("b"), encode_record(full), 8)], 8, 0.0)
    after = mirror.view
    assert (after.namespaces, after.drains) == (before.namespaces, before.drains)
    assert after.namespaces is before.namespaces
    assert after.revision == before.revision + 1
    assert changed_nodes(before, after) == [(before.nodes["b"], full)]
    assert changed_nodes(before, after)[0].before is before.nodes["b"]
    everything = [
        kv(PATHS.node("a"), encode_record(again), 7),
        kv(PATHS.node("b"), encode_record(full), 8),
        kv(PATHS.namespace("t", "00"), encode_record(entry("00")), 6),
    ]
    assert not mirror.reset(everything, 9, 0.0)
    assert mirror.view is after, "nor is one that is read again"


def test_what_engines_open_namespaces_by_is_urgent_and_how_full_nodes_are_is_not() -> None:
    mirror = Mirror(PATHS)
    mirror.reset([], 1, 0.0)
    assert mirror.view is not None
    assert mirror.changed([put_event(PATHS.node("a"), encode_record(record("a")), 2)], 2, 0.0)
    assert not mirror.urgent
    changed = put_event(PATHS.namespace("t", "00"), encode_record(entry("00", epoch=1)), 3)
    assert mirror.changed([changed], 3, 0.0)
    assert mirror.urgent
    assert mirror.view is not None
    assert not mirror.urgent, "it was told"


def test_epochs_never_go_back() -> None:
    mirror = Mirror(PATHS)
    key = PATHS.namespace("t", "00")
    newest = entry("00", epoch=7, fence=7)
    mirror.reset([kv(key, encode_record(newest), 9)], 9, 0.0)
    twice = NamespaceSettings(replicas=2)
    mirror.reset([kv(key, encode_record(entry("00", epoch=3, fence=2, settings=twice)), 4)], 4, 0.0)
    assert mirror.view.namespaces[("t", "00")] == msgspec.structs.replace(newest, settings=twice)
    assert [e.epoch for e in mirror.unsaved] == [7]
    mirror.reset([], 1, 0.0)
    assert mirror.view.namespaces[("t", "00")].epoch == 7
    assert [e.epoch for e in mirror.unsaved] == [7]
    mirror.changed([put_event(key, encode_record(newest), 2)], 2, 0.0)
    assert mirror.unsaved == []


def clock_event(revision: int, *values: int) -> Any:
    return put_event(PATHS.clock, encode_record(NamespaceClock(*values)), revision)


def with_namespaces(**epochs: int) -> Mirror:
    """Of tenant t, each in its epoch, at revision 9."""
    mirror = Mirror(PATHS)
    entries = [entry(name.removeprefix("n"), epoch=epoch) for name, epoch in epochs.items()]
    listed = [kv(PATHS.namespace("t", one.digest), encode_record(one), 9) for one in entries]
    mirror.reset(listed, 9, 0.0)
    return mirror


def digests(mirror: Mirror) -> list[str]:
    return sorted(digest for _, digest in mirror.view.namespaces)


@pytest.mark.parametrize("clock_first", [True, False])
def test_a_namespace_that_was_deleted_is_told_from_one_that_was_lost(clock_first: bool) -> None:
    mirror = with_namespaces(n00=3, n11=4)
    first, second = PATHS.namespace("t", "00"), PATHS.namespace("t", "11")
    # By hand, or with an etcd that has lost some of its data.
    assert not mirror.changed([delete_event(first, 10)], 10, 0.0)
    assert digests(mirror) == ["00", "11"]
    # One transaction, whose changes come in any order.
    events = [clock_event(11, 0, 5, 1), delete_event(second, 11)]
    assert mirror.changed(events if clock_first else events[::-1], 11, 0.0)
    assert digests(mirror) == ["00"]
    assert mirror.view.clock == NamespaceClock(0, 5, 1)
    assert [e.digest for e in mirror.unsaved] == ["00"]


def test_deleted_while_nobody_watched() -> None:
    mirror = with_namespaces(n00=3, n11=7, n22=1)
    listed = [
        kv(PATHS.namespace("t", "22"), encode_record(entry("22", epoch=1)), 9),
        kv(PATHS.clock, encode_record(NamespaceClock(40, 4, 1)), 20),
    ]
    mirror.reset(listed, 30, 0.0)
    assert digests(mirror) == ["11", "22"], (
        "the one in epoch 7 cannot have been deleted: it is lost"
    )
    assert [e.digest for e in mirror.unsaved] == ["11"]
    assert (mirror.clock_revision, mirror.clock_lost) == (20, False)


@pytest.mark.parametrize("restored", [None, NamespaceClock(10, 2, 0)])
def test_an_etcd_whose_clock_has_gone_back_has_deleted_nothing(
    restored: NamespaceClock | None,
) -> None:
    mirror = with_namespaces(n00=3)
    mirror.changed([clock_event(10, 50, 8, 2)], 10, 0.0)
    listed = [] if restored is None else [kv(PATHS.clock, encode_record(restored), 3)]
    mirror.reset(listed, 4, 0.0)
    assert digests(mirror) == ["00"]
    assert [e.digest for e in mirror.unsaved] == ["00"]
    assert mirror.view.clock == NamespaceClock(50, 8, 2), "it never goes back"
    assert mirror.clock_lost
    # Put back by another node, after the namespaces.
    changes = [
        put_event(PATHS.namespace("t", "00"), encode_record(entry("00", epoch=3)), 5),
        clock_event(6, 50, 8, 2),
    ]
    mirror.changed(changes, 6, 0.0)
    assert digests(mirror) == ["00"]
    assert (mirror.unsaved, mirror.clock_lost) == ([], False)


def test_deleted_and_registered_anew_between_two_looks() -> None:
    mirror = with_namespaces(n00=3)
    key = PATHS.namespace("t", "00")
    anew = entry("00", epoch=4, fence=4, generation=1)
    events = [
        clock_event(10, 0, 4, 1),
        delete_event(key, 10),
        put_event(key, encode_record(anew), 11),
    ]
    mirror.changed(events, 11, 0.0)
    assert mirror.view.namespaces["t", "00"] == anew
    # The same, from a list; and one that was restored in a former epoch stays as it was.
    mirror = with_namespaces(n00=3, n11=3)
    mirror.reset(
        [
            kv(key, encode_record(anew), 11),
            kv(PATHS.namespace("t", "11"), encode_record(entry("11", epoch=1)), 2),
            kv(PATHS.clock, encode_record(NamespaceClock(0, 4, 1)), 10),
        ],
        12,
        0.0,
    )
    assert mirror.view.namespaces["t", "00"] == anew
    assert mirror.view.namespaces["t", "11"].epoch == 3


def made(entry_: Any, at: int) -> Any:
    """It was created then, and not changed since."""
    key = PATHS.namespace(entry_.tenant, entry_.digest)
    return rpc.KeyValue(key=key, value=encode_record(entry_), mod_revision=at, create_revision=at)


def test_what_appears_below_the_clock_was_deleted_before_and_begins_anew() -> None:
    """An older kvpool, which does not know the clock, makes it again as it remembers it."""
    mirror = with_namespaces(n00=3)
    mirror.changed([clock_event(10, 0, 8, 2)], 10, 0.0)
    rightly, wrongly = entry("11", epoch=2), entry("22", epoch=2, generation=1)
    events = [rpc.Event(kv=made(rightly, 7)), rpc.Event(kv=made(wrongly, 12))]
    mirror.changed(events, 12, 0.0)
    assert mirror.view.namespaces["t", "11"] == rightly, "it was made before the clock moved"
    anew = entry("22", epoch=8, fence=8, generation=2)
    assert mirror.view.namespaces["t", "22"] == anew
    assert mirror.unsaved == [anew]
    mirror.changed([put_event(PATHS.namespace("t", "22"), encode_record(anew), 13)], 13, 0.0)
    assert mirror.unsaved == []
    # A node that starts then reads the same.
    fresh = Mirror(PATHS)
    clock = kv(PATHS.clock, encode_record(NamespaceClock(0, 8, 2)), 10)
    fresh.reset([made(rightly, 7), made(wrongly, 12), clock], 20, 0.0)
    assert fresh.view.namespaces["t", "11"] == rightly
    assert fresh.view.namespaces["t", "22"] == anew


def test_a_copy_of_etcd_brings_back_what_was_deleted_since() -> None:
    mirror = with_namespaces(n00=3)
    mirror.changed([clock_event(10, 50, 8, 2)], 10, 0.0)
    copy = [
        made(entry("00", epoch=3, used=40), 2),
        made(entry("11", epoch=1), 3),  # deleted since, and reset before that
        kv(PATHS.clock, encode_record(NamespaceClock(30, 1, 0)), 4),
    ]
    mirror.reset(copy, 5, 0.0)
    assert mirror.clock_lost
    assert mirror.view.namespaces["t", "00"].epoch == 3
    anew = mirror.view.namespaces["t", "11"]
    assert (anew.epoch, anew.fence, anew.generation) == (8, 8, 2)
    assert mirror.unsaved == [anew]


def test_when_a_namespace_was_used_never_goes_back_and_is_not_urgent() -> None:
    mirror = with_namespaces(n00=3)
    key = PATHS.namespace("t", "00")
    assert mirror.view is not None
    used = encode_record(entry("00", epoch=3, used=9))
    assert mirror.changed([put_event(key, used, 10)], 10, 0.0)
    assert not mirror.urgent
    assert mirror.view.namespaces["t", "00"].used == 9
    assert not mirror.incomplete
    assert not mirror.changed([put_event(key, encode_record(entry("00", epoch=3)), 11)], 11, 0.0)
    assert mirror.view.namespaces["t", "00"].used == 9
    assert mirror.incomplete
    assert [e.used for e in mirror.unsaved] == [9]
    mirror.changed([put_event(key, encode_record(entry("00", epoch=4)), 12)], 12, 0.0)
    assert mirror.urgent


def test_a_clock_that_cannot_be_read_is_left_out() -> None:
    mirror = with_namespaces(n00=3)
    for value in (b"{", encode_record(NamespaceClock(-1))):
        mirror.changed([put_event(PATHS.clock, value, 10)], 10, 0.0)
    assert mirror.view.clock == NamespaceClock()
    assert (mirror.undecodable, mirror.clock_revision) == (2, 0)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_no_key_and_no_value_does_harm(name: bytes, value: bytes) -> None:
    mirror = with_nodes("a")
    before = dict(mirror.view.nodes)
    for kind in (b"", b"nodes/", b"namespaces/", b"incarnations/", b"chores/", b"config", b"clock"):
        mirror.changed([put_event(PATHS.root + kind + name, value, 6)], 6, 0.0)
    assert dict(mirror.view.nodes) == before
    assert dict(mirror.view.namespaces) == {}


DIGEST = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "not in hex"},
        {"digest": "ABCDEF"},
        {"digest": "ab cd"},
        {"digest": ""},
        {"epoch": -1},
        {"epoch": 1 << 64},
        {"fence": -1},
        {"generation": 1 << 70},
    ],
)
def test_an_entry_of_no_namespace_is_left_out_and_counted(changes: dict[str, Any]) -> None:
    mirror = Mirror(PATHS)
    bad = msgspec.to_builtins(entry(DIGEST)) | changes
    good = entry(DIGEST[::-1])
    kvs = [
        kv(PATHS.namespace("t", bad["digest"]), json.dumps(bad).encode(), 6),
        kv(PATHS.namespace("t", good.digest), encode_record(good), 7),
    ]
    mirror.reset(kvs, 7, 0.0)
    assert dict(mirror.view.namespaces) == {("t", good.digest): good}
    assert mirror.undecodable == 1


def test_a_record_that_is_nested_without_end_is_left_out() -> None:
    mirror = with_nodes("a")
    deep = (
        b'{"node":"b","incarnation":"' + b"ab" * 8 + b'","later":' + b"[" * 99_999 + b"]" * 99_999
    )
    mirror.changed([put_event(PATHS.node("b"), deep + b"}", 6)], 6, 0.0)
    assert set(mirror.view.nodes) == {"a"}
    assert mirror.undecodable == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gone",
        "tcp://",
        "://a:1",
        "tcp://a",
        "tcp://a:99999",
        "tcp://a..b:1",
        f"tcp://{'a' * 64}:1",
        "tcp://[::1",
        "tcp://a:1/path",
        "tcp://a:1?source=10.0.0.1",
        "nixl://a..b:1",
    ],
)
def test_an_address_that_cannot_be_used_is_left_out_and_the_rest_of_the_record_is_not(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = record("b")
    good = TransportRecord("tcp://10.0.0.2:1", rail="r")
    other = TransportRecord("pigeon://whatever installed transports call an address")
    mirror = Mirror(PATHS)
    for used in (1, 2):
        wrong = msgspec.structs.replace(
            right,
            transports=(TransportRecord(url), good, other),
            tiers=(TierRecord("dram", 100, used),),
        )
        mirror.changed([put_event(PATHS.node("b"), encode_record(wrong), 5 + used)], 9, 0.0)
    seen = mirror.view.nodes["b"]
    assert seen == msgspec.structs.replace(wrong, transports=(good, other))
    assert seen.url == good.url
    assert mirror.undecodable == 2
    assert [line.getMessage().count(repr(url)) for line in caplog.records] == [1]

    alone = msgspec.structs.replace(right, transports=(TransportRecord(url),))
    mirror.changed([put_event(PATHS.node("b"), encode_record(alone), 10)], 10, 0.0)
    assert mirror.view.nodes["b"].url == ""


# ---- the lease ------------------------------------------------------------------------------------------

TTL = 6.0


def test_standing_over_a_life() -> None:
    lease = LeaseWatch(TTL, 0.0)
    assert lease.standing(0.0) is lease.standing(6.0) is Standing.MEMBER
    assert lease.standing(6.1) is Standing.UNSURE, "nobody has asked"
    lease.confirm(2.0)
    assert lease.standing(8.0) is Standing.MEMBER
    lease.fail(4.0)
    assert lease.standing(8.0) is Standing.MEMBER
    assert lease.standing(8.1) is Standing.AWAY
    assert lease.standing(10.0) is Standing.AWAY
    assert lease.standing(10.1) is Standing.UNSURE, "the failure is old: we were stopped"
    lease.fail(9.0)
    assert lease.standing(10.1) is Standing.AWAY
    lease.confirm(12.0)
    assert lease.standing(18.0) is Standing.MEMBER
    assert lease.standing(18.1) is Standing.UNSURE, "failures before a confirmation mean nothing"


@given(
    st.lists(st.tuples(st.floats(0.1, 2.0), st.booleans()), max_size=50),
    st.floats(TTL * 1.01, 1000.0),
)
def test_whoever_was_stopped_for_longer_than_a_lease_is_unsure(
    attempts: list[tuple[float, bool]], stopped_s: float
) -> None:
    """Whatever went before: at the first look after a stop, it is neither MEMBER nor AWAY."""
    now = 0.0
    lease = LeaseWatch(TTL, now)
    for seconds, answered in attempts:
        begun = now
        now += seconds
        (lease.confirm if answered else lease.fail)(begun)
        assert lease.standing(now) is not Standing.UNSURE, "and one that runs never is"
    assert lease.standing(now + stopped_s) is Standing.UNSURE
    lease.fail(now)  # the attempt that was under way, and has timed out meanwhile
    assert lease.standing(now + stopped_s) is Standing.UNSURE


# ---- writes ---------------------------------------------------------------------------------------------


def test_what_is_worth_a_write() -> None:
    old = record("a", tiers=(TierRecord("dram", 6400, 1000), TierRecord("ssd", 0, 0)))

    def used(dram: int) -> Any:
        tiers = (TierRecord("dram", 6400, dram), TierRecord("ssd", 0, 0))
        return msgspec.structs.replace(old, tiers=tiers)

    assert hold_s(old, used(1000)) == math.inf
    assert hold_s(old, msgspec.structs.replace(old, state=NodeState.DRAINING)) == 0.0
    assert hold_s(old, msgspec.structs.replace(old, tiers=old.tiers[:1])) == 0.0
    assert hold_s(old, used(1099)) == hold_s(old, used(901)) == SMALL_USE_S
    assert hold_s(old, used(1100)) == hold_s(old, used(900)) == USE_S

    def secondary(nbytes: int) -> Any:
        tiers = (TierRecord("dram", 6400, 1000, nbytes), TierRecord("ssd", 0, 0))
        return msgspec.structs.replace(old, tiers=tiers)

    assert hold_s(old, secondary(99)) == SMALL_USE_S
    assert hold_s(old, secondary(100)) == USE_S, "a node that pulls is no more urgent"

    links = (LinkRecord("rack", 0.001, 1e9, 32.0, 1 << 30),)
    assert hold_s(old, msgspec.structs.replace(old, links=links)) == USE_S
    assert hold_s(old, msgspec.structs.replace(used(1001), links=links)) == USE_S


def test_links_are_told_anew_when_they_are_others() -> None:
    """Bandwidth that goes up and down by a few percent is not told to all nodes of a cluster each time."""
    link = LinkRecord("rack", 0.001, 1e9, 32.0, 1 << 30)
    apart = msgspec.structs.replace(link, node="b", bytes_s=4e8)
    old = record("a", links=(link, apart))

    def hold(at: int = 0, **changes: Any) -> float:
        links = [link, apart]
        links[at] = msgspec.structs.replace(links[at], **changes)
        return hold_s(old, msgspec.structs.replace(old, links=tuple(links)))

    assert hold() == math.inf
    for little in (0.81, 0.97, 1.03, 1.24):
        assert hold(bytes_s=1e9 * little) == hold(1, bytes_s=4e8 * little) == SMALL_USE_S
        assert hold(latency_s=0.001 * little) == SMALL_USE_S
    for much in (0.79, 1.26):
        assert hold(bytes_s=1e9 * much) == hold(1, bytes_s=4e8 * much) == USE_S
    assert hold(latency_s=0.0021) == hold(latency_s=0.0004) == USE_S
    assert hold(age_s=64.0) == hold(measured_bytes=1 << 31) == SMALL_USE_S
    assert hold(1, node="c") == hold(distance="zone") == USE_S
    assert hold_s(old, msgspec.structs.replace(old, links=(link,))) == USE_S


def test_the_progress_of_a_drain_waits_a_moment_and_its_phases_do_not() -> None:
    copying = record("a", state=NodeState.DRAINING, drain=DrainProgress("copying", 1, 10))
    more = msgspec.structs.replace(copying, drain=DrainProgress("copying", 2, 10))
    waiting = msgspec.structs.replace(copying, drain=DrainProgress("waiting", 2, 10))
    assert hold_s(copying, more) == PROGRESS_S
    assert hold_s(more, waiting) == 0.0
    assert hold_s(waiting, msgspec.structs.replace(waiting, drain=None)) == 0.0


@given(st.integers(0, 3000), st.integers(0, 50))
def test_all_nodes_together_write_no_more_than_a_few_records_a_second(
    serving: int, draining: int
) -> None:
    plain, drains = record("a"), record("b", drain=DrainProgress())
    nodes = [plain] * serving + [drains] * draining
    assert spread_s(nodes, plain) * WRITES_S == pytest.approx(serving)
    assert spread_s(nodes, drains) * WRITES_S == pytest.approx(draining)


# ---- renewals and writes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("renews", "stall_s"),
    [(True, 0.0), (False, 0.0), (False, TTL / 3)],
    ids=["renews leases only", "away", "away, and the machine stalls once"],
)
def test_a_write_that_hangs_delays_no_renewal(renews: bool, stall_s: float) -> None:
    """Else a lease ends although etcd renews it, or a node cannot know whether etcd is away."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch = LeaseWatch(TTL, loop.time())
        renewed = 0

        async def renew(timeout_s: float) -> bool:
            nonlocal renewed
            renewed += 1
            if renewed == 1 or renews:
                return True
            await asyncio.sleep(timeout_s + (stall_s if renewed == 3 else 0))
            raise Unavailable("no answer")

        async def write() -> None:
            await asyncio.sleep(CALL_S)
            raise Unavailable("no answer")

        keeper = asyncio.create_task(keep_lease(watch, TTL, loop.time, renew, write))
        standings = set()
        while loop.time() < 10 * TTL:
            standings.add(watch.standing(loop.time()))
            await asyncio.sleep(0.1)
        right = {Standing.MEMBER} if renews else {Standing.MEMBER, Standing.AWAY}
        assert standings == right
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    virtually(main)


# ---- the machine was suspended ---------------------------------------------------------------------------


def test_time_asleep_counts_for_the_lease() -> None:
    """The monotonic clock stands still meanwhile, and etcd's does not."""
    awake, slept = 100.0, 7.0
    renewed = asyncio.Event()

    class Client:
        async def keep_alive(self, lease: int, timeout_s: float) -> bool:
            renewed.set()
            return True

    async def main() -> None:
        nonlocal slept
        membership = EtcdMembership(
            EtcdSettings.from_url("etcd://127.0.0.1:1"),
            "test",
            ttl_s=TTL,
            clock=lambda: awake,
            suspended=lambda: slept,
        )
        watch = LeaseWatch(TTL, awake + slept)
        member = SimpleNamespace(watch=watch, lease=1, written=None, wanted=None)
        membership._member = cast(Any, member)
        assert membership.standing(awake) is Standing.MEMBER
        slept += 60
        assert membership.standing(awake) is Standing.UNSURE, "peers are not served"
        membership._client = cast(Any, Client())
        keeper = asyncio.create_task(membership._keep(cast(Any, member)))
        await renewed.wait()
        await asyncio.sleep(0)
        assert membership.standing(awake) is Standing.MEMBER, "it was asked anew"
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    asyncio.run(main())


def test_the_kernel_says_how_long_that_was() -> None:
    assert suspended_s() >= -0.001  # two clocks, read one after the other
