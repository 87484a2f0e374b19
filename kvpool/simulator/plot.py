"""Runs of the simulator as a picture. Needs matplotlib (`pip install 'kvpool[plots]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.errors import ConfigError

SHOWN = ("mean", "p50", "p90", "p99")


def require() -> None:
    """Raises `ConfigError` where there is no matplotlib, before anybody has waited for what is drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'kvpool[plots]'") from None


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Write a PNG: times to first token of each policy, the best first. rows: as `report.summary` has them."""
    from matplotlib.figure import Figure

    best_first = sorted(rows, key=lambda row: float(row["ttft_s"]["mean"]))
    figure = Figure(figsize=(max(5.0, 1.1 * len(rows)), 4.5))
    axis = figure.add_subplot()
    width = 0.8 / len(SHOWN)
    for number, name in enumerate(SHOWN):
        places = [place + (number - 1.5) * width for place in range(len(rows))]
        axis.bar(places, [row["ttft_s"][name] for row in best_first], width, label=name)
    names = [row["policy"] for row in best_first]
    axis.set_xticks(range(len(rows)), names, rotation=20, ha="right")
    axis.set_yscale("log")
    axis.set_ylabel("time to first token, s")
    axis.grid(visible=True, axis="y", which="both", alpha=0.25)
    axis.legend(ncols=len(SHOWN))
    figure.tight_layout()
    figure.savefig(path, dpi=90)
