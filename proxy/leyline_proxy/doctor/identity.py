"""The check of the identity provider: its keys, its clock, and the tenants of its tokens."""

from __future__ import annotations

from ..identity.key_set import HttpKeys, KeySetError
from ..settings import Settings
from .configured import known_tenants, strangers
from .findings import Finding, fail, ok, skip, warn

_NAME = "identity"


async def examine_identity(settings: Settings) -> list[Finding]:
    """Read the provider's keys as the proxy does, and compare clocks and tenants."""
    issuer = settings.oidc_issuer
    if issuer is None:
        return [skip(_NAME, "no tokens of an identity provider are taken (oidc_issuer)")]
    try:
        found = await HttpKeys(issuer, settings.oidc_jwks_url)()
    except KeySetError as error:
        return [
            fail(
                _NAME,
                f"no keys of {issuer}: {error}",
                "compare oidc_issuer with the iss of a token, and try the URL from this machine",
            )
        ]
    ids = ", ".join(sorted(found.keys))[:200]
    findings = [ok(_NAME, f"{len(found.keys)} keys of {issuer} can be used ({ids})")]
    skew_s = found.skew_s
    if skew_s is not None and abs(skew_s) > settings.oidc_leeway_s:
        findings.append(
            warn(
                _NAME,
                f"the provider's clock is {skew_s:+.0f} s from this machine's, more than "
                f"oidc_leeway_s ({settings.oidc_leeway_s:g})",
                "synchronise this machine's clock (timedatectl), or raise oidc_leeway_s",
            )
        )
    if not settings.oidc_tenants and not known_tenants(settings) and settings.api_keys_file is None:
        findings.append(
            fail(
                _NAME,
                "no token can name a tenant: there are none",
                "name them in tenants, or map claims to them with oidc_tenants",
            )
        )
    stranger = strangers(_NAME, "oidc_tenants", settings)
    return [*findings, stranger] if stranger is not None else findings
