"""`kvpool locate`: shows which nodes hold blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, Session, asks


@asks(panel=OPERATORS)
def locate(
    at: Session,
    keys: Annotated[
        list[str], typer.Argument(help="Block keys, 32 hex digits each.", metavar="KEY...")
    ],
    namespace: Annotated[
        str | None,
        typer.Option(help="Only look in this namespace: its first hex digits.", metavar="DIGEST"),
    ] = None,
) -> None:
    """Show which nodes hold blocks. Exit status 1 if some were not found.

    Example: kvpool locate 00112233445566778899aabbccddeeff --namespace 3fa9
    """
    from kvpool.cli.render.cluster import not_found, replicas, show_replicas
    from kvpool.cli.render.jobs import nodes_of
    from kvpool.cli.render.naming import block_key

    wanted = list(dict.fromkeys(map(block_key, keys)))
    digest = at.resolve(namespace) if namespace else b""
    cluster = at.client.cluster()
    found, silent = replicas(at.client, wanted, digest, nodes_of(cluster))
    at.show(found, show_replicas, found)
    missing = not_found(wanted, found, cluster["directory"])
    for line in (*(f"{name}: {why}" for name, why in silent.items()), missing):
        if line:
            base.complain(line)
    if missing:
        raise typer.Exit(EXIT_ERROR)
