"""`kvpool sessions`: what nodes know of sessions."""

from __future__ import annotations

from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import AnyNode, Session, argument, asks, option
from kvpool.errors import InvalidRequest

sessions = base.group("sessions", "Sessions, as their clients tell of them: list, show, end.")
SessionName = Annotated[str, argument("A session, as its client names it.", metavar="SESSION")]


@asks(sessions, "list")
def sessions_list(
    at: Session,
    node: AnyNode = "",
    limit: Annotated[int, option("The most sessions to list.", min=1, max=1000)] = 100,
    after: Annotated[
        str, option("Begin after this session, in the order of names.", metavar="SESSION")
    ] = "",
) -> None:
    """List the sessions that a node knows: their turns and blocks.

    Example: kvpool sessions list --node host-7
    """
    from kvpool.cli.render.sessions import sessions_view
    from kvpool.wire import operator as operator_wire

    found = at.client.ask_node(operator_wire.ListSessions(after, limit), node=node)
    at.show(found, sessions_view(found))


@asks(sessions, "show")
def sessions_show(at: Session, session: SessionName, node: AnyNode = "") -> None:
    """Show a session: the prompt of each of its agents, and where its blocks are. Exit status 1 if it is not known.

    Example: kvpool sessions show conversation-17
    """
    from kvpool.cli.render.sessions import session_view
    from kvpool.wire import operator as operator_wire

    found = at.client.ask_node(operator_wire.ShowSession(session), node=node)
    if found is None:
        raise _unknown(session)
    at.show(found, session_view(found))


@asks(sessions, "end")
def sessions_end(at: Session, session: SessionName, node: AnyNode = "") -> None:
    """End a session: its blocks are evicted before others. Exit status 1 if it is not known.

    Example: kvpool sessions end conversation-17
    """
    from kvpool.wire import operator as operator_wire

    with base.in_doubt("sessions show"):
        known = bool(at.client.ask_node(operator_wire.EndSession(session), node=node))
    if at.as_json or known:
        at.show({"session": session, "ended": known}, f"session {session} has ended")
    if not known:
        raise _unknown(session)


def _unknown(session: str) -> InvalidRequest:
    return InvalidRequest(
        f"no session {session!r} is known there: it has ended, or is another node's"
    )
