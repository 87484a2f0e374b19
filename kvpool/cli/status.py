"""`kvpool status`: shows a node's contents and activity."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, AsJson, Socket, Tenant, app
from kvpool.errors import InvalidRequest


@app.command()
def status(
    node: Annotated[
        str,
        typer.Option(help="Of this node of the cluster instead of the local one.", metavar="NAME"),
    ] = "",
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print nothing; only set the exit status."),
    ] = False,
) -> None:
    """Show a node's contents and activity. Exit status 1 if it does not serve, 3 if no daemon answers.

    A node does not serve while it is joining, draining, or considered dead by others; it still serves if
    only etcd is unreachable.

    Example: kvpool status --tenant research

    Example: kvpool status --quiet
    """
    from kvpool.cli.render.node import not_serving, show

    with base.client_of(socket, tenant) as client:
        stats = client.inspect(node) if node else client.stats()
        names = {} if as_json or quiet else base.node_names(client)
    if tenant not in stats.tenants:
        raise InvalidRequest(
            f"node {stats.node} has no tenant {tenant}: check --tenant; the node's configuration lists its tenants"
        )
    if as_json:
        base.print_json(stats)
    elif not quiet:
        show(stats, tenant, names)
    if why := not_serving(stats):
        if not quiet:
            base.complain(why)
        raise typer.Exit(EXIT_ERROR)
