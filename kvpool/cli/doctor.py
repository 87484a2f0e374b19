"""`kvpool doctor`: checks this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AsJson, Socket, Tenant, app
from kvpool.errors import KvpoolError, Unavailable


@app.command(rich_help_panel=OPERATORS)
def doctor(
    path: Annotated[
        list[str] | None,
        typer.Option(help="A folder to check for tier ssd; may be repeated.", metavar="FOLDER"),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Check this machine: RDMA, memory, huge pages, GPUs, disks, etcd, Redis, and the transport to each node.

    Works without a daemon. Exit status 1 if something present cannot be used.

    Example: kvpool doctor --path /mnt/nvme0/kvpool
    """
    from kvpool.cli.render.doctor import (
        BAD,
        OK,
        Finding,
        examine,
        plain,
        routes,
        servers,
        show,
        starting,
    )
    from kvpool.config import default_socket_path

    findings = examine(path or ())
    pairs = []
    try:
        with base.daemon_client(socket, tenant) as client:
            cluster = client.cluster()
        pairs = routes(cluster)
        findings += servers(cluster)
    except KvpoolError as error:
        if isinstance(error, Unavailable):
            findings += starting(socket or default_socket_path())
        findings.append(Finding("other nodes", OK, f"not known: {error}"))
    if as_json:
        base.print_json(plain(findings, pairs))
    else:
        show(findings, pairs)
    if any(finding.state == BAD for finding in findings):
        raise typer.Exit(EXIT_ERROR)
