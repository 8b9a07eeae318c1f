"""Exports spans beside the requests, and says once when that fails. Imported only where tracing
is on."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from os import environ, linesep
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult

log = structlog.get_logger("leyline.tracing")

_PROTOCOL = "http/protobuf"
_DEFAULT_PLACE = "localhost:4318"
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_QUEUE_LOGGER = "opentelemetry.sdk._shared_internal"
_CALLERS_LOGGERS = (
    "opentelemetry.attributes",
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)
"""They complain of what callers send, once a request."""

_STATUS = re.compile(r"code: (\d{3})")


def otlp_exporter() -> SpanExporter:
    """Exports by OTLP over HTTP, to where the ``OTEL_EXPORTER_OTLP_*`` variables say.

    Raises:
        ValueError: they ask for another protocol, or make no sense.
    """
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (asked := environ.get(name, _PROTOCOL)) != _PROTOCOL:
            raise ValueError(
                f"{name} is {asked[:40]!r}, but spans are exported by {_PROTOCOL} only; "
                "collectors take it at port 4318"
            )
    return ReportingExporter(OTLPSpanExporter(), collector_place())


def console_exporter() -> SpanExporter:
    """Prints one JSON line a span on stdout."""
    return ConsoleSpanExporter(
        out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + linesep
    )


def collector_place() -> str:
    """Host and port of the collector; its path and credentials are for nobody's log.

    Raises:
        ValueError: what should be its URL is none.
    """
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if url := environ.get(name):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{name} must start with http:// or https://")
            return urlsplit(url).netloc.rpartition("@")[2]
    return _DEFAULT_PLACE


class ReportingExporter(SpanExporter):
    """Says when spans begin to be lost and when they no longer are, instead of once a batch.

    Args:
        place: of the collector, for logs.
    """

    def __init__(self, exporter: SpanExporter, place: str) -> None:
        self._exporter = exporter
        self._place = place
        self._lost = 0
        self._why = _Heard()
        logging.getLogger(_EXPORTER_LOGGER).addFilter(self._why)
        logging.getLogger(_QUEUE_LOGGER).addFilter(_not_of_full_queues)
        for name in _CALLERS_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; runs in the processor's own thread."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("traces_exported_again", collector=self._place, lost_spans=self._lost)
            self._lost = 0
            return result
        if not self._lost:
            log.warning("traces_not_exported", collector=self._place, why=self._why.status)
        self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Give up what is under way."""
        self._exporter.shutdown()
        logging.getLogger(_EXPORTER_LOGGER).removeFilter(self._why)


class _Heard(logging.Filter):
    """Takes the exporter's own log lines, which come once a batch and name whole URLs."""

    status = "unreachable"

    def filter(self, record: logging.LogRecord) -> bool:
        """Never."""
        found = _STATUS.search(record.getMessage())
        self.status = f"status {found[1]}" if found is not None else "unreachable"
        return False


def _not_of_full_queues(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Queue full")
