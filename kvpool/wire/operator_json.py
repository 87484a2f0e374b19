"""Operators' requests as JSON: what the HTTP gateway forwards to a daemon, and what `kvpool` sends it from elsewhere.

    {"message": "PinBlocks", "keys": "AAAAAAAAAAAAAAAAAAAAAA==", "kind": "soft", "digest": ""}

An object with the message's name and its fields. Bytes are base64. What a message carries as JSON stands there as it
is: a job's `spec`, and `changes` of settings.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from kvpool.types import KEY_BYTES
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobName, JobSpec

TAG = "message"
TEXT_MAX = 1024
LIST_MAX = 1000
WAIT_S_MAX = 10.0

Shape = type[msgspec.Struct]

_AS_JSON = {
    "spec": JobSpec,
    "changes": Annotated[dict[str, Any], msgspec.Meta(min_length=1, max_length=100)],
}
_OWN = {
    **_AS_JSON,
    "job": JobName,
    "wait_s": Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)],
}
# Long polls would hold a gateway's places, and the node stands beside the request.
_LEFT_OUT = {("Events", "wait_s"), ("WhyMissing", "node")}
_BOUNDED: dict[Any, Any] = {
    bytes: Annotated[bytes, msgspec.Meta(max_length=frame.KEYS_MAX * KEY_BYTES)],
    str: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)],
}

CHANGES: frozenset[type[frame.Message]] = frozenset(
    {
        operator_wire.BeginJob,
        operator_wire.ChangeSettings,
        operator_wire.Clear,
        operator_wire.Configure,
        operator_wire.Drain,
        operator_wire.EndSession,
        operator_wire.IntendBlocks,
        operator_wire.PinBlocks,
        operator_wire.Scrub,
        operator_wire.StopJob,
    }
)
"""Those that are sent with an Idempotency-Key; others change nothing."""


NUMBERED: frozenset[type[frame.Message]] = frozenset(
    {
        operator_wire.ChangeSettings,
        operator_wire.Clear,
        operator_wire.Configure,
        operator_wire.Drain,
        operator_wire.EndSession,
        operator_wire.PinBlocks,
        operator_wire.StopJob,
    }
)
"""Those that are answered with a number."""


class OperatorAnswer(msgspec.Struct, frozen=True):
    """value: of requests that are answered with a number; otherwise null. answer: of the others, their JSON."""

    value: int | None
    answer: msgspec.Raw


def shape_of(kind: type[frame.Message]) -> Shape:
    """The struct of a message's JSON, which has limits for all that it contains."""
    fields: list[Any] = []
    for each in msgspec.structs.fields(kind):
        if (kind.__name__, each.name) in _LEFT_OUT:
            continue
        found = _OWN.get(each.name) or _bounded(each.type)
        if each.default is not msgspec.NODEFAULT:
            fields.append((each.name, found, each.default))
        elif each.default_factory is not msgspec.NODEFAULT:
            fields.append((each.name, found, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append((each.name, found))
    return msgspec.defstruct(
        f"Operator{kind.__name__}",
        fields,
        namespace={"__doc__": (kind.__doc__ or "").partition("\n")[0]},
        tag_field=TAG,
        tag=kind.__name__,
        frozen=True,
        forbid_unknown_fields=True,
    )


def _bounded(hint: Any) -> Any:
    """A field's type with limits; what has one already keeps it."""
    origin = get_origin(hint)
    if origin in {Union, UnionType}:
        return Union[tuple(_bounded(each) for each in get_args(hint))]  # noqa: UP007  (made here)
    if origin is list:
        (inner,) = get_args(hint)
        return Annotated[list[_bounded(inner)], msgspec.Meta(max_length=LIST_MAX)]
    return _BOUNDED.get(hint, hint)


def message_of(kind: type[frame.Message], shape: msgspec.Struct) -> frame.Message:
    """The message of a decoded shape of it."""
    fields = msgspec.structs.asdict(shape)
    for name in _AS_JSON.keys() & fields:
        fields[name] = msgspec.json.encode(fields[name])
    return kind(**fields)


def to_json(message: frame.Message) -> dict[str, Any]:
    """A message for `msgspec.json.encode`."""
    kind = type(message).__name__
    found: dict[str, Any] = {TAG: kind}
    for name in message.__struct_fields__:
        if (kind, name) not in _LEFT_OUT:
            value = getattr(message, name)
            found[name] = msgspec.Raw(value) if name in _AS_JSON else value
    return found
