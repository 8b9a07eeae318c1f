"""JSON Web Tokens (RFC 7519) as identities: checked with the provider's keys, mapped to tenants."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import jwt

from ..model.token_results import Result
from .errors import KeysGoneError, TokenRefusedError, UnknownTenantError
from .key_set import KeySet

MAX_TOKEN = 16 * 1024
"""Longest token in characters."""
_MAX_KEY_ID = 256
_MAX_KNOWN = 4096
"""Good tokens that are remembered."""
_PARTS = 3

_REFUSALS: Mapping[type[jwt.PyJWTError], tuple[str, Result]] = {
    jwt.InvalidIssuerError: ("The token is from another issuer.", Result.ISSUER),
    jwt.InvalidAudienceError: ("The token is for another audience.", Result.AUDIENCE),
    jwt.InvalidSignatureError: ("The token's signature is wrong.", Result.SIGNATURE),
    jwt.InvalidAlgorithmError: ("The token's signature is wrong.", Result.SIGNATURE),
}

_Known = tuple[str, str, float]
"""Tenant, key id and end of a good token."""


def looks_like_token(credential: str) -> bool:
    """Return True for what is meant as a token, and for no API key of Leyline's making."""
    return credential.startswith("eyJ") and credential.count(".") == _PARTS - 1


class Tokens:
    """Finds the tenant of a token.

    Args:
        keys: the provider's.
        issuer, audiences, algorithms, leeway_s: see the settings.
        claim: path of the claim with the tenant.
        tenants: tenants by the claim's value; empty if it is the name itself.
        counted: called with the result of each token.
        now: returns seconds since 1970.
    """

    def __init__(
        self,
        keys: KeySet,
        *,
        issuer: str,
        audiences: Sequence[str],
        algorithms: Sequence[str],
        leeway_s: float,
        claim: str,
        tenants: Mapping[str, str],
        counted: Callable[[Result], object] = lambda _: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.keys = keys
        self._issuer = issuer
        self._audiences = list(audiences)
        self._algorithms = list(algorithms)
        self._leeway_s = leeway_s
        self._claim = claim.split(".")
        self._tenants = dict(tenants)
        self._counted = counted
        self._now = now
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """Good tokens by their digest, the last used at the end."""

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants that the mapping names."""
        return frozenset(self._tenants.values())

    async def tenant(self, token: str, exists: Callable[[str], bool]) -> str:
        """Return the name of a token's tenant.

        Args:
            exists: returns True for the name of a tenant.

        Raises:
            TokenRefusedError: it isn't good.
            UnknownTenantError: it is nobody's here.
            KeysGoneError: it can't be checked.
        """
        digest = sha256(token.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(digest)
        if known is not None and self._now() < known[2] and self.keys.knows(known[1]):
            self._known.move_to_end(digest)
            return known[0]
        self._known.pop(digest, None)
        try:
            found = await self._checked(token, exists)
        except (TokenRefusedError, UnknownTenantError, KeysGoneError) as error:
            self._counted(error.result)
            raise
        self._counted(Result.VERIFIED)
        self._known[digest] = found
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return found[0]

    async def _checked(self, token: str, exists: Callable[[str], bool]) -> _Known:
        key_id, key = await self._key_of(token)
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=self._algorithms,
                audience=self._audiences,
                issuer=self._issuer,
                leeway=self._leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise self._refusal(error, token) from error
        end = float(claims["exp"]) + self._leeway_s
        return self._tenant_of(claims, exists), key_id, end

    async def _key_of(self, token: str) -> tuple[str, jwt.PyJWK]:
        if len(token) > MAX_TOKEN:
            raise TokenRefusedError(
                f"The token has more than {MAX_TOKEN} characters.", Result.MALFORMED
            )
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise TokenRefusedError("The token can't be read.", Result.MALFORMED) from error
        if header.get("alg") not in self._algorithms:
            raise TokenRefusedError(
                "The token is signed in a way that isn't accepted here (oidc_algorithms: "
                f"{', '.join(self._algorithms)}).",
                Result.ALGORITHM,
            )
        key_id = header.get("kid", "")
        if not isinstance(key_id, str) or len(key_id) > _MAX_KEY_ID:
            raise TokenRefusedError("The token's kid is no key id.", Result.MALFORMED)
        key = await self.keys.find(key_id)
        if key is None:
            raise TokenRefusedError(
                "The token is signed with a key that the identity provider doesn't publish.",
                Result.UNKNOWN_KEY,
            )
        return key_id, key

    def _refusal(self, error: jwt.PyJWTError, token: str) -> TokenRefusedError:
        if isinstance(error, jwt.ExpiredSignatureError):
            ago = self._now() - self._time(token, "exp")
            return TokenRefusedError(
                f"The token expired {ago:.0f} s ago. Get a new one{self._clocks()}.", Result.EXPIRED
            )
        if isinstance(error, jwt.ImmatureSignatureError):
            ahead = max(self._time(token, "nbf"), self._time(token, "iat")) - self._now()
            return TokenRefusedError(
                f"The token isn't valid for another {ahead:.0f} s{self._clocks()}. The clocks of "
                "this proxy and of the identity provider differ.",
                Result.NOT_YET,
            )
        if isinstance(error, jwt.MissingRequiredClaimError):
            return TokenRefusedError(f"The token has no {error.claim}.", Result.MALFORMED)
        told = next((each for kind, each in _REFUSALS.items() if isinstance(error, kind)), None)
        return TokenRefusedError(*(told or ("The token can't be read.", Result.MALFORMED)))

    def _clocks(self) -> str:
        """Return a hint, if the provider's clock is known to differ."""
        skew_s = self.keys.skew_s
        if skew_s is None or abs(skew_s) < self._leeway_s + 1:
            return ""
        return f"; the provider's clock is {skew_s:+.0f} s from this proxy's"

    @staticmethod
    def _time(token: str, claim: str) -> float:
        claims = jwt.decode(token, options={"verify_signature": False})  # it was verified before
        value = claims.get(claim)
        return float(value) if isinstance(value, int | float) else 0.0

    def _tenant_of(self, claims: Mapping[str, Any], exists: Callable[[str], bool]) -> str:
        value: Any = claims
        for step in self._claim:
            value = value.get(step) if isinstance(value, dict) else None
        path = ".".join(self._claim)
        if value is None:
            raise UnknownTenantError(f"The token has no claim {path} (oidc_tenant_claim).")
        values = value if isinstance(value, list) else [value]
        named = [each for each in values if isinstance(each, str)]
        if self._tenants:
            found = {self._tenants[each] for each in named if each in self._tenants}
        else:
            found = {each for each in named if exists(each)}
        if len(found) != 1:
            count = "several tenants" if found else "no tenant of this proxy"
            raise UnknownTenantError(
                f"The token's {path} names {count}. The operator maps its values with oidc_tenants."
            )
        return found.pop()
