"""`kvpool warm`: brings blocks into nodes' memory."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, BlockKeys, Digest, KeysFile, Socket, Tenant, app
from kvpool.cli.job_runs import DryRun, Wait, run_job
from kvpool.errors import InvalidRequest


@app.command(rich_help_panel=OPERATORS)
def warm(
    digest: Digest,
    keys: BlockKeys = None,
    keys_file: KeysFile = None,
    source: Annotated[
        str, typer.Option("--from", help="Without keys: all blocks on this node.", metavar="NAME")
    ] = "",
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", help="To this node; may be repeated. Default: the local one.", metavar="NAME"
        ),
    ] = None,
    dry_run: DryRun = False,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Bring blocks into nodes' memory, from any tier or node, before engines request them.

    Example: kvpool warm 3fa9 00112233445566778899aabbccddeeff --node host-7
    """
    from kvpool.cli.render.naming import block_keys

    named = block_keys(keys or [], keys_file)
    if bool(named) == bool(source):
        raise InvalidRequest("give block keys, or --from NODE for all its blocks")
    with base.client_of(socket, tenant) as client:
        spec = {
            "kind": "warm",
            "namespace": base.resolve(client, tenant, digest).hex(),
            "keys": [key.hex() for key in named],
            "source": source,
        }
        nodes = list(dict.fromkeys(node or [client.cluster()["node"]]))
        run_job(client, "warm", nodes, spec, {}, dry_run=dry_run, wait=wait, as_json=as_json)
