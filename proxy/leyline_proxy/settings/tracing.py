"""Settings of tracing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from .off import OR_FALSE


class TraceSettings(BaseModel):
    """The settings of tracing. OpenTelemetry's own variables (``OTEL_*``) set the rest: the
    address of the collector, which requests are traced, and the name of the service."""

    trace: Annotated[Literal["off", "otlp", "console"], OR_FALSE] = "off"
    """Where spans go: to a collector (OTLP over HTTP), or to stdout, one JSON line each."""
    trace_content: bool = False
    """Whether spans hold the messages that go upstream. These are prompt text."""
    trace_content_chars: Annotated[int, Field(ge=1, le=65_536)] = 4096
    """Characters of messages in one span; the latest are kept."""
    trace_flush_s: Annotated[float, Field(ge=0, le=60)] = 5.0
    """When it stops, the proxy takes at most this long, and no longer than ``shutdown_grace_s``, to
    export waiting spans."""
