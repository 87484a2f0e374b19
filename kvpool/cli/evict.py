"""`kvpool evict`: gives blocks up."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AsJson, Socket, Tenant, app
from kvpool.cli.job_runs import DryRun, KeysFile, OnNodes, Wait, named_nodes, run_job
from kvpool.errors import InvalidRequest

if TYPE_CHECKING:
    from kvpool.client import OperatorClient


@app.command(rich_help_panel=OPERATORS)
def evict(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Block keys, 32 hex digits each.", metavar="KEY...")
    ] = None,
    keys_file: KeysFile = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="And what follows these in their prefix chains.")
    ] = False,
    namespace: Annotated[
        str | None, typer.Option(help="Of this one only.", metavar="DIGEST")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(help="From this one only: dram, ssd or device; may be repeated."),
    ] = None,
    unused_s: Annotated[
        str | None,
        typer.Option(
            "--unused-s", help="Only what nobody has used for so long: 30m, 2h.", metavar="TIME"
        ),
    ] = None,
    least: Annotated[
        str | None,
        typer.Option(
            help="What is worth least, until so much is given up on each node: 10GiB. With --tier only.",
            metavar="SIZE",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of the tenant.")] = False,
    node: OnNodes = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before.")] = False,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Give blocks up, as if there were no room, on all nodes or some. Hard pins stay.

    On a terminal it asks first, unless blocks are named. Ctrl-C offers to stop it.

    Example: kvpool evict --namespace 3fa9 --unused-s 2h --node host-7 --dry-run

    Example: kvpool evict 00112233445566778899aabbccddeeff --chain
    """
    from kvpool.cli.render.naming import block_keys, period, size
    from kvpool.wire.jobs import TierName

    named = block_keys(keys or [], keys_file)
    chosen = any((named, namespace, unused_s, least))
    if everything == chosen:
        raise InvalidRequest(
            "say what to evict: the keys of blocks, --namespace, --unused-s or --least; or --all"
        )
    if chain and not named:
        raise InvalidRequest("--chain begins at keys: name some")
    for name in tier or ():
        if name not in get_args(TierName):
            raise InvalidRequest(
                f"--tier {name!r:.40}: it is one of {', '.join(get_args(TierName))}"
            )
    spec: dict[str, Any] = {
        "kind": "evict",
        "keys": [key.hex() for key in named],
        "chains": chain,
        "tiers": tier or [],
        "unused_s": period(unused_s) if unused_s else 0.0,
        "least_bytes": size(least) if least else 0,
    }
    with base.client_of(socket, tenant) as client:
        digest = base.resolve(client, tenant, namespace).hex() if namespace else ""
        spec["namespace"] = digest
        nodes, silent = _nodes(client, node, tenant, digest)
        if not (named or dry_run or yes):
            _confirm(f"Evict {_what(spec, tenant)} on {', '.join(nodes)}?")
        run_job(client, "evict", nodes, spec, silent, dry_run=dry_run, wait=wait, as_json=as_json)


def _nodes(
    client: OperatorClient, node: list[str] | None, tenant: str, digest: str
) -> tuple[list[str], dict[str, str]]:
    """As `named_nodes`, less those of all that have nothing of it; and those that do not answer."""
    from kvpool.cli.render.jobs import holders

    if node:
        return list(dict.fromkeys(node)), {}
    return holders(client, named_nodes(client, node), tenant, digest)


def _what(spec: dict[str, Any], tenant: str) -> str:
    from kvpool.cli.render.text import period_text, size_text

    of = f"namespace {spec['namespace'][:12]}" if spec["namespace"] else f"tenant {tenant}"
    if spec["least_bytes"]:
        text = f"what is worth least of {of}, {size_text(spec['least_bytes'])}"
    elif spec["unused_s"]:
        text = f"all of {of} that was not used for {period_text(spec['unused_s'])}"
    else:
        text = f"all blocks of {of}"
    return text + (f" in {', '.join(spec['tiers'])}" if spec["tiers"] else "")


def _confirm(question: str) -> None:
    """Ask whoever sits at a terminal; nobody else is there to answer."""
    if sys.stdin.isatty() and sys.stderr.isatty() and not typer.confirm(question, err=True):
        base.complain("nothing was changed")
        raise typer.Exit(EXIT_ERROR)
