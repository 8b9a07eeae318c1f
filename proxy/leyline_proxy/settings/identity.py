"""Settings for tokens of an identity provider (OpenID Connect)."""

from __future__ import annotations

from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from .api_keys import check_tenant

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
"""Signatures of public keys: whoever can check one can't make one."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class IdentitySettings(BaseModel):
    """The provider, and the tenants of its tokens. API keys work beside them."""

    oidc_issuer: str | None = None
    """URL of the provider whose tokens callers may send as ``Authorization: Bearer``, exactly as
    in the tokens' ``iss``."""
    oidc_audience: Annotated[tuple[str, ...], NoDecode] = ()
    """A token must be for one of these: its ``aud``."""
    oidc_jwks_url: str | None = None
    """URL of the provider's public keys; None finds it below ``oidc_issuer``."""
    oidc_tenant_claim: Annotated[str, Field(min_length=1, max_length=200)] = "tenant"
    """Claim with the tenant, as a path such as ``resource_access.leyline.roles``. It holds a text,
    or a list of which one is a tenant."""
    oidc_tenants: dict[str, str] = Field(default_factory=dict)
    """Tenants by value of that claim. Without any, the value is the tenant's name, and the tenant
    must be in ``tenants`` or have an API key."""
    oidc_algorithms: Annotated[tuple[Algorithm, ...], NoDecode] = ("RS256", "ES256")
    """Signatures that are accepted."""
    oidc_leeway_s: Annotated[float, Field(ge=0, le=300)] = 30.0
    """Difference of clocks that is tolerated in a token's times."""
    oidc_refresh_s: Annotated[float, Field(ge=10)] = 300.0
    """Time between two looks at the provider's keys. A token with an unknown key asks sooner, but
    not more often than every 10 seconds."""
    oidc_keys_max_age_s: Annotated[float, Field(ge=60)] = 86_400.0
    """Time for which keys are used if the provider can't be reached; then tokens are refused
    (503)."""

    @field_validator("oidc_audience", "oidc_algorithms", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return [word.strip() for word in value.split(",") if word.strip()]

    @field_validator("oidc_issuer", "oidc_jwks_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        near = parts.scheme == "http" and parts.hostname in _LOOPBACK
        if not parts.hostname or not (parts.scheme == "https" or near):
            raise ValueError("must be an https:// URL, because keys from it decide who may enter")
        return value

    @model_validator(mode="after")
    def _check_identity(self) -> IdentitySettings:
        if self.oidc_issuer is None:
            if self.oidc_audience or self.oidc_jwks_url or self.oidc_tenants:
                raise ValueError("oidc_audience, oidc_jwks_url and oidc_tenants need oidc_issuer")
            return self
        if not self.oidc_audience:
            raise ValueError(
                "oidc_issuer needs an oidc_audience; else tokens for other services would work here"
            )
        if not self.oidc_algorithms:
            raise ValueError(f"oidc_algorithms must name some of {', '.join(get_args(Algorithm))}")
        for name in self.oidc_tenants.values():
            check_tenant(name)
        return self
