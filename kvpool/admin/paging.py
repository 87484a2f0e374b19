"""Pages of lists, with opaque cursors. No I/O."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from kvpool.admin.problems import Refused
from kvpool.admin.types import Listed, Page
from kvpool.decoding import decode_json
from kvpool.errors import ProtocolError

T = TypeVar("T")


def pack_cursor(*place: Any) -> str:
    """A place in a list, as text that a client hands back."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def unpack_cursor(cursor: str, kind: Any) -> Any:
    """The place, of type `kind`. Raises `Refused` for what was never a cursor of this list."""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return decode_json(raw, kind, "a cursor")
    except (ValueError, ProtocolError):  # also for letters that are no ASCII
        raise Refused(400, "invalid", "cursor: this cursor does not belong to this list") from None


def listed(
    items: Iterable[T], key: Callable[[T], str], wanted: Page, unreachable: dict[str, str]
) -> Listed[T]:
    """The wanted part of these, by ascending key. What comes and goes meanwhile disturbs no other."""
    after = unpack_cursor(wanted.cursor, tuple[str])[0] if wanted.cursor else None
    ordered = sorted((item for item in items if after is None or key(item) > after), key=key)
    some = ordered[: wanted.limit]
    more = len(ordered) > wanted.limit
    return Listed(some, pack_cursor(key(some[-1])) if more else None, unreachable)
