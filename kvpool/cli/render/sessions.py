"""What `kvpool sessions` and `kvpool intend` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from kvpool.cli.render.text import Column, Parts, rows_table
from kvpool.wire.answers import Session, SessionChain, SessionDetail, Sessions, columns_of

ANSWERS = {
    "node": "node",
    "answer": "outcome",
    "blocks": "blocks",
    "of": "asked",
    "not there": "missing",
    "bytes": "nbytes",
    "reason": "reason",
}


def sessions_view(found: Sessions) -> Parts:
    """Sessions, and how to get the next ones."""
    if not found.sessions:
        yield Text("no sessions are known here")
        return
    yield rows_table("", found.sessions, Session)
    if found.more:
        yield Text(f"there are more: --after {found.sessions[-1].session}")


def session_view(session: SessionDetail) -> Parts:
    """One session with the prompts of its agents."""
    yield rows_table("", [session], Session)
    agent: dict[str, Column] = {"agent": lambda chain: chain.agent or "(main)"}
    yield rows_table("", session.chains, columns_of(SessionChain) | agent)


def answers_view(rows: Sequence[Mapping[str, Any]]) -> Parts:
    """The answers of nodes to an intent."""
    yield rows_table("", rows, ANSWERS)
