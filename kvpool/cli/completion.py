"""`kvpool completion`: for shells."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from kvpool.cli.base import app


class Shell(StrEnum):
    """Shells for which there is completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(
    shell: Annotated[Shell | None, typer.Argument(help="That of SHELL unless given.")] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Write it into the home folder, for new shells.")
    ] = False,
) -> None:
    """Print what makes a shell complete kvpool's commands and options with Tab, or install it.

    Example: kvpool completion bash > /etc/bash_completion.d/kvpool

    Example: kvpool completion zsh --install
    """
    from kvpool.cli.render.completion import PROGRAM, present_shell, script, write

    if shell is not None:
        chosen = shell.value
    else:
        chosen = present_shell([each.value for each in Shell], os.environ)
    if install:
        print(f"written to {write(chosen)}; a new {chosen} completes {PROGRAM}")
    else:
        print(script(chosen))
