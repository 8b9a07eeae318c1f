"""The two kinds of connections that TLS secures."""

from __future__ import annotations

from enum import StrEnum


class TlsSide(StrEnum):
    """The peers of a proxy."""

    CLIENTS = "clients"
    ENGINES = "engines"
