"""What `kvpool plan memory` asks and prints: hit rates over memory, and why blocks are missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvpool.cli.render.jobs import nodes_of
from kvpool.cli.render.text import make_console, make_table, size_text
from kvpool.errors import ClusterUnavailable, InvalidRequest, ProtocolError, Unavailable
from kvpool.telemetry.hit_curve import Curve, Memory, curve, misses_of
from kvpool.telemetry.memory_stats import Missed
from kvpool.telemetry.misses import WORDS, Reason
from kvpool.wire import operator as operator_wire

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.cli.render.jobs import Asks

TIMES = (0.5, 1.0, 1.5, 2.0, 4.0, 8.0)  # of the present memory, that the table shows


class Found(msgspec.Struct, frozen=True):
    """All nodes together. misses: reads and blocks by reason, since the nodes started. unreachable: why they did not
    answer.
    """

    curve: Curve
    misses: dict[str, Missed]
    nodes: int
    unreachable: dict[str, str]


def gather(client: Asks, tenant: str) -> Found:
    """Ask all nodes."""
    memories: list[Memory] = []
    stats = []
    unreachable: dict[str, str] = {}
    for node in nodes_of(client.ask_node(operator_wire.Cluster())):
        try:
            told = client.ask_node(operator_wire.HitCurves(), node=node, tenant=tenant)
            memories.append(msgspec.convert(told, Memory, strict=False))
            stats.append(client.inspect(node))
        except (Unavailable, ClusterUnavailable, InvalidRequest, ProtocolError) as error:
            unreachable[node] = str(error)
    return Found(curve(memories), misses_of(stats, tenant), len(memories), unreachable)


def show_memory(found: Found, console: Console | None = None) -> None:
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
    table = make_table("", ">memory", ">times", ">hit rate", ">more")
    now = seen.at(1.0)
    for point in seen.points:
        if point.times is None or point.dram_bytes is None:
            table.add_row("infinite", "", f"{point.hit:.1%}", f"{point.hit - now:+.1%}")
        elif point.times in TIMES:
            size, times = size_text(point.dram_bytes), f"{point.times:g}"
            table.add_row(size, times, f"{point.hit:.1%}", f"{point.hit - now:+.1%}")
    console.print(table)
    console.print(
        f"estimated with {seen.samples:,} followed blocks, to within {seen.error:.1%} (95 % confidence), as if the least "
        "recently used block left first",
        markup=False,
    )
    if found.misses:
        console.print()
        total = sum(missed.blocks for missed in found.misses.values())
        reasons = make_table("", "missed because", ">reads", ">blocks", ">share")
        for name, missed in sorted(found.misses.items(), key=lambda one: -one[1].blocks):
            words = WORDS[Reason(name)] if name in list(Reason) else name
            share = f"{missed.blocks / total:.0%}"
            reasons.add_row(words, f"{missed.requests:,}", f"{missed.blocks:,}", share)
        console.print(reasons)
