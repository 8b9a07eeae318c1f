"""Named results of a warm start. Pure."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The result for one run of tokens, or for a manifest that gives no runs."""

    REPLAYED = "replayed"
    PRESENT = "present"
    """This run of the engine computed it itself."""
    ELSEWHERE = "elsewhere"
    """Another engine serves its session."""
    OVER_TOKENS = "over_tokens"
    OVER_TIME = "over_time"
    EXPIRED = "expired"
    FORGOTTEN = "forgotten"
    """Its session has forgotten something since, or is about to."""
    UNKNOWN_SESSION = "unknown_session"
    """A forget could not find its session any more."""
    SWITCHED_OFF = "switched_off"
    CORRUPT = "corrupt"
    WRONG_KEY = "wrong_key"
    OTHER_TENANT = "other_tenant"
    OTHER_MODEL = "other_model"
    OTHER_TOKENIZER = "other_tokenizer"
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    ENGINE_FAILED = "engine_failed"


class FileResult(StrEnum):
    """The result of an attempt to change a manifest."""

    WRITTEN = "written"
    REMOVED = "removed"
    FAILED = "failed"
    """The file is as it was or as it should be; nothing in it had to go."""
    LEFT = "left"
    """The file may still hold what had to go."""


class ManifestError(Exception):
    """A manifest that gives no runs."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome
