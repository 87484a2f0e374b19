"""`kvpool nodes`: lists the nodes of the cluster."""

from __future__ import annotations

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, Socket, Tenant, app


@app.command(rich_help_panel=OPERATORS)
def nodes(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show the nodes of the cluster, as seen by this node.

    Example: kvpool nodes
    """
    from kvpool.cli.render.cluster import show_nodes

    with base.client_of(socket, tenant) as client:
        cluster = client.cluster()
    if as_json:
        base.print_json(cluster)
    else:
        show_nodes(cluster)
