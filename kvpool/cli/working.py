"""Verbs that take a while: jobs on this node and others, and those that look after jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvpool.cli import base
from kvpool.cli.base import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    OPERATORS,
    AsJson,
    Digest,
    Socket,
    Tenant,
    app,
)
from kvpool.errors import InvalidRequest

if TYPE_CHECKING:
    from kvpool.client import Client
    from kvpool.status.jobs import Job

OnNodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        help="On this node; may be repeated. All of the cluster unless given.",
        metavar="NAME",
    ),
]
Wait = Annotated[
    bool,
    typer.Option("--wait/--no-wait", help="Wait for its end, or print the job's name at once."),
]
KeysFile = Annotated[
    Path | None,
    typer.Option(help="Block keys, one a line; - reads standard input.", metavar="FILE"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count: nothing is changed.")]


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
    from kvpool.jobs import TierName
    from kvpool.status.naming import block_keys, period, size

    named = block_keys(keys or [], keys_file)
    chosen = any((named, namespace, unused_s, least))
    if everything == chosen:
        raise InvalidRequest(
            "say what is to go: the keys of blocks, --namespace, --unused-s or --least; or --all"
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
        _work(client, "evict", nodes, spec, silent, dry_run=dry_run, wait=wait, as_json=as_json)


@app.command(rich_help_panel=OPERATORS)
def warm(
    digest: Digest,
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Block keys in prefix order, 32 hex digits each.", metavar="KEY..."),
    ] = None,
    keys_file: KeysFile = None,
    source: Annotated[
        str, typer.Option("--from", help="Without keys: all that this node has.", metavar="NAME")
    ] = "",
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", help="To this node; may be repeated. This one unless given.", metavar="NAME"
        ),
    ] = None,
    dry_run: DryRun = False,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Bring blocks into nodes' memory, from wherever they are, before engines ask for them.

    Example: kvpool warm 3fa9 00112233445566778899aabbccddeeff --node host-7
    """
    from kvpool.status.naming import block_keys

    named = block_keys(keys or [], keys_file)
    if bool(named) == bool(source):
        raise InvalidRequest("give the keys of blocks, or --from NODE for all that it has")
    with base.client_of(socket, tenant) as client:
        spec = {
            "kind": "warm",
            "namespace": base.resolve(client, tenant, digest).hex(),
            "keys": [key.hex() for key in named],
            "source": source,
        }
        nodes = list(dict.fromkeys(node or [client.cluster()["node"]]))
        _work(client, "warm", nodes, spec, {}, dry_run=dry_run, wait=wait, as_json=as_json)


