"""Frames and messages: what goes in comes out, and garbage is a ProtocolError and nothing else."""

import asyncio
import dataclasses
import re
import secrets
import struct
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from msgspec import inspect

from kvpool.daemon.workers.device_proxy import DeviceWorkerProxy
from kvpool.errors import KvpoolError, PoolFull, ProtocolError
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire import peer as peer_wire
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire
from tests.support.memory import longest

MODULES = [frame, client_wire, operator_wire, peer_wire, worker_wire, storage_wire]
MESSAGES = [
    one
    for module in MODULES
    for one in vars(module).values()
    if isinstance(one, type)
    and one.__module__ == module.__name__
    and issubclass(one, frame.Message)
    if one.__struct_config__.tag
]
DECODERS = [
    client_wire.decode_client,
    client_wire.decode_daemon,
    peer_wire.decode_peer,
    worker_wire.decode_transfer,
    storage_wire.decode_disk,
    storage_wire.decode_object,
    worker_wire.decode_device,
    worker_wire.decode_gateway,
]
UNIONS = [
    client_wire.ClientMessage,
    client_wire.DaemonMessage,
    peer_wire.PeerMessage,
    worker_wire.TransferMessage,
    storage_wire.DiskMessage,
    storage_wire.ObjectMessage,
    worker_wire.DeviceMessage,
    worker_wire.GatewayMessage,
]


def test_each_message_has_a_number_of_its_own():
    tags = [one.__struct_config__.tag for one in MESSAGES]
    assert len(set(tags)) == len(tags)


# Those of operators are declared as commands.
TABLES = [module for module in MODULES if module is not operator_wire]


