"""Verbs that change what nodes hold, or the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    OPERATORS,
    AsJson,
    Digest,
    Socket,
    Tenant,
    app,
)
from kvpool.errors import InvalidRequest

DRAIN_S = 3600.0


@app.command(rich_help_panel=OPERATORS)
def drain(
    node: Annotated[str, typer.Argument(help="The node's name.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Call it off.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end.")] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.0, help="The longest wait, seconds.")
    ] = DRAIN_S,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Have a node copy what only it holds to others, and leave the cluster.

    Exit status 1 when something was left behind, or it did not end in time.

    Example: kvpool drain host-7
    """
    from kvpool.status.drain import call_off, carry_out

    with base.client_of(socket, tenant) as client:
        with base.in_doubt("nodes"):
            if cancel:
                _say(call_off(client, node), node, as_json=as_json)
                return
            client.drain(node)
        if not wait:
            text = f"{node} will be drained; `kvpool nodes` shows how far it has come"
            _say(text, node, as_json=as_json)
            return
        try:
            text, good = carry_out(client, node, timeout_s)
        except KeyboardInterrupt:
            base.complain(
                f"the drain of {node} goes on: `kvpool drain {node}` shows it again, and "
                f"`kvpool drain {node} --cancel` calls it off"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if not good:
        base.complain(text)
        raise typer.Exit(EXIT_ERROR)
    _say(text, node, as_json=as_json)


def _say(text: str, node: str, *, as_json: bool) -> None:
    """What became of a drain."""
    if as_json:
        base.print_json({"node": node, "text": text})
    else:
        print(text)


@app.command(rich_help_panel=OPERATORS)
def reset(
    digest: Digest,
    fence: Annotated[
        bool, typer.Option("--fence", help="Have engines open it again before they go on.")
    ] = False,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Begin a new epoch of a namespace: none of its blocks is found any more, on any node.

    Example: kvpool reset 3fa9 --fence
    """
    with base.client_of(socket, tenant) as client:
        chosen = base.resolve(client, tenant, digest)
        with base.in_doubt("namespaces"):
            epoch = client.clear(chosen, fence=fence)
    if as_json:
        base.print_json({"namespace": chosen.hex(), "epoch": epoch, "fence": fence})
        return
    print(
        f"namespace {chosen.hex()} of tenant {tenant} is in epoch {epoch}: no node finds what was stored "
        f"before, and its memory is given back bit by bit"
    )
    if fence:
        print("engines that have it open find and store nothing until they open it again")
    else:
        print("engines that have it open go on in the new epoch")


@app.command(rich_help_panel=OPERATORS)
def configure(
    digest: Digest,
    copies: Annotated[
        int | None, typer.Option(min=1, help="Nodes that are to hold each block.", metavar="N")
    ] = None,
    write: Annotated[
        str | None,
        typer.Option(
            help="When blocks go to SSD: through (when put), back (before eviction), none; or "
            "default: as each node is configured.",
            metavar="MODE",
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            help="Blocks that a node did not use for so long are gone: 30s, 15m, 12h, 7d; 0: never.",
            metavar="TIME",
        ),
    ] = None,
    ssd_codec: Annotated[
        str | None,
        typer.Option(help="What makes blocks smaller on SSD: blosc2, none.", metavar="CODEC"),
    ] = None,
    write_remote: Annotated[
        str | None,
        typer.Option(
            help="When blocks are written to object storage: back (before eviction), none.",
            metavar="MODE",
        ),
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(
            help="What it may hold on each node, by tier: dram=20%,ssd=50GiB, of the tenant's part; "
            "none: as much as the tenant.",
            metavar="TIER=SIZE[,...]",
        ),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Change settings of a namespace, on all nodes. What is not named stays as it is.

    Example: kvpool configure 3fa9 --copies 2 --write through --ttl 12h
    """
    from kvpool.status.naming import period, quotas

    if all(given is None for given in (copies, write, ttl, ssd_codec, quota, write_remote)):
        raise InvalidRequest(
            "name what is to change: --copies, --write, --ttl, --ssd-codec, --write-remote or --quota"
        )
    of_tiers = {} if quota is None else quotas(quota)
    ttl_s = None if ttl is None else period(ttl)
    with base.client_of(socket, tenant) as client:
        chosen = base.resolve(client, tenant, digest)
        with base.in_doubt("namespaces"):
            client.configure(
                chosen,
                copies=copies,
                write="" if write == "default" else write,
                ttl_s=ttl_s,
                ssd_codec="" if ssd_codec == "none" else ssd_codec,
                dram_quota=of_tiers.get("dram"),
                ssd_quota=of_tiers.get("ssd"),
                write_remote=write_remote,
            )
    if as_json:
        base.print_json({"namespace": chosen.hex(), "configured": True})
        return
    print(
        f"the settings of namespace {chosen.hex()} of tenant {tenant} are changed on all nodes; "
        f"`kvpool namespaces` shows them"
    )
    if copies is not None and copies > 1:
        print("nodes make copies in the background: new blocks at once, those there by and by")


PinKeys = Annotated[
    list[str], typer.Argument(help="Block keys, 32 hex digits each.", metavar="KEY...")
]
PinNode = Annotated[
    list[str] | None,
    typer.Option(
        "--node", help="On this node; may be repeated. This one unless given.", metavar="NAME"
    ),
]
OfNamespace = Annotated[str | None, typer.Option(help="In this one only.", metavar="DIGEST")]


@app.command(rich_help_panel=OPERATORS)
def pin(
    keys: PinKeys,
    kind: Annotated[
        str, typer.Option(help="soft: evicted last; hard: never; none: as any other.")
    ] = "soft",
    namespace: OfNamespace = None,
    node: PinNode = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Keep blocks that are on a node, in memory and on disks. Exit status 1 when some are not.

    Example: kvpool pin 00112233445566778899aabbccddeeff --kind hard
    """
    _pin(keys, kind, namespace, node, socket, tenant, as_json=as_json)


@app.command(rich_help_panel=OPERATORS)
def unpin(
    keys: PinKeys,
    namespace: OfNamespace = None,
    node: PinNode = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Take pins back: the blocks are evicted as any other. Exit status 1 when some are not there.

    Example: kvpool unpin 00112233445566778899aabbccddeeff
    """
    _pin(keys, "none", namespace, node, socket, tenant, as_json=as_json)


def _pin(
    keys: list[str],
    kind: str,
    namespace: str | None,
    node: list[str] | None,
    socket: str | None,
    tenant: str,
    *,
    as_json: bool,
) -> None:
    from kvpool import wire
    from kvpool.status.naming import block_keys

    wanted = block_keys(keys)
    found: dict[str, int] = {}
    with base.client_of(socket, tenant) as client:
        digest = base.resolve(client, tenant, namespace) if namespace else b""
        if node is None:
            found[""] = client.pin_blocks(wanted, kind, digest=digest)
        for name in dict.fromkeys(node or ()):
            message = wire.PinBlocks(b"".join(wanted), kind, digest)
            found[name] = client.ask_node(message, node=name)
    if as_json:
        base.print_json({"kind": kind, "keys": len(wanted), "found": found})
    else:
        what = "unpinned" if kind == "none" else f"pinned {kind}"
        for name, count in found.items():
            where = f" on {name}" if name else ""
            noun = "block" if len(wanted) == 1 else "blocks"
            print(f"{count} of {len(wanted)} {noun} {what}{where}")
    if any(count < len(wanted) for count in found.values()):
        base.complain(
            "not all of them are there: `kvpool locate KEY` shows which nodes have a block (--node NAME)"
        )
        raise typer.Exit(EXIT_ERROR)
