"""The tenants and their keys."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from ..errors import ForbiddenError, UnauthorizedError
from ..identity.errors import KeysGoneError, UnknownTenantError
from ..identity.tokens import Tokens, looks_like_token
from ..settings import DEFAULT_TENANT, Settings
from ..settings.api_keys import ApiKey, key_digest, parse_key, tenants_of
from ..tls.peers import tenants_named
from .key_file import read_keys
from .tenant import Tenant, build_tenant


class TenantDirectory:
    """Finds the tenant of a request. Stores keys as SHA-256 digests only.

    Args:
        fixed: keys from settings, valid as long as the process lives.
        filed: keys of the key file, which can be replaced.
        build: creates a tenant whose name a replaced file adds.
        is_open: True if everyone is the default tenant, with any key or none.
        tokens: of an identity provider.
        certificates: tenants by name in a client's certificate; see ``tls_tenants``.
        now: returns the time in seconds since 1970.
    """

    def __init__(
        self,
        fixed: Iterable[ApiKey],
        filed: Iterable[ApiKey],
        names: Iterable[str],
        build: Callable[[str], Tenant],
        *,
        is_open: bool,
        tokens: Tokens | None = None,
        certificates: Mapping[str, str] = MappingProxyType({}),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._fixed = tuple(fixed)
        self._build = build
        self._is_open = is_open
        self._now = now
        self.tokens = tokens
        """Tokens of an identity provider; None if there is none."""
        self._certificates = certificates
        named = {*certificates.values(), *(tokens.tenants if tokens is not None else ())}
        self._configured = frozenset(names) | named
        self._keys: tuple[ApiKey, ...] = ()
        self._tenants: Mapping[str, Tenant] = {}
        self.replace(filed)

    @property
    def open(self) -> bool:
        """True if no key is configured and everyone is the default tenant."""
        return self._is_open

    @property
    def locked_out(self) -> bool:
        """True if nobody can be let in now: tokens are the only way, and can't be checked."""
        others = self._is_open or self._keys or self._certificates
        return not others and self.tokens is not None and not self.tokens.keys.usable

    @property
    def names(self) -> frozenset[str]:
        """Names of all tenants."""
        return frozenset(self._tenants)

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys, including expired ones."""
        return self._keys

    def __contains__(self, name: object) -> bool:
        return name in self._tenants

    def get(self, name: str) -> Tenant | None:
        """Return the tenant of that name, or None."""
        return self._tenants.get(name)

    def replace(self, filed: Iterable[ApiKey]) -> None:
        """Replace the file's keys; requests under way aren't affected.

        Raises:
            leyline_policies.PolicyError, leyline_proxy.request.parse.OptionError: a new
                tenant's rules are wrong; nothing has changed then.
        """
        keys = (*self._fixed, *filed)
        names = self._configured | tenants_of(keys)
        tenants = {name: self._tenants.get(name) or self._build(name) for name in names}
        self._keys, self._tenants = keys, tenants

    async def identify(
        self, headers: Mapping[str, str], names: Sequence[str] | None = None
    ) -> Tenant:
        """Return a request's tenant, by certificate, token or API key.

        A certificate decides. A key beside it may be anything but another tenant's: most clients
        insist on sending one.

        Args:
            names: in the certificate of the request's connection; None without a certificate.

        Raises:
            UnauthorizedError, ForbiddenError: it has none.
            KeysGoneError: tokens can't be checked now.
        """
        shown = names if self._certificates else None
        own, offered = self._of_certificate(shown or ()), offered_key(headers)
        if own is None:
            if shown is not None and not offered:
                raise UnknownTenantError(
                    f"The client's certificate ({_described(shown)}) is no tenant's (tls_tenants), "
                    "and no API key is given."
                )
            return await self._of_credential(headers)
        try:
            other = await self._of_credential(headers) if offered else own
        except (UnauthorizedError, UnknownTenantError, KeysGoneError):
            return own
        if other is not own:
            raise ForbiddenError(
                "The API key or token is of another tenant than the client's certificate. Send one "
                "of them.",
                code="certificate_mismatch",
            )
        return own

    def _of_certificate(self, names: Sequence[str]) -> Tenant | None:
        """Return the tenant of a certificate, or None.

        Raises:
            ForbiddenError: it names several.
        """
        found = tenants_named(names, self._certificates)
        if len(found) > 1:
            raise ForbiddenError(
                "The client's certificate has names of several tenants (tls_tenants).",
                code="unknown_tenant",
            )
        return self._tenants.get(next(iter(found))) if found else None

    async def _of_credential(self, headers: Mapping[str, str]) -> Tenant:
        tokens = self.tokens
        if tokens is None or not looks_like_token(token := offered_key(headers)):
            return self.authenticate(headers)
        name = await tokens.tenant(token, self._tenants.__contains__)
        tenant = self._tenants.get(name)
        if tenant is None:
            raise UnknownTenantError("The token's tenant is no tenant of this proxy any more.")
        return tenant

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant of an API key: ``authorization: Bearer``, ``api-key`` or ``x-api-key``.

        Every configured key is compared, each in constant time, so timing reveals neither a similar
        key nor its tenant.

        Raises:
            UnauthorizedError: no key, an unknown one, or one that has expired.
        """
        if self._is_open:
            return self._tenants[DEFAULT_TENANT]
        keys = _offered_keys(headers)
        if not keys:
            raise UnauthorizedError("No API key given. Send it as 'Authorization: Bearer KEY'.")
        found = [each for key in keys for each in self._match(key_digest(key))]
        if not found:
            raise UnauthorizedError("This API key belongs to no tenant of this proxy.")
        now = self._now()
        for candidate in found:
            if candidate.valid(now):
                return self._tenants[candidate.tenant]
        raise UnauthorizedError("This API key has expired.")

    def _match(self, offered: bytes) -> list[ApiKey]:
        """Return all entries of the key; a file may list one twice, with another expiry."""
        same = hmac.compare_digest
        return [key for key in self._keys if same(offered, key.digest)]


