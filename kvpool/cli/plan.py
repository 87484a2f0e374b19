"""`kvpool plan`: how many engines and how large a pool a workload needs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.base import app


@app.command()
def plan(
    trace: Annotated[
        str | None,
        typer.Argument(help="A trace in Mooncake's format; without, a described workload."),
    ] = None,
    ttft: Annotated[float, typer.Option(help="Target: seconds to the first token.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Target: seconds a token after it.")] = 0.05,
    share: Annotated[float, typer.Option(help="Of requests that are to keep to both.")] = 0.9,
    rate: Annotated[
        float, typer.Option(help="Requests a second; 0: a trace's own times, 4 of a workload.")
    ] = 0.0,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt, on average.")] = 4000,
    output: Annotated[int, typer.Option(help="Tokens of an answer, on average.")] = 300,
    shared: Annotated[float, typer.Option(help="Share of a prompt that others have, too.")] = 0.5,
    hardware: Annotated[str, typer.Option(help="A profile's name, or a file.")] = "a800x8",
    model: Annotated[str, typer.Option(help="A profile's name, or a file.")] = "llama-3-70b",
    engines_max: Annotated[int, typer.Option(help="More are not tried.")] = 64,
    dram_max: Annotated[float, typer.Option(help="GB a node may have for the pool.")] = 1000.0,
    ssd_max: Annotated[float, typer.Option(help="The same of disks.")] = 8000.0,
    network: Annotated[float, typer.Option(help="GB/s a node; 0: the profile's.")] = 0.0,
    limit: Annotated[int, typer.Option(help="So many requests are simulated.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed, the same plan.")] = 0,
    json_path: Annotated[str | None, typer.Option("--json", help="Write all trials here.")] = None,
    plot: Annotated[
        str | None, typer.Option(help="Draw the sweeps as a PNG here; needs the extra plots.")
    ] = None,
) -> None:
    """Find how many engines of which kind, and how large a pool, a workload needs.

    Example: kvpool plan trace.jsonl --ttft 3 --tpot 0.1 --plot plan.png
    """
    from rich.console import Console

    from kvpool.planner.command import Room, requests_of, run, write
    from kvpool.planner.plot import draw
    from kvpool.planner.trials import Targets
    from kvpool.planner.workload import Workload
    from kvpool.simulator.plot import require
    from kvpool.simulator.simulated_cluster import Shape
    from kvpool.simulator.speeds import Speeds, load_hardware, load_model

    if plot is not None:
        require()
    shape = Shape(
        Speeds(load_hardware(hardware), load_model(model)),
        network_bytes_s=network * 1e9,
        seed=seed,
    )
    targets = Targets(ttft, tpot, share)
    described = Workload(rate or 4.0, prompt, output, shared)
    requests = requests_of(trace, described, rate, shape, limit)
    room = Room(engines_max, dram_max * 1e9, ssd_max * 1e9)
    found = run(requests, shape, targets, room, Console())
    if json_path is not None:
        write(found, targets, json_path)
    if plot is not None:
        draw(found, targets, plot)
