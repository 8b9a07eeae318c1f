"""Configuration of the proxy, by topic; :class:`Settings` has all of it."""

from .proxy import (
    DEFAULT_TENANT,
    ONLY_ENGINE,
    Settings,
    secret_of,
)
from .sources import load_settings
from .tenant import TenantSettings
from .upstreams import UpstreamSettings

__all__ = [
    "DEFAULT_TENANT",
    "ONLY_ENGINE",
    "Settings",
    "TenantSettings",
    "UpstreamSettings",
    "load_settings",
    "secret_of",
]
