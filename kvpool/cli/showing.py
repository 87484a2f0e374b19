"""Verbs that only look: what nodes hold, where blocks are, how the cluster stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AsJson, Digest, Socket, Tenant, app
from kvpool.errors import InvalidRequest

LOOKUP_S = 2.0  # for the directory's answer


@app.command()
def status(
    node: Annotated[
        str, typer.Option(help="Of this node of the cluster, not of this one.", metavar="NAME")
    ] = "",
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print nothing: the exit status says how it stands."),
    ] = False,
) -> None:
    """Show what a node holds and does. Exit status 1 when it does not serve, 3 when no daemon answers.

    A node that is joining, being drained, or taken for dead by others does not serve; one that has lost
    sight of etcd does.

    Example: kvpool status --tenant research

    Example: kvpool status --quiet
    """
    from kvpool import wire
    from kvpool.status.node import not_serving, show

    with base.client_of(socket, tenant) as client:
        stats = client.ask_node(wire.Inspect(), node=node) if node else client.stats()
        names = {} if as_json or quiet else base.node_names(client)
    if tenant not in stats["tenants"]:
        raise InvalidRequest(f"node {stats['node']} has no tenant {tenant}: its configuration says")
    if as_json:
        base.print_json(stats)
    elif not quiet:
        show(stats, tenant, names)
    if why := not_serving(stats):
        if not quiet:
            base.complain(why)
        raise typer.Exit(EXIT_ERROR)


@app.command()
def tiers(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show where this node keeps blocks: engines' own caches, memory and disks, how full, how well.

    Example: kvpool tiers
    """
    from kvpool.status.tiers import show_tiers, tier_rows

    with base.client_of(socket, tenant) as client:
        stats = client.stats()
    if as_json:
        base.print_json(tier_rows(stats, tenant))
    else:
        show_tiers(stats, tenant)


@app.command(rich_help_panel=OPERATORS)
def nodes(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show the nodes of the cluster, as this one sees them.

    Example: kvpool nodes
    """
    from kvpool.status.cluster import show_nodes

    with base.client_of(socket, tenant) as client:
        cluster = client.cluster()
    if as_json:
        base.print_json(cluster)
    else:
        show_nodes(cluster)


@app.command(rich_help_panel=OPERATORS)
def namespaces(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show the namespaces of the cluster: epochs, settings, and what this node holds of them.

    Example: kvpool namespaces
    """
    from kvpool.status.cluster import namespace_rows, show_namespaces

    with base.client_of(socket, tenant) as client:
        rows = namespace_rows(client.cluster(), client.stats(), tenant)
    if as_json:
        base.print_json(rows)
    else:
        show_namespaces(rows)


@app.command(rich_help_panel=OPERATORS)
def locate(
    keys: Annotated[
        list[str], typer.Argument(help="Block keys, 32 hex digits each.", metavar="KEY...")
    ],
    namespace: Annotated[
        str | None,
        typer.Option(help="Look in this one only: its first hex digits.", metavar="DIGEST"),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Show which nodes hold blocks. Exit status 1 when some were not found.

    Example: kvpool locate 00112233445566778899aabbccddeeff --namespace 3fa9
    """
    from kvpool.status.cluster import not_found, replicas, show_replicas
    from kvpool.status.jobs import nodes_of
    from kvpool.status.naming import block_key

    wanted = list(dict.fromkeys(map(block_key, keys)))
    with base.client_of(socket, tenant) as client:
        digest = base.resolve(client, tenant, namespace) if namespace else b""
        cluster = client.cluster()
        found, silent = replicas(client, wanted, digest, nodes_of(cluster))
    if as_json:
        base.print_json(found)
    else:
        show_replicas(found)
    missing = not_found(wanted, found, cluster["directory"])
    for line in (*(f"{name}: {why}" for name, why in silent.items()), missing):
        if line:
            base.complain(line)
    if missing:
        raise typer.Exit(EXIT_ERROR)


@app.command(rich_help_panel=OPERATORS)
def lookup(
    digest: Digest,
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Block keys in prefix order, 32 hex digits each.", metavar="KEY..."),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(help="Block keys, one a line; - reads standard input.", metavar="FILE"),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Show how much of a prefix each node could give. Exit status 1 when none has any of it.

    Example: kvpool lookup 3fa9 00112233445566778899aabbccddeeff
    """
    from kvpool.status.blocks import show_prefixes
    from kvpool.status.naming import block_keys

    wanted = block_keys(keys or [], keys_file)
    if not wanted:
        raise InvalidRequest("give the keys of blocks in prefix order, or --keys-file FILE")
    with base.client_of(socket, tenant) as client:
        chosen = base.resolve(client, tenant, digest)
        found = client.prefixes(chosen, wanted, wait_s=LOOKUP_S)
    if as_json:
        rows = [
            {"node": name, "memory_blocks": memory, "blocks": both}
            for name, (memory, both) in found.items()
        ]
        base.print_json({"keys": len(wanted), "items": rows})
    else:
        show_prefixes(found, len(wanted))
    if not found:
        raise typer.Exit(EXIT_ERROR)


@app.command(rich_help_panel=OPERATORS)
def blocks(
    digest: Annotated[
        str | None,
        typer.Argument(
            help="A namespace: its first hex digits; all unless given.", metavar="DIGEST"
        ),
    ] = None,
    node: Annotated[
        str, typer.Option(help="Of this node of the cluster, not of this one.", metavar="NAME")
    ] = "",
    tier: Annotated[str, typer.Option(help="Which: dram, ssd or device.")] = "dram",
    limit: Annotated[int, typer.Option(min=1, help="So many at most.")] = 100,
    cursor: Annotated[
        str, typer.Option(help="Where to go on: what the last call has said.", metavar="CURSOR")
    ] = "",
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """List blocks of a node: key, depth in its chain, size, age, pin.

    Example: kvpool blocks 3fa9 --node host-7 --tier ssd --limit 20
    """
    from kvpool.status.blocks import check_open, list_some, show_blocks

    with base.client_of(socket, tenant) as client:
        chosen = base.resolve(client, tenant, digest) if digest else b""
        if chosen:
            check_open(client, node, tenant, chosen.hex())
        found, after = list_some(client, node, tier, chosen, cursor, limit)
    if as_json:
        base.print_json({"items": found, "next": after})
    else:
        show_blocks(found, after, of_one=bool(chosen))
