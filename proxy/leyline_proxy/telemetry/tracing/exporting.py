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
from opentelemetry.util.re import parse_env_headers

log = structlog.get_logger("leyline.tracing")

_PROTOCOL = "http/protobuf"
_DEFAULT_PLACE = "localhost:4318"
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_QUEUE_LOGGER = "opentelemetry.sdk._shared_internal"
_QUOTING_LOGGERS = (
    "opentelemetry.attributes",
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
    "opentelemetry.util.re",
)
"""They quote what callers send, once a request, and the collector's credentials."""

_STATUS = re.compile(r"code: (\d{3})")


def otlp_exporter() -> SpanExporter:
    """Exports by OTLP over HTTP, to where the ``OTEL_EXPORTER_OTLP_*`` variables say.

    Raises:
        ValueError: they ask for another protocol, or make no sense.
    """
    _quiet()
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (asked := environ.get(name, _PROTOCOL)) != _PROTOCOL:
            raise ValueError(
                f"{name} is {asked[:40]!r}, but spans are exported by {_PROTOCOL} only; "
                "collectors take it at port 4318"
            )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"):
        parts = [part for part in environ.get(name, "").split(",") if part.strip()]
        if not all(parse_env_headers(part, liberal=True) for part in parts):
            raise ValueError(
                f"{name} must be name=value, with commas between and values percent-encoded"
            )
    place = collector_place()
    return ReportingExporter(OTLPSpanExporter(), place)


def console_exporter() -> SpanExporter:
    """Prints one JSON line a span on stdout."""
    _quiet()
    exporter = ConsoleSpanExporter(
        out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + linesep
    )
    return ReportingExporter(exporter, "stdout")


def _quiet() -> None:
    for name in _QUOTING_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def collector_place() -> str:
    """Host and port of the collector; its path and credentials are for nobody's log.

    Raises:
        ValueError: what should be its URL is none.
    """
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if url := environ.get(name):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{name} must start with http:// or https://")
            try:
                return urlsplit(url).netloc.rpartition("@")[2]
            except ValueError as error:
                raise ValueError(f"{name} is no URL: {error}") from error
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
        logging.getLogger(_QUEUE_LOGGER).addFilter(self._overflow)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; runs in the processor's own thread."""
        self._why.status = "unreachable"
        try:
            result = self._exporter.export(spans)
        except OSError:  # whoever read stdout has gone
            result = SpanExportResult.FAILURE
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
        logging.getLogger(_QUEUE_LOGGER).removeFilter(self._overflow)

    def _overflow(self, record: logging.LogRecord) -> bool:
        """Takes the queue's lines, which come every 20 s while it drops spans; one that drops them
        for want of a collector has been told of."""
        if not record.getMessage().startswith("Queue full"):
            return True
        if not self._lost:
            log.warning("traces_dropped", why="queue full (OTEL_BSP_MAX_QUEUE_SIZE)")
        return False


class _Heard(logging.Filter):
    """Takes the exporter's own log lines, which come once a batch and name whole URLs."""

    status = "unreachable"

    def filter(self, record: logging.LogRecord) -> bool:
        """Never."""
        said = record.getMessage()
        if (found := _STATUS.search(said)) is not None:
            self.status = f"status {found[1]}"
        elif said.startswith("Transient error") and isinstance(record.args, tuple):
            # A phrase is that of a response, without its number.
            answered = isinstance(record.args[0], str)
            self.status = "status 429 or 5xx" if answered else "unreachable"
        return False
