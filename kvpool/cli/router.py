"""`kvpool router`: the HTTP front, in the foreground."""

from __future__ import annotations

import os
from typing import Annotated

import typer  # noqa: TC002  (read from the hints)

from kvpool import __version__
from kvpool.cli import base
from kvpool.cli.base import app, option
from kvpool.cli.settings_command import RouterCommand
from kvpool.cli.supervisor import tell_ready


@app.command(cls=RouterCommand)
def router(
    ctx: typer.Context,
    config: Annotated[str | None, option("TOML file with settings.", metavar="FILE")] = None,
    verbose: Annotated[bool, option("Log more: --log-level info.", "--verbose", "-v")] = False,
) -> None:
    """Run an OpenAI-compatible router in front of engines, until SIGTERM.

    SIGINT and SIGHUP end it in the same way. Started by nohup, it goes on after its terminal is closed.

    Example: kvpool router --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001
    """
    from kvpool.router.command import run
    from kvpool.router.config import load
    from kvpool.telemetry import logs

    flags = {"log_level": "info"} | ctx.obj if verbose else ctx.obj
    settings, secrets = load(file=config, flags=flags)
    logs.setup(settings.log_level, settings.log_format)
    with base.in_foreground():
        run(settings, secrets, _say_router_ready)


def _say_router_ready(url: str, engines: int) -> None:
    """Programs parse this line: keep its beginning and its end unchanged."""
    what = "engine" if engines == 1 else "engines"
    print(f"kvpool {__version__} ready: router at {url}, {engines} {what}", flush=True)
    tell_ready(os.environ)
