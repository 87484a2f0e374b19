"""`kvpool blocks`: lists the blocks of a node."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.base import OPERATORS, Session, asks


@asks(panel=OPERATORS)
def blocks(
    at: Session,
    digest: Annotated[
        str | None,
        typer.Argument(help="A namespace: its first hex digits; default: all.", metavar="DIGEST"),
    ] = None,
    node: Annotated[
        str,
        typer.Option(help="On this node of the cluster instead of the local one.", metavar="NAME"),
    ] = "",
    tier: Annotated[str, typer.Option(help="The tier: dram, ssd or device.")] = "dram",
    limit: Annotated[int, typer.Option(min=1, help="The most blocks to list.")] = 100,
    cursor: Annotated[
        str,
        typer.Option(
            help="Where to continue: the cursor printed by the previous call.", metavar="CURSOR"
        ),
    ] = "",
) -> None:
    """List the blocks of a node: key, depth in its chain, size, age, pin.

    Example: kvpool blocks 3fa9 --node host-7 --tier ssd --limit 20
    """
    from kvpool.cli.render.blocks import check_open, list_some, show_blocks

    chosen = at.resolve(digest) if digest else b""
    if chosen:
        check_open(at.client, node, at.tenant, chosen.hex())
    found, after = list_some(at.client, node, tier, chosen, cursor, limit)
    at.show({"items": found, "next": after}, show_blocks, found, after, of_one=bool(chosen))
