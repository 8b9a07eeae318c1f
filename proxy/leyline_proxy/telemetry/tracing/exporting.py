"""Export of spans outside the requests, with one report when it fails. Imported only if tracing is
on."""

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
"""Loggers that quote callers' headers, once per request, and the collector's credentials."""

_STATUS = re.compile(r"code: (\d{3})")


def otlp_exporter() -> SpanExporter:
    """Return an exporter by OTLP over HTTP, configured by the ``OTEL_EXPORTER_OTLP_*`` variables.

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
    """Return an exporter that prints one JSON line per span on stdout."""
    _quiet()
    exporter = ConsoleSpanExporter(
        out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + linesep
    )
    return ReportingExporter(exporter, "stdout")


def _quiet() -> None:
    for name in _QUOTING_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def collector_place() -> str:
    """Return host and port of the collector, without the path and credentials, which must not be
    logged.

    Raises:
        ValueError: its variable isn't a URL.
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
    """Reports when spans begin to be lost and when that ends, instead of once per batch.

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
        except OSError:  # the reader of stdout has gone
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
        """Cancel the running export."""
        self._exporter.shutdown()
        logging.getLogger(_EXPORTER_LOGGER).removeFilter(self._why)
        logging.getLogger(_QUEUE_LOGGER).removeFilter(self._overflow)

    def _overflow(self, record: logging.LogRecord) -> bool:
        """Suppress the queue's lines, which come every 20 s while it drops spans; drops because of
        a missing collector have been reported."""
        if not record.getMessage().startswith("Queue full"):
            return True
        if not self._lost:
            log.warning("traces_dropped", why="queue full (OTEL_BSP_MAX_QUEUE_SIZE)")
        return False


class _Heard(logging.Filter):
    """Suppresses the exporter's own log lines, which come once per batch and contain whole URLs."""

    status = "unreachable"

    def filter(self, record: logging.LogRecord) -> bool:
        """Reject every record, and note its status."""
        said = record.getMessage()
        if (found := _STATUS.search(said)) is not None:
            self.status = f"status {found[1]}"
        elif said.startswith("Transient error") and isinstance(record.args, tuple):
            # The phrase comes from a response, without its number.
            answered = isinstance(record.args[0], str)
            self.status = "status 429 or 5xx" if answered else "unreachable"
        return False
