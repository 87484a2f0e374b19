"""What a run tells: numbers for a table and for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvpool.simulator.shape import Shape
from kvpool.simulator.simulated_cluster import Outcome, Simulation

if TYPE_CHECKING:
    from rich.console import Console


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values; NaN of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, p90, p99 and the largest."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: quantile(ordered, share) for name, share in shares.items()}
    return {"mean": mean(ordered), **found, "max": quantile(ordered, 1.0)}


def summary(
    shape: Shape,
    simulation: Simulation,
    outcomes: Sequence[Outcome],
    *,
    ttft_slo_s: float = math.inf,
    tpot_slo_s: float = math.inf,
) -> dict[str, Any]:
    """All numbers of one run, ready for JSON. Times are in seconds, hits are shares of blocks asked for."""
    served = [o for o in outcomes if not o.rejected]
    ttft_s = [o.ttft_s for o in served if o.ttft_s is not None]
    tpot_s = [tpot for o in served if (tpot := o.tpot_s) is not None]
    asked = sum(len(o.request.keys) for o in served)
    within = sum(
        o.ttft_s is not None
        and o.ttft_s <= ttft_slo_s
        and (o.tpot_s is None or o.tpot_s <= tpot_slo_s)
        for o in served
    )
    last_s = simulation.timeline.now
    computing = [busy for name, busy in simulation.busy_s.items() if not name.startswith("decode")]
    prefill, decode = simulation.estimates.prefill.error, simulation.estimates.decode.error
    return {
        "policy": shape.policy + ("/fifo" if shape.fifo else ""),
        "requests": len(outcomes),
        "rejected": len(outcomes) - len(served),
        "within_slo": within / len(outcomes),
        "ttft_s": spread(ttft_s),
        "tpot_s": spread(tpot_s) if tpot_s else None,
        "hit": sum(o.hit_blocks for o in served) / asked if asked else 0.0,
        "pulled_blocks": sum(o.pulled_blocks for o in served),
        "orders": sum(o.orders for o in served),
        "role_changes": simulation.role_changes,
        "busy": mean(computing) / last_s if last_s else 0.0,
        "seconds": last_s,
        "estimate_error": {"prefill": prefill.mean, "decode": decode.mean},
        "seed": shape.seed,
    }


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table of runs, for people: mean and quantiles of TTFT, p90 of TPOT, what was refused (429)."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    decoded = any(row["tpot_s"] for row in rows)
    names = ["TTFT s", "p50", "p90", "p99", *(["TPOT ms"] if decoded else [])]
    for name in (*names, "hit", "pulled", "busy", "429", "in SLO"):
        table.add_column(name, justify="right")
    for row in rows:
        ttft = [f"{row['ttft_s'][name]:.2f}" for name in ("mean", "p50", "p90", "p99")]
        tpot = []
        if decoded:
            tpot = [f"{1e3 * row['tpot_s']['p90']:.1f}" if row["tpot_s"] else ""]
        table.add_row(
            row["policy"],
            *ttft,
            *tpot,
            f"{row['hit']:.1%}",
            f"{row['pulled_blocks']:,}",
            f"{row['busy']:.1%}",
            f"{row['rejected']:,}",
            f"{row['within_slo']:.1%}",
        )
    console.print(table)
