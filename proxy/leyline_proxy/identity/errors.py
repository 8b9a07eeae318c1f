"""The errors of tokens. Each has a result for the metric; none quotes a token."""

from __future__ import annotations

from ..errors import ForbiddenError, TryLaterError, UnauthorizedError
from ..model.token_results import Result


class TokenRefusedError(UnauthorizedError):
    """A token that isn't good."""

    code = "invalid_token"

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": 'Bearer error="invalid_token"'}


class UnknownTenantError(ForbiddenError):
    """A good token of nobody that this proxy knows."""

    code = "unknown_tenant"
    result = Result.TENANT


class KeysGoneError(TryLaterError):
    """The provider's keys are too old, or were never read."""

    status = 503
    kind = "server_error"
    code = "identity_unavailable"
    result = Result.KEYS_GONE

    def __init__(self, problem: str) -> None:
        super().__init__(
            "Tokens can't be checked now, because the identity provider's keys can't be read: "
            f"{problem}. API keys still work.",
            10.0,
        )
