"""What others wrote reaches no terminal as anything but text."""

from __future__ import annotations

import ast
import io
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.panel import Panel

import kvpool
from kvpool.cli import base
from kvpool.cli.render.text import PlainConsole, make_console, make_table
from kvpool.plain_text import plain
from kvpool.telemetry.logs import TextFormatter

if TYPE_CHECKING:
    import pytest

EVIL = "\x1b]0;pwned\x07\x1b[31mEVIL\x9b2J\x00\r\x7f\u202egnp.exe"


def test_what_a_terminal_would_obey_is_replaced() -> None:
    assert (
        plain(EVIL) == "\ufffd]0;pwned\ufffd\ufffd[31mEVIL\ufffd2J\ufffd\ufffd\ufffd\ufffdgnp.exe"
    )
    assert plain("größe\t名前 🙂\nline") == "größe\t名前 🙂\nline"


@given(st.text())
def test_nothing_else_is(text: str) -> None:
    shown = plain(text)
    assert len(shown) == len(text)
    for was, now in zip(text, shown, strict=True):
        assert now in (was, "�")
        assert now in "\t\n" or (ord(now) >= 32 and not 127 <= ord(now) < 160)


def printed(thing: Any, *, terminal: bool = True) -> str:
    out = io.StringIO()
    PlainConsole(file=out, force_terminal=terminal, width=100).print(thing)
    return out.getvalue()


def test_a_console_shows_texts_of_others_as_text_and_keeps_its_own_colours() -> None:
    table = make_table(EVIL, "name", ">n")
    table.add_row(EVIL, "1", style="red")
    for thing in (EVIL, table, Panel(EVIL, title=EVIL)):
        shown = printed(thing)
        assert "EVIL" in shown and "\ufffd" in shown
        for bad in ("\x1b]", "\x1b[31mEVIL", "\x07", "\x9b", "\x00", "\r", "\u202e"):
            assert bad not in shown
        assert "\x1b" not in printed(thing, terminal=False)
    assert "\x1b[31m" in printed(table), "the row's own style"


def test_live_displays_still_move_the_cursor() -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=40, height=10)
    with Live(EVIL, console=console, auto_refresh=False) as live:
        live.update("second", refresh=True)
    assert "\x1b[2K" in out.getvalue() and "\x1b]0" not in out.getvalue()


def test_errors_and_logs(capsys: pytest.CaptureFixture[str]) -> None:
    base.complain(EVIL)
    assert "\x1b" not in capsys.readouterr().err
    base.print_json({EVIL: EVIL})
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and json.loads(out) == {EVIL: EVIL}
    record = logging.LogRecord("kvpool", logging.WARNING, "f", 1, EVIL, None, None)
    record.engine = EVIL
    line = TextFormatter({}).format(record)
    for bad in ("\x1b", "\x07", "\x9b", "\x00", "\r", "\u202e"):
        assert bad not in line


def test_no_command_has_another_console() -> None:
    root = Path(kvpool.__file__).parent / "cli"
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"Console", "PlainConsole"}
    ]
    assert len(found) == 1 and found[0].startswith("render/text.py"), found
    assert isinstance(make_console(), PlainConsole)
