"""The router's metrics for Prometheus, declared at the field."""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from kvpool.retry import BreakerState

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

BREAKER_STATES = (BreakerState.CLOSED, BreakerState.OPEN)
"""Of an engine's breaker. No request is its trial, so it is never half open."""

OUTCOMES = ("answered", "refused", "rejected", "failed", "deadline", "broken_off", "client_left")
"""How a request ends: answered; refused by an engine with an error of its own; rejected by the router; no engine could
serve it; past its deadline; an error after the answer began; the client closed the connection."""

SPAN_OUTCOMES = ("exported", "lost", "dropped")
"""How the export of a span ends: a collector accepted it; no collector accepted it; the buffer was full."""

RECORD_OUTCOMES = ("written", "queue_full", "write_failed", "file_full")
"""What becomes of a request's line in a recording: it is in the file; too many waited to be written; the disk did not
take it; the file was full."""


def counter(text: str, labels: tuple[str, ...] = (), *, values: tuple[str, ...] = ()) -> Any:
    """Declare a counter. values: of its label, whose series are there from the start."""
    return partial(Counter, documentation=text, labelnames=labels), values


def gauge(text: str, labels: tuple[str, ...] = ()) -> Any:
    """Declare a gauge."""
    return partial(Gauge, documentation=text, labelnames=labels), ()


def histogram(text: str, buckets: tuple[float, ...]) -> Any:
    """Declare a histogram."""
    return partial(Histogram, documentation=text, buckets=buckets), ()


class Metrics:
    """The metrics of one router, in a registry of their own: `kvpool_router_` and the field's name. Not thread-safe."""

    requests: Counter = counter("Requests that ended, by outcome.", ("outcome",), values=OUTCOMES)
    rejections: Counter = counter("Rejected requests, by error code.", ("code",))
    engine_calls: Counter = counter("Calls to engines, by operation.", ("engine", "operation"))
    engine_call_failures: Counter = counter(
        "Failed calls to engines, by reason.", ("engine", "reason")
    )
    intents: Counter = counter(
        "Answers of nodes to intents for prompts, by outcome; unreachable: there was none.",
        ("outcome",),
    )
    connections_dropped: Counter = counter(
        "Connections closed because all places were taken, idle ones first."
    )
    retries: Counter = counter("Calls repeated on another engine.")
    prompt_tokens: Counter = counter("Tokens of prompts.")
    cached_tokens: Counter = counter("Tokens of prompts expected to be in a cache or in the pool.")
    active_requests: Gauge = gauge("Requests in progress.")
    requests_waiting: Gauge = gauge("Requests waiting for an engine.")
    routers: Gauge = gauge("Connected routers of the group, with this one.")
    leader: Gauge = gauge("1 while this router schedules itself, 0 while another one does.")
    leader_changes: Counter = counter("Changes of the router that schedules.")
    held_bytes: Gauge = gauge(
        "Bytes of bodies, prompts and answers that requests hold, without the first 128 KiB of each."
    )
    draining: Gauge = gauge("1 while the router accepts no new requests.")
    time_to_first_token_seconds: Histogram = histogram(
        "Time from the arrival of a request to the first part of its answer, in seconds.", SECONDS
    )
    queue_seconds: Histogram = histogram(
        "Time from the arrival of a request to its first call to an engine, in seconds.", SECONDS
    )
    prepare_seconds: Histogram = histogram(
        "Time to tokenise and hash a prompt and to look its blocks up in the pool, in seconds.",
        SECONDS,
    )
    time_per_output_token_seconds: Histogram = histogram(
        "Time per output token after the first one, in seconds.", TOKEN_SECONDS
    )
    engine_event_lag_seconds: Histogram = histogram(
        "Time from an engine's KV event to its entry in the index, in seconds.", LAG_SECONDS
    )
    engine_up: Gauge = gauge("1 while the engine receives requests.", ("engine",))
    engine_breaker: Gauge = gauge(
        "1 for the current state of the engine's circuit breaker, 0 for the others.",
        ("engine", "state"),
    )
    engine_cache_known: Gauge = gauge(
        "1 while the engine's block hashes are verified, so that its cache counts.", ("engine",)
    )
    engines_required: Gauge = gauge(
        "How many engines the present load would keep fully busy, by kind of engine and role.",
        ("kind", "role"),
    )
    own_tokenizer: Gauge = gauge(
        "1 while the router tokenises these prompts of a model itself, 0 while engines do: its tokens are not yet "
        "proven equal to theirs, or have differed.",
        ("model", "prompt"),
    )
    estimate_error_ratio: Gauge = gauge(
        "Mean of |estimated - actual| / actual, by kind of engine and estimate.",
        ("kind", "estimate"),
    )
    estimate_bias_ratio: Gauge = gauge(
        "Mean of (estimated - actual) / actual, by kind of engine and estimate.",
        ("kind", "estimate"),
    )
    session_requests: Counter = counter("Requests that name a session.")
    session_hints_ignored: Counter = counter(
        "Values of requests' hints on sessions that were of no use."
    )
    session_news: Counter = counter(
        "News of sessions for daemons, beside what engines tell: told to the own daemon, or lost.",
        ("outcome",),
        values=("told", "lost"),
    )
    spans: Counter = counter(
        "Ended trace spans, by outcome of their export.", ("outcome",), values=SPAN_OUTCOMES
    )
    recorded_requests: Counter = counter(
        "Requests whose lines were written to the recording, or dropped, by what became of them.",
        ("outcome",),
        values=RECORD_OUTCOMES,
    )

    def __init__(self) -> None:
        # Creation times of series are not used.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        for name in type(self).__annotations__:
            make, values = getattr(type(self), name)
            metric = make(f"kvpool_router_{name}", registry=self._registry)
            for value in values:
                metric.labels(value)
            setattr(self, name, metric)

    def breaks(self, engine: str, state: BreakerState) -> None:
        """Record the state of an engine's breaker."""
        for other in BREAKER_STATES:
            self.engine_breaker.labels(engine, other.value).set(other is state)
        self.engine_up.labels(engine).set(state is not BreakerState.OPEN)

    def forget(self, engine: str) -> None:
        """Drop the gauges of an engine that has left. Its counters stay."""
        for state in BREAKER_STATES:
            self.engine_breaker.remove(engine, state.value)
        self.engine_up.remove(engine)
        self.engine_cache_known.remove(engine)

    def text(self) -> bytes:
        return generate_latest(self._registry)
