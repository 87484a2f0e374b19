"""Jobs of operators: begun on several nodes under one name, followed to their end, shown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, get_args

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvpool.cli.render.text import count, duration, make_console, make_table, size_text
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobSpec, JobState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LOOK_S = 0.2
PATIENCE_S = 30.0  # so long a node may fail to answer until its part of a job is given up
SILENT = "silent"
"""The state of a job on a node that does not answer any more."""

STATE_STYLES = {
    JobState.RUNNING: "cyan",
    JobState.DONE: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
    SILENT: "bold red",
}
WORDS: dict[str, tuple[str, str]] = {
    kind.__struct_config__.tag: kind.words for kind in get_args(JobSpec)
}
"""The result of a job of each kind, or its forecast in a dry run."""


class Asks(Protocol):
    """`OperatorClient`."""

    def inspect(self, node: str = "") -> NodeStats: ...

    def ask_node(
        self,
        message: frame.Message,
        *,
        node: str = "",
        tenant: str = "",
        by: str = "",
        wait_s: float = 0.0,
    ) -> Any: ...


def nodes_of(cluster: Mapping[str, Any]) -> list[str]:
    """The nodes of the cluster by name, the one that is asked first. cluster: from `Client.cluster`."""
    others = sorted(r["node"] for r in cluster["nodes"] if r["state"] != "gone")
    return list(dict.fromkeys([cluster["node"], *others]))


class Job:
    """One job on some nodes. views: the last word of each; failures: nodes on which it did not begin, and why."""

    def __init__(
        self, client: Asks, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.views: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self._client = client
        self._clock = clock
        self._heard: dict[str, float] = {}

    def begin(
        self, nodes: Sequence[str], spec: Mapping[str, Any], *, dry_run: bool = False
    ) -> None:
        """Raises what the first node said when it begins on none."""
        raw = json.dumps(spec).encode()
        refused: KvpoolError | None = None
        for node in nodes:
            try:
                view = self._client.ask_node(
                    operator_wire.BeginJob(self.name, raw, dry_run), node=node
                )
            except KvpoolError as error:
                refused = refused or error
                self.failures[node] = str(error)
            else:
                self._take(node, view)
        if refused is not None and not self.views:
            raise refused

    def look(self, nodes: Iterable[str] = ()) -> None:
        """Ask how far it is on these nodes, or where it is running."""
        for node in list(nodes) or self.running:
            try:
                found = self._client.ask_node(operator_wire.Jobs([self.name]), node=node)
            except KvpoolError as error:
                if self._clock() - self._heard.get(node, -PATIENCE_S) >= PATIENCE_S:
                    self._give_up(node, str(error))
            else:
                if found:
                    self._take(node, found[0])
                elif node in self.views:
                    self._give_up(node, f"node {node} knows nothing of it: it was started anew")

    def stop(self) -> list[str]:
        """Have it stopped where it runs; the nodes that have heard of it."""
        told = []
        for node in self.running:
            try:
                self._client.ask_node(operator_wire.StopJob(self.name), node=node)
            except KvpoolError as error:
                self.failures[node] = str(error)
            else:
                told.append(node)
        return told

    def _take(self, node: str, view: dict[str, Any]) -> None:
        self.views[node] = view
        self._heard[node] = self._clock()

    def _give_up(self, node: str, why: str) -> None:
        self.failures[node] = why
        if node in self.views:
            self.views[node] = {**self.views[node], "state": SILENT, "error": why}

    @property
    def running(self) -> list[str]:
        return [n for n, view in self.views.items() if view["state"] == JobState.RUNNING]

    @property
    def good(self) -> bool:
        """Whether it was begun and done everywhere."""
        states = {view["state"] for view in self.views.values()}
        return not self.failures and states == {JobState.DONE}

    def sum(self, field: str) -> int:
        return sum(view[field] for view in self.views.values())

    def plain(self) -> dict[str, Any]:
        """For `--json`."""
        return {"job": self.name, "nodes": list(self.views.values()), "failures": self.failures}


def follow(
    job: Job, show: Callable[[Job], None], *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Look again and again until the job runs nowhere."""
    show(job)
    while job.running:
        sleep(LOOK_S)
        job.look()
        show(job)


def carry_out(job: Job, *, quiet: bool = False) -> None:
    """Follow it, with a bar on a terminal, else with a line when it has begun. quiet: with neither."""
    console = make_console(sys.stderr, quiet=quiet)
    bar = _bar(console) if console.is_terminal and not quiet else None
    shower: AbstractContextManager[Any] = bar if bar is not None else nullcontext()
    if bar is None:
        console.print(
            f"job {job.name} runs on {', '.join(job.views)}", markup=False, soft_wrap=True
        )
    with shower:
        follow(job, _on_bar(bar) if bar is not None else _nothing)


