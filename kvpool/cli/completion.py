"""`kvpool completion`: completion for shells."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from kvpool.cli.base import app


class Shell(StrEnum):
    """Supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(
    shell: Annotated[Shell | None, typer.Argument(help="Default: the shell in SHELL.")] = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="Write the script into the home folder, for new shells."),
    ] = False,
) -> None:
    """Print the script that completes kvpool's commands and options with Tab, or install it.

    Example: kvpool completion bash > /etc/bash_completion.d/kvpool

    Example: kvpool completion zsh --install
    """
    from kvpool.cli.render.completion import PROGRAM, present_shell, script, write

    if shell is not None:
        chosen = shell.value
    else:
        chosen = present_shell([each.value for each in Shell], os.environ)
    if install:
        print(f"written to {write(chosen)}; new {chosen} shells complete {PROGRAM}")
    else:
        print(script(chosen))
