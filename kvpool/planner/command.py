"""`kvpool plan`: a workload and targets, a recommendation, its tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpool.errors import InvalidRequest
from kvpool.planner.search import Found, Limits, search
from kvpool.planner.trials import Plan, Targets, Trial, Trials
from kvpool.planner.workload import Workload, unique_tokens
from kvpool.scheduler.values import Request
from kvpool.simulator.bound import services_s
from kvpool.simulator.recordings import Trace, first_of
from kvpool.simulator.report import quantile
from kvpool.simulator.shape import Shape

if TYPE_CHECKING:
    from rich.console import Console


PLANNED = ("prefill", "decode", "mixed", "dram_bytes", "ssd_bytes", "network_bytes_s")
MEASURED = ("ttft_s", "tpot_s", "hit", "busy", "met")
"""What the file says of a plan and of its trial."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a node may have, in bytes, and how many engines there may be."""

    engines: int
    dram_bytes: float
    ssd_bytes: float


def trace_of(trace: str | None, described: Workload, limit: int, seed: int) -> Trace:
    """The first `limit` requests of a trace file, or so many of what is described."""
    if trace is None:
        return Trace(described.entries(limit, seed))
    return first_of(trace, limit)


def run(
    requests: Sequence[Request], shape: Shape, targets: Targets, room: Room, console: Console
) -> Found:
    """Search, print, and return what was found. shape: whatever a plan does not say."""
    services = services_s(requests, shape.speeds, shape.step_tokens, shape.block_tokens)
    _require_possible(services, shape, targets)
    span_s = max(requests[-1].arrived_s - requests[0].arrived_s, *services)
    limits = Limits(
        room.engines,
        room.dram_bytes,
        room.ssd_bytes,
        shape.network_bytes_s or shape.speeds.hardware.network_bytes_s,
        unique_tokens(requests, shape.block_tokens) * shape.speeds.model.kv_bytes,
    )
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def told(plan: Plan) -> None:
            progress.update(task, description=f"trial {len(trials) + 1}: {_words(plan)}")

        trials = Trials(requests, shape, targets, told)
        found = search(trials.run, limits, targets, start=math.ceil(sum(services) / span_s))
    show(found, targets, console)
    return found


def _require_possible(services: Sequence[float], shape: Shape, targets: Targets) -> None:
    """Raises `InvalidRequest` where no number of engines is enough. services: seconds of each prompt by itself."""
    in_time = sum(seconds <= targets.ttft_s for seconds in services) / len(services)
    if in_time < targets.share:
        needed = quantile(sorted(services), targets.share)
        raise InvalidRequest(
            f"on an idle engine, with its prefix cached, a prompt takes up to {needed:.3g} s for {targets.share:.0%} "
            f"of requests, and {targets.ttft_s:g} s are enough for {in_time:.0%}: allow a longer time to first "
            "token, or use faster hardware"
        )
    token_s = shape.speeds.decode_coefficients[0]
    if token_s > targets.tpot_s:
        raise InvalidRequest(
            f"a token takes {token_s:.3g} s on an idle engine: allow a longer time per token, or use faster hardware"
        )


def show(found: Found, targets: Targets, console: Console) -> None:
    """Tables of what was tried, and what is recommended."""
    sweeps = (
        ("DRAM a node", found.memory, lambda p: _size(p.dram_bytes)),
        ("SSD a node", found.disks, lambda p: _size(p.ssd_bytes)),
        ("network a node", found.bandwidths, lambda p: f"{_size(p.network_bytes_s)}/s"),
    )
    smallest = [trial for trial in (found.aggregated, found.disaggregated) if trial is not None]
    console.print(_table("smallest", smallest, _words, targets))
    for name, trials, label in sweeps:
        if trials:
            console.print(_table(name, trials, label, targets))
    console.print(recommendation(found))


def recommendation(found: Found) -> str:
    """In one sentence or two."""
    plan = found.best.plan
    kind = "aggregated" if plan.mixed else "disaggregated"
    pool = _size(plan.dram_bytes) + " of DRAM" if plan.dram_bytes else "no pool"
    if plan.ssd_bytes:
        pool += f" and {_size(plan.ssd_bytes)} of SSD"
    text = (
        f"Recommended: {kind}, {_words(plan)}; {pool} on each node that computes prompts, "
        f"{_size(plan.network_bytes_s)}/s of network a node."
    )
    if not found.best.met:
        text += " With so little memory a node the targets are missed: allow more."
    return text


def document(found: Found, targets: Targets) -> dict[str, Any]:
    """All of it, ready for JSON. Bytes and seconds; rows are trials, each in its sweep."""
    sweeps = {
        "aggregated": (found.aggregated,),
        "disaggregated": (found.disaggregated,),
        "dram": found.memory,
        "ssd": found.disks,
        "network": found.bandwidths,
    }
    return {
        "targets": asdict(targets),
        "recommended": {
            "serving": "aggregated" if found.best.plan.mixed else "disaggregated",
            **_row(found.best),
        },
        "rows": [
            {"sweep": name, **_row(trial)}
            for name, trials in sweeps.items()
            for trial in trials
            if trial is not None
        ],
    }


def write(found: Found, targets: Targets, path: str) -> None:
    """Write all that was found as JSON."""
    Path(path).write_text(json.dumps(document(found, targets), indent=2) + "\n")


def _row(trial: Trial) -> dict[str, Any]:
    row = {name: getattr(trial.plan, name) for name in PLANNED}
    row |= {name: getattr(trial, name) for name in MEASURED}
    # What never came has no time.
    return row if trial.ttft_s < math.inf else row | {"ttft_s": None}


def _table(
    name: str, trials: Sequence[Trial], label: Callable[[Plan], str], targets: Targets
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(name, no_wrap=True, min_width=24)
    share = f"p{100 * targets.share:g}"
    for column in (f"TTFT {share} s", f"TPOT {share} ms", "hit", "busy", "met"):
        table.add_column(column, justify="right")
    for trial in trials:
        table.add_row(
            label(trial.plan),
            f"{trial.ttft_s:.2f}",
            f"{1e3 * trial.tpot_s:.1f}",
            f"{trial.hit:.1%}",
            # What does both is busy with answers, too: that says nothing.
            "" if trial.plan.mixed else f"{min(trial.busy, 1.0):.0%}",
            "yes" if trial.met else "no",
        )
    return table


def _words(plan: Plan) -> str:
    if plan.mixed:
        return f"{plan.mixed} for both"
    return f"{plan.prefill} prefill + {plan.decode} decode"


def _size(count: float) -> str:
    """Bytes in GB, or TB, with three digits."""
    if count >= 1e12:
        return f"{count / 1e12:.3g} TB"
    return f"{count / 1e9:.3g} GB"
