"""How an operator's command is declared: once, as a message with `@command`.

    @command("operator", Scope.JOB, answer=int)
    class StopJob(Message, tag=106):
        '''Stop a running job.'''

        job: Annotated[str, in_json(JobName)]

From this declaration come the message on the wire, its dispatch in the daemon (`kvpool.daemon.ops.operators`), the
route `POST /v1/operator/stop-job` of the gateway with its description, the least role and the tenants that it is for
(`kvpool.admin.handlers.operator`), and what a command line elsewhere sends there (`kvpool.client.gateway`).

The route takes the message's fields as a JSON object. Bytes are base64. A field that carries JSON stands there as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from kvpool.types import KEY_BYTES
from kvpool.wire.frame import KEYS_MAX, Message

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
    role: Role | None, scope: Scope = Scope.TENANT, *, answer: Any = dict
) -> Callable[[M], M]:
    """Declare a message as an operator's command. See `Command`."""

    def declare(kind: M) -> M:
        COMMANDS[kind] = Command(kind, role, scope, answer)
        return kind

    return declare


def in_json(hint: Any) -> msgspec.Meta:
    """The type of a field in JSON, where it differs from the one on the wire. None: JSON does not have the field.

    A bytes field that is declared so carries JSON of this type.
    """
    return msgspec.Meta(extra={"json": hint})


_SAME = object()
_BOUNDED: dict[Any, Any] = {
    bytes: Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX * KEY_BYTES)],
    str: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)],
}


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
def shape_of(kind: type[Message]) -> type[msgspec.Struct]:
    """The struct of a message's JSON, with limits for all that it contains."""
    fields: list[Any] = []
    for each in msgspec.structs.fields(kind):
        declared = _declared(each.type)
        if declared is None:
            continue
        hint = _bounded(each.type) if declared is _SAME else declared
        if each.default is not msgspec.NODEFAULT:
            fields.append((each.name, hint, each.default))
        elif each.default_factory is not msgspec.NODEFAULT:
            fields.append((each.name, hint, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append((each.name, hint))
    return msgspec.defstruct(
        f"Operator{kind.__name__}",
        fields,
        namespace={"__doc__": (kind.__doc__ or "").partition("\n")[0]},
        frozen=True,
        forbid_unknown_fields=True,
    )


def message_of(kind: type[Message], shape: msgspec.Struct) -> Message:
    """The message of a decoded shape of it."""
    fields = msgspec.structs.asdict(shape)
    for each in msgspec.structs.fields(kind):
        if _carries_json(each.type):
            fields[each.name] = msgspec.json.encode(fields[each.name])
    return kind(**fields)


def to_json(message: Message) -> dict[str, Any]:
    """A message for `msgspec.json.encode`."""
    found: dict[str, Any] = {}
    for each in msgspec.structs.fields(message):
        if _declared(each.type) is not None:
            value = getattr(message, each.name)
            found[each.name] = msgspec.Raw(value) if _carries_json(each.type) else value
    return found