@pytest.mark.parametrize("module", TABLES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_table_at_the_top_names_every_message(module):
    rows = {}
    for line in module.__doc__.splitlines():
        words = line.split()
        if len(words) > 1 and words[0].isdigit() and words[1].isidentifier():
            rows[int(words[0])] = words[1]
    messages = [one for one in MESSAGES if one.__module__ == module.__name__]
    assert rows == {one.__struct_config__.tag: one.__name__ for one in messages}


def unlimited(hint: Any) -> Any:
    """A type as it travels: its limits are only for who receives it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return unlimited(args[0])
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(unlimited, args))]  # noqa: UP007  (made here)
    if origin is None:
        return hint
    return origin[tuple(each if each is ... else unlimited(each) for each in args)]


def layout(message: type) -> str:
    """A message as it travels: its number, and its fields in their order with types and defaults."""
    fields = []
    for field in msgspec.structs.fields(message):
        hint = unlimited(field.type)
        plain = isinstance(hint, type) and not typing.get_args(hint)
        kind = hint.__name__ if plain else re.sub(r"kvpool[.a-z_]*[.]", "", str(hint))
        if optional := re.fullmatch(r"typing\.(?:Optional|Union)\[(.*)\]", kind):
            members = optional[1] if "Union" not in kind else optional[1].replace(", ", " | ")
            kind = members.replace("NoneType", "None") + (" | None" if "Optional" in kind else "")
        default = [] if field.default is msgspec.NODEFAULT else field.default
        fields.append(f"{field.name}: {kind}" + ("" if field.required else f" = {default!r}"))
    number = tag_of(message)
    return f"{'-' if number is None else number} {message.__name__}({', '.join(fields)})"


def tag_of(message: Any) -> Any:
    return message.__struct_config__.tag


def test_numbers_and_fields_of_all_messages_are_as_written_down():
    """Daemons and clients of other versions read by them: a difference here, names aside, breaks the protocol."""
    written = (Path(__file__).parent / "wire_messages.txt").read_text().splitlines()
    tagged = sorted(MESSAGES, key=tag_of)
    inner = (client_wire.LeasedPart, peer_wire.PartKeys, worker_wire.PartRows)
    assert [layout(one) for one in (*inner, *tagged)] == written


def parts_of(hint: inspect.Type) -> Iterator[inspect.Type]:
    """A type with the types in it."""
    yield hint
    match hint:
        case inspect.Metadata():
            yield from parts_of(hint.type)
        case inspect.UnionType():
            for each in hint.types:
                yield from parts_of(each)
        case inspect.ListType() | inspect.VarTupleType():
            yield from parts_of(hint.item_type)
        case inspect.TupleType():
            for each in hint.item_types:
                yield from parts_of(each)
        case inspect.StructType() if not hint.tag:
            for field in hint.fields:
                yield from parts_of(field.type)


FIELDS = [
    pytest.param(field, id=f"{message.__name__}.{field.name}")
    for message in MESSAGES
    for field in typing.cast(inspect.StructType, inspect.type_info(message)).fields
]
LENGTHS = {"digest": 16, "digests": 16, "nonce": 32, "proof": 32, "more": 32}
# Where an empty digest stands for all namespaces, or for one that is named otherwise.
OF_ALL = {client_wire.Intend, operator_wire.Evict, operator_wire.IntendBlocks}
OF_ALL |= {operator_wire.ListAccounts, operator_wire.ListBlocks, operator_wire.ListReceipts}
OF_ALL |= {operator_wire.Locate, operator_wire.PinBlocks, operator_wire.ShowBlocks}


@pytest.mark.parametrize("field", FIELDS)
def test_every_number_has_a_range(field):
    """What is received indexes, slices and sizes: a number without a range is a fault in one of its uses."""
    for each in parts_of(field.type):
        if isinstance(each, inspect.IntType | inspect.FloatType):
            assert each.ge is not None and (each.le is not None or each.lt is not None)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_digests_nonces_and_proofs_have_their_length(message):
    found = typing.cast(inspect.StructType, inspect.type_info(message))
    for field in found.fields:
        lengths = [each for each in parts_of(field.type) if isinstance(each, inspect.BytesType)]
        if field.name in LENGTHS and lengths:
            shorter = message in OF_ALL or field.name in {"proof", "more"}
            least = 0 if shorter else LENGTHS[field.name]
            assert [(each.min_length or 0, each.max_length) for each in lengths] == [
                (least, LENGTHS[field.name])
            ], field.name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (client_wire.Abort, "tickets"),
        (client_wire.Commit, "tickets"),
        (client_wire.Commit, "checksums"),
        (client_wire.Release, "tokens"),
    ],
)
def test_lists_that_cost_time_in_one_piece_are_short(message, field):
    found = typing.cast(inspect.StructType, inspect.type_info(message))
    (wanted,) = [each for each in found.fields if each.name == field]
    assert isinstance(wanted.type, inspect.ListType)
    assert wanted.type.max_length is not None and wanted.type.max_length <= 4096


@pytest.mark.parametrize(
    "fields",
    [
        [145, b"", b"k" * 16],  # WhyMissing of no namespace
        [145, bytes(15), b"k" * 16],
        [145, bytes(17), b"k" * 16],
        [107, 1 << 63, 1],  # Events after a number that nothing can skip
        [107, -1, 1],
        [32, b"k" * 16, bytes(17)],  # Locate
        [14, [1] * 4097],  # Abort
        [18, ["token"] * 4097],  # Release
    ],
    ids=str,
)
def test_a_value_out_of_its_range_is_refused_where_it_is_decoded(fields):
    with pytest.raises(ProtocolError):
        client_wire.decode_client(msgspec.msgpack.encode(fields))


def test_bytes_of_a_frame():
    sent = client_wire.Commit([7], [b"\1" * 16], replicas=2)
    body = b"\x94\x0d\x91\x07\x91\xc4\x10" + b"\1" * 16 + b"\x02"
    assert frame.encode(sent, 9) == struct.pack("<II", len(body), 9) + body


def test_each_message_is_in_a_union():
    named = {one for union in UNIONS for one in union.__args__}
    assert named == set(MESSAGES)


def drawn(field_type: object) -> st.SearchStrategy:
    """Values of a field's type."""
    if field_type is bytes:
        return st.binary(max_size=40)
    if field_type is str:
        return st.text(max_size=20)
    if typing.get_origin(field_type) is typing.Annotated:
        return drawn_within(*typing.get_args(field_type))
    if field_type is int:  # of an engine's record
        return st.integers(-(2**63), 2**64 - 1)
    if field_type is bool:
        return st.booleans()
    if types.NoneType in typing.get_args(field_type):
        some = [member for member in typing.get_args(field_type) if member is not types.NoneType]
        return st.none() | st.one_of([drawn(member) for member in some])
    if isinstance(field_type, type) and issubclass(field_type, msgspec.Struct):
        return structs(field_type)
    if isinstance(field_type, types.UnionType):
        return st.one_of([structs(member) for member in field_type.__args__])
    if dataclasses.is_dataclass(field_type):
        hints = typing.get_type_hints(field_type)
        return st.builds(field_type, **{name: drawn(hint) for name, hint in hints.items()})
    origin, args = typing.get_origin(field_type), typing.get_args(field_type)
    if origin is list:
        return st.lists(drawn(args[0]), max_size=3)
    if args[1:] == (...,):
        return st.lists(drawn(args[0]), max_size=3).map(tuple)
    assert origin is tuple
    return st.tuples(*map(drawn, args))


def drawn_within(kind: object, limits: msgspec.Meta, *_others: msgspec.Meta) -> st.SearchStrategy:
    """others: of the field in JSON, as `kvpool.wire.command.in_json` declares it."""
    if limits.extra:
        return drawn(kind)
    if kind is int:
        assert limits.ge is not None
        most = limits.le if limits.lt is None else limits.lt - 1
        return st.integers(limits.ge, most)
    if kind is float:
        return st.floats(limits.ge, limits.le)
    if kind is bytes:
        return st.binary(min_size=limits.min_length or 0, max_size=limits.max_length)
    return drawn(kind)


def structs(message: type) -> st.SearchStrategy:
    fields = msgspec.structs.fields(message)
    return st.builds(message, *[drawn(field.type) for field in fields])


@pytest.mark.parametrize("union", UNIONS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_there_and_back(union, data):
    decode = DECODERS[UNIONS.index(union)]
    sent = data.draw(st.one_of([structs(message) for message in union.__args__]))
    request = data.draw(st.integers(0, 2**32 - 1))
    framed = frame.encode(sent, request)
    assert struct.unpack_from("<II", framed) == (len(framed) - 8, request)
    assert frame.FrameReader().feed(framed) == [(request, framed[8:])]
    assert decode(framed[8:]) == sent


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("decode", DECODERS)
@settings(max_examples=200, deadline=None)
@given(
    payload=st.binary(max_size=200)
    | json_like.map(msgspec.msgpack.encode)
    | st.tuples(st.integers(0, 80), st.lists(json_like, max_size=8)).map(
        lambda pair: msgspec.msgpack.encode([pair[0], *pair[1]])
    )
)
def test_garbage_is_a_protocol_error_and_nothing_else(decode, payload):
    try:
        assert isinstance(decode(payload), frame.Message)
    except ProtocolError:
        pass


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 60_000,
        b"\x81\xa1a" * 60_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x14\xdd\xff\xff\xff\xff",
        b"\x92\x04\xc6\xff\xff\xff\xff",
        b"\x93\x03\xa1\xff\xa1x",
        b"\xc7\xff\x01",
    ],
    ids=[
        "empty",
        "reserved",
        "deep",
        "deep-maps",
        "long",
        "long-list",
        "long-bytes",
        "no-utf8",
        "ext",
    ],
)
def test_hostile_payloads(decode, payload):
    with pytest.raises(ProtocolError):
        decode(payload)


