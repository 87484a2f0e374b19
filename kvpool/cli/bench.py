"""`kvpool bench`: measures this node's daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, Socket, TenantHere, app


@app.command(rich_help_panel=OPERATORS)
def bench(
    block_size: Annotated[str, typer.Option(help="Size of one block.", metavar="SIZE")] = "64KiB",
    size: Annotated[
        str,
        typer.Option(
            help="Size of all blocks; at most a quarter of the tenant's memory is used.",
            metavar="SIZE",
        ),
    ] = "64MiB",
    seed: Annotated[int, typer.Option(help="Seed for keys and bytes; 0: a new one each time.")] = 0,
    socket: Socket = None,
    tenant: TenantHere = "default",
    as_json: AsJson = False,
) -> None:
    """Measure put, match and get of this node's daemon, compared with copying in memory.

    Uses a namespace of its own and removes its blocks at the end. If the pool is full, other blocks are evicted,
    as for any put.

    Example: kvpool bench --block-size 256KiB
    """
    import secrets

    from kvpool.cli.render.bench import Bench, measure, show
    from kvpool.cli.render.bench import plain as plain_rows
    from kvpool.cli.render.naming import size as size_of

    nbytes = size_of(block_size)
    base.only_here("bench", socket)
    with (
        base.daemon_client(socket, tenant) as client,
        Bench(client, nbytes, size_of(size), seed=seed or secrets.randbits(63)) as bench,
    ):
        found = measure(bench)
    if as_json:
        base.print_json({"block_bytes": nbytes, "cut": bench.cut, "measured": plain_rows(found)})
    else:
        show(found, nbytes, cut=bench.cut)
