"""Separation of a tenant's KV. Pure.

Engines share the KV of equal prefixes between all requests. A caller who can time a request, or
reads its cached tokens, can thus find out whether a given text was sent before. A different salt
for each tenant in the cache's keys prevents that; a prefix is then computed once per tenant.
"""

from __future__ import annotations

import hmac
from typing import Literal

CacheScope = Literal["shared", "tenant"]

MEMBER = "cache_salt"
"""Member of a request; a client's value never reaches an engine."""


def cache_salt(tenant: str, secret: str | None) -> str:
    """Return the salt of a tenant: the same in every proxy that shares ``secret``."""
    key = (secret or "").encode("utf-8", "surrogatepass")
    name = b"cache scope\x00" + tenant.encode("utf-8", "surrogatepass")
    return hmac.new(key, name, "sha256").hexdigest()[:32]
