"""`kvpool move`: moves a namespace's blocks from one node to another."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, Digest, Socket, Tenant, app
from kvpool.cli.job_runs import DryRun, Wait, run_job
from kvpool.errors import InvalidRequest


@app.command(rich_help_panel=OPERATORS)
def move(
    digest: Digest,
    source: Annotated[str, typer.Option("--from", help="The source node.", metavar="NAME")],
    target: Annotated[str, typer.Option("--to", help="The destination node.", metavar="NAME")],
    dry_run: DryRun = False,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Move a node's blocks of a namespace, in memory and on disks, into another node's memory.

    Example: kvpool move 3fa9 --from host-7 --to host-8
    """
    if source == target:
        raise InvalidRequest(f"--from and --to are both {source}: name two different nodes")
    with base.client_of(socket, tenant) as client:
        spec = {
            "kind": "warm",
            "namespace": base.resolve(client, tenant, digest).hex(),
            "source": source,
            "move": True,
        }
        run_job(client, "move", [target], spec, {}, dry_run=dry_run, wait=wait, as_json=as_json)
