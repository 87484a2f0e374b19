"""`kvpool drain`: removes a node from the cluster on purpose."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, EXIT_INTERRUPTED, OPERATORS, AsJson, Socket, Tenant, app

DRAIN_S = 3600.0


@app.command(rich_help_panel=OPERATORS)
def drain(
    node: Annotated[str, typer.Argument(help="The node's name.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the drain.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the drain ends.")
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.0, help="The longest wait, seconds.")
    ] = DRAIN_S,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Copy the blocks that only NODE holds to other nodes, and take it out of the cluster.

    Exit status 1 if blocks were left behind, or the drain did not end in time.

    Example: kvpool drain host-7
    """
    from kvpool.cli.render.drain import call_off, carry_out

    with base.client_of(socket, tenant) as client:
        with base.in_doubt("nodes"):
            if cancel:
                _say(call_off(client, node), node, as_json=as_json)
                return
            client.drain(node)
        if not wait:
            text = f"{node} will be drained; `kvpool nodes` shows its progress"
            _say(text, node, as_json=as_json)
            return
        try:
            text, good = carry_out(client, node, timeout_s)
        except KeyboardInterrupt:
            base.complain(
                f"the drain of {node} continues: `kvpool drain {node}` shows it again, and "
                f"`kvpool drain {node} --cancel` cancels it"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if not good:
        base.complain(text)
        raise typer.Exit(EXIT_ERROR)
    _say(text, node, as_json=as_json)


def _say(text: str, node: str, *, as_json: bool) -> None:
    """The result of a drain."""
    if as_json:
        base.print_json({"node": node, "text": text})
    else:
        print(text)
