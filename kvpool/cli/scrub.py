"""`kvpool scrub`: verifies all blocks on disks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AsJson, Socket, Tenant, app
from kvpool.cli.job_runs import Wait, run_job


@app.command(rich_help_panel=OPERATORS)
def scrub(
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            help="Run as a job on this node; may be repeated. Default: on the local node, step by step.",
            metavar="NAME",
        ),
    ] = None,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Compare all blocks on nodes' disks with their checksums. Exit status 1 if some were damaged.

    Damaged blocks are dropped; engines compute them again.

    Example: kvpool scrub

    Example: kvpool scrub --node host-7 --no-wait
    """
    with base.client_of(socket, tenant) as client:
        if node or not wait:
            nodes = list(dict.fromkeys(node or [client.cluster()["node"]]))
            job = run_job(client, "scrub", nodes, {"kind": "scrub"}, {}, wait=wait, as_json=as_json)
            bad = job.sum("blocks") if wait else 0
        else:
            from kvpool.cli.render.tiers import scrub as run

            seen, bad = run(client)
            if as_json:
                base.print_json({"seen": seen, "bad": bad})
            else:
                print(
                    f"{seen:,} {'block' if seen == 1 else 'blocks'} seen, {bad:,} bad and dropped"
                )
    if bad:
        raise typer.Exit(EXIT_ERROR)
