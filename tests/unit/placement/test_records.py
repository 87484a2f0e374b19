"""Records on the wire: what was written is read, what is no record is refused, versions may differ."""

import hashlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.placement.records import (
    RECORD_BYTES_MAX,
    ClusterConfig,
    NamespaceEntry,
    NamespaceSettings,
    NodeRecord,
    NodeState,
    SettingsChange,
    TierRecord,
    TransportRecord,
    decode_record,
    encode_record,
    epoch_digest,
    new_incarnation,
    plain,
)
from kvpool.telemetry.cluster_stats import DrainProgress

text = st.text(max_size=20)
count = st.integers(0, 1 << 50)
nodes = st.builds(
    NodeRecord,
    node=text,
    incarnation=st.binary(min_size=8, max_size=8).map(bytes.hex),
    state=st.sampled_from(NodeState),
    transports=st.lists(st.builds(TransportRecord, text, text), max_size=3).map(tuple),
    tiers=st.lists(st.builds(TierRecord, text, count, count), max_size=3).map(tuple),
    labels=st.dictionaries(text, text, max_size=3),
    version=text,
    protocol=st.integers(0, 1000),
    drain=st.none() | st.builds(DrainProgress, text, *[count] * 6),
)
parts = st.lists(
    st.tuples(count, st.sampled_from(["full", "window"]), count, count), max_size=3
).map(tuple)
kept = st.builds(NamespaceSettings, count, text, st.floats(0, 1e9), text)
entries = st.builds(NamespaceEntry, text, text, text, parts, count, count, count, kept)
configs = st.builds(ClusterConfig, text, count, count, text)


@given(nodes | entries | configs)
def test_what_is_written_is_read(record: msgspec.Struct) -> None:
    data = encode_record(record)
    assert decode_record(data, type(record), "here") == record
    assert json.loads(data) == json.loads(json.dumps(plain(record))), "and it is plain JSON"


@given(st.binary(max_size=200), st.sampled_from([NodeRecord, NamespaceEntry, ClusterConfig]))
def test_what_is_no_record_is_refused_and_nothing_else_happens(
    data: bytes, kind: type[msgspec.Struct]
) -> None:
    # Random bytes are no JSON object with the fields that have no default.
    with pytest.raises(ProtocolError, match="the key x"):
        decode_record(data, kind, "the key x")


@given(nodes, st.data())
def test_a_record_cut_short_or_overwritten_never_decodes_to_something_else_silently(
    record: NodeRecord, data: st.DataObject
) -> None:
    whole = encode_record(record)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        decode_record(whole[:cut], NodeRecord, "x")


def test_too_long_a_record_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match=rf"{RECORD_BYTES_MAX + 1} bytes"):
        decode_record(b"{" + b" " * RECORD_BYTES_MAX, NodeRecord, "x")


def test_versions_share_a_cluster() -> None:
    later = (
        b'{"node": "n", "incarnation": "00", "colour": "blue", "tiers": [{"name": "hbm", "x": 1}]}'
    )
    expected = NodeRecord("n", "00", tiers=(TierRecord("hbm"),))
    assert decode_record(later, NodeRecord, "x") == expected
    with pytest.raises(ProtocolError, match="state"):
        decode_record(b'{"node": "n", "incarnation": "00", "state": "asleep"}', NodeRecord, "x")
    former = (
        b'{"tenant": "t", "digest": "00", "fields": "{}", "parts": [], "epoch": 4, "replicas": 3}'
    )
    known = decode_record(former, NamespaceEntry, "x")
    assert (known.epoch, known.settings) == (4, NamespaceSettings())


# ---- settings of a namespace ----------------------------------------------------------------------------

NAMES = ("replicas", "write", "ttl_s", "ssd_codec")
GOOD = {
    "replicas": st.integers(1, 100),
    "write": st.sampled_from(["", "back", "through", "none"]),
    "ttl_s": st.floats(0, 315_360_000),
    "ssd_codec": st.sampled_from(["", "blosc2"]),
}
good_changes = st.fixed_dictionaries({}, optional=GOOD)
good_settings = st.fixed_dictionaries(GOOD)


