"""Verbs about this machine: what it has, how it is configured, how fast it is."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvpool import __version__
from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AsJson, Socket, Tenant, app
from kvpool.errors import KvpoolError


@app.command(rich_help_panel=OPERATORS)
def doctor(
    path: Annotated[
        list[str] | None,
        typer.Option(help="A folder meant for tier ssd; may be repeated.", metavar="FOLDER"),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Look at what this machine has: RDMA, memory, huge pages, GPUs, disks; and how others are reached.

    Works without a daemon. Exit status 1 when something that is there cannot be used.

    Example: kvpool doctor --path /mnt/nvme0/kvpool
    """
    from kvpool.status.doctor import BAD, OK, Finding, examine, plain, routes, show

    findings = examine(path or ())
    pairs = []
    try:
        with base.client_of(socket, tenant) as client:
            pairs = routes(client.cluster())
    except KvpoolError as error:
        findings.append(Finding("other nodes", OK, f"not known: {error}"))
    if as_json:
        base.print_json(plain(findings, pairs))
    else:
        show(findings, pairs)
    if any(finding.state == BAD for finding in findings):
        raise typer.Exit(EXIT_ERROR)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version.

    Example: kvpool version
    """
    if as_json:
        base.print_json({"version": __version__})
    else:
        print(__version__)


config = typer.Typer(help="The configuration.", no_args_is_help=True)
app.add_typer(config, name="config", rich_help_panel=OPERATORS)


@config.command("check")
def config_check(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file with settings; KVPOOL_CONFIG unless given.", metavar="FILE"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the configuration as `kvpool serve` does, and show what comes of it and where from.

    Secrets are shown as ***. Exit status 1 when something is wrong; the message names the remedy.

    Example: kvpool config check /etc/kvpool/kvpool.toml
    """
    from kvpool.status.settings import effective, plain, show

    found = effective(None if file is None else str(file), os.environ)
    if as_json:
        base.print_json(plain(found))
    else:
        show(found)


@app.command(rich_help_panel=OPERATORS)
def bench(
    block_size: Annotated[str, typer.Option(help="Of one block.", metavar="SIZE")] = "64KiB",
    size: Annotated[
        str,
        typer.Option(
            help="Of all blocks; at most a quarter of the tenant's memory is taken.", metavar="SIZE"
        ),
    ] = "64MiB",
    seed: Annotated[int, typer.Option(help="Of keys and bytes; 0: another one each time.")] = 0,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Measure how fast this node's daemon takes, finds and gives blocks, beside copying in memory.

    It uses a namespace of its own and gives its blocks up in the end. A pool that is full gives up other
    blocks for them, as for any that are put.

    Example: kvpool bench --block-size 256KiB
    """
    import secrets

    from kvpool.status.bench import Bench, measure, show
    from kvpool.status.bench import plain as plain_rows
    from kvpool.status.naming import size as size_of

    nbytes = size_of(block_size)
    with (
        base.client_of(socket, tenant) as client,
        Bench(client, nbytes, size_of(size), seed=seed or secrets.randbits(63)) as bench,
    ):
        found = measure(bench)
    if as_json:
        base.print_json({"block_bytes": nbytes, "measured": plain_rows(found)})
    else:
        show(found, nbytes)


class Shell(StrEnum):
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
    from kvpool.status.completion import PROGRAM, present_shell, script, write

    if shell is not None:
        chosen = shell.value
    else:
        chosen = present_shell([each.value for each in Shell], os.environ)
    if install:
        print(f"written to {write(chosen)}; a new {chosen} completes {PROGRAM}")
    else:
        print(script(chosen))
