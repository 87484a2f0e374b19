"""What `kvpool doctor` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from kvpool.cli.render.cluster import links_table
from kvpool.cli.render.text import Column, Command, Parts, rows_table

STYLES = {"ok": "green", "note": "yellow", "bad": "red"}


def findings_view(findings: Sequence[Any], links: Sequence[Mapping[str, Any]]) -> Parts:
    """The findings (`kvpool.cli.machine.Finding`), and how this node pulls from others."""
    columns: dict[str, Column] = {
        "what": "topic",
        "": lambda one: Text(one.state, style=STYLES[one.state]),
        "found": "found",
    }
    yield rows_table("This machine", findings, columns, wraps={"found"})
    for one in findings:
        if one.remedy:
            yield Text(f"\n{one.topic}, remedy:")
            yield Command(f"  {one.remedy}")
    if links:
        yield Text()
        yield links_table(links)