def _nothing(_job: Job) -> None:
    pass


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _on_bar(bar: Progress) -> Callable[[Job], None]:
    task = bar.add_task("", total=None, words="")

    def show(job: Job) -> None:
        total = job.sum("total")
        bar.update(
            task,
            description=escape(job.name),
            completed=min(job.sum("seen"), total),
            total=total or None,
            words=f"{count(job.sum('blocks'), 'block')} {_word(job)}",
        )

    return show


def _word(job: Job) -> str:
    view = next(iter(job.views.values()))
    done, would = WORDS[view["kind"]]
    return would if view["dry_run"] else done


def summary(job: Job) -> str:
    """What came of it, in a line."""
    view = next(iter(job.views.values()))
    if view["kind"] == "scrub":
        return f"{count(job.sum('seen'), 'block')} seen, {job.sum('blocks'):,} bad and dropped"
    text = f"{count(job.sum('blocks'), 'block')} {_word(job)}"
    if nbytes := job.sum("nbytes"):
        text += f", {size_text(nbytes)}"
    if kept := job.sum("kept"):
        text += f"; {count(kept, 'block')} {'stays' if kept == 1 else 'stay'}, pinned"
    if any(each["state"] == JobState.CANCELLED for each in job.views.values()):
        text += "; it was stopped before its end"
    return text


def show_job(job: Job, console: Console | None = None) -> None:
    """Print what came of a job: by node where there are several, then in all."""
    console = console or make_console()
    if len(job.views) > 1:
        show_jobs(list(job.views.values()), console)
        console.print()
    if job.views:
        console.print(summary(job), markup=False)


def complaints(job: Job) -> list[str]:
    """A line for each node where all is not well."""
    found = [f"{node}: {why}" for node, why in job.failures.items()]
    for node, view in job.views.items():
        if view["error"] and node not in job.failures:
            found.append(f"{node}: {view['error']}")
    return found


def show_jobs(views: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print a table of `JobView`s."""
    console = console or make_console()
    if not views:
        console.print("no node remembers a job")
        return
    console.print(jobs_table(views))
    for view in views:
        if view["error"]:
            text = f"{view['job']} on {view['node']}: {view['error']}"
            console.print(text, style="yellow", markup=False)


def jobs_table(views: Iterable[Mapping[str, Any]]) -> Table:
    """Jobs as a table, a row for each node."""
    table = make_table("", "job", "node", "state", ">seen", ">blocks", ">bytes", ">took", "by")
    for view in views:
        seen = f"{view['seen']:,}"
        if view["total"] > view["seen"] and view["state"] != JobState.DONE:
            seen += f" of {view['total']:,}"
        words = f"{view['state']}, dry run" if view["dry_run"] else view["state"]
        table.add_row(
            escape(view["job"]),
            escape(view["node"]),
            Text(words, style=STATE_STYLES.get(view["state"], "")),
            seen,
            f"{view['blocks']:,}",
            size_text(view["nbytes"]),
            duration(view["took_s"]),
            escape(view["by"]),
        )
    for column in table.columns:
        column.no_wrap = column.header in {"job", "node", "state"}
        column.overflow = "fold"
    return table


def jobs_on(
    client: Asks, nodes: Iterable[str], names: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Views of jobs on these nodes, the youngest first; and nodes that do not answer, with why."""
    views: list[dict[str, Any]] = []
    silent: dict[str, str] = {}
    for node in nodes:
        try:
            views += client.ask_node(operator_wire.Jobs(list(names)), node=node)
        except KvpoolError as error:
            silent[node] = str(error)
    return sorted(views, key=lambda view: (view["age_s"], view["node"])), silent


def holders(
    client: Asks, nodes: Sequence[str], tenant: str, digest: str
) -> tuple[list[str], dict[str, str]]:
    """Of these nodes those that have the tenant, and its namespace open if one is given; those that do not answer."""
    found: list[str] = []
    silent: dict[str, str] = {}
    for node in nodes:
        try:
            tenants = client.inspect(node).tenants
        except KvpoolError as error:
            silent[node] = str(error)
            continue
        if tenant in tenants and (not digest or digest in tenants[tenant].namespaces):
            found.append(node)
    if not found and not silent:
        what = f"namespace {digest} open" if digest else f"tenant {tenant}"
        raise InvalidRequest(
            f"no node has {what}: no memory holds any of its blocks; `kvpool namespaces` shows what there is"
        )
    return found, silent
