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
        bool, typer.Option("--fence", help="Have engines open it again before they go on.")
    ] = False,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Begin a new epoch of a namespace: none of its blocks is found any more, on any node.

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
        f"namespace {chosen.hex()} of tenant {tenant} is in epoch {epoch}: no node finds what was stored "
        f"before; its memory is freed in the background"
    )
    if fence:
        print("engines that have it open find and store nothing until they open it again")
    else:
        print("engines that have it open go on in the new epoch")
