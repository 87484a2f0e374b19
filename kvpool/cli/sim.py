"""`kvpool sim`: simulates a cluster on a trace."""

from __future__ import annotations

from typing import Annotated

from kvpool.cli.base import app, argument, option


@app.command()
def sim(
    trace: Annotated[
        str,
        argument(
            "A recording of a router, a trace in Mooncake's format, or gen:shared-prefixes, gen:multi-turn, "
            "gen:agent."
        ),
    ],
    prefill: Annotated[int, option("Number of engines that compute prompts.")] = 10,
    decode: Annotated[
        int, option("Number of engines that decode; 0: requests end with the first token.")
    ] = 10,
    mixed: Annotated[int, option("Number of engines that do both.")] = 0,
    flexible: Annotated[
        bool, option("Let engines change between prefill and decode with the load.")
    ] = False,
    policy: Annotated[
        list[str] | None,
        option("May be repeated; all: every policy. NAME/fifo: in order of arrival."),
    ] = None,
    hardware: Annotated[str, option("Hardware: a profile's name, or a file.")] = "a800x8",
    model: Annotated[str, option("Model: a profile's name, or a file.")] = "llama-3-70b",
    load: Annotated[
        float, option("Load as a share of the prefill capacity; 0: the trace's own times.")
    ] = 0.0,
    seed: Annotated[int, option("The same seed gives the same run.")] = 0,
    limit: Annotated[int, option("Number of requests; 0: the whole trace.")] = 0,
    rate: Annotated[float, option("Requests a second, for gen: traces.")] = 4.0,
    pool_tokens: Annotated[int, option("Memory of all nodes together, tokens.")] = 50_000_000,
    ssd_tokens: Annotated[int, option("Disks of all nodes together, tokens.")] = 0,
    pool: Annotated[bool, option("Let nodes pull from each other.")] = True,
    network: Annotated[float, option("Link bandwidth in GB/s per node; 0: the profile's.")] = 0.0,
    lag: Annotated[float, option("Delay of KV events to the index, seconds.")] = 0.05,
    noise: Annotated[float, option("Noise of the estimates: 0.3 is about 30 %.")] = 0.0,
    ttft_slo: Annotated[
        float | None, option("Target for the time to first token, seconds.")
    ] = None,
    tpot_slo: Annotated[
        float | None, option("Target for the time per output token, seconds.")
    ] = None,
    reject: Annotated[bool, option("Refuse requests that will not meet the targets.")] = False,
    json_path: Annotated[
        str | None, option("Write the result rows to this file.", "--json")
    ] = None,
    plot: Annotated[
        str | None, option("Write a PNG of the policies to this file; needs the extra plots.")
    ] = None,
) -> None:
    """Simulate a cluster on a trace: the real scheduler and eviction, simulated engines and links.

    Example: kvpool sim trace.jsonl --prefill 16 --decode 0 --load 0.8 --policy all
    """
    import math

    from kvpool.cli.render.text import make_console
    from kvpool.scheduler.policies import DEFAULT_POLICY, POLICIES
    from kvpool.scheduler.scheduler import Settings
    from kvpool.simulator.command import requests_of, run, trace_of, write_rows
    from kvpool.simulator.plot import draw, require
    from kvpool.simulator.shape import Shape
    from kvpool.simulator.speeds import Speeds, load_hardware, load_model

    if plot is not None:
        require()
    ttft_slo_s = math.inf if ttft_slo is None else ttft_slo
    tpot_slo_s = math.inf if tpot_slo is None else tpot_slo
    settings = Settings(ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s) if reject else Settings()
    found = trace_of(trace, limit=limit, rate=rate, seed=seed)
    shape = Shape(
        Speeds(load_hardware(hardware), load_model(model)),
        block_tokens=found.block_tokens,
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        flexible=flexible,
        settings=settings,
        pool_tokens=pool_tokens,
        ssd_tokens=ssd_tokens,
        shared=pool,
        network_bytes_s=network * 1e9,
        lag_s=lag,
        noise=noise,
        seed=seed,
    )
    chosen = list(POLICIES) if policy == ["all"] else policy or [DEFAULT_POLICY]
    requests = requests_of(found, shape, load=load)
    console = make_console()
    if found.said:
        console.print(found.said, markup=False)
    rows = run(requests, shape, chosen, console, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
    if json_path is not None:
        write_rows(rows, found, json_path)
    if plot is not None:
        draw(rows, plot)