@app.command(rich_help_panel=OPERATORS)
def move(
    digest: Digest,
    source: Annotated[
        str, typer.Option("--from", help="The node that gives them up.", metavar="NAME")
    ],
    target: Annotated[str, typer.Option("--to", help="The node that gets them.", metavar="NAME")],
    dry_run: DryRun = False,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Move what a node has of a namespace, in memory and on disks, into another node's memory.

    Example: kvpool move 3fa9 --from host-7 --to host-8
    """
    if source == target:
        raise InvalidRequest(f"--from and --to are both {source}: name two nodes")
    with base.client_of(socket, tenant) as client:
        spec = {
            "kind": "warm",
            "namespace": base.resolve(client, tenant, digest).hex(),
            "source": source,
            "move": True,
        }
        _work(client, "move", [target], spec, {}, dry_run=dry_run, wait=wait, as_json=as_json)


@app.command(rich_help_panel=OPERATORS)
def scrub(
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            help="As a job on this node; may be repeated. Without: here, step by step.",
            metavar="NAME",
        ),
    ] = None,
    wait: Wait = True,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Compare all blocks on nodes' disks with their checksums. Exit status 1 when some were bad.

    Bad ones are dropped; engines compute them again.

    Example: kvpool scrub

    Example: kvpool scrub --node host-7 --no-wait
    """
    with base.client_of(socket, tenant) as client:
        if node or not wait:
            nodes = list(dict.fromkeys(node or [client.cluster()["node"]]))
            job = _work(client, "scrub", nodes, {"kind": "scrub"}, {}, wait=wait, as_json=as_json)
            bad = job.sum("blocks") if wait else 0
        else:
            from kvpool.status.tiers import scrub as run

            seen, bad = run(client)
            if as_json:
                base.print_json({"seen": seen, "bad": bad})
            else:
                print(
                    f"{seen:,} {'block' if seen == 1 else 'blocks'} seen, {bad:,} bad and dropped"
                )
    if bad:
        raise typer.Exit(EXIT_ERROR)


jobs = typer.Typer(
    help="What operators have begun that takes a while: evict, warm, move, scrub.",
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
    """Show the jobs that nodes remember, the youngest first.

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
    """Show how far a job is on each node. Exit status 1 when no node knows it.

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
    """Stop a job where it runs; what it has done stays done.

    Example: kvpool jobs stop evict-5f21c09a
    """
    from kvpool.status.jobs import Job, complaints

    with base.client_of(socket, tenant) as client:
        found = Job(client, job)
        found.look(_named(client, node))
        if not found.views:
            raise InvalidRequest(_unknown(job, found.failures))
        told = found.stop()
    if as_json:
        base.print_json({"job": job, "stopped": told, "failures": found.failures})
    elif told:
        print(f"job {job} is stopped on {', '.join(told)}")
    else:
        print(f"job {job} runs nowhere: it has ended")
    _complain_of(complaints(found) if found.failures else [])


def _print_jobs(
    names: list[str], node: list[str] | None, socket: str | None, tenant: str, *, as_json: bool
) -> None:
    from kvpool.status.jobs import jobs_on, show_jobs

    with base.client_of(socket, tenant) as client:
        views, silent = jobs_on(client, _named(client, node), names)
    if names and not views:
        raise InvalidRequest(_unknown(names[0], silent))
    if as_json:
        base.print_json({"jobs": views, "failures": silent})
    else:
        show_jobs(views)
    _complain_of([f"{name}: {why}" for name, why in silent.items()])


def _unknown(job: str, silent: dict[str, str]) -> str:
    hint = f"; not answered: {', '.join(silent)}" if silent else ""
    return f"no node knows a job {job}: `kvpool jobs list` shows those that are remembered{hint}"


# ---- what these share ------------------------------------------------------------------------------


def _named(client: Client, node: list[str] | None) -> list[str]:
    """Those of the option, or all of the cluster."""
    from kvpool.status.jobs import nodes_of

    return list(dict.fromkeys(node)) if node else nodes_of(client.cluster())


def _nodes(
    client: Client, node: list[str] | None, tenant: str, digest: str
) -> tuple[list[str], dict[str, str]]:
    """As `_named`, less those of all that have nothing of it; and those that do not answer."""
    from kvpool.status.jobs import holders

    if node:
        return list(dict.fromkeys(node)), {}
    return holders(client, _named(client, node), tenant, digest)


def _what(spec: dict[str, Any], tenant: str) -> str:
    from kvpool.status.text import period_text, size_text

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


def _work(
    client: Client,
    verb: str,
    nodes: list[str],
    spec: dict[str, Any],
    silent: dict[str, str],
    *,
    dry_run: bool = False,
    wait: bool = True,
    as_json: bool = False,
) -> Job:
    """Begin a job, follow it unless nobody waits, and say what came of it.

    silent: nodes that were meant and do not answer, which is not well either.
    """
    import secrets

    from kvpool.status.jobs import Job, carry_out, complaints, name_for, show_job

    job = Job(client, name_for(verb, secrets.randbits(32)))
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
    _complain_of(complaints(job))
    if wait and not job.good:
        raise typer.Exit(EXIT_ERROR)
    return job


def _interrupted(job: Job) -> None:
    """The job goes on unless whoever waited for it wants it stopped."""
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
        base.complain(f"job {job.name} goes on: {hint}")
    raise typer.Exit(EXIT_INTERRUPTED)


def _complain_of(lines: list[str]) -> None:
    for line in lines:
        base.complain(line)
    if lines:
        raise typer.Exit(EXIT_ERROR)
