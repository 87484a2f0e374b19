"""`kvpool bench`: measures this node's daemon, and how fast blocks travel from another node into it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AsJson, Socket, TenantHere, app

LOCAL = "local"
Seed = Annotated[int, typer.Option(help="Seed for keys and bytes; 0: a new one each time.")]


class _BenchGroup(base.CommandsWithUsual):
    """`kvpool bench --size 1GiB` is `kvpool bench local --size 1GiB`."""

    usual = LOCAL


bench_app = typer.Typer(cls=_BenchGroup, pretty_exceptions_enable=False)
app.add_typer(
    bench_app,
    name="bench",
    help="Measure this node's daemon (`local`, which may be left out), or pulls from another node (`transfer`).",
    rich_help_panel=OPERATORS,
)


@bench_app.command(LOCAL)
def bench(
    block_size: Annotated[str, typer.Option(help="Size of one block.", metavar="SIZE")] = "64KiB",
    size: Annotated[
        str,
        typer.Option(
            help="Size of all blocks; at most a quarter of the tenant's memory is used.",
            metavar="SIZE",
        ),
    ] = "64MiB",
    seed: Seed = 0,
    socket: Socket = None,
    tenant: TenantHere = "default",
    as_json: AsJson = False,
) -> None:
    """Measure put, match and get of this node's daemon, compared with copying in memory. `local` may be left out.

    Uses a namespace of its own and removes its blocks at the end. If the pool is full, other blocks are evicted,
    as for any put.

    Example: kvpool bench local --block-size 256KiB
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


@bench_app.command()
def transfer(
    node: Annotated[str, typer.Argument(help="The node to pull from.", metavar="NODE")],
    block_size: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of one block; may be repeated. Default: 4KiB, 64KiB, 1MiB and 4MiB.",
            metavar="SIZE",
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            help="Size of all blocks of one size; at most 4,096 of them, and a quarter of the tenant's memory at either "
            "node.",
            metavar="SIZE",
        ),
    ] = "64MiB",
    seed: Seed = 0,
    socket: Socket = None,
    tenant: TenantHere = "default",
    as_json: AsJson = False,
) -> None:
    """Measure how fast blocks travel from another node into this one, by which way, and at what price.

    Blocks of namespaces of its own are put here, brought to the other node (a job of kind warm there), removed here,
    and pulled back: many in one request, and one at a time. They are removed everywhere at the end, also after Ctrl-C;
    what is left of a measurement that was killed goes after ten minutes. If a pool is full, other blocks are evicted,
    as for any put. For the other direction run it on the other node. Exit status 1 if blocks did not match their
    checksums.

    Example: kvpool bench transfer host-7

    Example: kvpool bench transfer host-7 --block-size 1MiB --size 1GiB
    """
    import secrets

    from kvpool.cli.render.bench_transfer import measure
    from kvpool.cli.render.naming import size as size_of
    from kvpool.cli.render.transfer_report import BLOCK_SIZES, show, trouble

    wanted = [size_of(each) for each in block_size] if block_size else list(BLOCK_SIZES)
    base.only_here("bench transfer", socket)
    with base.daemon_client(socket, tenant) as client:
        found = measure(client, node, wanted, size_of(size), seed=seed or secrets.randbits(63))
    if as_json:
        base.print_json(found)
    else:
        show(found)
    if why := trouble(found):
        base.complain(why)
        raise typer.Exit(EXIT_ERROR)
