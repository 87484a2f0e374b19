"""`kvpool lookup`: shows how much of a prefix each node could provide."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import (
    EXIT_ERROR,
    OPERATORS,
    BlockKeys,
    Digest,
    KeysFile,
    Session,
    asks,
)
from kvpool.errors import InvalidRequest

LOOKUP_S = 2.0  # for the directory's answer


@asks(panel=OPERATORS)
def lookup(
    at: Session,
    digest: Digest,
    keys: BlockKeys = None,
    keys_file: KeysFile = None,
    why: Annotated[
        bool,
        typer.Option("--why", help="Show of each node why it lacks the first block that it lacks."),
    ] = False,
) -> None:
    """Show how much of a prefix each node could provide. Exit status 1 if no node has any of it.

    Example: kvpool lookup 3fa9 00112233445566778899aabbccddeeff

    Example: kvpool lookup 3fa9 --keys-file prompt.keys --why
    """
    from kvpool.cli.render.blocks import show_prefixes
    from kvpool.cli.render.misses import ask_why, show_why
    from kvpool.cli.render.naming import block_keys

    wanted = block_keys(keys or [], keys_file)
    if not wanted:
        raise InvalidRequest("give the keys of blocks in prefix order, or --keys-file FILE")
    chosen = at.resolve(digest)
    found = at.client.prefixes(chosen, wanted, wait_s=LOOKUP_S)
    told, silent = ask_why(at.client, at.tenant, chosen, wanted) if why else ({}, {})
    if at.as_json:
        rows = [
            {"node": name, "memory_blocks": memory, "blocks": both}
            for name, (memory, both) in found.items()
        ]
        reasons = {"why": told, "silent": silent} if why else {}
        base.print_json({"keys": len(wanted), "items": rows, **reasons})
    else:
        show_prefixes(found, len(wanted))
        show_why(told)
        for name, reason in silent.items():
            base.complain(f"{name}: {reason}")
    if not found:
        raise typer.Exit(EXIT_ERROR)
