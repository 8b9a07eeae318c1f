"""The identity provider of the settings."""

from __future__ import annotations

from ..identity.key_set import HttpKeys, KeySet
from ..identity.tokens import Tokens
from ..model.token_results import Result
from ..settings import Settings
from ..telemetry.metrics import Metrics


def build_tokens(settings: Settings, metrics: Metrics | None = None) -> Tokens | None:
    """Return the tokens of the settings; None if there are none. Nothing is read yet."""
    if settings.oidc_issuer is None:
        return None

    def fetched(good: bool) -> None:
        if metrics is not None:
            metrics.identity_fetches.labels("read" if good else "failed").inc()

    def counted(result: Result) -> None:
        if metrics is not None:
            metrics.identity_tokens.labels(result.value).inc()

    keys = KeySet(
        HttpKeys(settings.oidc_issuer, settings.oidc_jwks_url),
        refresh_s=settings.oidc_refresh_s,
        max_age_s=settings.oidc_keys_max_age_s,
        fetched=fetched,
    )
    return Tokens(
        keys,
        issuer=settings.oidc_issuer,
        audiences=settings.oidc_audience,
        algorithms=settings.oidc_algorithms,
        leeway_s=settings.oidc_leeway_s,
        claim=settings.oidc_tenant_claim,
        tenants=settings.oidc_tenants,
        counted=counted,
    )
