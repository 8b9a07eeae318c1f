"""A prompt with a secret between head and tail, labelled so that it can be forgotten by name."""

from __future__ import annotations

from typing import Any

import msgspec
from scheduler_kit import SECRETS, text

from leyline_engine.contract import EditPayload, SpanLabel

SECRET = SECRETS + 3
HEAD, TAIL = 60, 50
TOLD = [*text(HEAD, 1), SECRET, *text(TAIL, 2)]
REDACTED = [*TOLD[:HEAD], 7, *TOLD[HEAD + 1 :]]
SPANS = (
    SpanLabel("head", 0, HEAD),
    SpanLabel("secret", HEAD, HEAD + 1),
    SpanLabel("tail", HEAD + 1, len(TOLD)),
)


def telling(**changes: Any) -> EditPayload:
    """The turn that reads the secret."""
    payload = EditPayload(session="s", scope="t", turn="t1", spans=SPANS)
    return msgspec.structs.replace(payload, **changes)


def forgetting(**changes: Any) -> EditPayload:
    """The turn that demands its forgetting."""
    return telling(**({"turn": "t9", "forget": ("secret",)} | changes))
