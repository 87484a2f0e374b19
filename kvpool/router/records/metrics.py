"""The router's metrics for Prometheus. This table has all names."""

from __future__ import annotations

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


class Metrics:
    """The metrics of one router, in a registry of their own. Not thread-safe."""

    def __init__(self) -> None:
        # Creation times of series are not used.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvpool_router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"kvpool_router_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(
                f"kvpool_router_{name}", text, labels, registry=registry, buckets=buckets
            )

        self.requests = counter("requests", "Requests that ended, by outcome.", ("outcome",))
        self.rejections = counter("rejections", "Rejected requests, by error code.", ("code",))
        self.engine_calls = counter(
            "engine_calls", "Calls to engines, by operation.", ("engine", "operation")
        )
        self.engine_call_failures = counter(
            "engine_call_failures", "Failed calls to engines, by reason.", ("engine", "reason")
        )
        self.intents = counter(
            "intents",
            "Answers of nodes to intents for prompts, by outcome; unreachable: there was none.",
            ("outcome",),
        )
        self.connections_dropped = counter(
            "connections_dropped",
            "Connections closed because all places were taken, idle ones first.",
        )
        self.retries = counter("retries", "Calls repeated on another engine.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter(
            "cached_tokens", "Tokens of prompts expected to be in a cache or in the pool."
        )
        self.active_requests = gauge("active_requests", "Requests in progress.")
        self.requests_waiting = gauge("requests_waiting", "Requests waiting for an engine.")
        self.routers = gauge("routers", "Connected routers of the group, with this one.")
        self.leader = gauge(
            "leader", "1 while this router schedules itself, 0 while another one does."
        )
        self.leader_changes = counter("leader_changes", "Changes of the router that schedules.")
        self.held_bytes = gauge(
            "held_bytes",
            "Bytes of bodies, prompts and answers that requests hold, without the first 128 KiB of each.",
        )
        self.draining = gauge("draining", "1 while the router accepts no new requests.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Time from the arrival of a request to the first part of its answer, in seconds.",
            SECONDS,
        )
        self.queue = histogram(
            "queue_seconds",
            "Time from the arrival of a request to its first call to an engine, in seconds.",
            SECONDS,
        )
        self.prepare = histogram(
            "prepare_seconds",
            "Time to tokenise and hash a prompt and to look its blocks up in the pool, in seconds.",
            SECONDS,
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds",
            "Time per output token after the first one, in seconds.",
            TOKEN_SECONDS,
        )
        self.engine_event_lag = histogram(
            "engine_event_lag_seconds",
            "Time from an engine's KV event to its entry in the index, in seconds.",
            LAG_SECONDS,
        )
        self.engine_up = gauge("engine_up", "1 while the engine receives requests.", ("engine",))
        self.engine_breaker = gauge(
            "engine_breaker",
            "1 for the current state of the engine's circuit breaker, 0 for the others.",
            ("engine", "state"),
        )
        self.engine_cache_known = gauge(
            "engine_cache_known",
            "1 while the engine's block hashes are verified, so that its cache counts.",
            ("engine",),
        )
        self.engines_required = gauge(
            "engines_required",
            "How many engines the present load would keep fully busy, by kind of engine and role.",
            ("kind", "role"),
        )
        self.own_tokenizer = gauge(
            "own_tokenizer",
            "1 while the router tokenises these prompts of a model itself, 0 while engines do: its tokens are not yet "
            "proven equal to theirs, or have differed.",
            ("model", "prompt"),
        )
        self.estimate_error = gauge(
            "estimate_error_ratio",
            "Mean of |estimated - actual| / actual, by kind of engine and estimate.",
            ("kind", "estimate"),
        )
        self.estimate_bias = gauge(
            "estimate_bias_ratio",
            "Mean of (estimated - actual) / actual, by kind of engine and estimate.",
            ("kind", "estimate"),
        )
        self.session_requests = counter("session_requests", "Requests that name a session.")
        self.session_hints_ignored = counter(
            "session_hints_ignored", "Values of requests' hints on sessions that were of no use."
        )
        self.session_news = counter(
            "session_news",
            "News of sessions for daemons, beside what engines tell: told to the own daemon, or lost.",
            ("outcome",),
        )
        for outcome in ("told", "lost"):
            self.session_news.labels(outcome)
        self.spans = counter(
            "spans", "Ended trace spans, by outcome of their export.", ("outcome",)
        )
        self.recorded_requests = counter(
            "recorded_requests",
            "Requests whose lines were written to the recording, or dropped, by what became of them.",
            ("outcome",),
        )
        for outcome in RECORD_OUTCOMES:
            self.recorded_requests.labels(outcome)
        for outcome in SPAN_OUTCOMES:
            self.spans.labels(outcome)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

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
