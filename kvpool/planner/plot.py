"""The sweeps of a plan as a plot. Needs matplotlib (`pip install 'kvpool[plots]'`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.planner.search import Found
from kvpool.planner.trials import Plan, Targets, Trial


def draw(found: Found, targets: Targets, path: str) -> None:
    """Write a PNG: times by ratio, by memory, by bandwidth; the targets as lines."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, Sequence[Trial], Callable[[Plan], str]]] = [
        ("prefill : decode", found.ratios, lambda p: f"{p.prefill}:{p.decode}"),
        ("DRAM a node, GB", found.memory, lambda p: f"{p.dram_bytes / 1e9:.3g}"),
        ("SSD a node, GB", found.disks, lambda p: f"{p.ssd_bytes / 1e9:.3g}"),
        ("network a node, GB/s", found.bandwidths, lambda p: f"{p.network_bytes_s / 1e9:.3g}"),
    ]
    shown = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(5 * len(shown), 4))
    for number, (name, trials, label) in enumerate(shown, 1):
        axis = figure.add_subplot(1, len(shown), number)
        places = range(len(trials))
        share = f"p{100 * targets.share:g}"
        axis.plot(places, [t.ttft_s for t in trials], "o-", color="C0", label=f"TTFT {share}")
        axis.axhline(targets.ttft_s, color="C0", linestyle=":")
        axis.set_yscale("log")
        axis.set_ylabel("time to first token, s")
        other = axis.twinx()
        other.plot(
            places, [1e3 * t.tpot_s for t in trials], "s-", color="C1", label=f"TPOT {share}"
        )
        other.axhline(1e3 * targets.tpot_s, color="C1", linestyle=":")
        other.set_ylabel("a token, ms")
        axis.set_xticks(list(places), [label(t.plan) for t in trials], rotation=45)
        axis.set_xlabel(name)
        lines = [*axis.get_lines()[:1], *other.get_lines()[:1]]
        axis.legend(handles=lines)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
