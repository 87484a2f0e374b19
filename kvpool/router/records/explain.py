"""What happened to a request, and why: kept for recent ones, for `/explain`. No I/O."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.scheduler.links import Link
from kvpool.scheduler.policies import Choice
from kvpool.scheduler.values import DecodeEstimate, DecodeOrder, Estimate, Order, Rejection, Request

IN_FLIGHT = "in flight"
SHOWN_MAX = 8
"""The most candidates of an order, and steps of a request, that are kept."""


@dataclass(slots=True)
class Account:
    """For one request. Times are seconds since its arrival; a step is an event with its time."""

    ident: str
    model: str
    tenant: str
    arrived_s: float
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    outcome: str = IN_FLIGHT

    def note(self, now: float, what: str, **details: Any) -> None:
        """Add a step; at the limit the last one is replaced, so that the end is always included."""
        step = {"at_s": round(now - self.arrived_s, 6), "what": what, **details}
        if len(self.steps) >= 8 * SHOWN_MAX:
            self.steps[-1] = step
        else:
            self.steps.append(step)

    def ordered(self, order: Order, now: float) -> None:
        """A part of the prompt was given to an engine."""
        self.note(
            now,
            "order",
            engine=order.estimate.engine.name,
            serves="prompt and answer" if order.whole else "prompt",
            up_to_token=order.end,
            last=order.last,
            decode=None if order.decode is None else order.decode.name,
            follow=order.follow,
            expected=order.estimate,
            candidates=order.candidates[:SHOWN_MAX],
            decode_candidates=order.decoders[:SHOWN_MAX],
        )

    def decode_ordered(self, order: DecodeOrder, now: float) -> None:
        """The answer was given to an engine."""
        self.note(
            now,
            "decode order",
            engine=order.engine.name,
            decode_candidates=order.decoders[:SHOWN_MAX],
        )

    def plain(self, tenant: str | None = None) -> dict[str, Any]:
        """For JSON. tenant: whom it is for; None: an operator, who also sees which other namespaces and nodes had a part in
        a miss.
        """
        facts = dict(self.facts)
        if tenant is not None and "reason" in (why := facts.get("missing", {})):
            facts["missing"] = {**why, "by": "", "where": "", "differs": None}
        return {
            "request": self.ident,
            "model": self.model,
            "tenant": self.tenant,
            "outcome": self.outcome,
            **facts,
            "steps": [{key: _plain(detail) for key, detail in step.items()} for step in self.steps],
        }


class Accounts:
    """Recent requests, by tenant and request id, which clients choose. Of duplicates the later one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[str, str], Account] = OrderedDict()
        self._latest: dict[str, Account] = {}  # of any tenant, by id

    def add(self, account: Account) -> None:
        name = (account.tenant, account.ident)
        self._kept.pop(name, None)
        self._kept[name] = self._latest[account.ident] = account
        if len(self._kept) > self._most:
            _, oldest = self._kept.popitem(last=False)
            if self._latest[oldest.ident] is oldest:
                del self._latest[oldest.ident]

    def get(self, ident: str, tenant: str | None = None) -> Account | None:
        """The tenant's; None: the latest of all tenants'."""
        return self._latest.get(ident) if tenant is None else self._kept.get((tenant, ident))


def estimate_of(estimate: Estimate) -> dict[str, Any]:
    """Estimates for a request on one engine; seconds, blocks."""
    return {
        "engine": estimate.engine.name,
        "cached_blocks": estimate.cached,
        "loaded_blocks": estimate.loaded,
        "pulled_blocks": estimate.pulled,
        "source": estimate.source,
        "link": link_of(estimate.link),
        "waits_for_blocks": estimate.pending,
        "load_s": _number(estimate.load_s),
        "starts_s": _number(estimate.starts_s),
        "prefill_s": _number(estimate.prefill_s),
        "ttft_s": _number(estimate.ttft_s),
        "cost": _number(estimate.cost),
    }


def decoder_of(estimate: DecodeEstimate) -> dict[str, Any]:
    """Estimates for its answer on one engine."""
    return {
        "engine": estimate.engine.name,
        "tpot_s": _number(estimate.tpot_s),
        "lacks_blocks": estimate.lacks,
        "handover_s": _number(estimate.handover_s),
        "link": link_of(estimate.link),
        "fits": estimate.fits,
        "cost": _number(estimate.cost),
    }


def link_of(link: Link | None) -> dict[str, Any] | None:
    """What pulls were taken to cost, and who says so; None: nothing is pulled."""
    if link is None:
        return None
    bytes_s = 1 / max(link.byte_s, 1e-15)
    shown = {"latency_s": link.latency_s, "bytes_s": bytes_s, "known": link.known}
    return shown if link.age_s is None else {**shown, "age_s": link.age_s}


def dry_run(request: Request, found: Choice | Rejection) -> dict[str, Any]:
    """How a request would be routed now."""
    shown: dict[str, Any] = {
        "prompt_tokens": request.tokens,
        "prompt_blocks": len(request.keys),
        "output_tokens": request.output_tokens,
    }
    if isinstance(found, Rejection):
        return {**shown, "rejected": rejection_of(found)}
    return {
        **shown,
        "engine": found.best.engine.name,
        "expected": estimate_of(found.best),
        "candidates": candidates_of(found.candidates),
        "decode_candidates": [decoder_of(each) for each in found.decoders[:SHOWN_MAX]],
    }


def candidates_of(candidates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """The considered engines, for display."""
    return [estimate_of(each) for each in candidates[:SHOWN_MAX]]


def rejection_of(rejection: Rejection) -> Mapping[str, Any]:
    """A rejection, for display."""
    return {
        "code": rejection.code,
        "reason": rejection.reason,
        "retry_after_s": _number(rejection.retry_after_s),
    }


def _plain(detail: Any) -> Any:
    """Estimates are kept unformatted: most are never requested."""
    match detail:
        case Estimate():
            return estimate_of(detail)
        case DecodeEstimate():
            return decoder_of(detail)
        case list() | tuple():
            return [_plain(each) for each in detail]
        case _:
            return detail


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 6) if math.isfinite(value) else None
