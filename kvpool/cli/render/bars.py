"""Progress on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from kvpool.cli.render.text import make_console

if TYPE_CHECKING:
    from rich.console import Console

BAR = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=None),
    TextColumn("{task.percentage:>3.0f}%"),
    TextColumn("{task.fields[words]}"),
)
"""Columns of a bar whose task has `words`."""


def make_bar(*columns: ProgressColumn, console: Console | None = None) -> Progress:
    """For `with`: progress on standard error, gone when it ends; nothing where there is no terminal."""
    console = console or make_console(sys.stderr)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
