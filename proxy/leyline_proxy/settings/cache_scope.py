"""Keeping a tenant's KV to itself. Pure.

Engines share the KV of equal prefixes between all requests. Who can time a request, or reads its
cached tokens, can so find out whether somebody has sent a given text before. A salt in the keys of
the cache, another for each tenant, ends that; a prefix is then computed once per tenant.
"""

from __future__ import annotations

import hmac
from typing import Literal

CacheScope = Literal["shared", "tenant"]

MEMBER = "cache_salt"
"""Of a request; what clients send under this name never reaches an engine."""


def cache_salt(tenant: str, secret: str | None) -> str:
    """The salt of a tenant: the same in every proxy that shares ``secret``."""
    key = (secret or "").encode("utf-8", "surrogatepass")
    name = b"cache scope\x00" + tenant.encode("utf-8", "surrogatepass")
    return hmac.new(key, name, "sha256").hexdigest()[:32]
