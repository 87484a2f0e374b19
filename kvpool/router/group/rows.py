"""The scheduler's values as messages carry them, and back: engines by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
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
from kvpool.scheduler.values import DecodeEstimate, Engine, Estimate, Order, Request, Role

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
    return EstimateRow(estimate.engine.name, *_values(estimate))


def estimate_of(row: EstimateRow, engine_of: EngineOf) -> Estimate:
    """Of another router."""
    _, *values, link = msgspec.structs.astuple(row)
    return Estimate._make([engine_of(row.engine), *values, link_of(link)])


def decode_row(estimate: DecodeEstimate) -> DecodeRow:
    """As a message carries it."""
    return DecodeRow(estimate.engine.name, *_values(estimate))


def decode_estimate_of(row: DecodeRow, engine_of: EngineOf) -> DecodeEstimate:
    """Of another router."""
    _, *values, link = msgspec.structs.astuple(row)
    return DecodeEstimate._make([engine_of(row.engine), *values, link_of(link)])


def _values(estimate: Estimate | DecodeEstimate) -> Iterator[Any]:
    """Yield the estimated values in the order of the fields, which messages have in common with the scheduler."""
    for name, value in zip(estimate._fields[1:], estimate[1:], strict=True):
        yield finite(value, name) if isinstance(value, float) else value


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
