"""Runs of prompt tokens, and the named results of a warm start. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from leyline_engine.contract import SpanLabel

from ..model.rendered import TokenIds

TOKEN_BYTES = 4
"""Bytes of a packed token."""

Owner = tuple[str, str]
"""Tenant and session."""


class EngineIdentity(NamedTuple):
    """The engines for which token ids mean the same text, and whose KV of them is the same."""

    model: str
    """Served name."""
    fingerprint: str
    """``Capability.model_fingerprint``."""
    tokenizer: str
    """Digest of chat template and tokenizer."""


class Group(NamedTuple):
    """The runs of one manifest."""

    tenant: str
    identity: EngineIdentity


@dataclass(frozen=True, slots=True)
class Run:
    """The prompt of a session's last settled turn."""

    tenant: str
    session: str
    identity: EngineIdentity
    tokens: TokenIds
    spans: tuple[SpanLabel, ...]
    """Names of its messages: a forget of one finds its KV wherever it was replayed."""
    engine: str
    """The engine's run that has its KV; see ``UpstreamStatus.retains_as``."""
    demands: int
    """The session's demands to forget by then; see ``Session.demands``."""
    since: float
    """Start of the session; another one of its name is another session."""
    named: bool
    """True if the session is found by its id alone."""
    at: float
    """Seconds since the epoch."""

    @property
    def owner(self) -> Owner:
        """Tenant and session."""
        return self.tenant, self.session

    @property
    def group(self) -> Group:
        """The manifest that it belongs to."""
        return Group(self.tenant, self.identity)

    def first(self, length: int) -> Run:
        """Return its first ``length`` tokens as a run: a prefix is as good a start."""
        if len(self.tokens) <= length:
            return self
        return replace(self, tokens=self.tokens[:length], spans=clipped(self.spans, length))


def clipped(spans: Iterable[SpanLabel], length: int) -> tuple[SpanLabel, ...]:
    """Return the labels of the first ``length`` tokens."""
    return tuple(
        span if span.end <= length else SpanLabel(span.span, span.start, length)
        for span in spans
        if span.start < length
    )


def packed(tokens: TokenIds) -> bytes:
    """Return token ids as bytes that sort as the tokens do.

    Raises:
        OverflowError: an id isn't an unsigned 32-bit number.
    """
    words = array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def unpacked(data: bytes) -> TokenIds:
    """Return the tokens of :func:`packed`.

    Raises:
        ValueError: not a whole number of tokens.
    """
    words = array("I")
    words.frombytes(data)
    if sys.byteorder == "little":
        words.byteswap()
    return array("q", words)


def shared_tokens(one: bytes, other: bytes) -> int:
    """Return the number of leading tokens that two packed runs share."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        # Only the part that isn't known to be equal.
        begin, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[begin:end] == other[begin:end]:
            low = middle
        else:
            high = middle - 1
    return low


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
