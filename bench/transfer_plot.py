"""Draws what bench/transfer.py measured of many prompts at a time.

.venv-peers/bin/python bench/transfer_plot.py JSON PNG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())["rows"]
    points = [row for row in rows if row["name"].endswith("at a time")]
    (knee,) = (row["together"] for row in rows if row["name"] == "the knee")
    together = [row["together"] for row in points]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    upper.plot(together, [row["gb_s"] for row in points], marker="o")
    upper.set_ylabel("GB/s of all prompts")
    upper.set_ylim(bottom=0)
    for name, label in (("p50_ms", "median"), ("p99_ms", "p99"), ("slowest_ms", "slowest")):
        lower.plot(together, [row[name] for row in points], marker="o", label=label)
    lower.set_ylabel("ms of one prompt")
    lower.set_yscale("log")
    lower.legend()
    lower.set_xlabel("prompts of 8 parts, from 4 nodes, that are pulled at a time")
    for axis in (upper, lower):
        axis.set_xscale("log", base=2)
        axis.set_xticks(together, [str(n) for n in together])
        axis.axvline(knee, linestyle=":", color="grey")
        axis.grid(visible=True, which="both", alpha=0.25)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
