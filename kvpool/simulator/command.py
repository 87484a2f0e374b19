"""`kvpool sim`: a trace, some policies, a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from kvpool.errors import InvalidRequest
from kvpool.scheduler.values import Request
from kvpool.simulator.bound import scale_for
from kvpool.simulator.recordings import Trace, first_of
from kvpool.simulator.report import show, summary
from kvpool.simulator.shape import Shape
from kvpool.simulator.simulated_cluster import Simulation
from kvpool.simulator.traces import generate

if TYPE_CHECKING:
    from rich.console import Console

SHAPE_PREFIX = "gen:"


def trace_of(trace: str, *, limit: int, rate: float, seed: int) -> Trace:
    """A trace file, or `gen:SHAPE`. limit: so many requests at most; 0 for all. rate: of those that are generated."""
    if trace.startswith(SHAPE_PREFIX):
        return Trace(generate(trace.removeprefix(SHAPE_PREFIX), limit or 2000, seed, rate))
    return first_of(trace, limit or None)


def requests_of(trace: Trace, shape: Shape, *, load: float) -> list[Request]:
    """The requests of a trace as they are to arrive. shape: in blocks of the trace's size.

    load: of the engines that compute prompts, as a share of what they can do over an infinite cache; 0
    leaves the trace's own times.
    """
    requests = trace.requests(shape.seed)
    if not load:
        return requests
    if requests[-1].arrived_s == requests[0].arrived_s:
        raise InvalidRequest("a load needs requests that arrive at different times")
    engines = shape.prefill + shape.mixed
    scale = scale_for(
        *(requests, shape.speeds, engines, shape.step_tokens, load), block_tokens=trace.block_tokens
    )
    return trace.requests(shape.seed, scale)


def run(
    requests: Sequence[Request],
    shape: Shape,
    policies: Sequence[str],
    console: Console,
    *,
    ttft_slo_s: float = math.inf,
    tpot_slo_s: float = math.inf,
) -> list[dict[str, Any]]:
    """Simulate each policy, print the table, return its rows.

    The objectives are what is counted; whether requests are refused for them is in the shape's settings.
    """
    rows = []
    what = TextColumn("{task.description}")
    columns = what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        for name in policies:
            task = progress.add_task(name, total=len(requests))
            # A name with /fifo: its requests wait in the order in which they came.
            policy, _, queue = name.partition("/")
            own = replace(shape, policy=policy, fifo=queue == "fifo")
            simulation = Simulation(own, requests)
            outcomes = simulation.run(_shown_in(progress, task))
            row = summary(own, simulation, outcomes, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
            rows.append(row)
            progress.remove_task(task)
    show(rows, console)
    return rows


def _shown_in(progress: Progress, task: TaskID) -> Callable[[int], None]:
    return lambda done: progress.update(task, completed=done)


def write_rows(rows: Sequence[dict[str, Any]], trace: Trace, path: str) -> None:
    """Write the rows as JSON, with how many requests of the trace were left out."""
    left_out = {name: getattr(trace, name) for name in ("without_hashes", "without_answer")}
    Path(path).write_text(json.dumps({"rows": rows, "left_out": left_out}, indent=2) + "\n")