@pytest.mark.parametrize("decode", DECODERS)
def test_mutated_messages(decode):
    """Every single byte of a message changed, and every end cut off."""
    payload = frame.encode(frame.Error("limit", "of something"), 1)[8:]
    for at in range(len(payload)):
        for value in (0, 0x7F, 0x80, 0xC1, 0xFF, payload[at] ^ 1):
            changed = payload[:at] + bytes([value]) + payload[at + 1 :]
            try:
                decode(changed)
            except ProtocolError:
                pass
        with pytest.raises(ProtocolError):
            decode(payload[:at])
    with pytest.raises(ProtocolError):
        decode(payload + b"\0")


def test_wrong_and_surplus_fields():
    for fields in (
        [13, "1", b"", b""],
        [13, 1, "", b""],
        [13, 1],
        [13],
        [13, 1, b"", b"", b""],
        [13.5, 1, b"", b""],
        {"type": 13},
        [],
        13,
        None,
    ):
        with pytest.raises(ProtocolError):
            client_wire.decode_client(msgspec.msgpack.encode(fields))


def test_messages_do_not_cross_unions():
    with pytest.raises(ProtocolError):
        client_wire.decode_client(frame.encode(frame.Done(1), 1)[8:])
    with pytest.raises(ProtocolError):
        peer_wire.decode_peer(frame.encode(client_wire.Stats(), 1)[8:])


