"""`kvpool clear`: empties a namespace."""

from __future__ import annotations

from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import (
    OPERATORS,
    Digest,
    DryRun,
    Session,
    Yes,
    asks,
    complain_of,
    named_nodes,
    option,
)


@asks(panel=OPERATORS)
def clear(
    at: Session,
    digest: Digest,
    fence: Annotated[
        bool, option("Require engines to open it again before they continue.", "--fence")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Start a new epoch of a namespace: all its blocks become misses, on all nodes. It asks for confirmation.

    Example: kvpool clear 3fa9 --dry-run

    Example: kvpool clear 3fa9 --fence --yes
    """
    from kvpool.cli.asking import holdings
    from kvpool.cli.render.cluster import holdings_view

    chosen = at.resolve(digest)
    if dry_run:
        rows, silent = holdings(at.client, named_nodes(at.client, None), at.tenant, chosen.hex())
        at.show(
            {"namespace": chosen.hex(), "nodes": rows, "failures": silent},
            holdings_view(rows, f"would become misses: namespace {chosen.hex()}"),
        )
        complain_of(silent)
        return
    base.confirm(
        f"Make all blocks of namespace {chosen.hex()} of tenant {at.tenant} misses, on all nodes?",
        at.socket,
        yes=yes,
    )
    with base.in_doubt("namespaces"):
        epoch = at.client.clear(chosen, fence=fence)
    after = "can neither read nor store blocks until they open it again"
    at.show(
        {"namespace": chosen.hex(), "epoch": epoch, "fence": fence},
        f"namespace {chosen.hex()} of tenant {at.tenant} is in epoch {epoch}: older blocks are misses on all nodes; "
        "their memory is freed in the background\n"
        f"engines that have it open {after if fence else 'continue in the new epoch'}",
    )
