"""Whether an engine keeps a tenant's KV as the tenant is promised."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..tenants import Tenant
from ..upstream.handshake import UpstreamStatus


def check_scope(tenant: Tenant, status: UpstreamStatus) -> None:
    """Refuse a request whose KV others would share. A server without a capability document is taken
    at the operator's word.

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
