"""Traces: a request as a span, its stages as spans below it. OpenTelemetry itself is imported in
``otel`` alone, which nothing here imports."""

from .current import RequestTrace, Tracing, current_trace, current_trace_id, stage_span

__all__ = ["RequestTrace", "Tracing", "current_trace", "current_trace_id", "stage_span"]