@given(good_settings, good_changes)
def test_a_change_changes_what_it_names_and_nothing_else(
    before: dict[str, object], named: dict[str, object]
) -> None:
    change = msgspec.convert(named, SettingsChange).checked()
    after = change.apply(msgspec.convert(before, NamespaceSettings))
    assert {name: getattr(after, name) for name in NAMES} == before | named
    assert change.empty == (not named)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (SettingsChange(replicas=0), "0 replicas: must be at least 1"),
        (SettingsChange(replicas=-2), "-2 replicas"),
        (SettingsChange(write="later"), "'later'.*back, through, none"),
        (SettingsChange(write="Back"), "'Back'"),
        (SettingsChange(ttl_s=-0.1), "ttl_s -0.1"),
        (SettingsChange(ttl_s=float("nan")), "ttl_s nan"),
        (SettingsChange(ttl_s=float("inf")), "ttl_s inf"),
        (SettingsChange(ttl_s=315_360_001.0), "to 315360000 seconds"),
        (SettingsChange(ssd_codec="zip"), "'zip'.*blosc2"),
    ],
)
def test_what_no_namespace_can_have(change: SettingsChange, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        change.checked()


@given(good_settings, good_settings)
def test_wishes_fill_in_what_nobody_has_asked_for(
    before: dict[str, object], wanted: dict[str, object]
) -> None:
    first, second = (msgspec.convert(one, NamespaceSettings) for one in (before, wanted))
    filled = first.filled(second)
    assert filled.replicas == max(first.replicas, second.replicas)
    for name in NAMES[1:]:
        old, new = before[name], wanted[name]
        assert getattr(filled, name) == (old if old != type(old)() else new)


def test_a_node_makes_of_settings_what_it_can() -> None:
    good = NamespaceSettings(3, "none", 5.0, "blosc2")
    assert good.known_here(8) == good
    assert good.known_here(2) == NamespaceSettings(2, "none", 5.0, "blosc2")
    strange = NamespaceSettings(-4, "sideways", -1.0, "of-next-year")
    assert strange.known_here(8) == NamespaceSettings()


def test_incarnations_are_16_hex_digits_and_differ() -> None:
    made = {new_incarnation() for _ in range(1000)}
    assert len(made) == 1000
    for text in made:
        assert NodeRecord("n", text).incarnation_bytes == bytes.fromhex(text)
        assert len(bytes.fromhex(text)) == 8


@given(st.binary(min_size=16, max_size=16), st.integers(1, 1 << 40))
def test_an_epoch_makes_another_digest(digest: bytes, epoch: int) -> None:
    assert epoch_digest(digest, 0) == digest
    made = epoch_digest(digest, epoch)
    assert made == hashlib.sha256(digest + epoch.to_bytes(8, "big")).digest()[:16]
    assert len({made, digest, epoch_digest(digest, epoch + 1)}) == 3


def test_a_record_of_before_there_were_cards_is_read_as_one_that_says_nothing_of_them() -> None:
    old = b'{"node":"a","incarnation":"' + b"ab" * 8 + b'","transports":[{"url":"tcp://a:1"}]}'
    record = decode_record(old, NodeRecord, "here")
    assert record.transports == (TransportRecord("tcp://a:1", "", -1, "", ""),)
    assert (record.host, record.numa) == ("", -1)


def test_where_a_node_is_asked():
    def url(*listed: str) -> str:
        return NodeRecord("a", "ab" * 8, transports=tuple(map(TransportRecord, listed))).url

    assert url() == ""
    assert url("tcp://a:1", "tcp://a:2") == "tcp://a:1"
    assert url("nixl://a:3", "tcp://a:1") == "tcp://a:1"
    assert url("nixl://a:3") == ""
