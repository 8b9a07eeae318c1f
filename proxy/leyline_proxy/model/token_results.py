"""The results of looking at a caller's token."""

from __future__ import annotations

from enum import StrEnum


class Result(StrEnum):
    """The result of looking at a token."""

    VERIFIED = "verified"
    MALFORMED = "malformed"
    ALGORITHM = "algorithm"
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    EXPIRED = "expired"
    NOT_YET = "not_yet"
    ISSUER = "issuer"
    AUDIENCE = "audience"
    TENANT = "tenant"
    KEYS_GONE = "keys_gone"
