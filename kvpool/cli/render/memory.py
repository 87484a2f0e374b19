"""What `kvpool plan memory` prints: hit rates over memory, and why blocks are missed."""

from __future__ import annotations

from rich.text import Text

from kvpool.cli.render.text import Column, Parts, rows_table, size_text
from kvpool.telemetry.hit_curve import MemoryPlan
from kvpool.telemetry.misses import WORDS, Reason

TIMES = (0.5, 1.0, 1.5, 2.0, 4.0, 8.0)  # of the present memory, that the table shows


def memory_view(found: MemoryPlan) -> Parts:
    """The hit rate over memory, and the reasons of misses."""
    seen = found.curve
    if seen.hit is None:
        yield Text("no blocks have been asked for yet: there is nothing to plan with")
        return
    disks = f", {size_text(seen.ssd_bytes)} of disks" if seen.ssd_bytes else ""
    yield Text(
        f"{found.nodes} nodes, {size_text(seen.dram_bytes)} of memory{disks}; hit rate now {seen.hit:.1%}, at most "
        f"{seen.ceiling:.1%} with infinite memory"
    )
    yield Text()
    now = seen.at(1.0)
    columns: dict[str, Column] = {
        ">memory": lambda at: "infinite" if at.dram_bytes is None else size_text(at.dram_bytes),
        ">times": lambda at: "" if at.times is None else f"{at.times:g}",
        ">hit rate": lambda at: f"{at.hit:.1%}",
        ">more": lambda at: f"{at.hit - now:+.1%}",
    }
    points = [point for point in seen.points if point.times in {None, *TIMES}]
    yield rows_table("", points, columns)
    yield Text(
        f"estimated with {seen.samples:,} followed blocks, to within {seen.error:.1%} (95 % confidence), as if the least "
        "recently used block left first"
    )
    if found.misses:
        yield Text()
        total = sum(missed.blocks for missed in found.misses.values())
        reasons: dict[str, Column] = {
            "missed because": lambda one: (
                WORDS[Reason(one[0])] if one[0] in list(Reason) else one[0]
            ),
            ">reads": lambda one: f"{one[1].requests:,}",
            ">blocks": lambda one: f"{one[1].blocks:,}",
            ">share": lambda one: f"{one[1].blocks / total:.0%}",
        }
        most = sorted(found.misses.items(), key=lambda one: -one[1].blocks)
        yield rows_table("", most, reasons)