def test_too_long_to_send():
    with pytest.raises(ProtocolError, match="the limit is"):
        frame.encode(frame.Bytes(bytes(frame.FRAME_BYTES_MAX)), 1)
    frame.encode(frame.Bytes(bytes(frame.FRAME_BYTES_MAX - 16)), 1)


# ---- FrameReader -------------------------------------------------------------------------------------


frames = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=60)), max_size=6)


@settings(max_examples=200, deadline=None)
@given(frames=frames, data=st.data())
def test_frames_in_any_pieces(frames, data):
    stream = b"".join(frame.HEADER.pack(len(body), request) + body for request, body in frames)
    reader = frame.FrameReader(limit=60)
    got = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == frames
    assert not reader.partial


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 40))
def test_any_stream(stream, limit):
    """Frames within the limit, or a ProtocolError; never more held than one incomplete frame."""
    reader = frame.FrameReader(limit)
    try:
        for at in range(0, len(stream), 7):
            for _, payload in reader.feed(stream[at : at + 7]):
                assert len(payload) <= limit
            assert longest(reader) <= limit + 8 + 7
    except ProtocolError:
        pass


def test_a_length_above_the_limit_is_refused_before_its_bytes_come():
    reader = frame.FrameReader(limit=100)
    with pytest.raises(ProtocolError):
        reader.feed(frame.HEADER.pack(101, 1))
    assert frame.FrameReader(limit=100).feed(frame.HEADER.pack(100, 1)) == []


def test_partial_tells_of_a_frame_that_was_cut_off():
    reader = frame.FrameReader()
    assert not reader.partial
    reader.feed(b"\1")
    assert reader.partial
    reader.feed(b"\0\0\0\5\0\0\0x")
    assert not reader.partial


def test_a_long_frame_in_small_pieces_costs_no_more_than_its_length():
    body = bytes(4 << 20)
    stream = frame.HEADER.pack(len(body), 3) + body
    reader = frame.FrameReader()
    got = []
    for at in range(0, len(stream), 1000):
        got += reader.feed(stream[at : at + 1000])
    assert got == [(3, body)]


# ---- errors --------------------------------------------------------------------------------------------


def test_errors_travel():
    message = frame.error_message(PoolFull("no slot"))
    assert message == frame.Error("pool_full", "no slot")
    with pytest.raises(PoolFull, match="no slot"):
        frame.raise_error(message)


def test_an_error_of_a_newer_peer_is_still_one_of_ours():
    with pytest.raises(KvpoolError, match="news") as caught:
        frame.raise_error(frame.Error("of_the_future", "news"))
    assert type(caught.value) is KvpoolError


def test_rows_are_little_endian():
    assert frame.pack_rows([1, frame.NO_ROW]) == b"\1\0\0\0\xff\xff\xff\xff"


def test_every_life_of_a_device_process_can_be_sent(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: (1 << bits) - 1)

    async def life() -> int:
        start = worker_wire.DeviceStart("cpu", [])
        return DeviceWorkerProxy(start, {}).life

    welcome = client_wire.Welcome(1, "node", "incarnation", 1, 1, b"handle", asyncio.run(life()))
    assert client_wire.decode_daemon(frame.encode(welcome, 1)[frame.HEADER.size :]) == welcome
