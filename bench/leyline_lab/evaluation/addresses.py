"""Addresses of engines, as users give them. Pure."""

from __future__ import annotations

import httpx


def is_address(engine: str) -> bool:
    """Return True if ``--engine`` is an engine's address: http or https, a host, and no key.

    Keys in an address would be shown in errors.
    """
    try:
        url = httpx.URL(engine)
    except httpx.InvalidURL:
        return False
    plain = not (url.userinfo or url.query or url.fragment)
    return url.scheme in ("http", "https") and bool(url.host) and plain
