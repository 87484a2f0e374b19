"""`kvpool jobs`: operators' long-running work."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, AsJson, Socket, Tenant, app
from kvpool.cli.job_runs import OnNodes, complain_of, named_nodes
from kvpool.errors import InvalidRequest

jobs = typer.Typer(
    cls=base.Commands,
    help="Operators' long-running work: evict, warm, move, scrub.",
    no_args_is_help=True,
)
app.add_typer(jobs, name="jobs", rich_help_panel=OPERATORS)
JobName = Annotated[str, typer.Argument(help="The job's name.", metavar="JOB")]


@jobs.command("list")
def jobs_list(
    node: OnNodes = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Show the jobs that nodes remember, newest first.

    Example: kvpool jobs list
    """
    _print_jobs([], node, socket, tenant, as_json=as_json)


@jobs.command("show")
def jobs_show(
    job: JobName,
    node: OnNodes = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Show a job's progress on each node. Exit status 1 if no node knows it.

    Example: kvpool jobs show evict-5f21c09a
    """
    _print_jobs([job], node, socket, tenant, as_json=as_json)


@jobs.command("stop")
def jobs_stop(
    job: JobName,
    node: OnNodes = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Stop a job; work already done is kept.

    Example: kvpool jobs stop evict-5f21c09a
    """
    from kvpool.cli.render.jobs import Job, complaints

    with base.client_of(socket, tenant) as client:
        found = Job(client, job)
        found.look(named_nodes(client, node))
        if not found.views:
            raise InvalidRequest(_unknown(job, found.failures))
        told = found.stop()
    if as_json:
        base.print_json({"job": job, "stopped": told, "failures": found.failures})
    elif told:
        print(f"job {job} is stopped on {', '.join(told)}")
    else:
        print(f"job {job} is not running: it has ended")
    complain_of(complaints(found) if found.failures else [])


def _print_jobs(
    names: list[str], node: list[str] | None, socket: str | None, tenant: str, *, as_json: bool
) -> None:
    from kvpool.cli.render.jobs import jobs_on, show_jobs

    with base.client_of(socket, tenant) as client:
        views, silent = jobs_on(client, named_nodes(client, node), names)
    if names and not views:
        raise InvalidRequest(_unknown(names[0], silent))
    if as_json:
        base.print_json({"jobs": views, "failures": silent})
    else:
        show_jobs(views)
    complain_of([f"{name}: {why}" for name, why in silent.items()])


def _unknown(job: str, silent: dict[str, str]) -> str:
    hint = f"; not answered: {', '.join(silent)}" if silent else ""
    return f"no node knows a job {job}: `kvpool jobs list` shows those that are remembered{hint}"
