"""The scheduler's values as messages carry them, and back: engines by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpool.decoding import finite
from kvpool.errors import ProtocolError
from kvpool.router.group.messages import (
    COUNT_MAX,
    DecodeRow,
    EstimateRow,
    LinkRow,
    OrderRow,
    RequestRow,
)
from kvpool.router.records.explain import SHOWN_MAX
from kvpool.scheduler.links import Link
from kvpool.scheduler.values import (
    DecodeEstimate,
    Engine,
    Estimate,
    Order,
    Request,
    Role,
)

EngineOf = Callable[[str], Engine]
Among = Callable[[str], tuple[frozenset[str], frozenset[str] | None]]


def packed(keys: Sequence[Any]) -> bytes:
    """Keys of the prefix index, 8 bytes each."""
    return np.array(keys, dtype="<u8").tobytes()


def unpacked(keys: bytes) -> list[int]:
    """Raises `ProtocolError` if these are no whole keys."""
    if len(keys) % 8:
        raise ProtocolError(f"{len(keys)} bytes are no keys of 8 bytes each")
    found: list[int] = np.frombuffer(keys, dtype="<u8").tolist()
    return found


def stranger(name: str) -> Engine:
    """Stands for an engine that this router does not know, or no longer: its orders fail."""
    return Engine(name, "", Role.BOTH, "", "", (), 0)


# ---- requests --------------------------------------------------------------------------------------------


def request_row(request: Request, model: str, now: float) -> RequestRow:
    """ident: a whole number."""
    assert isinstance(request.ident, int), "requests are numbered"
    left_s = request.deadline_s - now
    return RequestRow(
        request.ident,
        model,
        packed(request.keys),
        request.tokens,
        min(request.output_tokens, COUNT_MAX),
        max(0.0, now - request.arrived_s),
        max(0.0, left_s) if left_s <= 1e9 else None,
        request.session if isinstance(request.session, str) else None,
        request.priority,
        request.tenant,
        request.whole,
        request.segments,
    )


def request_of(row: RequestRow, ident: Any, among: Among, now: float) -> Request:
    """among: the engines that serve a model. Raises `ProtocolError`."""
    kinds, engines = among(row.model)
    return Request(
        ident,
        unpacked(row.keys),
        max(row.tokens, 1),
        row.output_tokens,
        now - row.waited_s,
        session=row.session,
        priority=row.priority,
        tenant=row.tenant,
        deadline_s=math.inf if row.left_s is None else now + row.left_s,
        kinds=kinds,
        engines=engines,
        whole=row.whole,
        segments=row.segments,
    )


# ---- orders ----------------------------------------------------------------------------------------------


def estimate_row(estimate: Estimate) -> EstimateRow:
    """As a message carries it."""
    return EstimateRow(
        estimate.engine.name,
        estimate.cached,
        estimate.loaded,
        estimate.pulled,
        estimate.source,
        finite(estimate.load_s, "load_s"),
        finite(estimate.starts_s, "starts_s"),
        finite(estimate.prefill_s, "prefill_s"),
        finite(estimate.cost, "cost"),
        estimate.pending,
        estimate.link,
    )


def estimate_of(row: EstimateRow, engine_of: EngineOf) -> Estimate:
    """Of another router."""
    return Estimate(
        engine_of(row.engine),
        row.cached,
        row.loaded,
        row.pulled,
        row.source,
        row.load_s,
        row.starts_s,
        row.prefill_s,
        row.cost,
        row.pending,
        link_of(row.link),
    )


def decode_row(estimate: DecodeEstimate) -> DecodeRow:
    """As a message carries it."""
    return DecodeRow(
        estimate.engine.name,
        finite(estimate.tpot_s, "tpot_s"),
        estimate.lacks,
        finite(estimate.handover_s, "handover_s"),
        estimate.fits,
        finite(estimate.cost, "cost"),
        estimate.link,
    )


def decode_estimate_of(row: DecodeRow, engine_of: EngineOf) -> DecodeEstimate:
    """Of another router."""
    return DecodeEstimate(
        *(engine_of(row.engine), row.tpot_s, row.lacks, row.handover_s, row.fits, row.cost),
        link_of(row.link),
    )


def link_of(row: LinkRow | None) -> Link | None:
    """Of another router."""
    return None if row is None else Link(*row)


def order_row(order: Order) -> OrderRow:
    """As a message carries it, with the candidates that are shown."""
    return OrderRow(
        estimate_row(order.estimate),
        order.end,
        order.last,
        None if order.decode is None else order.decode.name,
        order.whole,
        order.follow,
        [estimate_row(each) for each in order.candidates[:SHOWN_MAX]],
        [decode_row(each) for each in order.decoders[:SHOWN_MAX]],
        order.number,
    )


def order_of(row: OrderRow, request: Request, engine_of: EngineOf) -> Order:
    """Of another router."""
    return Order(
        request,
        estimate_of(row.estimate, engine_of),
        row.end,
        row.last,
        None if row.decode is None else engine_of(row.decode),
        row.whole,
        row.follow,
        [estimate_of(each, engine_of) for each in row.candidates],
        [decode_estimate_of(each, engine_of) for each in row.decoders],
        row.number,
    )
