"""What `kvpool job` prints: jobs on several nodes, and how far they are."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import get_args

from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.text import Text

from kvpool.cli.jobs import Job, follow
from kvpool.cli.render.bars import BAR, make_bar
from kvpool.cli.render.text import Column, Part, Parts, count, make_console, rows_table, size_text
from kvpool.wire.jobs import JobSpec, JobState, JobView

STATE_STYLES = {
    JobState.RUNNING: "cyan",
    JobState.DONE: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
    JobState.SILENT: "bold red",
}
WORDS: dict[str, tuple[str, str]] = {
    kind.__struct_config__.tag: kind.words for kind in get_args(JobSpec)
}
"""The result of a job of each kind, or its forecast in a dry run."""


def carry_out(job: Job, *, quiet: bool = False) -> None:
    """Follow it, with a bar on a terminal, else with a line when it has begun. quiet: with neither."""
    console = make_console(sys.stderr, quiet=quiet)
    if not console.is_terminal:
        names = ", ".join(job.views)
        console.print(f"job {job.name} runs on {names}", markup=False, soft_wrap=True)
    with make_bar(*BAR, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(escape(job.name), total=None, words="")

        def show(job: Job) -> None:
            total = job.sum("total")
            bar.update(
                task,
                completed=min(job.sum("seen"), total),
                total=total or None,
                words=f"{count(job.sum('blocks'), 'block')} {_word(job)}",
            )

        follow(job, show)


def _word(job: Job) -> str:
    view = next(iter(job.views.values()))
    done, would = WORDS[view.kind]
    return would if view.dry_run else done


def summary(job: Job) -> str:
    """What came of it, in a line."""
    view = next(iter(job.views.values()))
    if view.kind == "scrub":
        return f"{count(job.sum('seen'), 'block')} seen, {job.sum('blocks'):,} bad and dropped"
    text = f"{count(job.sum('blocks'), 'block')} {_word(job)}"
    if nbytes := job.sum("nbytes"):
        text += f", {size_text(nbytes)}"
    if kept := job.sum("kept"):
        text += f"; {count(kept, 'block')} {'stays' if kept == 1 else 'stay'}, pinned"
    if any(each.state == JobState.CANCELLED for each in job.views.values()):
        text += "; it was stopped before its end"
    return text


def job_view(job: Job) -> Parts:
    """What came of a job: by node where there are several, then in all."""
    if len(job.views) > 1:
        yield from jobs_view(list(job.views.values()))
        yield Text()
    if job.views:
        yield Text(summary(job))


def jobs_view(views: Sequence[JobView]) -> Parts:
    """A table of `JobView`s, and their errors."""
    if not views:
        yield Text("no node remembers a job")
        return
    yield jobs_table(views)
    for view in views:
        if view.error:
            yield Text(f"{view.job} on {view.node}: {view.error}", style="yellow")


def jobs_table(views: Iterable[JobView]) -> Part:
    """Jobs as a table, a row for each node."""
    return rows_table("", views, JOBS, wraps={"seen", "blocks", "bytes", "took", "by"})


def _state(view: JobView) -> Text:
    words = f"{view.state}, dry run" if view.dry_run else view.state
    return Text(words, style=STATE_STYLES[view.state])


def _seen(view: JobView) -> str:
    more = view.total > view.seen and view.state is not JobState.DONE
    return f"{view.seen:,} of {view.total:,}" if more else f"{view.seen:,}"


JOBS: dict[str, Column] = {
    "job": "job",
    "node": "node",
    "state": _state,
    ">seen": _seen,
    "blocks": "blocks",
    "bytes": "nbytes",
    "took": "took_s",
    "by": "by",
}
