"""`kvpool plan`: finds how many engines and how large a pool a workload needs, and what more memory would give a running
pool."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import Session, app, argument, asks, option

WORKLOAD = "workload"


class _PlanGroup(base.CommandsWithUsual):
    """`kvpool plan TRACE` is `kvpool plan workload TRACE`."""

    usual = WORKLOAD


plan_app = typer.Typer(cls=_PlanGroup, pretty_exceptions_enable=False)
app.add_typer(
    plan_app,
    name="plan",
    help="Find how much a workload needs (`workload`, which may be left out), or what more memory would give a running "
    "pool (`memory`).",
)


@asks(plan_app)
def memory(at: Session) -> None:
    """Show what more memory would give: the hit rate for several amounts of it, and why blocks are missed now.

    The nodes measure it while they run, for what a tenant's engines ask for.

    Example: kvpool plan memory
    """
    from kvpool.cli.asking import memory_plan
    from kvpool.cli.render.memory import memory_view

    found = memory_plan(at.client, at.tenant)
    at.show(found, memory_view(found))
    base.complain_of(found.unreachable, fatal=False)


@plan_app.command(WORKLOAD)
def plan(
    trace: Annotated[
        str | None,
        argument(
            "A recording of a router, or a trace in Mooncake's format; default: the workload described by the "
            "options."
        ),
    ] = None,
    ttft: Annotated[float, option("Target for the time to first token, seconds.")] = 2.0,
    tpot: Annotated[float, option("Target for the time per output token, seconds.")] = 0.05,
    share: Annotated[float, option("Share of requests that must meet both targets.")] = 0.9,
    rate: Annotated[
        float, option("Requests a second; 0: the trace's own times, or 4 for a described workload.")
    ] = 0.0,
    prompt: Annotated[int, option("Mean tokens of a prompt.")] = 4000,
    output: Annotated[int, option("Mean tokens of an answer.")] = 300,
    shared: Annotated[float, option("Share of a prompt in common with others.")] = 0.5,
    hardware: Annotated[str, option("Hardware: a profile's name, or a file.")] = "a800x8",
    model: Annotated[str, option("Model: a profile's name, or a file.")] = "llama-3-70b",
    engines_max: Annotated[int, option("The most engines to try.")] = 64,
    dram_max: Annotated[
        float, option("The most GB of memory a node may use for the pool.")
    ] = 1000.0,
    ssd_max: Annotated[float, option("The most GB of disk a node may use for the pool.")] = 8000.0,
    network: Annotated[float, option("Link bandwidth in GB/s per node; 0: the profile's.")] = 0.0,
    router: Annotated[
        str,
        option(
            "Take engines' speeds as this router has measured them. The token: KVPOOL_ROUTER_TOKEN.",
            metavar="URL",
        ),
    ] = "",
    kind: Annotated[
        str, option("With --router: which kind of engines, if there are several.")
    ] = "",
    limit: Annotated[int, option("Number of requests to simulate.")] = 1000,
    seed: Annotated[int, option("The same seed gives the same plan.")] = 0,
    json_path: Annotated[str | None, option("Write all trials to this file.", "--json")] = None,
) -> None:
    """Find how many engines of each role, and how large a pool, a workload needs. `workload` may be left out.

    Example: kvpool plan workload trace.jsonl --ttft 3 --tpot 0.1 --router http://10.0.0.2:8080
    """
    from kvpool.cli.render.text import make_console
    from kvpool.planner.command import Room, run, trace_of, write
    from kvpool.planner.measured import as_assumed, as_measured
    from kvpool.planner.trials import Targets
    from kvpool.planner.workload import Workload, at_rate
    from kvpool.router.client import RouterHttp
    from kvpool.simulator.shape import Shape
    from kvpool.simulator.speeds import Speeds, load_hardware, load_model

    found = trace_of(trace, Workload(rate or 4.0, prompt, output, shared), limit, seed)
    shape = Shape(
        Speeds(load_hardware(hardware), load_model(model)),
        network_bytes_s=network * 1e9,
        block_tokens=found.block_tokens,
        seed=seed,
    )
    if router:
        told = RouterHttp(router).ask("/engines")
        shape, known = as_measured(told, kind, shape)
    else:
        known = as_assumed(shape, hardware, model)
    console = make_console()
    console.print(known, markup=False)
    targets = Targets(ttft, tpot, share)
    if found.said:
        console.print(found.said, markup=False)
    requests = at_rate(found, rate if trace else 0.0, seed)
    room = Room(engines_max, dram_max * 1e9, ssd_max * 1e9)
    planned = run(requests, shape, targets, room, console)
    if json_path is not None:
        write(planned, targets, json_path)
