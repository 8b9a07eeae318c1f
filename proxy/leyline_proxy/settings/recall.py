"""Settings of recall: evicted texts that can be brought back."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from .sessions import MEMORY, MIB, REDIS_SCHEMES, SessionSettings, has_place

REDIS = "redis"

_KEY_CHARS = 16
"""Smallest length; a shorter key can be guessed."""

_FILES = re.compile(r"[a-z][a-z0-9+.-]{0,31}://[^\s?#]+")


def _word(value: object) -> object:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


OnOff = Annotated[Literal["off", "on"], BeforeValidator(_word)]
"""A switch; YAML reads the bare words as booleans."""


class RecallSettings(SessionSettings):
    """The settings of recall, which may use the sessions' Redis."""

    recall: OnOff = "off"
    """``on`` keeps the texts that policies with ``recallable=true`` evict, so that they can be
    brought back."""
    recall_store: SecretStr = SecretStr(MEMORY)
    """Place of evicted texts: ``memory``; ``redis`` for the Redis of ``session_store``; the URL of
    another Redis, in the same forms; or the URL of a folder that fsspec knows, such as
    ``file:///var/lib/leyline/parts`` or ``s3://BUCKET/FOLDER`` (for which ``s3fs`` must be
    installed). Proxies with the same sessions need the same place."""
    recall_key: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Secret that encrypts evicted texts anywhere but in memory. With several, the first encrypts,
    and all decrypt."""
    recall_ttl_s: Annotated[float, Field(ge=1)] = 86_400.0
    """How long an evicted text is kept after a turn put it there."""
    recall_tenant_bytes: Annotated[int, Field(ge=1024)] = 64 * MIB
    """Size of one tenant's evicted texts. Above the limit, its oldest go."""
    recall_max_part_bytes: Annotated[int, Field(ge=1024)] = 4 * MIB
    """Size of one evicted text. A longer one isn't kept."""
    recall_memory_bytes: Annotated[int, Field(ge=MIB)] = 256 * MIB
    """Size of all evicted texts in memory. Above the limit, the tenant with the most loses its
    oldest."""
    recall_store_timeout_s: Annotated[float, Field(gt=0, le=30)] = 2.0
    """Longest wait for one operation of the store."""
    recall_tool: bool = True
    """Whether the model is offered a tool that brings evicted texts back."""
    recall_tokens: Annotated[int, Field(ge=1)] = 32_768
    """Tokens that one turn may bring back."""
    recall_calls: Annotated[int, Field(ge=1, le=1024)] = 8
    """Calls of that tool by the model in one turn."""

    @field_validator("recall_key", mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return [word.strip() for word in value.split(",") if word.strip()]

    @model_validator(mode="after")
    def _check_recall(self) -> RecallSettings:
        where = self.recall_store.get_secret_value()
        if any(len(key) < _KEY_CHARS for key in self.recall_key):
            raise ValueError(f"recall_key must have at least {_KEY_CHARS} characters")
        if where == MEMORY:
            return self
        if where.startswith(REDIS_SCHEMES):
            if not has_place(where):
                raise ValueError(
                    "recall_store isn't a URL: in its password, write anything but letters and "
                    "digits as %XX"
                )
        elif where != REDIS and not _FILES.fullmatch(where):
            raise ValueError(
                "recall_store must be memory, redis, the URL of a Redis, or the URL of a folder "
                "without a query, such as file:///var/lib/leyline/parts or s3://BUCKET/FOLDER"
            )
        if where == REDIS and self.session_store.get_secret_value() == MEMORY:
            raise ValueError(
                "recall_store: redis is the Redis of session_store, which is memory; give "
                "recall_store the URL of a Redis"
            )
        if not self.recall_key:
            raise ValueError(
                "recall_store needs recall_key, a secret that encrypts evicted texts; only in "
                "memory they need none"
            )
        return self
