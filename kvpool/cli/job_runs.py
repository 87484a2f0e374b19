"""Starts a job on nodes, and follows it: shared by the commands that run jobs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from kvpool.cli.render.gateway_http import Operator
    from kvpool.cli.render.jobs import Job


OnNodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        help="On this node; may be repeated. Default: all nodes.",
        metavar="NAME",
    ),
]
Wait = Annotated[
    bool,
    typer.Option("--wait/--no-wait", help="Wait for the end, or print the job's name at once."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")]


def named_nodes(client: Operator, node: list[str] | None) -> list[str]:
    """The nodes given by the option, or all nodes of the cluster."""
    from kvpool.cli.render.jobs import nodes_of

    return list(dict.fromkeys(node)) if node else nodes_of(client.cluster())


def run_job(
    client: Operator,
    verb: str,
    nodes: list[str],
    spec: dict[str, Any],
    silent: dict[str, str],
    *,
    dry_run: bool = False,
    wait: bool = True,
    as_json: bool = False,
) -> Job:
    """Start a job, follow it unless told not to, and print its result.

    silent: selected nodes that do not answer; they make the exit status 1.
    """
    import secrets

    from kvpool.cli.render.jobs import Job, carry_out, complaints, show_job
    from kvpool.wire.jobs import job_name

    job = Job(client, job_name(verb, secrets.randbits(32)))
    job.begin(nodes, spec, dry_run=dry_run)
    job.failures.update(silent)
    if wait:
        try:
            carry_out(job, quiet=as_json)
        except KeyboardInterrupt:
            _interrupted(job)
    if as_json:
        base.print_json(job.plain())
    elif wait:
        show_job(job)
    else:
        print(job.name)
    complain_of(complaints(job))
    if wait and not job.good:
        raise typer.Exit(EXIT_ERROR)
    return job


def _interrupted(job: Job) -> None:
    """The job continues unless the user asks to stop it."""
    hint = f"`kvpool jobs show {job.name}` shows it, `kvpool jobs stop {job.name}` stops it"
    stop = False
    if sys.stdin.isatty() and sys.stderr.isatty():
        try:
            stop = typer.confirm(f"\nStop job {job.name}?", err=True)
        except typer.Abort:
            stop = False
    if stop:
        told = job.stop()
        base.complain(f"job {job.name} is stopped on {', '.join(told) or 'no node: it has ended'}")
    else:
        base.complain(f"job {job.name} continues: {hint}")
    raise typer.Exit(EXIT_INTERRUPTED)


def complain_of(lines: list[str]) -> None:
    """Print lines for the user on stderr."""
    for line in lines:
        base.complain(line)
    if lines:
        raise typer.Exit(EXIT_ERROR)
