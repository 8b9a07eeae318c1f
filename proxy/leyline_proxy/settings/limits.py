"""Settings that limit what callers can use, and the settings of the admin port."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, field_validator

from .api_keys import digest_of

MIB = 1024 * 1024

_MIN_ADMIN_KEY = 16

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Values = Annotated[int, Field(ge=1024)]


class TenantLimitSettings(BaseModel):
    """Limits of one tenant. Unset ones come from the proxy-wide settings."""

    max_concurrent: Count | None = None
    """Requests of the tenant in progress; None for ``max_tenant_share`` of the proxy's limit."""
    max_queued: Annotated[int, Field(ge=0)] | None = None
    queue_timeout_s: Seconds | None = None
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Share of the places that become free, relative to other tenants with waiting requests."""
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Also the largest burst, after a minute without requests."""
    max_body_bytes: Annotated[int, Field(ge=1024)] | None = None
    max_messages: Count | None = None
    max_body_values: Values | None = None
    forward_credentials: bool = False
    """Send the caller's own credentials upstream instead of the proxy's."""


class LimitSettings(BaseModel):
    """Limits of the proxy, and of each tenant without its own limits."""

    max_concurrent: Count = 256
    """Requests in progress. Further ones wait, and are admitted fairly by tenant."""
    max_tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of these that one tenant may have, so that its long streams leave room for others.
    Without API keys there is only one tenant, which may have all."""
    max_queued: Annotated[int, Field(ge=0)] = 128
    """Waiting requests of one tenant. Further ones are refused."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait for a place."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 32 * MIB
    """Size of the body of one request."""
    max_messages: Count = 20_000
    """Messages of one request."""
    max_body_values: Values = 200_000
    """JSON values in one body: lists, objects, texts, members' names and commas count as one each;
    of whole numbers in a list, such as token ids, six count as one. Decoding more takes longer than
    others should wait."""
    max_connections: Count = 8192
    """Open connections. Further ones are turned away."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    """Size of the headers of one request, names and values together."""
    max_headers: Count = 200
    """Number of headers of one request."""
    header_timeout_s: Seconds = 30.0
    """From the start of a connection to the end of its first request's headers; for each further
    request, from its first byte."""
    body_timeout_s: Seconds = 120.0
    """Longest time for a whole request body."""
    stall_timeout_s: Seconds = 120.0
    """A client that reads nothing of a response for this long is cut off."""
    stream_ping_interval_s: Annotated[float, Field(ge=0)] = 10.0
    """Longest silence within a stream, such as during a prefill. After it, the client gets a
    comment, or a ping in Anthropic's API. An error before the first one has a status of its own,
    a later one is an event. 0 sends none."""

    text_memory_bytes: Annotated[int, Field(ge=8 * MIB)] = 1024 * MIB
    """Rough size of the texts that the proxy remembers to avoid repeated work: bodies, rendered
    messages, tokens. Turns cost more if this is too small for the active sessions."""
    shutdown_delay_s: Annotated[float, Field(ge=0)] = 1.0
    """After SIGTERM the proxy continues to take requests for this long while ``/readyz`` returns
    503, so that load balancers turn away first. SIGINT, from a keyboard, doesn't wait."""
    shutdown_grace_s: Annotated[int, Field(ge=0)] = 30
    """After that, responses in progress have this long to end; the rest are cut off."""

    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the admin API, which is off by default; 0 lets the system choose."""
    admin_host: str = "127.0.0.1"
    """Address of the admin port."""
    admin_key: SecretStr | None = None
    """Key of the admin API: the key itself, or ``sha256:`` and its digest."""
    metrics_on_admin: bool = False
    """Serve ``/metrics`` on the admin port only."""

    @field_validator("admin_key")
    @classmethod
    def _check_admin_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            digest_of(value.get_secret_value())
            if len(value) < _MIN_ADMIN_KEY:
                raise ValueError(f"must have at least {_MIN_ADMIN_KEY} characters")
        return value
