"""Who is calling: API keys to tenants, and what each tenant may and wants."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from leyline_policies import Policy, load_pipeline

from .core.options import UndeclaredRules
from .errors import UnauthorizedError
from .settings import DEFAULT_TENANT, Settings, TenantSettings


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant with its effective rules."""

    name: str
    policies: tuple[Policy, ...]
    undeclared: UndeclaredRules
    allow_request_policy: bool
    share: str = ""
    """Scope that may see what the tenant's turns splice; empty for each session alone."""
    upstreams: frozenset[str] | None = None
    """Names of the upstreams that may serve it; None for all."""


class TenantDirectory:
    """Finds the tenant of a request. Keys are kept as SHA-256 digests only."""

    def __init__(
        self, keys: Mapping[str, tuple[bytes, ...]], tenants: Mapping[str, Tenant]
    ) -> None:
        self._keys = tuple((digest, name) for name, digests in keys.items() for digest in digests)
        self._tenants = dict(tenants)

    @property
    def open(self) -> bool:
        """True when no key is configured and everybody is the default tenant."""
        return not self._keys

    @property
    def names(self) -> frozenset[str]:
        """Of all tenants."""
        return frozenset(self._tenants)

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request, from ``authorization: Bearer`` or ``api-key``.

        Every configured key is compared, in constant time each, so that timing tells neither
        which key nor which tenant came close.

        Raises:
            UnauthorizedError: no key or an unknown one.
        """
        if self.open:
            return self._tenants[DEFAULT_TENANT]
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        key = credential.strip() if scheme.lower() == "bearer" else ""
        key = key or headers.get("api-key", "") or headers.get("x-api-key", "")
        if not key:
            raise UnauthorizedError("No API key given. Send it as 'Authorization: Bearer KEY'.")
        offered = key_digest(key)
        found: str | None = None
        for digest, name in self._keys:
            if hmac.compare_digest(offered, digest):
                found = name
        if found is None:
            raise UnauthorizedError("This API key belongs to no tenant of this proxy.")
        return self._tenants[found]


def key_digest(key: str) -> bytes:
    """SHA-256 of an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def build_directory(settings: Settings) -> TenantDirectory:
    """The directory that ``settings`` describe; policies are loaded, so faults show at start-up.

    Raises:
        leyline_policies.PolicySpecError: an unknown policy or a bad parameter.
        leyline_proxy.core.options.OptionError: a bad rule for undeclared edits.
        ValueError: an unreadable key file.
    """
    secrets = settings.secrets()
    names = {*secrets, *settings.tenants, *(() if secrets else (DEFAULT_TENANT,))}
    tenants = {name: _tenant(name, settings) for name in names}
    digests = {name: tuple(map(key_digest, keys)) for name, keys in secrets.items()}
    return TenantDirectory(digests, tenants)


def _tenant(name: str, settings: Settings) -> Tenant:
    own = settings.tenants.get(name, TenantSettings())
    policy = settings.policy if own.policy is None else own.policy
    undeclared = settings.undeclared if own.undeclared is None else own.undeclared
    allow = own.allow_request_policy
    return Tenant(
        name=name,
        policies=tuple(load_pipeline(policy)) if policy else (),
        undeclared=UndeclaredRules.parse(undeclared),
        allow_request_policy=settings.allow_request_policy if allow is None else allow,
        share=own.share,
        upstreams=frozenset(own.upstreams) if own.upstreams is not None else None,
    )
