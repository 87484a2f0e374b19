"""`kvpool status`: what a node holds and does."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, AsJson, Socket, Tenant, app
from kvpool.errors import InvalidRequest


@app.command()
def status(
    node: Annotated[
        str, typer.Option(help="Of this node of the cluster, not of this one.", metavar="NAME")
    ] = "",
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print nothing: the exit status says how it stands."),
    ] = False,
) -> None:
    """Show what a node holds and does. Exit status 1 when it does not serve, 3 when no daemon answers.

    A node that is joining, being drained, or taken for dead by others does not serve; one that has lost
    sight of etcd does.

    Example: kvpool status --tenant research

    Example: kvpool status --quiet
    """
    from kvpool.cli.render.node import not_serving, show
    from kvpool.wire import operator as operator_wire

    with base.client_of(socket, tenant) as client:
        stats = client.ask_node(operator_wire.Inspect(), node=node) if node else client.stats()
        names = {} if as_json or quiet else base.node_names(client)
    if tenant not in stats["tenants"]:
        raise InvalidRequest(f"node {stats['node']} has no tenant {tenant}: its configuration says")
    if as_json:
        base.print_json(stats)
    elif not quiet:
        show(stats, tenant, names)
    if why := not_serving(stats):
        if not quiet:
            base.complain(why)
        raise typer.Exit(EXIT_ERROR)
