"""Settings of the warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, model_validator

_KEY_CHARS = 16
"""Smallest length; a shorter key can be guessed."""


class WarmStartSettings(BaseModel):
    """The settings of the warm start."""

    warm_start_path: Path | None = None
    """Folder for the encrypted prompts of active sessions, which are replayed into a new engine
    before it counts as ready. Each proxy needs its own. None switches the warm start off."""
    warm_start_key: SecretStr | None = None
    """Secret that encrypts them."""
    warm_start_tokens: Annotated[int, Field(ge=1024, le=16_777_216)] = 200_000
    """Prompt tokens that one engine gets, shared fairly by the tenants."""
    warm_start_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    """Longest time that a new engine waits for them."""
    warm_start_interval_s: Annotated[float, Field(ge=0.1, le=3600)] = 60.0
    """Time between two looks for prompts to write. A forget is written at once."""

    @model_validator(mode="after")
    def _check_warm_start(self) -> WarmStartSettings:
        path, key = self.warm_start_path, self.warm_start_key
        if path is None and key is not None:
            raise ValueError("warm_start_key needs warm_start_path, the folder that it encrypts")
        if path is not None and key is None:
            raise ValueError("warm_start_path needs warm_start_key, a secret that encrypts prompts")
        if key is not None and len(key) < _KEY_CHARS:
            raise ValueError(f"warm_start_key must have at least {_KEY_CHARS} characters")
        return self
