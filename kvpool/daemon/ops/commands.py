"""How a daemon answers operators' commands: methods marked with `@answers`, and what they have in common. No I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

from kvpool.daemon.core.blocks import NamespaceState, Tenant
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
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class Asker(NamedTuple):
    """Whose objects a request is about, and who makes it, for the audit log."""

    tenant: Tenant
    by: str


def answers(method: Handler) -> Handler:
    """Make a method the handler of the command that its argument `m` is.

    It returns a number or what is to be encoded as JSON, as the command declares.
    """
    (*_, kind, _) = get_type_hints(method).values()
    vars(method)["answers"] = kind
    return method


def handlers_of(*parts: object) -> dict[type, Callable[[Asker, Any], Awaitable[Any]]]:
    """The handlers of these objects, by the commands that they answer."""
    return {
        method.answers: getattr(part, name)
        for part in parts
        for name, method in vars(type(part)).items()
        if hasattr(method, "answers")
    }


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
