"""`kvpool status`: shows a node's contents and activity."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, AnyNode, Session, asks
from kvpool.errors import InvalidRequest


@asks()
def status(
    at: Session,
    node: AnyNode = "",
    every: Annotated[
        bool,
        typer.Option("--all", help="All nodes, a line each: whether they are well, and why not."),
    ] = False,
    expect: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --all: fewer nodes than this are a problem. One that crashed is a member no more.",
            metavar="N",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print nothing; only set the exit status."),
    ] = False,
) -> None:
    """Show a node's contents and activity. Exit status 1 if it does not serve, 3 if no daemon answers.

    With --all exit status 1 if any node is degraded or lost: for probes and cron.

    A node does not serve while it is joining, draining, or considered dead by others; it still serves if
    only etcd is unreachable.

    Example: kvpool status --tenant research

    Example: kvpool status --quiet

    Example: kvpool status --all --expect 2
    """
    if every:
        if node:
            raise InvalidRequest("--all and --node exclude each other")
        _all(at, expect, quiet=quiet)
        return
    if expect is not None:
        raise InvalidRequest("--expect needs --all")
    from kvpool.cli.render.node import not_serving, show

    stats = at.client.inspect(node) if node else at.client.stats()
    names = {} if at.as_json or quiet else base.node_names(at.client)
    if at.tenant not in stats.tenants:
        raise InvalidRequest(
            f"node {stats.node} has no tenant {at.tenant}: check --tenant; the node's configuration lists its tenants"
        )
    if at.as_json or not quiet:
        at.show(stats, show, stats, at.tenant, names)
    if why := not_serving(stats):
        if not quiet:
            base.complain(why)
        raise typer.Exit(EXIT_ERROR)


def _all(at: Session, expect: int | None, *, quiet: bool) -> None:
    from kvpool.cli.render.health import look, show_health

    found = look(at.client, expect or 0)
    if at.as_json or not quiet:
        at.show(found, show_health, found)
    if found.problem:
        if not quiet:
            base.complain(found.problem)
        raise typer.Exit(EXIT_ERROR)
