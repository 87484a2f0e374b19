"""Completion scripts for shells; typer's own, which ask the program itself for what may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from typer.completion import (  # type: ignore[attr-defined]
    completion_init,
    get_completion_script,
    install,
)

from kvpool.errors import InvalidRequest

PROGRAM = "kvpool"
COMPLETE = "_KVPOOL_COMPLETE"
"""The variable in which a shell asks what may come."""


def prepare() -> None:
    """Before the command line is read, where a shell asks: typer knows its own scripts then."""
    completion_init()


def script(shell: str) -> str:
    """shell: bash, zsh or fish."""
    return str(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE, shell=shell))


def write(shell: str) -> Path:
    """Into the user's home folder, and have the shell read it. Raises `InvalidRequest` where that is not possible."""
    try:
        _, path = install(shell=shell, prog_name=PROGRAM, complete_var=COMPLETE)
    except OSError as error:
        raise InvalidRequest(
            f"cannot write to {error.filename}: {error.strerror}; `kvpool completion {shell}` prints it"
        ) from None
    return Path(path)


def present_shell(known: Sequence[str], environ: Mapping[str, str]) -> str:
    """The user's shell. Raises `InvalidRequest` for one that is not known."""
    name = PurePath(environ.get("SHELL", "")).name
    if name not in known:
        raise InvalidRequest(f"SHELL names none of {', '.join(known)}: name one of them")
    return name
