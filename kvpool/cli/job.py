"""`kvpool job`: operators' long-running work. `job start` has a command for each kind that `kvpool.wire.jobs` declares."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from kvpool.cli import base
from kvpool.cli.base import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    BlockKeys,
    Digest,
    DryRun,
    KeysFile,
    OnNodes,
    OnSomeNodes,
    Session,
    Yes,
    argument,
    asks,
    complain_of,
    named_nodes,
    option,
)
from kvpool.errors import InvalidRequest

if TYPE_CHECKING:
    from kvpool.cli.jobs import Job

Wait = Annotated[
    bool, option("Wait for the end, or print the job's name at once.", "--wait/--no-wait")
]
JobName = Annotated[str, argument("The job's name.", metavar="JOB")]


class StartGroup(base.Commands):
    """A command for each kind of job. They are made on first use, so that other commands do not wait for them."""

    _made: dict[str, Any] | None = None

    @property
    def commands(self) -> Any:
        """The commands by kind."""
        if self._made is None:
            from kvpool.wire.jobs import JobSpec

            self._made = {kind.__struct_config__.tag: _command(kind) for kind in get_args(JobSpec)}
        return self._made

    @commands.setter
    def commands(self, _: Any) -> None:
        """Ignore the empty mapping that the base class assigns."""


job = base.group("job", "Operators' long-running work: start, list, show, stop.")
start = base.group(
    "start",
    "Start a job. It goes on if the command that waits for it ends.",
    parent=job,
    kind=StartGroup,
    panel=None,
)


@asks(job, "list")
def job_list(at: Session, node: OnNodes = None) -> None:
    """Show the jobs that nodes remember, newest first.

    Example: kvpool job list
    """
    _print_jobs(at, [], node)


@asks(job, "show")
def job_show(at: Session, job: JobName, node: OnNodes = None) -> None:
    """Show a job's progress on each node. Exit status 1 if no node knows it.

    Example: kvpool job show evict-5f21c09a
    """
    _print_jobs(at, [job], node)


@asks(job, "stop")
def job_stop(at: Session, job: JobName, node: OnNodes = None) -> None:
    """Stop a job; work already done is kept.

    Example: kvpool job stop evict-5f21c09a
    """
    from kvpool.cli.jobs import Job, complaints

    found = Job(at.client, job)
    found.look(named_nodes(at.client, node))
    if not found.views:
        raise InvalidRequest(_unknown(job, found.failures))
    told = found.stop()
    text = f"stopped on {', '.join(told)}" if told else "not running: it has ended"
    at.show({"job": job, "stopped": told, "failures": found.failures}, f"job {job} is {text}")
    if found.failures:
        complain_of(complaints(found))


def _print_jobs(at: Session, names: list[str], node: list[str] | None) -> None:
    from kvpool.cli.jobs import jobs_on
    from kvpool.cli.render.jobs import jobs_view

    views, silent = jobs_on(at.client, named_nodes(at.client, node), names)
    if names and not views:
        raise InvalidRequest(_unknown(names[0], silent))
    at.show({"jobs": views, "failures": silent}, jobs_view(views))
    complain_of(silent)


def _unknown(job: str, silent: dict[str, str]) -> str:
    hint = f"; not answered: {', '.join(silent)}" if silent else ""
    return f"no node knows a job {job}: `kvpool job list` shows those that are remembered{hint}"


# ---- start -----------------------------------------------------------------------------------------


def _fields(kind: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The type of each field of a job, and what `kvpool.wire.jobs.typed` and the type say of it."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name in kind.__struct_fields__:
            about: dict[str, Any] = {}
            for meta in getattr(hint, "__metadata__", ()):
                about |= {"help": meta.description} | (meta.extra or {})
            found[name] = get_args(hint)[0] if about else hint, about
    return found


def _command(kind: Any) -> Any:
    """The command that starts jobs of a kind, with an option for each field."""
    parameters: dict[str, tuple[Any, Any]] = {}
    for name, (hint, about) in _fields(kind).items():
        if about.get("typed") == "keys":
            parameters |= {"keys": (BlockKeys, None), "keys_file": (KeysFile, None)}
        elif "option" not in about:
            parameters[name] = Digest, inspect.Parameter.empty
        else:
            plain = hint if hint is bool or "typed" not in about else str
            shown = option(about["help"], about["option"], metavar=about["metavar"])
            parameters[name] = Annotated[plain | None, shown], False if hint is bool else None
    parameters |= {
        "node": (OnNodes if kind.everywhere else OnSomeNodes, None),
        **({"dry_run": (DryRun, False)} if kind.words[1] else {}),
        **({"yes": (Yes, False)} if kind.everywhere else {}),
        "wait": (Wait, True),
    }

    def begin(at: Session, **given: Any) -> None:
        _start(at, kind, **given)

    base.set_parameters(begin, parameters)
    begin.__doc__ = "\n\n".join(
        [inspect.cleandoc(kind.__doc__), *(f"Example: {each}" for each in kind.examples)]
    )
    made = typer.Typer(add_completion=False, rich_markup_mode=None)
    asks(made, kind.__struct_config__.tag)(begin)
    return typer.main.get_command(made)


def _start(
    at: Session,
    kind: Any,
    *,
    node: list[str] | None,
    wait: bool,
    dry_run: bool = False,
    yes: bool = False,
    keys_file: Path | None = None,
    **given: Any,
) -> None:
    """Start a job of this kind, follow it unless told not to, and print its result."""
    import json
    import secrets

    from kvpool.cli.asking import holders
    from kvpool.cli.jobs import Job
    from kvpool.cli.naming import block_keys, period, size
    from kvpool.wire.jobs import job_name, parse_job, verb_of

    fields = _fields(kind)
    spec: dict[str, Any] = {"kind": kind.__struct_config__.tag}
    if "keys" in fields:
        spec["keys"] = [key.hex() for key in block_keys(given.pop("keys") or [], keys_file)]
    parsers: dict[str, Callable[[str], Any]] = {
        "time": period,
        "size": size,
        "digest": lambda text: at.resolve(text).hex(),
    }
    for name, value in given.items():
        if value:
            parse = parsers.get(fields[name][1].get("typed", ""))
            spec[name] = parse(value) if parse else value
    try:
        parsed = parse_job(json.dumps(spec).encode())
    except InvalidRequest as error:
        raise InvalidRequest(_in_options(str(error), fields)) from None
    nodes, silent = list(dict.fromkeys(node or ())), dict[str, str]()
    if not nodes and kind.everywhere:
        every = named_nodes(at.client, None)
        nodes, silent = holders(at.client, every, at.tenant, spec.get("namespace", ""))
    nodes = nodes or [at.client.cluster()["node"]]
    if kind.everywhere and not (spec["keys"] or dry_run):
        base.confirm(f"Evict {_what(parsed, at.tenant)} on {', '.join(nodes)}?", at.socket, yes=yes)
    job = Job(at.client, job_name(verb_of(parsed), secrets.randbits(32)))
    job.begin(nodes, spec, dry_run=dry_run)
    job.failures.update(silent)  # selected nodes that do not answer make the exit status 1
    _carry_out(at, job, wait=wait)


def _in_options(text: str, fields: dict[str, tuple[Any, dict[str, Any]]]) -> str:
    """An error about fields of a job, as one about the options that they are given by."""
    return re.sub(r"`(\w+)`", lambda m: str(fields[m[1]][1].get("option", m[1])), text)


def _carry_out(at: Session, job: Job, *, wait: bool) -> None:
    """Follow a job that has begun unless told not to, and print its result."""
    from kvpool.cli.jobs import complaints
    from kvpool.cli.render.jobs import carry_out, job_view

    if wait:
        try:
            carry_out(job, quiet=at.as_json)
        except KeyboardInterrupt:
            _interrupted(job)
    at.show(job.plain(), job_view(job) if wait else job.name)
    complain_of(complaints(job))
    damaged = any(view.kind == "scrub" and view.blocks for view in job.views.values())
    if wait and (damaged or not job.good):
        raise typer.Exit(EXIT_ERROR)


def _interrupted(job: Job) -> None:
    """The job continues unless the user asks to stop it."""
    hint = f"`kvpool job show {job.name}` shows it, `kvpool job stop {job.name}` stops it"
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


def _what(spec: Any, tenant: str) -> str:
    """The blocks that an `EvictJob` without keys takes away."""
    from kvpool.cli.render.text import period_text, size_text

    of = f"namespace {spec.namespace[:12]}" if spec.namespace else f"tenant {tenant}"
    if spec.least_bytes:
        text = f"the least valuable blocks of {of}, {size_text(spec.least_bytes)}"
    elif spec.unused_s:
        text = f"all of {of} that was not used for {period_text(spec.unused_s)}"
    else:
        text = f"all blocks of {of}"
    return text + (f" in {', '.join(spec.tiers)}" if spec.tiers else "")
