"""`kvpool clear`: empties a namespace."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, Digest, Socket, Tenant, app


@app.command(rich_help_panel=OPERATORS)
def clear(
    digest: Digest,
    fence: Annotated[
        bool, typer.Option("--fence", help="Require engines to open it again before they continue.")
    ] = False,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Start a new epoch of a namespace: all its blocks become misses, on all nodes.

    Example: kvpool clear 3fa9 --fence
    """
    with base.client_of(socket, tenant) as client:
        chosen = base.resolve(client, tenant, digest)
        with base.in_doubt("namespaces"):
            epoch = client.clear(chosen, fence=fence)
    if as_json:
        base.print_json({"namespace": chosen.hex(), "epoch": epoch, "fence": fence})
        return
    print(
        f"namespace {chosen.hex()} of tenant {tenant} is in epoch {epoch}: older blocks are misses on all nodes; "
        "their memory is freed in the background"
    )
    if fence:
        print(
            "engines that have it open can neither read nor store blocks until they open it again"
        )
    else:
        print("engines that have it open continue in the new epoch")
