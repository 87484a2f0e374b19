"""`kvpool clear`: empties a namespace."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import (
    OPERATORS,
    AsJson,
    Digest,
    Socket,
    Tenant,
    Yes,
    app,
    complain_of,
    named_nodes,
)


@app.command(rich_help_panel=OPERATORS)
def clear(
    digest: Digest,
    fence: Annotated[
        bool, typer.Option("--fence", help="Require engines to open it again before they continue.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be lost; change nothing.")
    ] = False,
    yes: Yes = False,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Start a new epoch of a namespace: all its blocks become misses, on all nodes. It asks for confirmation.

    Example: kvpool clear 3fa9 --dry-run

    Example: kvpool clear 3fa9 --fence --yes
    """
    from kvpool.cli.render.cluster import holdings, show_holdings

    with base.client_of(socket, tenant) as client:
        chosen = base.resolve(client, tenant, digest)
        if dry_run:
            rows, silent = holdings(client, named_nodes(client, None), tenant, chosen.hex())
            if as_json:
                base.print_json({"namespace": chosen.hex(), "nodes": rows, "failures": silent})
            else:
                show_holdings(rows, f"would become misses: namespace {chosen.hex()}")
            complain_of([f"{name}: {why}" for name, why in silent.items()])
            return
        base.confirm(
            f"Make all blocks of namespace {chosen.hex()} of tenant {tenant} misses, on all nodes?",
            socket,
            yes=yes,
        )
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
