"""Engines' speeds as a router has measured them, in place of a profile's assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpool.errors import InvalidRequest
from kvpool.simulator.shape import Shape

MEASURED_MIN = 64
"""Fewer steps than that say little."""
_LINKS = {"dram": "host_bytes_s", "ssd": "ssd_bytes_s", "peer": "network_bytes_s"}


def as_measured(told: Mapping[str, Any], kind: str, shape: Shape) -> tuple[Shape, str]:
    """The shape with what a router knows of a kind of engines, and that in words.

    told: its answer to `/engines`. kind: a name; empty: the only one that there is. What the router has not measured
    stays as the shape has it. Raises `InvalidRequest` if it has measured too little.
    """
    kinds: Mapping[str, Any] = told["knowledge"].get("kinds", {})
    capacities: dict[str, int] = {}
    for row in told["engines"]:
        if row["kind"] in kinds and "capacity_tokens" in row:
            known = capacities.get(row["kind"], row["capacity_tokens"])
            capacities[row["kind"]] = min(known, row["capacity_tokens"])
    names = sorted(capacities)
    if not kind and len(names) == 1:
        (kind,) = names
    if kind not in capacities:
        raise InvalidRequest(
            f"name a kind of engines in service with --kind: the router has {', '.join(names) or 'none'}"
        )
    found = kinds[kind]
    prefill, decode = found["prefill"], found["decode"]
    for what, fit in (("steps of prompts", prefill), ("answers", decode)):
        if fit["count"] < MEASURED_MIN:
            raise InvalidRequest(
                f"the router has measured {fit['count']} {what} of {kind}: {MEASURED_MIN} are needed; send it requests, or "
                "plan with --hardware and --model"
            )
    speeds = shape.speeds
    loads = found["loads"]
    links = {_LINKS[tier]: bytes_s for tier, bytes_s in loads.items() if tier in _LINKS}
    measured = replace(
        speeds,
        hardware=replace(speeds.hardware, **links),
        model=replace(speeds.model, kv_bytes=found["block_bytes"] // found["block_tokens"]),
        measured=(tuple(prefill["coefficients"]), tuple(decode["coefficients"]), capacities[kind]),
    )
    said = (
        f"Speeds of {kind} as the router has measured them: {prefill['count']} steps of prompts, estimates "
        f"{prefill['error']:.0%} off; {decode['count']} answers, {decode['error']:.0%} off; "
        f"of loads: {', '.join(sorted(loads)) or 'none'}."
    )
    return replace(shape, speeds=measured, step_tokens=found["step_tokens"]), said


def as_assumed(shape: Shape, hardware: str, model: str) -> str:
    """In words, what a plan by a profile rests on."""
    share = shape.speeds.hardware.flop_share
    return (
        f"Speeds are assumed: {model} on {hardware}, engines that reach {share:g} of its arithmetic. --router takes what "
        "a router has measured."
    )
