"""How an operator's command is declared: once, as a message with `@command`.

    @command("operator", Scope.JOB, answer=int)
    class StopJob(Message, tag=106):
        '''Stop a running job.'''

        job: Annotated[str, in_json(JobName)]

From this declaration come the message on the wire, its dispatch in the daemon (`kvpool.daemon.ops.operators`), the
route `POST /v1/operator/stop-job` of the gateway with its description, the least role and the tenants that it is for
(`kvpool.admin.handlers.operator`), and what a command line elsewhere sends there (`kvpool.client.gateway`). With
`everywhere="POST /v1/pins"` there is another route, which asks all nodes at a time.

The routes take the message's fields as a JSON object. Keys and digests are hex. A field that carries JSON stands there
as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from kvpool.decoding import decode_json
from kvpool.errors import ProtocolError
from kvpool.types import split_keys
from kvpool.wire.frame import AnyDigest, Bytes, Digest, Done, Message

TEXT_MAX = 1024
LIST_MAX = 1000

Role = Literal["viewer", "operator", "admin"]


class Scope(Enum):
    """The objects that a command concerns."""

    TENANT = "tenant"
    """The objects of one tenant."""
    WHOLE = "whole"
    """Objects of no single tenant: reserved for tokens that are not limited to tenants."""
    SHOWN = "shown"
    """Objects of all tenants. A limited token gets the part of the answer that is its own tenants'."""
    NAMED = "named"
    """Objects of the tenants that the message names, or of the token's tenants if it names none."""
    JOB = "job"
    """A job. Its tenant is looked up first."""


class Command(NamedTuple):
    """The declaration of one command."""

    kind: type[Message]
    role: Role | None
    """The least role of a token, or None if the gateway has no route for the command."""
    scope: Scope
    answer: Any
    """The type of the answer: `int` for a `Done`, otherwise that of the JSON in a `Bytes`."""
    everywhere: str = ""
    """The method and path of the route that asks all nodes, or empty if there is none."""

    @property
    def path(self) -> str:
        """The path of its route."""
        return f"/v1/operator/{re.sub('(?<!^)(?=[A-Z])', '-', self.kind.__name__).lower()}"

    @property
    def changes(self) -> bool:
        """Whether it changes something."""
        return self.role != "viewer"


COMMANDS: dict[type[Message], Command] = {}
"""All commands by their messages, in the order of their declaration."""

M = TypeVar("M", bound=type[Message])


def command(
    role: Role | None,
    scope: Scope = Scope.TENANT,
    *,
    answer: Any = dict,
    everywhere: str = "",
) -> Callable[[M], M]:
    """Declare a message as an operator's command. See `Command`."""

    def declare(kind: M) -> M:
        COMMANDS[kind] = Command(kind, role, scope, answer, everywhere)
        return kind

    return declare


def in_json(hint: Any) -> msgspec.Meta:
    """The type of a field in JSON, where it differs from the one on the wire. None: JSON does not have the field.

    A bytes field that is declared so carries JSON of this type.
    """
    return msgspec.Meta(extra={"json": hint})


NAMES = {"digest": "namespace"}
"""The names of fields in JSON, where they differ from those on the wire."""
_SAME = object()
_HEX = r"[0-9a-f]{32}"
_DIGESTS = {
    Digest: Annotated[str, msgspec.Meta(pattern=f"^{_HEX}$")],
    AnyDigest: Annotated[str, msgspec.Meta(pattern=f"^({_HEX})?$")],
}
_BOUNDED: dict[Any, Any] = {
    **_DIGESTS,
    bytes: list[Annotated[str, msgspec.Meta(pattern=f"^{_HEX}$")]],
    str: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)],
}
"""The types of fields in JSON. Bytes that are no digest are block keys: a body limits them, and then the daemon."""


def _declared(hint: Any) -> Any:
    """The type given with `in_json`, or `_SAME`."""
    found = _SAME
    for meta in getattr(hint, "__metadata__", ()):
        found = (meta.extra or {}).get("json", found)
    return found


def _carries_json(hint: Any) -> bool:
    """Whether a field has bytes on the wire that are a JSON value of their own."""
    declared = _declared(hint)
    return declared is not None and declared is not _SAME and get_args(hint)[0] is bytes


def _bounded(hint: Any) -> Any:
    """The type of a field with limits. A limit that the type has stays."""
    origin = get_origin(hint)
    if origin in {Union, UnionType}:
        return Union[tuple(_bounded(each) for each in get_args(hint))]  # noqa: UP007  (made here)
    if origin is list:
        (inner,) = get_args(hint)
        return Annotated[list[_bounded(inner)], msgspec.Meta(max_length=LIST_MAX)]
    return _BOUNDED.get(hint, hint)


@cache
def shape_of(kind: type[Message], base: type[msgspec.Struct] | None = None) -> type[msgspec.Struct]:
    """The struct of a message's JSON, with limits for all that it contains. base: declares further fields."""
    fields: list[Any] = []
    for each in msgspec.structs.fields(kind):
        declared = _declared(each.type)
        if declared is None:
            continue
        hint = _bounded(each.type) if declared is _SAME else declared
        if each.default is not msgspec.NODEFAULT:
            fields.append((each.name, hint, _to_json(each.type, each.default)))
        elif each.default_factory is not msgspec.NODEFAULT:
            fields.append((each.name, hint, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append((each.name, hint))
    return msgspec.defstruct(
        f"Operator{kind.__name__}",
        fields,
        bases=(base,) if base else None,
        namespace={"__doc__": (kind.__doc__ or "").partition("\n")[0]},
        rename=NAMES,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _to_json(hint: Any, value: Any) -> Any:
    """A field of a message for JSON."""
    if _carries_json(hint):
        return msgspec.Raw(value)
    if hint in _DIGESTS:
        return value.hex()
    return [key.hex() for key in split_keys(value)] if hint is bytes else value


def _of_json(hint: Any, value: Any) -> Any:
    """The field of a message from its JSON."""
    if _carries_json(hint):
        return msgspec.json.encode(value)
    if hint in _DIGESTS:
        return bytes.fromhex(value)
    return bytes.fromhex("".join(value)) if hint is bytes else value


def message_of(kind: type[Message], shape: msgspec.Struct) -> Message:
    """The message of a decoded shape of it."""
    fields = {
        each.name: _of_json(each.type, getattr(shape, each.name))
        for each in msgspec.structs.fields(kind)
        if _declared(each.type) is not None
    }
    return kind(**fields)


def to_json(message: Message) -> dict[str, Any]:
    """A message for `msgspec.json.encode`."""
    return {
        NAMES.get(each.name, each.name): _to_json(each.type, getattr(message, each.name))
        for each in msgspec.structs.fields(message)
        if _declared(each.type) is not None
    }


def answer_of(message: Message, answer: Message, kind: Any = None) -> Any:
    """The answer to a message: the number of a `Done`, or the JSON of a `Bytes`.

    kind: the type of the JSON, by default the one that the command declares. Raises `ProtocolError`.
    """
    kind = kind or COMMANDS[type(message)].answer
    match answer:
        case Done(value) if kind is int:
            return value
        case Bytes(data) if kind is not int:
            return decode_json(
                data, kind, f"an answer to a {type(message).__name__} of this version"
            )
    raise ProtocolError(f"a {type(message).__name__} was answered with a {type(answer).__name__}")
