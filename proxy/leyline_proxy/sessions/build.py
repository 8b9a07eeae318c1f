"""The session store that the settings ask for."""

from __future__ import annotations

from ..settings import Settings
from .memory import MemorySessionStore
from .redis import RedisLink, RedisOptions, RedisSessionStore, Seal
from .settings import MEMORY
from .store import SessionStore


def build_session_store(settings: Settings) -> SessionStore:
    """A store; nothing is connected yet."""
    if settings.session_store.get_secret_value() == MEMORY:
        return MemorySessionStore(
            max_sessions=settings.max_sessions,
            max_bytes=settings.max_session_bytes,
            ttl_s=settings.session_ttl_s,
            idle_pack_s=settings.session_idle_s,
        )
    return RedisSessionStore(
        RedisLink(redis_options(settings)),
        ttl_s=settings.session_ttl_s,
        seal=Seal([secret.get_secret_value() for secret in settings.session_secret]),
        prefix=settings.redis_prefix,
        max_session_bytes=settings.redis_max_session_bytes,
        max_sessions=settings.redis_max_sessions,
    )


def redis_options(settings: Settings) -> RedisOptions:
    """How Redis is reached."""
    return RedisOptions(
        url=settings.session_store.get_secret_value(),
        ca_file=str(settings.redis_ca_file) if settings.redis_ca_file is not None else None,
        connect_timeout_s=settings.redis_connect_timeout_s,
        timeout_s=settings.redis_timeout_s,
        max_connections=settings.redis_max_connections,
    )
