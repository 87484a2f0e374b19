"""Exports finished spans to a collector by OTLP over HTTP. Needs the extra kvpool[tracing].

The spans are made by `kvpool.telemetry.spans` as plain values; OpenTelemetry's SDK is loaded here only, in
processes and threads that no request waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

from kvpool.errors import ConfigError, KvpoolError
from kvpool.extras import install
from kvpool.telemetry.spans import CLIENT, NAMES, SERVER, TAKE_MAX, Batch, Finished

log = logging.getLogger("kvpool.telemetry.otlp")

EVERY_S = 1.0
EXPORT_S = 3.0
"""The longest that one attempt may take."""
ATTEMPTS_MAX = 3
"""Attempts per batch before it is dropped. Meanwhile spans wait in their buffer."""
PREFIX = "kvpool."
TRACES_PATH = "/v1/traces"


@dataclass(slots=True)
class Counts:
    """For one exporter. exported, lost: spans. failures: attempts. dropped: spans that overflowed the buffer."""

    exported: int = 0
    lost: int = 0
    failures: int = 0
    dropped: int = 0

    def plain(self) -> dict[str, int]:
        return asdict(self)


class Exporter:
    """Sends batches of one service. `export` blocks, for `EXPORT_S` at most; one thread at a time."""

    def __init__(self, endpoint: str, service: str, instance: str, version: str) -> None:
        """Raises `ConfigError` if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ModuleNotFoundError as error:
            raise ConfigError(f"otlp: traces need {error.name}: {install('tracing')}") from None
        self.endpoint = endpoint
        # Its own logs are suppressed: failures are counted here, and logged once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=endpoint + TRACES_PATH, timeout=EXPORT_S)
        self._resource = Resource(
            {
                "service.name": service,
                "service.instance.id": instance,
                "service.version": version,
            }
        )

    def export(self, spans: Sequence[Finished]) -> bool:
        """Whether the collector has accepted them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        readable = [_readable(span, self._resource) for span in spans]
        return bool(self._exporter.export(readable) is SpanExportResult.SUCCESS)

    def close(self) -> None:
        """Cancels the export under way."""
        self._exporter.shutdown()


Take = Callable[[int], Awaitable[Batch]]


async def export_spans(
    take: Take,
    exporter: Exporter,
    counts: Counts,
    every_s: float = EVERY_S,
) -> None:
    """Export batches periodically, until this is cancelled.

    Failed batches are retried, and dropped after `ATTEMPTS_MAX` attempts. take: raises `KvpoolError` if
    spans are not available at present. An outage is logged once.
    """
    waiting: Sequence[Finished] = ()
    attempts, well = 0, True
    while True:
        more = False
        if not waiting:
            try:
                batch = await take(TAKE_MAX)
            except KvpoolError as error:
                log.debug("spans cannot be read: %s", error)
            else:
                waiting, more, attempts = batch.spans, batch.left > 0, 0
                counts.dropped = batch.dropped
        if waiting:
            sent = await asyncio.to_thread(exporter.export, waiting)
            if sent:
                counts.exported += len(waiting)
            else:
                counts.failures += 1
                attempts += 1
            if sent != well:
                well = sent
                _say(exporter.endpoint, well=well)
            if sent or attempts >= ATTEMPTS_MAX:
                counts.lost += 0 if sent else len(waiting)
                waiting = ()
            more = more and sent
        if not more:
            await asyncio.sleep(every_s)


def _say(endpoint: str, *, well: bool) -> None:
    if well:
        log.info("%s accepts traces again", endpoint)
    else:
        log.warning(
            "%s does not accept traces: they are retried, then dropped and counted",
            endpoint,
        )


def _readable(span: Finished, resource: object) -> object:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    kind = {SERVER: SpanKind.SERVER, CLIENT: SpanKind.CLIENT}.get(
        NAMES.get(span.name, ""), SpanKind.INTERNAL
    )
    trace, flags = int(span.trace, 16), TraceFlags(TraceFlags.SAMPLED)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace, int(span.span, 16), is_remote=False, trace_flags=flags),
        parent=SpanContext(trace, int(span.parent, 16), is_remote=True, trace_flags=flags)
        if span.parent
        else None,
        resource=resource,
        attributes={PREFIX + name: value for name, value in span.attributes.items()},
        kind=kind,
        instrumentation_scope=InstrumentationScope("kvpool"),
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )
