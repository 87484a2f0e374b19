"""`kvpool drain`: follows a node's drain to its end, and says how it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.cli.render.bars import BAR, make_bar
from kvpool.cli.render.cluster import drain_text
from kvpool.cli.render.text import count, make_console, size_text
from kvpool.client.operator import OperatorRequests
from kvpool.errors import ClusterUnavailable, Unavailable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


LOOK_S = 0.2
PATIENCE_S = 15.0  # so long the daemon of this node may fail to answer
LINE_EVERY_S = 2.0

Look = Callable[[], Mapping[str, Any]]
"""The cluster as it is now: `OperatorClient.cluster`."""


class Ended(NamedTuple):
    """How following a drain ended.

    how: drained; vanished, which is gone before it had said that all was copied; absent, which is gone
        from the start; recalled, which is that somebody called it off; late, which is the time-out.
    progress: the node's last word, if any.
    """

    how: str
    progress: Mapping[str, Any] | None


def follow(
    look: Look,
    node: str,
    show: Callable[[Mapping[str, Any]], None],
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """Look again and again until the node has left, or does not have to any more.

    `show` gets its progress at every look. Raises what `look` raises when that lasts.
    """
    deadline = clock() + timeout_s
    progress: Mapping[str, Any] | None = None
    present = wanted = False
    while True:
        cluster = _look_patiently(look, clock, sleep)
        record = next((r for r in cluster["nodes"] if r["node"] == node), None)
        if record is not None and record["drain"] is not None:
            progress = record["drain"]
            show(progress)
        left_itself = cluster["node"] == node and cluster["state"] == "gone"
        if record is None or record["state"] == "gone" or left_itself:
            if progress is not None and progress["phase"] != "copying":
                return Ended("drained", progress)
            return Ended("vanished" if present else "absent", progress)
        present = True
        # The wish itself takes a moment to reach the daemon that is asked.
        if wanted and node not in cluster["drains"]:
            return Ended("recalled", progress)
        wanted = node in cluster["drains"]
        if clock() >= deadline:
            return Ended("late", progress)
        sleep(LOOK_S)


def _look_patiently(
    look: Look, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Mapping[str, Any]:
    """A daemon that is busy or restarts is asked again for a while."""
    until = clock() + PATIENCE_S
    while True:
        try:
            return look()
        except (Unavailable, ClusterUnavailable):
            if clock() >= until:
                raise
        sleep(LOOK_S)


def verdict(node: str, ended: Ended, timeout_s: float) -> tuple[str, bool]:
    """What to tell the operator, and whether all is well."""
    back = f"`kvpool drain {node} --cancel` brings it back"
    progress = ended.progress
    so_far = f" ({drain_text(progress)})" if progress is not None else ""
    others = {
        "late": f"{node} is not drained after {timeout_s:g} s{so_far}; it continues. `kvpool drain {node}` shows it "
        f"again, `kvpool drain {node} --cancel` cancels it",
        "recalled": f"the drain of {node} was cancelled by another operator{so_far}",
        "vanished": f"{node} has left the cluster and was not seen to finish its drain{so_far}: where it was stopped "
        f"or has died, what only it held is lost. While it runs, {back}",
        "absent": f"{node} is not in the cluster: it was drained before, or does not run. It stays out until "
        f"`kvpool drain {node} --cancel` is said",
    }
    if ended.how in others:
        return others[ended.how], ended.how == "absent"
    assert progress is not None, "a node that is drained has said so"
    if progress["failed"]:
        return (
            f"{node} has left the cluster, and {count(progress['failed'], 'block')} that only it holds "
            f"found no other place: they are lost when its daemon is stopped. {back} with them; make "
            f"room on other nodes, or add one, and drain it again"
        ), False
    what = "others hold whatever it held"
    if copied := progress["copied"]:
        were = "was" if copied == 1 else "were"
        nbytes = size_text(progress["copied_bytes"])
        what = f"{count(copied, 'block')} that only it held {were} copied to others, {nbytes}"
    if progress["left"]:
        left = count(progress["left"], "block")
        what += f", and {left} stay on its disks for want of time (ssd_drain_s)"
    return (
        f"{node} is drained and has left the cluster: {what}. While its daemon runs it serves "
        f"its own clients; {back}"
    ), True


def carry_out(client: OperatorRequests, node: str, timeout_s: float) -> tuple[str, bool]:
    """Follow the drain that was asked for, with a bar on a terminal, else with a line now and then."""
    console = make_console(sys.stderr)
    with make_bar(*BAR, console=console) as bar:
        show = _on_bar(bar, node)
        if not console.is_terminal:
            show = Lines(node, console, time.monotonic).show
        ended = follow(client.cluster, node, show, timeout_s)
    return verdict(node, ended, timeout_s)


def call_off(client: OperatorRequests, node: str) -> str:
    """Say that a node need not be drained any more, and what that does."""
    wanted = node in client.cluster()["drains"]
    client.drain(node, wanted=False)
    if not wanted:
        return f"nobody wanted {node} drained"
    return f"{node} is no longer drained: it comes back if it runs, and keeps what it holds"


class Lines:
    """Progress for a log: a line when there is news, and not too many of them."""

    def __init__(self, node: str, console: Console, clock: Callable[[], float]) -> None:
        self._node = node
        self._console = console
        self._clock = clock
        self._last = ""
        self._due = 0.0

    def show(self, progress: Mapping[str, Any]) -> None:
        text = drain_text(progress)
        now = self._clock()
        if text != self._last and now >= self._due:
            self._last, self._due = text, now + LINE_EVERY_S
            self._console.print(f"{self._node}: {text}", markup=False, soft_wrap=True)


def _on_bar(bar: Progress, node: str) -> Callable[[Mapping[str, Any]], None]:
    task = bar.add_task(node, total=None, words="")

    def show(progress: Mapping[str, Any]) -> None:
        words = f"{size_text(progress['copied_bytes'])} copied"
        if progress["failed"]:
            words += f", {progress['failed']:,} without a place"
        if progress["phase"] == "waiting":
            words = f"{count(progress['leases'], 'lease')} to end"
        # A node without blocks has nothing to look at, and is done with that.
        total = progress["blocks_total"] or 1
        seen = min(progress["blocks"], total) if progress["blocks_total"] else total
        bar.update(task, completed=seen, total=total, words=words)

    return show
