"""`kvpool config`: checks the configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, app

config = typer.Typer(help="The configuration.", no_args_is_help=True)
app.add_typer(config, name="config", rich_help_panel=OPERATORS)


@config.command("check")
def config_check(
    file: Annotated[
        Path | None,
        typer.Argument(help="A TOML file with settings; default: KVPOOL_CONFIG.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the configuration as `kvpool serve` does, and show each value and its source.

    Secrets are shown as ***. Exit status 1 on errors; the message names the remedy.

    Example: kvpool config check /etc/kvpool/kvpool.toml
    """
    from kvpool.cli.render.settings import effective, plain, show

    found = effective(None if file is None else str(file), os.environ)
    if as_json:
        base.print_json(plain(found))
    else:
        show(found)
