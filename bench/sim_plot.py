"""Draws what bench/sim.py or `kvpool sim` wrote: times to first token by policy and load.

.venv-peers/bin/python bench/sim_plot.py JSON PNG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

SHOWN = ("mean", "p50", "p90", "p99")


def figures(row: dict) -> dict[str, float] | None:
    """A row's times to first token, seconds; None where it has none."""
    times = row.get("ttft_s", row)
    return {key: times[key] for key in SHOWN} if all(key in times for key in SHOWN) else None


def main() -> None:
    rows = [row for row in json.loads(Path(sys.argv[1]).read_text())["rows"] if "policy" in row]
    found: dict[float, dict[str, dict[str, float]]] = {}
    for row in rows:
        if (times := figures(row)) is not None:
            found.setdefault(row.get("load", 0.0), {})[row["policy"]] = times  # means come last
    figure, axes = plt.subplots(len(found), 1, figsize=(11, 4.5 * len(found)), squeeze=False)
    for axis, (load, policies) in zip(axes.flat, sorted(found.items()), strict=True):
        names = sorted(policies, key=lambda name: policies[name]["mean"])
        width = 0.8 / len(SHOWN)
        for number, key in enumerate(SHOWN):
            places = [place + (number - 1.5) * width for place in range(len(names))]
            axis.bar(places, [policies[name][key] for name in names], width, label=key)
        axis.set_xticks(range(len(names)), names, rotation=20, ha="right")
        axis.set_yscale("log")
        axis.set_ylabel("time to first token, s")
        axis.set_title(f"load {load:g}" if load else "the trace's own times")
        axis.grid(visible=True, axis="y", which="both", alpha=0.25)
        axis.legend(ncols=len(SHOWN))
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
