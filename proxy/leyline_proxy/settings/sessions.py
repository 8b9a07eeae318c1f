"""Settings of the session stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

MIB = 1024 * 1024
MEMORY = "memory"
REDIS_SCHEMES = ("redis://", "rediss://", "redis+cluster://", "rediss+cluster://")

_SECRET_CHARS = 16
"""Smallest length; a shorter secret can be guessed."""

Seconds = Annotated[float, Field(gt=0, le=30)]


class SessionSettings(BaseModel):
    """The settings of sessions, except for the limits of memory."""

    hints_secret: SecretStr | None = None
    """Shared with the engine. Signs envelopes, so that the engine acts on no one else's."""
    session_idle_s: Annotated[float, Field(gt=0)] = 30.0
    """A session in memory is packed after it hasn't been used for this long."""
    session_store: SecretStr = SecretStr(MEMORY)
    """``memory``, or the Redis that several proxies share: ``redis://HOST:PORT/DB``, ``rediss://``
    for TLS, ``redis+cluster://`` and ``rediss+cluster://`` for a cluster."""
    session_secret: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Secret that encrypts sessions in Redis, and compactions that clients carry. With several, the
    first encrypts, and all decrypt. With none, no prompt text is stored, only the proxy that has a
    session can splice it, and compactions are encrypted with a random key of this process."""
    redis_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "leyline"
    """Prefix of the names of all entries in Redis."""
    redis_ca_file: Path | None = None
    """CA certificates for Redis, instead of the system's."""
    redis_connect_timeout_s: Seconds = 0.25
    """Longest wait for a connection."""
    redis_timeout_s: Seconds = 0.5
    """Longest wait for a command."""
    redis_max_connections: Annotated[int, Field(ge=1)] = 64
    """Connections from one proxy to each server."""
    redis_max_sessions: Annotated[int, Field(ge=1)] | None = None
    """Sessions of all tenants. Above the limit, the tenant with the most sessions loses those that
    were updated longest ago. With None, only ``session_ttl_s`` applies."""
    redis_max_session_bytes: Annotated[int, Field(ge=1024)] = 4 * MIB
    """Size of one stored session. For a longer one, only the account is stored."""

    @field_validator("session_secret", mode="before")
    @classmethod
    def _split_secrets(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return [word.strip() for word in value.split(",") if word.strip()]

    @model_validator(mode="after")
    def _check_session_store(self) -> SessionSettings:
        where = self.session_store.get_secret_value()
        if any(len(secret.get_secret_value()) < _SECRET_CHARS for secret in self.session_secret):
            raise ValueError(f"session_secret must have at least {_SECRET_CHARS} characters")
        if where == MEMORY:
            return self
        if not where.startswith(REDIS_SCHEMES):
            schemes = ", ".join(REDIS_SCHEMES)
            raise ValueError(f"session_store must be {MEMORY}, or begin with one of {schemes}")
        if not has_place(where):
            raise ValueError(
                "session_store isn't a URL: in its password, write anything but letters and digits "
                "as %XX"
            )
        if set(parse_qs(urlsplit(where).query, keep_blank_values=True)) - {"db"}:
            raise ValueError(
                "session_store takes no option after its ? but db: everything else that Redis "
                "needs has its own setting, with a name that begins with redis_"
            )
        if self.redis_ca_file is not None and not where.startswith("rediss"):
            raise ValueError(
                "redis_ca_file needs a session_store with TLS, that is, a rediss:// URL"
            )
        if self.hints_secret is None and not self.session_secret:
            raise ValueError(
                "session_store in Redis needs a session_secret, which encrypts sessions, or at "
                "least a hints_secret: proxies share it to find conversations by their history"
            )
        return self

    def history_secret(self) -> str | None:
        """Return the key of the hashes by which conversations are found."""
        if self.hints_secret is not None:
            return self.hints_secret.get_secret_value()
        return self.session_secret[0].get_secret_value() if self.session_secret else None


def has_place(url: str) -> bool:
    """Return True for a URL with a host."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # not reported: it quotes a part of the password
        return False
