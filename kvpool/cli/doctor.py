"""`kvpool doctor`: checks this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, Session, asks, option
from kvpool.errors import KvpoolError, Unavailable


@asks(panel=OPERATORS)
def doctor(
    at: Session,
    path: Annotated[
        list[str] | None,
        option("A folder to check for tier ssd; may be repeated.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Check this machine: RDMA, memory, huge pages, GPUs, disks, etcd, Redis, and the transport to each node.

    Works without a daemon. Exit status 1 if something present cannot be used.

    Example: kvpool doctor --path /mnt/nvme0/kvpool
    """
    from kvpool.cli.machine import BAD, OK, Finding, examine, servers, starting
    from kvpool.cli.render.doctor import findings_view
    from kvpool.config import default_socket_path

    findings, links = examine(path or ()), []
    try:
        with base.daemon_client(at.socket, at.tenant) as client:
            cluster = client.cluster()
        links = cluster.get("links", [])
        findings += servers(cluster)
    except KvpoolError as error:
        if isinstance(error, Unavailable):
            findings += starting(at.socket or default_socket_path())
        findings.append(Finding("other nodes", OK, f"not known: {error}"))
    at.show({"findings": findings, "peers": links}, findings_view(findings, links))
    if any(finding.state == BAD for finding in findings):
        raise typer.Exit(EXIT_ERROR)
