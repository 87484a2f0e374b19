"""One central queue in the order of arrival over an ideal cache: what a scheduler that keeps to that order
can hardly beat. A yardstick, not a proof: steps that compute parts of two prompts read the weights once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvpool.scheduler.values import Request
from kvpool.simulator.bound import services_s
from kvpool.simulator.speeds import Speeds


def central_queue(
    requests: Sequence[Request], speeds: Speeds, engines: int, step_tokens: int
) -> list[float]:
    """Times to first token with one queue for all engines, in order, over that cache, loads for nothing.

    Work-conserving: the first in the queue goes to whichever engine is free first.
    """
    free_at = [0.0] * engines
    ttft_s = []
    services = services_s(requests, speeds, step_tokens)
    for request, service in zip(requests, services, strict=True):
        begins = max(heapq.heappop(free_at), request.arrived_s)
        heapq.heappush(free_at, begins + service)
        ttft_s.append(begins + service - request.arrived_s)
    return ttft_s