def _described(names: Sequence[str]) -> str:
    """Return a certificate's first name, or the reason that it has none."""
    return names[0][:200] if names else "it has no URI and no DNS name, or several SPIFFE IDs"


def offered_key(headers: Mapping[str, str]) -> str:
    """Return the key of a request; empty for none."""
    return next(iter(_offered_keys(headers)), "")


def _offered_keys(headers: Mapping[str, str]) -> list[str]:
    """Return all keys of a request, the most meant first. A client that is signed in to another
    service may send its token for that beside the key."""
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    bearer = credential.strip() if scheme.lower() == "bearer" else ""
    found = (bearer, headers.get("api-key", ""), headers.get("x-api-key", ""))
    return [*dict.fromkeys(filter(None, found))]


def build_directory(settings: Settings, tokens: Tokens | None = None) -> TenantDirectory:
    """Return the directory for ``settings``; it loads policies, so faults show at start-up.

    Args:
        tokens: of the identity provider, if the settings name one.

    Raises:
        leyline_policies.PolicyError: an unknown policy or a bad parameter.
        leyline_proxy.request.parse.OptionError: a bad rule for undeclared edits.
        ValueError: an unreadable or wrong key file, or one without a key.
    """
    fixed = configured_keys(settings)
    filed = read_keys(settings.api_keys_file) if settings.api_keys_file is not None else ()
    # A key file, a provider and certificates close the proxy, whatever happens to them.
    others = (settings.api_keys_file, settings.oidc_issuer, settings.tls_tenants or None)
    is_open = not fixed and all(each is None for each in others)
    names = {*settings.tenants, *((DEFAULT_TENANT,) if is_open else ())}
    return TenantDirectory(
        fixed,
        filed,
        names,
        lambda name: build_tenant(name, settings, alone=is_open),
        is_open=is_open,
        tokens=tokens,
        certificates=settings.tls_tenants,
    )


def configured_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """Return the keys given as settings, without those of the key file.

    Raises:
        leyline_proxy.settings.api_keys.KeyLineError: a key in the wrong form.
    """
    lines = [secret.get_secret_value() for secret in settings.api_keys]
    lines += [
        f"{tenant}:{secret.get_secret_value()}"
        for tenant, own in settings.tenants.items()
        for secret in own.api_keys
    ]
    return tuple(map(parse_key, lines))
