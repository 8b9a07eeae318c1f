"""Checks that an engine keeps a tenant's KV within the promised scope."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..tenants import Tenant
from ..upstream.handshake import UpstreamStatus

_SGLANG = "sglang"
"""Owner of all models of an SGLang without the plugin."""


def check_scope(tenant: Tenant, status: UpstreamStatus) -> None:
    """Refuse a request whose KV others would share.

    For a server without a capability document, the operator's settings are trusted.

    Raises:
        UnsupportedError: the engine knows no scopes.
    """
    capability = status.capability
    if tenant.cache_salt is None or capability is None or capability.isolates:
        return
    raise UnsupportedError(
        f"This engine ({capability.engine}) can't keep a tenant's KV apart, as cache_scope: tenant "
        "asks for. Use SGLang with the Leyline plugin, or give the tenant engines of its own.",
        code="cache_scope_unsupported",
    )


def check_other_path(tenant: Tenant, status: UpstreamStatus, path: str) -> None:
    """Refuse a request that the proxy passes on unchanged if its KV can't be kept apart.

    SGLang 0.5.23 reads ``cache_salt`` in completions only: KV of embeddings, scores and
    transcriptions is shared by everyone. A server that is neither SGLang nor has a capability
    document is trusted, as in :func:`check_scope`.

    Args:
        path: below ``/v1/``.

    Raises:
        UnsupportedError: the engine reads no salt there.
    """
    check_scope(tenant, status)
    unsalted = status.capability is not None or _SGLANG in status.owners
    if tenant.cache_salt is not None and unsalted:
        raise unsalted_path(f"This engine ({status.engine})", path)


def unsalted_path(who: str, path: str) -> UnsupportedError:
    """Return the refusal of a request whose KV can't be kept apart."""
    return UnsupportedError(
        f"{who} takes no cache_salt on /v1/{path[:200]}, so the tenant's KV can't be kept apart "
        "there, as cache_scope: tenant asks for. Give the tenant engines of its own "
        "(tenants.NAME.upstreams) and cache_scope: shared.",
        code="cache_scope_unsupported",
    )
