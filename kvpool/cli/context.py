"""`kvpool context`: the clusters that commands speak to over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, app

context = typer.Typer(
    cls=base.Commands,
    help="Contexts: clusters that commands speak to over HTTP, with a token: set, use, list, rm.",
    no_args_is_help=True,
)
app.add_typer(context, name="context", rich_help_panel=OPERATORS)
ContextName = Annotated[str, typer.Argument(help="A context's name.", metavar="NAME")]


@context.command("set")
def context_set(
    name: ContextName,
    url: Annotated[
        str, typer.Option(help="Of a gateway of the cluster: https://HOST:PORT.", metavar="URL")
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of mode 0600 with the token that `kvpool token` printed; without one it is read from "
            "KVPOOL_GATEWAY_TOKEN.",
            metavar="FILE",
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            help="Certificates of the authority to trust, instead of those of this machine.",
            metavar="FILE",
        ),
    ] = None,
    tenant: Annotated[
        str, typer.Option(help="The tenant of commands that name none.", metavar="NAME")
    ] = "",
    insecure_http: Annotated[
        bool,
        typer.Option(
            "--insecure-http",
            help="Accept http:// to another machine: the token and all answers can be read on the way.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a context, or replace the one of that name. Nothing is sent.

    Example: kvpool context set prod --url https://node-a.example.org:7071 --token-file prod.token --ca ca.pem
    """
    from kvpool.cli.render import contexts as c

    path = c.path_of(os.environ)
    made = c.Context(
        name, url.rstrip("/"), c.absolute(token_file), c.absolute(ca), tenant, insecure_http
    )
    c.write(path, c.changed(c.read(path), made))
    if as_json:
        base.print_json(made)
    else:
        print(f"{made.where} is set; `kvpool context use {name}` makes it the current one")


@context.command("use")
def context_use(
    name: Annotated[
        str,
        typer.Argument(help="A context's name; local: this machine's daemon.", metavar="NAME"),
    ],
    as_json: AsJson = False,
) -> None:
    """Make a context the current one: commands speak to it, unless --context, KVPOOL_CONTEXT or --socket says otherwise.

    Example: kvpool context use prod
    """
    from kvpool.cli.render import contexts as c

    path = c.path_of(os.environ)
    c.write(path, c.used(c.read(path), name))
    if as_json:
        base.print_json({"current": name})
    else:
        print(f"commands speak to {'this machine' if name == c.LOCAL else name} from now on")


@context.command("list")
def context_list(as_json: AsJson = False) -> None:
    """List the contexts; a star marks the one that commands speak to now.

    Example: kvpool context list
    """
    from rich.markup import escape

    from kvpool.cli.render import contexts as c
    from kvpool.cli.render.text import make_console, make_table

    found = c.read(c.path_of(os.environ))
    chosen = base.chosen_context(None)
    current = c.LOCAL if chosen is None else chosen.name
    known = [c.one(found, name, "list") for name in sorted(found.context)]
    if as_json:
        base.print_json({"current": current, "items": known})
        return
    table = make_table("", "  context", "url", "token", "tenant")
    rows = [(c.LOCAL, "this machine's daemon", "", "")]
    rows += [(x.name, x.url, x.token_file or "KVPOOL_GATEWAY_TOKEN", x.tenant) for x in known]
    for name, *cells in rows:
        table.add_row(f"{'*' if name == current else ' '} {name}", *map(escape, cells))
    for column in table.columns:
        column.overflow = "fold"
    make_console().print(table)


@context.command("rm")
def context_rm(name: ContextName, as_json: AsJson = False) -> None:
    """Remove a context that is not the current one. Its token's file stays.

    Example: kvpool context rm staging
    """
    from kvpool.cli.render import contexts as c

    path = c.path_of(os.environ)
    c.write(path, c.without(c.read(path), name))
    if as_json:
        base.print_json({"removed": name})
    else:
        print(f"context {name} is removed")
