"""`kvpool blocks`: lists the blocks of a node, and finds blocks in the cluster."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import (
    EXIT_ERROR,
    AnyNode,
    BlockKeys,
    Digest,
    KeysFile,
    OfNamespace,
    Session,
    argument,
    asks,
    option,
)
from kvpool.errors import InvalidRequest

LOOKUP_S = 2.0  # for the directory's answer

blocks = base.group("blocks", "Blocks: list those of a node, locate some, look up a prefix.")


@asks(blocks, "list")
def blocks_list(
    at: Session,
    digest: Annotated[
        str | None, argument("A namespace: its first hex digits; default: all.", metavar="DIGEST")
    ] = None,
    node: AnyNode = "",
    tier: Annotated[str, option("The tier: dram, ssd or device.")] = "dram",
    limit: Annotated[int, option("The most blocks to list.", min=1)] = 100,
    cursor: Annotated[
        str, option("Where to continue: the cursor printed by the previous call.", metavar="CURSOR")
    ] = "",
) -> None:
    """List the blocks of a node: key, depth in its chain, size, age, pin.

    Example: kvpool blocks list 3fa9 --node host-7 --tier ssd --limit 20
    """
    from kvpool.cli.asking import check_open, list_some
    from kvpool.cli.render.blocks import blocks_view

    chosen = at.resolve(digest) if digest else b""
    if chosen:
        check_open(at.client, node, at.tenant, chosen.hex())
    found, after = list_some(at.client, node, tier, chosen, cursor, limit)
    at.show({"items": found, "next": after}, blocks_view(found, after, of_one=bool(chosen)))


@asks(blocks, "locate")
def blocks_locate(
    at: Session,
    keys: Annotated[list[str], argument("Block keys, 32 hex digits each.", metavar="KEY...")],
    namespace: OfNamespace = None,
) -> None:
    """Show which nodes hold blocks. Exit status 1 if some were not found.

    Example: kvpool blocks locate 00112233445566778899aabbccddeeff --namespace 3fa9
    """
    from kvpool.cli.asking import nodes_of, replicas
    from kvpool.cli.naming import block_key
    from kvpool.cli.render.cluster import not_found, replicas_view

    wanted = list(dict.fromkeys(map(block_key, keys)))
    digest = at.resolve(namespace) if namespace else b""
    cluster = at.client.cluster()
    found, silent = replicas(at.client, wanted, digest, nodes_of(cluster))
    at.show(found, replicas_view(found))
    base.complain_of(silent, fatal=False)
    if missing := not_found(wanted, found, cluster["directory"]):
        raise base.Failed(missing)


@asks(blocks, "lookup")
def blocks_lookup(
    at: Session,
    digest: Digest,
    keys: BlockKeys = None,
    keys_file: KeysFile = None,
    why: Annotated[
        bool, option("Show of each node why it lacks the first block that it lacks.", "--why")
    ] = False,
) -> None:
    """Show how much of a prefix each node could provide. Exit status 1 if no node has any of it.

    Example: kvpool blocks lookup 3fa9 00112233445566778899aabbccddeeff

    Example: kvpool blocks lookup 3fa9 --keys-file prompt.keys --why
    """
    from kvpool.cli.asking import ask_why
    from kvpool.cli.naming import block_keys
    from kvpool.cli.render.blocks import prefixes_view
    from kvpool.cli.render.misses import why_view

    wanted = block_keys(keys or [], keys_file)
    if not wanted:
        raise InvalidRequest("give the keys of blocks in prefix order, or --keys-file FILE")
    chosen = at.resolve(digest)
    found = at.client.routing.prefixes(chosen, wanted, wait_s=LOOKUP_S)
    told, silent = ask_why(at.client, at.tenant, chosen, wanted) if why else ({}, {})
    rows = [
        {"node": name, "memory_blocks": memory, "blocks": both}
        for name, (memory, both) in found.items()
    ]
    reasons = {"why": told, "silent": silent} if why else {}
    at.show(
        {"keys": len(wanted), "items": rows, **reasons},
        chain(prefixes_view(found, len(wanted)), why_view(told)),
    )
    if not at.as_json:
        base.complain_of(silent, fatal=False)
    if not found:
        raise typer.Exit(EXIT_ERROR)
