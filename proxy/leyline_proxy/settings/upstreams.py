"""Settings of one engine among several, and of a router in front of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator

from ..model.name_rule import NameRule

_HEADER = NameRule(
    "[A-Za-z0-9!#$%&'*+.^_`|~-]", "letters, digits and ! # $ % & ' * + . ^ _ ` | ~ -", 64
)


def engine_url(value: str) -> str:
    """Return the base URL of a server, without a version in its path.

    Raises:
        ValueError: it isn't one.
    """
    if not value.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    if not {"?", "#"}.isdisjoint(value):
        raise ValueError("must end with its path: requests have their own queries")
    # OpenAI clients have the version in the base URL; the proxy adds it itself.
    return value.rstrip("/").removesuffix("/v1")


EngineUrl = Annotated[str, AfterValidator(engine_url)]


class UpstreamSettings(BaseModel):
    """One engine of several."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: EngineUrl
    """Its base URL, such as ``http://gpu1:30000``."""
    router: EngineUrl | None = None
    """Base URL of the router through which its chat requests go; defaults to the proxy's
    ``router``."""
    api_key: SecretStr | None = None
    """Defaults to ``upstream_api_key``."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its share of the sessions, relative to the other engines."""
    apis: frozenset[Literal["messages", "responses"]] = frozenset()
    """APIs that it speaks itself beside chat completions. If the engine can't splice, requests of
    these APIs pass through when no message was edited."""


class RouterSettings(BaseModel):
    """A router in front of the engines."""

    router: EngineUrl | None = None
    """Base URL of a router in front of the engines in ``upstreams``, such as
    ``http://router:8000``. Chat requests go through it; everything else goes to the engines
    themselves. The receipts report which engine has answered."""
    affinity_header: str | None = None
    """A further header that carries the session's id upstream, for a router that hashes it. With
    ``router``, the proxy always sends ``x-smg-routing-key`` and ``x-session-id``."""

    @field_validator("affinity_header")
    @classmethod
    def _check_affinity_header(cls, value: str | None) -> str | None:
        if value is not None and (broken := _HEADER.broken(value)) is not None:
            raise ValueError(
                f"{broken}; it must be the name of an HTTP header, such as x-smg-routing-key"
            )
        return value
