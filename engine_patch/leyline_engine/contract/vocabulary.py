"""The closed vocabularies of the wire contract."""

from __future__ import annotations

from enum import StrEnum

PROTOCOL_VERSION = "0.1"
"""Version of the ``kv_hints`` envelope, shared with vLLM, Dynamo and SGLang."""

EDIT_ACTION = "leyline.edit"
CLAIM_ACTION = "leyline.claim"
REUSE_ACTION = "leyline.reuse"
RECEIPT_ACTION = "leyline.receipt"
PROVE_ACTION = "leyline.prove"
CARRIAGE_ACTION = "leyline.carriage"
ACTION_VERSION = "1.0"

ATTENTION_SINK = 32
"""Destination positions below this are always prefilled, never spliced."""


class Mode(StrEnum):
    """An edit's promise about the KV computed after the edited span was read."""

    AMORTIZE = "amortize"
    """The suffix keeps its values; only positions are corrected (Leyline paper, section 3.1)."""
    FORGET = "forget"
    """Nothing computed after the span was first read survives."""


class RecurrentEdits(StrEnum):
    """The promise of an amortized edit about recurrent states, which no rotation can correct."""

    KEPT = "kept"
    """The state after a kept run is the one that the source had there, bit for bit: it still holds
    what was cut, and lacks what was put in its place."""
    EXACT = "exact"
    """Everything after the first edit is computed again."""


class Reason(StrEnum):
    """The reason why a request that carried an edit ran as it did."""

    SPLICED = "spliced"
    REPREFILLED = "reprefilled"
    INVALID_DIRECTIVE = "invalid_directive"
    INVALID_EDIT = "invalid_edit"
    TOKEN_MISMATCH = "token_mismatch"  # noqa: S105 - a reason code, no password
    MISSING_SOURCE = "missing_source"
    INCOMPATIBLE_IDENTITY = "incompatible_identity"
    UNSUPPORTED_RUNTIME = "unsupported_runtime"
    SOURCE_EVICTED = "source_evicted"
    NOTHING_TO_REUSE = "nothing_to_reuse"
    TRANSFORM_FAILED = "transform_failed"
    NOT_WORTH_IT = "not_worth_it"
    REFUSED_BY_CLAIM = "refused_by_claim"
    UNNAMED_SESSION = "unnamed_session"
    """Proxies alone give this: the session has no certain name."""
    NOTHING_CACHED = "nothing_cached"
    """Proxies alone give this: nothing that the edits concern was cached."""
    STANDING = "standing"
    """Proxies alone give this: the cache holds the messages as earlier edits left them."""
    RECURRENT_STATE = "recurrent_state"
    """The model has recurrent layers, and its tenant wants exact states."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Proxies alone give this: the prompt's text is longer than the context can hold."""


class Outcome(StrEnum):
    """The outcome of a request's edits, in one word."""

    UNEDITED = "unedited"
    """The request carried no edit: an ordinary prefix hit and prefill."""
    EDITED = "edited"
    """Proxies alone give this: edits changed the prompt, and cost no cached token."""
    SPLICED = "spliced"
    REPREFILLED = "reprefilled"
    """The request was edited and ran as an ordinary prefill; the reason says why."""
