"""A collector that takes traces by OTLP over HTTP and remembers them; for tests. Needs the extra kvpool[tracing]."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATH = "/v1/traces"
BODY_BYTES_MAX = 16 << 20
KINDS = {1: "internal", 2: "server", 3: "client"}
ERROR = 2  # of a status


@dataclass(frozen=True)
class Received:
    """One span as it came. Times are nanoseconds since 1970. resource: what is said of who made it."""

    trace: str
    span: str
    parent: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    error: str | None
    resource: Mapping[str, Any]

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])


class Collector:
    """Listens on loopback while it is entered. `status` is what it answers; thread-safe enough to be changed."""

    def __init__(self, port: int = 0) -> None:
        self.status = 200
        self.requests = 0
        self._spans: list[Received] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                body = self.rfile.read(min(size, BODY_BYTES_MAX))
                status = collector._took(self.path, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def spans(self, trace: str = "") -> list[Received]:
        """All that came, or those of one trace."""
        with self._lock:
            return [span for span in self._spans if not trace or span.trace == trace]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _took(self, path: str, body: bytes) -> int:
        with self._lock:
            self.requests += 1
            if self.status != 200 or path != PATH:
                return self.status if self.status != 200 else 404
            message = ExportTraceServiceRequest.FromString(body)
            for group in message.resource_spans:
                resource = _plain(group.resource.attributes)
                for scope in group.scope_spans:
                    self._spans += [_received(span, resource) for span in scope.spans]
        return 200


def _received(span: Any, resource: Mapping[str, Any]) -> Received:
    return Received(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        KINDS[span.kind],
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        span.status.message if span.status.code == ERROR else None,
        resource,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
