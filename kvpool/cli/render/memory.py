"""What `kvpool plan memory` asks and prints: hit rates over memory, and why blocks are missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvpool.cli.render.asking import ask_each, nodes_of
from kvpool.cli.render.text import Column, make_console, rows_table, size_text
from kvpool.telemetry.hit_curve import Memory, MemoryPlan, curve, misses_of
from kvpool.telemetry.misses import WORDS, Reason
from kvpool.wire import operator as operator_wire

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.client.gateway import Operator

TIMES = (0.5, 1.0, 1.5, 2.0, 4.0, 8.0)  # of the present memory, that the table shows


def gather(client: Operator, tenant: str) -> MemoryPlan:
    """Ask all nodes."""
    nodes = nodes_of(client.ask_node(operator_wire.Cluster()))
    told, silent = ask_each(client, nodes, operator_wire.HitCurves(), tenant=tenant)
    memories = [msgspec.convert(each, Memory, strict=False) for each in told.values()]
    stats, others = ask_each(client, told, None)
    misses = misses_of(stats.values(), tenant)
    return MemoryPlan(tenant, len(memories), curve(memories), misses, silent | others)


def show_memory(found: MemoryPlan, console: Console | None = None) -> None:
    """Print it."""
    console = console or make_console()
    seen = found.curve
    if seen.hit is None:
        console.print("no blocks have been asked for yet: there is nothing to plan with")
        return
    disks = f", {size_text(seen.ssd_bytes)} of disks" if seen.ssd_bytes else ""
    console.print(
        f"{found.nodes} nodes, {size_text(seen.dram_bytes)} of memory{disks}; hit rate now {seen.hit:.1%}, at most "
        f"{seen.ceiling:.1%} with infinite memory",
        markup=False,
    )
    console.print()
    now = seen.at(1.0)
    columns: dict[str, Column] = {
        ">memory": lambda at: "infinite" if at.dram_bytes is None else size_text(at.dram_bytes),
        ">times": lambda at: "" if at.times is None else f"{at.times:g}",
        ">hit rate": lambda at: f"{at.hit:.1%}",
        ">more": lambda at: f"{at.hit - now:+.1%}",
    }
    points = [point for point in seen.points if point.times in {None, *TIMES}]
    console.print(rows_table("", points, columns))
    console.print(
        f"estimated with {seen.samples:,} followed blocks, to within {seen.error:.1%} (95 % confidence), as if the least "
        "recently used block left first",
        markup=False,
    )
    if found.misses:
        console.print()
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
        console.print(rows_table("", most, reasons))
