"""`kvpool locate`: shows which nodes hold blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AsJson, Socket, Tenant, app


@app.command(rich_help_panel=OPERATORS)
def locate(
    keys: Annotated[
        list[str], typer.Argument(help="Block keys, 32 hex digits each.", metavar="KEY...")
    ],
    namespace: Annotated[
        str | None,
        typer.Option(help="Only look in this namespace: its first hex digits.", metavar="DIGEST"),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Show which nodes hold blocks. Exit status 1 if some were not found.

    Example: kvpool locate 00112233445566778899aabbccddeeff --namespace 3fa9
    """
    from kvpool.cli.render.cluster import not_found, replicas, show_replicas
    from kvpool.cli.render.jobs import nodes_of
    from kvpool.cli.render.naming import block_key

    wanted = list(dict.fromkeys(map(block_key, keys)))
    with base.client_of(socket, tenant) as client:
        digest = base.resolve(client, tenant, namespace) if namespace else b""
        cluster = client.cluster()
        found, silent = replicas(client, wanted, digest, nodes_of(cluster))
    if as_json:
        base.print_json(found)
    else:
        show_replicas(found)
    missing = not_found(wanted, found, cluster["directory"])
    for line in (*(f"{name}: {why}" for name, why in silent.items()), missing):
        if line:
            base.complain(line)
    if missing:
        raise typer.Exit(EXIT_ERROR)
