"""`kvpool namespaces`: lists the namespaces of the cluster."""

from __future__ import annotations

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, Socket, Tenant, app


@app.command(rich_help_panel=OPERATORS)
def namespaces(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show the namespaces of the cluster: epochs, settings, and their blocks and hit rates on this node.

    Example: kvpool namespaces
    """
    from kvpool.cli.render.cluster import namespace_rows, show_namespaces

    with base.client_of(socket, tenant) as client:
        rows = namespace_rows(client.cluster(), client.stats(), tenant)
    if as_json:
        base.print_json(rows)
    else:
        show_namespaces(rows)
