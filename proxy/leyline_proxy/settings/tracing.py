"""Settings of tracing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator


class TraceSettings(BaseModel):
    """The part of the settings that tracing has. OpenTelemetry's own variables (``OTEL_*``) say
    the rest: where the collector is, which requests are traced, what the service is called."""

    trace: Literal["off", "otlp", "console"] = "off"
    """Where spans go: to a collector by OTLP over HTTP, or to stdout, one JSON line each."""
    trace_content: bool = False
    """Whether spans hold the messages that go upstream. They are prompt text."""
    trace_content_chars: Annotated[int, Field(ge=1, le=65_536)] = 4096
    """Characters of messages in one span; the latest are kept."""
    trace_flush_s: Annotated[float, Field(ge=0, le=60)] = 5.0
    """Told to stop, the proxy takes so long at most, and no longer than ``shutdown_grace_s``, to
    export what waits."""

    @field_validator("trace", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return "off" if value is False else value  # as YAML reads a bare off
