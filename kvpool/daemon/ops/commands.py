"""What the answers to requests have in common: how methods answer messages, and whose objects they are about. No I/O."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from inspect import isfunction
from typing import Any, NamedTuple, get_type_hints

from kvpool.daemon.core.blocks import Holder, NamespaceState, Tenant
from kvpool.daemon.core.events import Named
from kvpool.daemon.core.node import Node
from kvpool.errors import (
    ClusterUnavailable,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    Unavailable,
)
from kvpool.types import KEY_BYTES, split_keys
from kvpool.wire import frame

KEYS_BYTES_MAX = frame.KEYS_MAX * KEY_BYTES


class Asker(NamedTuple):
    """Whose objects a request is about, and who makes it, for the audit log."""

    tenant: Tenant
    by: str


def handlers_of(asker: type, *parts: Any) -> dict[type, Callable[[Any, Any], Any]]:
    """Return the methods of these objects that answer messages, by the message.

    A method answers a message if its parameters are an `asker` and the message. A command's method returns a number or
    what is to be encoded as JSON, as the command declares.
    """
    return {
        kind: getattr(part, name)
        for part in parts
        for kind, name in _answered(type(part), asker).items()  # type: ignore[arg-type]  # classes are hashable
    }


def _is_message(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, frame.Message) and kind is not frame.Message


@functools.cache
def _answered(part: type, asker: type) -> dict[type, str]:
    """The names of the methods of a class that answer messages."""
    found = {}
    for name, method in vars(part).items():
        hints = list(get_type_hints(method).values()) if isfunction(method) else []
        if len(hints) == 3 and hints[0] is asker and _is_message(hints[1]):
            found[hints[1]] = name
    return found


def namespace_for(node: Node, holder: Holder, number: int, keys: bytes) -> NamespaceState:
    """The namespace that a client names by a number, for a request about these keys.

    Raises `LimitExceeded` for too many keys, and as `Namespaces.by_number`.
    """
    if len(keys) > KEYS_BYTES_MAX:
        raise LimitExceeded(f"{len(keys) // 16} keys in one request; the limit is {frame.KEYS_MAX}")
    namespace = node.namespaces.by_number(holder.tenant, number)
    node.events.emit(Named(namespace, keys))
    return namespace


def namespace_of(tenant: Tenant, digest: bytes) -> NamespaceState:
    """The tenant's namespace of this digest, in its current epoch. Raises `InvalidRequest` if it is not open here."""
    epochs = tenant.epochs.get(digest)
    if not epochs:
        raise InvalidRequest(f"namespace {digest.hex()} is not open on this node")
    return epochs[-1]


def namespaces_of(tenant: Tenant, digest: bytes) -> list[NamespaceState]:
    """One of the tenant's namespaces, or all of them if `digest` is empty. Raises as `namespace_of`."""
    if digest:
        return [namespace_of(tenant, digest)]
    return [epochs[-1] for epochs in tenant.epochs.values()]


def unpacked(packed: bytes, most: int) -> Sequence[bytes]:
    """The keys of a request. Raises `LimitExceeded` for more than it may name."""
    if len(packed) > most * KEY_BYTES:
        raise LimitExceeded(f"at most {most} keys per request")
    return split_keys(packed)


@contextlib.contextmanager
def asking_others() -> Iterator[None]:
    """Failures of others are not failures of this daemon: its client may continue to use it."""
    try:
        yield
    except (InternalError, Unavailable) as error:
        raise ClusterUnavailable(str(error)) from None
