"""Which engine decodes a request, and whether it has the memory. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.policies.base import TIE
from kvpool.scheduler.values import Engine, Request


class DecodeOutlook(NamedTuple):
    """tpot_s: seconds a token with this request. fits: whether its whole context does."""

    engine: Engine
    tpot_s: float
    fits: bool


def context_tokens(request: Request) -> int:
    """What a decode engine holds of a request in the end, and what is reserved for it."""
    return request.tokens + request.output_tokens


def pick_decode(
    request: Request,
    engines: Sequence[Engine],
    kinds: Mapping[str, KindEstimates],
    rng: Random,
) -> DecodeOutlook | None:
    """The engine that decodes fastest with this request; any of equals. None without engines.

    One with the memory goes before all that lack it.
    """
    outlooks = [_outlook(request, engine, kinds[engine.kind]) for engine in engines]
    if not outlooks:
        return None
    fitting = [outlook for outlook in outlooks if outlook.fits] or outlooks
    least = min(outlook.tpot_s for outlook in fitting) * (1 + TIE)
    return rng.choice([outlook for outlook in fitting if outlook.tpot_s <= least])


def _outlook(request: Request, engine: Engine, kind: KindEstimates) -> DecodeOutlook:
    whole = engine.context_tokens + context_tokens(request)
    tpot_s = kind.decode.step_s(engine.decodes + 1, whole)
    return DecodeOutlook(engine, tpot_s, whole <= engine.capacity_tokens)
