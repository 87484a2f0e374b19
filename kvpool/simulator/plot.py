"""Runs of the simulator as a plot. Needs matplotlib (`pip install '.[plots]'`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.errors import ConfigError
from kvpool.extras import install

SHOWN = ("mean", "p50", "p90", "p99")


def require() -> None:
    """Raises `ConfigError` where there is no matplotlib, before any run starts."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(f"a plot needs matplotlib: {install('plots')}") from None


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write a PNG: times to first token of each policy, the best first; a panel for each load.

    rows: as `report.summary` has them, each with its `policy`; those of one `load` make a panel, and of rows
    of one policy and load the last one counts.
    """
    from matplotlib.figure import Figure

    loads: dict[float, dict[str, Mapping[str, float]]] = {}
    for row in rows:
        times = row.get("ttft_s", row)
        if "policy" in row and all(key in times for key in SHOWN):
            loads.setdefault(row.get("load", 0.0), {})[row["policy"]] = times
    widest = max((len(policies) for policies in loads.values()), default=0)
    figure = Figure(figsize=(max(5.0, 1.1 * widest), 4.5 * len(loads)))
    axes = figure.subplots(max(1, len(loads)), 1, squeeze=False)
    width = 0.8 / len(SHOWN)
    for axis, (load, policies) in zip(axes.flat, sorted(loads.items()), strict=False):
        names = sorted(policies, key=lambda name: float(policies[name]["mean"]))
        for number, key in enumerate(SHOWN):
            places = [place + (number - 1.5) * width for place in range(len(names))]
            axis.bar(places, [policies[name][key] for name in names], width, label=key)
        axis.set_xticks(range(len(names)), names, rotation=20, ha="right")
        axis.set_yscale("log")
        axis.set_ylabel("time to first token, s")
        if load:
            axis.set_title(f"load {load:g}")
        axis.grid(visible=True, axis="y", which="both", alpha=0.25)
        axis.legend(ncols=len(SHOWN))
    figure.tight_layout()
    figure.savefig(path, dpi=90)
