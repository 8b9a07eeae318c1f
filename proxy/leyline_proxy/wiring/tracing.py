"""Tracing according to the settings."""

from __future__ import annotations

from importlib.metadata import version

from ..settings.tracing import TraceSettings
from ..telemetry.tracing.current import Tracing

OTEL_INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


def build_tracing(settings: TraceSettings, *, grace_s: float) -> Tracing:
    """Return the tracing of the settings; OpenTelemetry is imported only if needed.

    Args:
        grace_s: for everything that ends with the process.

    Raises:
        ValueError: OpenTelemetry isn't installed, or its variables are wrong.
    """
    if settings.trace == "off":
        return Tracing()
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from ..telemetry.tracing.exporting import console_exporter, otlp_exporter
        from ..telemetry.tracing.otel import OtelTracing
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise ValueError(
            f"trace needs OpenTelemetry, which isn't installed: {OTEL_INSTALL}"
        ) from error
    own = {"service.name": "leyline", "service.version": version("leyline-kv")}
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = otlp_exporter() if settings.trace == "otlp" else console_exporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracing(
        provider,
        content_chars=settings.trace_content_chars if settings.trace_content else 0,
        flush_s=min(settings.trace_flush_s, grace_s),
    )
