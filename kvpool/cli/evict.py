"""`kvpool evict`: evicts blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, KeysFile, Socket, Tenant, Yes, app
from kvpool.cli.job_runs import DryRun, OnNodes, Wait, named_nodes, run_job
from kvpool.errors import InvalidRequest

if TYPE_CHECKING:
    from kvpool.cli.render.gateway_http import Operator


@app.command(rich_help_panel=OPERATORS)
def evict(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Block keys, 32 hex digits each.", metavar="KEY...")
    ] = None,
    keys_file: KeysFile = None,
    chain: Annotated[
        bool,
        typer.Option("--chain", help="Also evict the blocks after these in their prefix chains."),
    ] = False,
    namespace: Annotated[
        str | None, typer.Option(help="Only in this namespace.", metavar="DIGEST")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(help="Only from this tier: dram, ssd or device; may be repeated."),
    ] = None,
    unused_s: Annotated[
        str | None,
        typer.Option(
            "--unused-s", help="Only blocks not used for this long: 30m, 2h.", metavar="TIME"
        ),
    ] = None,
    least: Annotated[
        str | None,
        typer.Option(
            help="Evict the least valuable blocks until this much is freed on each node: 10GiB. With --tier only.",
            metavar="SIZE",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of the tenant.")] = False,
    node: OnNodes = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Evict blocks on all nodes or some. Blocks with hard pins stay.

    It asks for confirmation, unless blocks are named by their keys. Ctrl-C offers to stop the job.

    Example: kvpool evict --namespace 3fa9 --unused-s 2h --node host-7 --dry-run

    Example: kvpool evict 00112233445566778899aabbccddeeff --chain
    """
    from kvpool.cli.render.naming import block_keys, period, size
    from kvpool.wire.jobs import TierName

    named = block_keys(keys or [], keys_file)
    chosen = any((named, namespace, unused_s, least))
    if everything and chosen:
        raise InvalidRequest(
            "--all is all blocks of the tenant, so it excludes keys, --namespace, --unused-s and --least: leave out "
            "--all to evict what the others choose"
        )
    if not everything and not chosen:
        raise InvalidRequest(
            "name the blocks to evict: keys, --namespace, --unused-s or --least; or --all"
        )
    if chain and not named:
        raise InvalidRequest("--chain needs keys: name at least one")
    for name in tier or ():
        if name not in get_args(TierName):
            raise InvalidRequest(
                f"--tier {name!r:.40}: must be one of {', '.join(get_args(TierName))}"
            )
    spec: dict[str, Any] = {
        "kind": "evict",
        "keys": [key.hex() for key in named],
        "chains": chain,
        "tiers": tier or [],
        "unused_s": period(unused_s) if unused_s else 0.0,
        "least_bytes": size(least) if least else 0,
        "everything": everything,
    }
    with base.client_of(socket, tenant) as client:
        digest = base.resolve(client, tenant, namespace).hex() if namespace else ""
        spec["namespace"] = digest
        nodes, silent = _nodes(client, node, tenant, digest)
        if not (named or dry_run):
            base.confirm(f"Evict {_what(spec, tenant)} on {', '.join(nodes)}?", socket, yes=yes)
        run_job(client, "evict", nodes, spec, silent, dry_run=dry_run, wait=wait, as_json=as_json)


def _nodes(
    client: Operator, node: list[str] | None, tenant: str, digest: str
) -> tuple[list[str], dict[str, str]]:
    """Like `named_nodes`, without nodes that have none of it, unless named; and the nodes that do not answer."""
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
