"""What `kvpool sessions` and `kvpool intend` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cli.render.text import Column, make_console, rows_table
from kvpool.wire.answers import Session, SessionChain, SessionDetail, Sessions, columns_of

if TYPE_CHECKING:
    from rich.console import Console

ANSWERS = {
    "node": "node",
    "answer": "outcome",
    "blocks": "blocks",
    "of": "asked",
    "not there": "missing",
    "bytes": "nbytes",
    "reason": "reason",
}


def show_sessions(found: Sessions, console: Console | None = None) -> None:
    """Print sessions, and how to get the next ones."""
    console = console or make_console()
    if not found.sessions:
        console.print("no sessions are known here")
        return
    console.print(rows_table("", found.sessions, Session))
    if found.more:
        console.print(f"there are more: --after {found.sessions[-1].session}", markup=False)


def show_session(session: SessionDetail, console: Console | None = None) -> None:
    """Print one session with the prompts of its agents."""
    console = console or make_console()
    console.print(rows_table("", [session], Session))
    agent: dict[str, Column] = {"agent": lambda chain: chain.agent or "(main)"}
    console.print(rows_table("", session.chains, columns_of(SessionChain) | agent))


def show_answers(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the answers of nodes to an intent."""
    (console or make_console()).print(rows_table("", rows, ANSWERS))
