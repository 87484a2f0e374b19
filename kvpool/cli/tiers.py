"""`kvpool tiers`: shows where this node keeps blocks."""

from __future__ import annotations

from kvpool.cli import base
from kvpool.cli.base import AsJson, Socket, Tenant, app


@app.command()
def tiers(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show this node's tiers: engines' own caches, memory and disks, their usage and health.

    Example: kvpool tiers
    """
    from kvpool.cli.render.tiers import show_tiers, tier_rows

    with base.client_of(socket, tenant) as client:
        stats = client.stats()
    if as_json:
        base.print_json(tier_rows(stats, tenant))
    else:
        show_tiers(stats, tenant)
