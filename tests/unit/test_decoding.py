"""Bytes from outside: whatever they are, a value or one kind of error."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

import kvpool
from kvpool import wire
from kvpool.decoding import Finite, JsonDecoder, MsgpackDecoder, decode_hex, decode_json, finite
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.placement.kv_events import stream
from kvpool.wire import frame

DEEP = 100_000
NESTED = {"msgpack": b"\x91" * DEEP + b"\xc0", "json": b"[" * DEEP + b"]" * DEEP}


class Point(msgspec.Struct, array_like=True):
    x: Finite
    label: str = ""


class Box(msgspec.Struct):
    width: Finite = 0.0
    label: str = ""


of_point = MsgpackDecoder[Point](Point, "a point")
of_box = JsonDecoder[Box](Box, "a box")
of_any = MsgpackDecoder[Any](Any, "anything")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        NESTED["msgpack"],
        b"\x93\x01\xa0" + NESTED["msgpack"],
        b"\x92\x01\xa2\xff\xfe",
        b"\x93\x01\xa0\xa2\xff\xfe",
        b"\x91\xcb\x7f\xf8" + bytes(6),
        b"\x91\xcb\x7f\xf0" + bytes(6),
        b"\x91\xcb\xff\xf0" + bytes(6),
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x01\xdb\xff\xff\xff\xff",
    ],
    ids=[
        "empty", "no-msgpack", "nested", "nested-surplus", "no-text", "no-text-surplus", "nan", "inf",
        "minus-inf", "long-array", "long-text",
    ],
)  # fmt: skip
def test_bad_messagepack_is_one_error(data: bytes) -> None:
    if data == b"\x93\x01\xa0\xa2\xff\xfe":
        of_point(data)  # what is not wanted is not read as text
        return
    with pytest.raises(ProtocolError, match="not a point"):
        of_point(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", NESTED["json"], b'{"other":' + NESTED["json"] + b"}", b'{"label":"\xff"}', b'{"width":NaN}',
     b'{"width":1e999}', b'{"width":' + b"9" * 5000 + b"}", b'{"label":"\\ud800"}', b"[]"],
    ids=["empty", "cut", "nested", "nested-surplus", "no-text", "nan", "inf", "digits", "surrogate", "array"],
)  # fmt: skip
def test_bad_json_is_one_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a box"):
        of_box(data)


def test_hex_and_kinds_known_only_now() -> None:
    assert decode_hex("00ff", "a key") == b"\0\xff"
    for bad in ("0", "zz", "é", "0x"):
        with pytest.raises(ProtocolError, match="not a key in hex"):
            decode_hex(bad, "a key")
    assert decode_json(b"[1]", list[int], "numbers") == [1]
    with pytest.raises(ProtocolError, match="not numbers"):
        decode_json(b'["x"]', list[int], "numbers")


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(wire.__path__, "kvpool.wire."):
        yield found.name


DECODERS: dict[str, frame.Decoder] = {
    f"{module}.{name}": decoder
    for module in modules()
    for name, decoder in vars(importlib.import_module(module)).items()
    if isinstance(decoder, frame.Decoder)
}


def messages() -> list[type[frame.Message]]:
    found: set[type[frame.Message]] = set()
    for module in modules():
        for one in vars(importlib.import_module(module)).values():
            if (
                isinstance(one, type)
                and issubclass(one, frame.Message)
                and one is not frame.Message
            ):
                found.add(one)
    return sorted(found, key=lambda one: one.__name__)


def floats_of(kind: inspect.Type, seen: set[type]) -> Iterator[inspect.FloatType]:
    """All floats that a value of this type can hold."""
    match kind:
        case inspect.FloatType():
            yield kind
        case inspect.StructType():
            if kind.cls not in seen:
                seen.add(kind.cls)
                for each in kind.fields:
                    yield from floats_of(each.type, seen)
        case inspect.UnionType():
            for inner in kind.types:
                yield from floats_of(inner, seen)
        case inspect.ListType() | inspect.SetType() | inspect.VarTupleType():
            yield from floats_of(kind.item_type, seen)
        case inspect.TupleType():
            for inner in kind.item_types:
                yield from floats_of(inner, seen)
        case inspect.DictType():
            yield from floats_of(kind.value_type, seen)
        case inspect.AnyType():
            raise AssertionError("anything may hold a NaN")
        case _:
            pass


@pytest.mark.parametrize("kind", messages(), ids=lambda kind: kind.__name__)
def test_no_message_can_carry_what_is_no_number(kind: type[frame.Message]) -> None:
    for found in floats_of(inspect.type_info(kind), set()):
        assert found.ge is not None and found.le is not None, f"{kind.__name__}: use `Finite`"


def test_no_event_can_carry_what_is_no_number() -> None:
    for found in floats_of(inspect.type_info(stream._Payload), set()):
        assert found.ge is not None and found.le is not None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)  # fmt: skip
bad_bytes = st.sampled_from(
    [b"\xc1", b"\xa2\xff\xfe", b"\x91" * 3000, b"\xdd\xff\xff\xff\xff", b"\xcb\x7f\xf8" + bytes(6), b"\xc7\x0c\xff"]
)  # fmt: skip


@given(st.data())
def test_whatever_comes_is_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    """Real messages with fields replaced, cut, and with surplus ones."""
    decode = data.draw(st.sampled_from(sorted(DECODERS)).map(DECODERS.__getitem__))
    kind = data.draw(st.sampled_from(messages()))
    length = len(kind.__struct_fields__)
    fields = data.draw(st.lists(values, min_size=0, max_size=length + 2))
    payload = msgspec.msgpack.encode([kind.__struct_config__.tag, *fields])
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(payload)))
        payload = payload[:at] + data.draw(bad_bytes) + payload[at:]
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    try:
        message = decode(payload)
    except ProtocolError:
        return
    assert isinstance(message, frame.Message)


def test_nothing_else_decodes() -> None:
    """Whoever calls msgspec's decoders has to know all that they raise: only one module does."""
    root = Path(kvpool.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if path != root / "decoding.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"decode", "Decoder"}
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in {"json", "msgpack"}
    ]
    assert not found


def test_times_as_messages_carry_them() -> None:
    assert [finite(each, "x") for each in (1.5, 0.0, -2.0)] == [1.5, 0.0, -2.0]
    for endless in (float("inf"), float("-inf")):
        assert of_point(msgspec.msgpack.encode([finite(endless, "x")])).x == finite(endless, "x")
    with pytest.raises(InvalidRequest, match="wait_s must be a number, not NaN"):
        finite(float("nan"), "wait_s")
