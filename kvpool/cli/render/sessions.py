"""What `kvpool sessions` and `kvpool intend` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    duration,
    make_console,
    make_table,
    size_text,
)

if TYPE_CHECKING:
    from rich.console import Console


def show_sessions(
    found: Sequence[Mapping[str, Any]], console: Console | None = None, *, more: bool = False
) -> None:
    """Print sessions, and how to get the next ones."""
    console = console or make_console()
    if not found:
        console.print("no sessions are known here")
        return
    table = make_table("", "session", ">turns", ">agents", ">blocks", ">bytes", ">last turn")
    for each in found:
        table.add_row(
            escape(each["session"]),
            f"{each['turns']:,}",
            str(each["agents"]),
            f"{each['blocks']:,}",
            size_text(each["nbytes"]),
            f"{duration(each['idle_s'])} ago",
        )
    console.print(table)
    if more:
        console.print(f"there are more: --after {found[-1]['session']}", markup=False)


def show_session(session: Mapping[str, Any], console: Console | None = None) -> None:
    """Print one session with the prompts of its agents."""
    console = console or make_console()
    show_sessions([session], console)
    table = make_table(
        "", "namespace", "agent", ">blocks", ">in memory", ">only on disks", ">not here"
    )
    for chain in session["chains"]:
        table.add_row(
            chain["namespace"][:DIGEST_SHOWN],
            escape(chain["agent"]) or "(main)",
            *(f"{chain[name]:,}" for name in ("blocks", "in_memory", "on_disk", "missing")),
        )
    console.print(table)


def show_answers(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the answers of nodes to an intent."""
    console = console or make_console()
    table = make_table("", "node", "answer", ">blocks", ">of", ">not there", ">bytes", "reason")
    for row in rows:
        table.add_row(
            escape(row["node"]),
            row["outcome"],
            *(f"{row[name]:,}" for name in ("blocks", "asked", "missing")),
            size_text(row["nbytes"]),
            escape(row["reason"]),
        )
    console.print(table)
