"""How long engines compute for a trace over an ideal cache, and how much load that is."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.scheduler.values import Request
from kvpool.simulator.speeds import Speeds
from kvpool.simulator.traces import BLOCK_TOKENS, ideal_hits


def service_s(
    speeds: Speeds, tokens: int, cached: int, step_tokens: int, block_tokens: int = BLOCK_TOKENS
) -> float:
    """To compute a prompt of which so many blocks are cached, with an engine to itself."""
    fixed_s, token_s, attended_s = speeds.coefficients
    weights_s = max(0.0, speeds.decode_coefficients[0] - fixed_s)
    start, seconds = min(cached * block_tokens, tokens - 1), 0.0
    while start < tokens:
        end = min(start + step_tokens, tokens)
        arithmetic_s = (end - start) * (token_s + attended_s * (start + end) / 2)
        seconds += fixed_s + max(arithmetic_s, weights_s)
        start = end
    return seconds


def services_s(
    requests: Sequence[Request], speeds: Speeds, step_tokens: int, block_tokens: int = BLOCK_TOKENS
) -> list[float]:
    """Of each request, over an infinite cache that has everything the moment it is asked for."""
    hits = ideal_hits(requests)
    return [
        service_s(speeds, request.tokens, cached, step_tokens, block_tokens)
        for request, cached in zip(requests, hits, strict=True)
    ]


def scale_for(
    requests: Sequence[Request],
    speeds: Speeds,
    engines: int,
    step_tokens: int,
    load: float,
    block_tokens: int = BLOCK_TOKENS,
) -> float:
    """How many times longer the trace must be, so that its work is this share of what engines can do.

    The work is that over an infinite cache, so that a load is the same for every policy.
    """
    span_s = requests[-1].arrived_s - requests[0].arrived_s
    work_s = sum(services_s(requests, speeds, step_tokens, block_tokens))
    return work_s / (engines * load * span_s)
