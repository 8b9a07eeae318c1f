"""Settings for TLS, to engines and from clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from .api_keys import check_tenant


class TlsSettings(BaseModel):
    """Files in PEM, which are read again when they change."""

    tls_cert: Path | None = None
    """Certificate chain of the ports, the proxy's own first. With it, they speak HTTPS alone."""
    tls_key: Path | None = None
    """Key of ``tls_cert``, without a passphrase."""
    tls_client_ca: Path | None = None
    """Authorities of clients' certificates. With it, clients are asked for one."""
    tls_clients: Literal["required", "optional"] | None = None
    """Clients without a certificate: ``required``, as if unset, ends their handshake, ``optional``
    lets them show an API key or a token instead."""
    tls_tenants: dict[str, str] = Field(default_factory=dict)
    """Tenants by name in the client's certificate: a URI such as a SPIFFE ID, or a DNS name. A name
    that ends in ``/*`` means every path below it. API keys work beside them."""
    upstream_tls_ca: Path | None = None
    """Authorities of the certificates of engines and routers; None for those that the system
    trusts."""
    upstream_tls_cert: Path | None = None
    """Certificate chain that the proxy shows engines and routers."""
    upstream_tls_key: Path | None = None
    """Key of ``upstream_tls_cert``, without a passphrase."""
    upstream_tls_names: Annotated[tuple[str, ...], NoDecode] = ()
    """Names of which the certificate of an engine or router must have one, in place of its host
    name: SPIFFE IDs or DNS names, also with ``/*`` at the end."""
    tls_reload_s: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    """Time between two looks at these files."""

    @field_validator("upstream_tls_names", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return [word.strip() for word in value.split(",") if word.strip()]

    @field_validator("upstream_tls_names")
    @classmethod
    def _check_tls_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            _check_name(name)
        return value

    @field_validator("tls_tenants")
    @classmethod
    def _check_tenants(cls, value: dict[str, str]) -> dict[str, str]:
        for name, tenant in value.items():
            _check_name(name)
            check_tenant(tenant)
        return value

    @model_validator(mode="after")
    def _check_tls(self) -> TlsSettings:
        for side in ("tls", "upstream_tls"):
            certificate, key = f"{side}_cert", f"{side}_key"
            given = [name for name in (certificate, key) if getattr(self, name) is not None]
            if len(given) == 1:
                raise ValueError(f"{certificate} and {key} need each other; only {given[0]} is set")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert: only HTTPS has clients' certificates")
        if self.tls_clients is not None and self.tls_client_ca is None:
            raise ValueError(
                "tls_clients needs tls_client_ca: without it, no client is asked for a certificate"
            )
        if self.tls_tenants and self.tls_client_ca is None:
            raise ValueError(
                "tls_tenants needs tls_client_ca: without it, clients show no certificate"
            )
        return self

    @property
    def secures_upstreams(self) -> bool:
        """True if connections to engines have settings of their own."""
        given = (self.upstream_tls_ca, self.upstream_tls_cert, self.upstream_tls_names)
        return any(given)


def _check_name(name: str) -> None:
    """Check the name of a certificate, or a pattern of names.

    Raises:
        ValueError: it fits none, or every one.
    """
    plain = name.removesuffix("/*")
    if not plain or "*" in plain or plain.endswith(("/", ":")) or any(map(str.isspace, name)):
        raise ValueError(
            f"{name[:200]!r} is no name of a certificate: give a SPIFFE ID (spiffe://DOMAIN/PATH), "
            "another URI or a DNS name; * is allowed only at the end, after a /"
        )
