"""What a command would print, for tests of its texts and tables."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType

from kvpool.cli.render.text import print_parts


def printed(parts: Iterable[RenderableType], width: int = 80) -> str:
    """These texts and tables, as they are printed to a terminal of this width without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    print_parts(parts, console)
    return out.getvalue()
