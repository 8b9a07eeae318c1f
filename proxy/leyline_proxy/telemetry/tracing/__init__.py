"""Traces: a request as a span, with its stages as spans below it. Only ``otel`` imports
OpenTelemetry itself, and nothing here imports ``otel``."""

from .current import RequestTrace, Tracing, current_trace, current_trace_id, stage_span

__all__ = ["RequestTrace", "Tracing", "current_trace", "current_trace_id", "stage_span"]
