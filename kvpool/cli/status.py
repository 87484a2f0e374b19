"""`kvpool status`: shows a node's contents and activity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, AnyNode, Session, asks, option
from kvpool.errors import InvalidRequest

if TYPE_CHECKING:
    from kvpool.cli.render.text import Parts


@asks()
def status(
    at: Session,
    node: AnyNode = "",
    every: Annotated[
        bool, option("All nodes, a line each: whether they are well, and why not.", "--all")
    ] = False,
    expect: Annotated[
        int | None,
        option(
            "With --all: fewer nodes than this are a problem. One that crashed is a member no more.",
            min=1,
            metavar="N",
        ),
    ] = None,
    quiet: Annotated[
        bool, option("Print nothing; only set the exit status.", "--quiet", "-q")
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
    from kvpool.cli.render.node import not_serving, status_view

    stats = at.client.inspect(node) if node else at.client.stats()
    names = {} if at.as_json or quiet else base.node_names(at.client)
    if at.tenant not in stats.tenants:
        raise InvalidRequest(
            f"node {stats.node} has no tenant {at.tenant}: check --tenant; the node's configuration lists its tenants"
        )
    _judge(at, stats, status_view(stats, at.tenant, names), not_serving(stats), quiet=quiet)


def _all(at: Session, expect: int | None, *, quiet: bool) -> None:
    from kvpool.cli.render.health import health_view, look

    found = look(at.client, expect or 0)
    _judge(at, found, health_view(found), found.problem, quiet=quiet)


def _judge(at: Session, value: Any, shown: Parts, problem: str, *, quiet: bool) -> None:
    """Print what was found unless `quiet`, and end the command with status 1 if there is a problem."""
    if at.as_json or not quiet:
        at.show(value, shown)
    if problem and quiet:
        raise typer.Exit(EXIT_ERROR)
    if problem:
        raise base.Failed(problem)
