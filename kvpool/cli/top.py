"""`kvpool top`: shows the activity of all nodes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, Session, asks, option


@asks(panel=OPERATORS)
def top(
    at: Session,
    once: Annotated[bool, option("Print once and exit.", "--once")] = False,
    every_s: Annotated[
        float, option("Seconds between updates.", "--every-s", min=0.2, max=60.0)
    ] = 1.0,
) -> None:
    """Show the activity of all nodes: usage, puts, reads and pulls a second, hits by node and namespace, leases, jobs.

    q or Ctrl-C ends it. Without a terminal, and with --json, it prints once.

    Example: kvpool top

    Example: kvpool top --once --json
    """
    from kvpool.cli.render.top import once as look_once
    from kvpool.cli.render.top import plain, run, view

    if at.as_json or once or not sys.stdout.isatty():
        watch = look_once(at.client, every_s)
        at.show(plain(watch), [view(watch)])
        return
    try:
        run(at.client, every_s)
    except KeyboardInterrupt:
        raise typer.Exit(base.EXIT_INTERRUPTED) from None
