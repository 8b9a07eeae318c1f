"""Spans that end in memory, and a collector that decodes what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import SpanKind

from leyline_proxy.telemetry.tracing.otel import OtelTracing

PATIENCE_S = 10.0


class Recorder:
    """Tracing whose spans can be looked at."""

    def __init__(self, *, content_chars: int = 0, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = OtelTracing(self.provider, content_chars=content_chars)

    def clear(self) -> None:
        """Forget the spans so far."""
        self._exporter.clear()

    def spans(self) -> list[ReadableSpan]:
        """Finished spans by their start."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def request(self) -> ReadableSpan:
        """The only request's span, once it has ended; its client may have the answer before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            roots = [span for span in self.spans() if span.kind is SpanKind.SERVER]
            if roots or time.monotonic() > deadline:
                (root,) = roots
                return root
            time.sleep(0.01)

    def stages(self, name: str | None = None) -> list[ReadableSpan]:
        """The spans below it, or those of a name."""
        root = self.request()
        below = [span for span in self.spans() if span is not root]
        return [span for span in below if name in (None, span.name)]


def events(span: ReadableSpan) -> list[tuple[str, dict[str, Any]]]:
    """Names and attributes of a span's events."""
    return [(event.name, dict(event.attributes or {})) for event in span.events]


def duration_s(span: ReadableSpan) -> float:
    """Seconds."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@dataclass
class Collector:
    """A collector and what it has received."""

    endpoint: str
    bodies: list[bytes] = field(default_factory=list)
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    status: int = 200
    """The status it answers; it keeps nothing with any other."""

    def spans(self) -> Sequence[ProtoSpan]:
        """All spans, in the order of their arrival."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def holds(self, words: str) -> bool:
        """Return True if the bytes received hold ``words``."""
        return any(words.encode() in body for body in self.bodies)


@contextmanager
def collector() -> Iterator[Collector]:
    """An OTLP/HTTP receiver on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces", self.path
            if got.status == HTTPStatus.OK:
                got.requests.append(ExportTraceServiceRequest.FromString(body))
                got.bodies.append(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(got.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        got = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join()
