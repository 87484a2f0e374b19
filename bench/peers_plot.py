"""Draws what bench/peers.py wrote.

.venv-peers/bin/python bench/peers_plot.py JSON PNG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from peers_results import size

PANELS = (
    ("get", "gb_s", "read, GB/s"),
    ("put", "gb_s", "write, GB/s"),
    ("exists", "keys_s", "which keys are there, keys/s"),
    ("get", "cpu_s_per_gb", "CPU seconds a GB read"),
)


def main() -> None:
    rows = [row for row in json.loads(Path(sys.argv[1]).read_text())["rows"] if "op" in row]
    names = sorted({row["who"] for row in rows}, key=lambda name: ("kvpool" not in name, name))
    colours = dict(zip(names, plt.get_cmap("tab20").colors, strict=False))
    figure, axes = plt.subplots(2, 2, figsize=(13, 9))
    handles = {}
    for axis, (op, value, title) in zip(axes.flat, PANELS, strict=True):
        shapes = sorted({(r["block_bytes"], r["blocks"]) for r in rows if r["op"] == op})
        for name in names:
            points = {
                (r["block_bytes"], r["blocks"]): r[value]
                for r in rows
                if r["op"] == op and r["who"] == name
            }
            if not points:
                continue
            (handles[name],) = axis.plot(
                [shapes.index(shape) for shape in sorted(points)],
                [points[shape] for shape in sorted(points)],
                marker="o",
                linewidth=2.5 if "kvpool" in name else 1.2,
                color=colours[name],
            )
        axis.set_title(title)
        axis.set_yscale("log")
        axis.set_xticks(range(len(shapes)), [f"{size(b)}\nx {n}" for b, n in shapes])
        axis.grid(visible=True, which="both", alpha=0.25)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=6)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
