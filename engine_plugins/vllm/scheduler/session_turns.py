"""A request's hint about its session: a conversation or a run of an agent, of which the request is one turn.

    kv_transfer_params={"kvpool_session": {"id": "chat-7", "agent": "planner"}}

When the request has ended, its daemon hears which blocks it used, and with that which ones of the turn before are not
needed any more (`Client.sessions.turn`). Fields that are not known here are ignored: a newer router may say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvpool.errors import InvalidRequest

FIELD = "kvpool_session"
NAME_MAX = 256
_AGENT_MAX = 200  # characters before what names an adapter

_Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]


class SessionTurn(msgspec.Struct, frozen=True):
    """agent: a strand of the session; empty: the main one. end: it is the session's last turn.
    shared: several conversations may have this name.
    """

    id: _Name
    agent: _Name = ""
    end: bool = False
    shared: bool = False

    def strand(self, adapter: bytes) -> str:
        """The agent, apart for each adapter: blocks of two adapters are no turns of one another."""
        return f"{self.agent[:_AGENT_MAX]}@{adapter.hex()[:32]}" if adapter else self.agent


def session_turn(params: Mapping[str, object] | None) -> SessionTurn | None:
    """What a request's `kv_transfer_params` say; None: nothing. Raises `InvalidRequest`."""
    given: Any = (params or {}).get(FIELD)
    if given is None:
        return None
    try:
        turn = msgspec.convert(given, SessionTurn)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f'kv_transfer_params["{FIELD}"]: {error}') from None
    if not turn.id or not (turn.id + turn.agent).isprintable():
        raise InvalidRequest(f'kv_transfer_params["{FIELD}"]: names must be printable')
    return turn
