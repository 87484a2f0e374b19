"""How fast does this node's daemon take, find and give blocks, and how fast do they travel from another node?

    python bench/node.py local [--block-size 256KiB]
    python bench/node.py transfer NODE [--block-size 1MiB --size 1GiB]

Needs a daemon on this machine, and for `transfer` another one in its cluster.
"""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import node_local
import node_report
import node_transfer
import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, EXIT_INTERRUPTED, Session, asks
from kvpool.cli.naming import size as size_of
from kvpool.errors import KvpoolError
from kvpool.signals import unwind_on_ending

Seed = Annotated[int, typer.Option(help="Seed for keys and bytes; 0: a new one each time.")]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)


@asks(app, "local")
def local(
    at: Session,
    block_size: Annotated[str, typer.Option(help="Size of one block.", metavar="SIZE")] = "64KiB",
    size: Annotated[
        str,
        typer.Option(
            help="Size of all blocks; at most a quarter of the tenant's memory is used.",
            metavar="SIZE",
        ),
    ] = "64MiB",
    seed: Seed = 0,
) -> None:
    """Measure put, match and get of this node's daemon, compared with copying in memory.

    Uses a namespace of its own and removes its blocks at the end. If the pool is full, other blocks are evicted,
    as for any put.
    """
    nbytes = size_of(block_size)
    with (
        base.daemon_client(at.socket, at.tenant) as client,
        node_local.Bench(client, nbytes, size_of(size), seed=seed or secrets.randbits(63)) as bench,
    ):
        found = node_local.measure(bench)
    shown = {"block_bytes": nbytes, "cut": bench.cut, "measured": node_local.plain(found)}
    at.show(shown, node_local.view(found, nbytes, cut=bench.cut))


@asks(app, "transfer")
def transfer(
    at: Session,
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
) -> None:
    """Measure how fast blocks travel from another node into this one, by which way, and at what price.

    Blocks of namespaces of its own are put here, brought to the other node (a job of kind warm there), removed here,
    and pulled back: many in one request, and one at a time. They are removed everywhere at the end, also after Ctrl-C;
    what is left of a measurement that was killed goes after ten minutes. If a pool is full, other blocks are evicted,
    as for any put. For the other direction run it on the other node. Exit status 1 if blocks did not match their
    checksums.
    """
    wanted = [size_of(each) for each in block_size] if block_size else list(node_report.BLOCK_SIZES)
    with base.daemon_client(at.socket, at.tenant) as client:
        found = node_transfer.measure(
            client, node, wanted, size_of(size), seed=seed or secrets.randbits(63)
        )
    at.show(found, node_report.view(found))
    if why := node_report.trouble(found):
        base.complain(why)
        raise typer.Exit(EXIT_ERROR)


if __name__ == "__main__":
    try:
        unwind_on_ending()
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except KvpoolError as error:
        base.complain(str(error))
        sys.exit(base.exit_status(error))
