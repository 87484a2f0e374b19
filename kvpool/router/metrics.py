"""The router's own numbers, for Prometheus. Every name is in one table here."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from kvpool.router.breaker import State

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

OUTCOMES = ("answered", "refused", "rejected", "failed", "deadline", "broken_off", "client_left")
"""How a request may end: with an answer; with an engine's own error; not taken; with no engine that could do
it; too late; with an error after its beginning; nobody waits for it any more."""

SPAN_OUTCOMES = ("exported", "lost", "dropped")
"""What becomes of a span: a collector has it; none took it; there was no room for it meanwhile."""


class Metrics:
    """One registry a router. Not thread-safe."""

    def __init__(self) -> None:
        # When each series began is of no use to anybody here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvpool_router_{name}", what, labels, registry=registry)

        def gauge(name: str, what: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"kvpool_router_{name}", what, labels, registry=registry)

        def histogram(
            name: str, what: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(
                f"kvpool_router_{name}", what, labels, registry=registry, buckets=buckets
            )

        self.requests = counter("requests", "Requests, by how they ended.", ("outcome",))
        self.rejections = counter("rejections", "Requests that were not taken, by why.", ("code",))
        self.orders = counter("orders", "Calls to engines, by what for.", ("engine", "what"))
        self.failures = counter("failures", "Calls that failed, by why.", ("engine", "reason"))
        self.retries = counter("retries", "Orders given again to another engine.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("cached_tokens", "Of these, expected not to be computed.")
        self.in_flight = gauge("in_flight", "Requests from their coming to their end.")
        self.waiting = gauge("waiting", "Requests that wait for an engine.")
        self.draining = gauge("draining", "1 while the router takes no new requests.")
        self.ttft = histogram("ttft_seconds", "To the first part of an answer.", SECONDS)
        self.queued = histogram("queue_seconds", "To the first order.", SECONDS)
        self.prepared = histogram(
            "prepare_seconds", "To tokenise, hash, and ask what the pool holds.", SECONDS
        )
        self.tpot = histogram("tpot_seconds", "A token after the first one.", TOKEN_SECONDS)
        self.lag = histogram(
            "event_lag_seconds", "From an engine's event to the index.", LAG_SECONDS
        )
        self.up = gauge("engine_up", "1: gets requests.", ("engine",))
        self.breaker = gauge("engine_breaker", "1 for the state it is in.", ("engine", "state"))
        self.affinity = gauge("engine_affinity", "1: its block hashes are known.", ("engine",))
        self.error_mean = gauge(
            "estimate_error", "Mean of |expected - seen| / seen.", ("kind", "what")
        )
        self.error_bias = gauge(
            "estimate_bias", "Mean of (expected - seen) / seen.", ("kind", "what")
        )
        self.spans = counter(
            "spans", "Spans of traces that have ended, by what became of them.", ("outcome",)
        )
        for outcome in SPAN_OUTCOMES:
            self.spans.labels(outcome)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

    def breaks(self, engine: str, state: State) -> None:
        """An engine's breaker is in this state."""
        for other in State:
            self.breaker.labels(engine, other.value).set(other is state)
        self.up.labels(engine).set(state is not State.OPEN)

    def forget(self, engine: str) -> None:
        """An engine is known no more. Its counters stay."""
        for state in State:
            self.breaker.remove(engine, state.value)
        self.up.remove(engine)
        self.affinity.remove(engine)

    def text(self) -> bytes:
        return generate_latest(self._registry)
