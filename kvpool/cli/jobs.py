"""Jobs of operators: begun on several nodes under one name, and followed to their end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvpool.cli.asking import ask_each
from kvpool.client.operator import OperatorRequests
from kvpool.errors import KvpoolError
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobState, JobView

LOOK_S = 0.2
PATIENCE_S = 30.0  # so long a node may fail to answer until its part of a job is given up


class Job:
    """One job on some nodes. views: the last word of each; failures: nodes on which it did not begin, and why."""

    def __init__(
        self, client: OperatorRequests, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.views: dict[str, JobView] = {}
        self.failures: dict[str, str] = {}
        self._client = client
        self._clock = clock
        self._heard: dict[str, float] = {}

    def begin(
        self, nodes: Sequence[str], spec: Mapping[str, Any], *, dry_run: bool = False
    ) -> None:
        """Raises what the first node said when it begins on none."""
        message = operator_wire.BeginJob(self.name, json.dumps(spec).encode(), dry_run)
        begun, self.failures = ask_each(self._client, nodes, message, one_at_least=True)
        for node, view in begun.items():
            self._take(node, view)

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
        told, failed = ask_each(self._client, self.running, operator_wire.StopJob(self.name))
        self.failures |= failed
        return list(told)

    def _take(self, node: str, view: JobView) -> None:
        self.views[node] = view
        self._heard[node] = self._clock()

    def _give_up(self, node: str, why: str) -> None:
        self.failures[node] = why
        if node in self.views:
            self.views[node] = msgspec.structs.replace(
                self.views[node], state=JobState.SILENT, error=why
            )

    @property
    def running(self) -> list[str]:
        return [n for n, view in self.views.items() if view.state == JobState.RUNNING]

    @property
    def good(self) -> bool:
        """Whether it was begun and done everywhere."""
        states = {view.state for view in self.views.values()}
        return not self.failures and states == {JobState.DONE}

    def sum(self, field: str) -> int:
        return sum(getattr(view, field) for view in self.views.values())

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


def complaints(job: Job) -> dict[str, str]:
    """The nodes where all is not well, and why."""
    errors = {node: view.error for node, view in job.views.items() if view.error}
    return job.failures | {node: why for node, why in errors.items() if node not in job.failures}


def jobs_on(
    client: OperatorRequests, nodes: Iterable[str], names: Sequence[str] = ()
) -> tuple[list[JobView], dict[str, str]]:
    """Views of jobs on these nodes, the youngest first; and nodes that do not answer, with why."""
    found, silent = ask_each(client, nodes, operator_wire.Jobs(list(names)))
    views = [view for some in found.values() for view in some]
    return sorted(views, key=lambda view: (view.age_s, view.node)), silent
