"""Tables and figures for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvpool.plain_text import plain
from kvpool.wire.answers import columns_of

if TYPE_CHECKING:
    from msgspec import Struct

Column = str | Callable[[Any], str | Text]
Part = RenderableType
Parts = Iterator[Part]
"""What a command prints, one below the other: texts and tables, and an empty text for an empty line."""

FIELDS_SHOWN = 3
FIELD_LENGTH_MAX = 32
PIPED_WIDTH = 240  # whoever filters lines wants a row to be one of them
DIGEST_SHOWN = 12
BELOW_INDENT = 4
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class PlainConsole(Console):
    """A console that passes no escape sequence of others on: see `kvpool.plain_text`. Its own are none of its text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


def make_console(file: IO[str] | None = None, *, quiet: bool = False) -> Console:
    """Standard output, or a file: as wide as the terminal, or wide enough for a row where there is none."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ or file is not None
    width = None if narrow else PIPED_WIDTH
    return PlainConsole(file=file, highlight=False, width=width, quiet=quiet)


class Command(Text):
    """A line to copy: it is not broken, however narrow the terminal is."""

    __slots__ = ()


def print_parts(parts: Iterable[RenderableType], console: Console | None = None) -> None:
    """Print tables and texts, one below the other, on standard output or a console."""
    console = console or make_console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Command))


def make_table(title: str, *columns: str) -> Table:
    """Columns whose name begins with > are numbers."""
    table = Table(
        title=escape(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        show_header=any(columns),
        header_style="dim",
    )
    for name in columns:
        table.add_column(
            escape(name.removeprefix(">")), justify="right" if name.startswith(">") else "left"
        )
    return table


@dataclass(frozen=True)
class Rows:
    """A table that fits the width it is shown in. No text is cut off.

    heads: of the columns; those that begin with > are to the right. wraps: heads of columns that may continue in a next
    line; None: all. spare: heads of columns that are left out where not all fit, the first one first. below: the
    head of the column, if any, that is shown below its row where not all fit.
    """

    title: str
    heads: Sequence[str]
    cells: Sequence[Sequence[str | Text]]
    wraps: Collection[str] | None = None
    spare: Collection[str] = ()
    below: Collection[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [head.removeprefix(">") for head in self.heads]
        shown = list(range(len(names)))
        below = None
        for name in (*self.below, *self.spare):
            if self._table(shown).__rich_measure__(console, options).maximum <= options.max_width:
                break
            shown.remove(at := names.index(name))
            below = at if name in self.below else below
        table = self._table(shown)
        if below is None:
            yield table
            return
        lines = console.render_lines(table, options, pad=False)
        for row, line in enumerate(lines, len(self.cells) - len(lines)):
            yield from line
            yield Segment.line()
            if row >= 0:
                yield Padding(self.cells[row][below], (0, 0, 0, BELOW_INDENT))

    def _table(self, shown: Sequence[int]) -> Table:
        table = make_table(self.title, *(self.heads[at] for at in shown))
        for column in table.columns:
            column.no_wrap = self.wraps is not None and column.header not in self.wraps
            column.overflow = "fold"
        for row in self.cells:
            table.add_row(*(row[at] for at in shown))
        return table


def rows_table(
    title: str,
    rows: Iterable[Any],
    columns: Mapping[str, Column] | type[Struct],
    *,
    wraps: Collection[str] | None = None,
    spare: Collection[str] = (),
    below: Collection[str] = (),
) -> Rows:
    """Return a table of structs or mappings.

    columns: by their headings what is in them: the name of a field, or a function of a row; or a struct whose fields
    declare their columns. Numbers, and functions whose heading begins with >, are to the right. The others are as of
    `Rows`.
    """
    if isinstance(columns, type):
        columns = columns_of(columns)
    cells = [[_cell(row, column) for column in columns.values()] for row in rows]
    heads = [
        f">{head}" if any(isinstance(row[at], Number) for row in cells) else head
        for at, head in enumerate(columns)
    ]
    return Rows(title, heads, cells, wraps, spare, below)


class Number(str):
    """The text of a number."""

    __slots__ = ()


def _cell(row: Any, column: Column) -> str | Text:
    if not isinstance(column, str):
        found = column(row)
        return escape(found) if type(found) is str else found
    value = row[column] if isinstance(row, Mapping) else getattr(row, column)
    if isinstance(value, (int, float)):
        return Number(number_text(column, value))
    if column in {"namespace", "digest"}:
        value = value[:DIGEST_SHOWN]
    return escape("" if value is None else str(value))


def number_text(name: str, value: float) -> str:
    """A number as its field's name says what it is: bytes, `_s` for seconds, or a count."""
    if "bytes" in name:
        return size_text(value)
    return duration(value) if name.endswith("_s") else f"{value:,}"


def cluster_title(cluster: str, *more: str) -> Text:
    """The first line of what is shown of a cluster."""
    return Text(", ".join([f"cluster {cluster}", *more]), style="bold")


def facts(fields: Mapping[str, Any]) -> Iterator[str]:
    """The first few facts of a namespace's record, those that say most to a reader first."""
    names = sorted(
        fields.keys() - {"format_version"},
        key=lambda name: (name != "model", name != "tp_size", name),
    )
    for name in names[:FIELDS_SHOWN]:
        text = str(fields[name])
        if len(text) > FIELD_LENGTH_MAX:
            text = f"{text[: FIELD_LENGTH_MAX - 1]}…"
        yield f"{name}={text}"
    if len(names) > FIELDS_SHOWN:
        yield f"and {len(names) - FIELDS_SHOWN} more"


def count(n: int, what: str) -> str:
    """A number with its noun, in singular or plural."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def size_text(nbytes: float) -> str:
    """Bytes for people: at most four digits, binary units."""
    return f"{_in_unit(nbytes, unit := _unit(nbytes))} {_UNITS[unit]}"


def used_text(used: int, capacity: int) -> str:
    """How much of something is in use, both in one unit: 1.2/64 GiB."""
    unit = _unit(capacity)
    return f"{_in_unit(used, unit)}/{_in_unit(capacity, unit)} {_UNITS[unit]}"


def _unit(nbytes: float) -> int:
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return unit


def _in_unit(nbytes: float, unit: int) -> str:
    value = nbytes / 1024**unit
    digits = 0 if unit == 0 or value == int(value) or value >= 100 else 1
    return f"{value:.{digits}f}"


def period_text(seconds: float) -> str:
    """A time as operators type it, in the largest unit of which it is a whole number: 36h."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.15g}s"


def duration(seconds: float) -> str:
    """A time for people, in its two largest units."""
    left = int(seconds)
    if left < 60:
        return f"{left} s"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    words: list[str] = []
    for name, length in units:
        n, left = divmod(left, length)
        if n or words:
            words.append(f"{n} {name}")
    return " ".join(words[:2])
