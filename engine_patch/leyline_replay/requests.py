"""A request to the replay engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from leyline_engine.contract import (
    EditPayload,
    ForgetCounts,
    ProvePayload,
    ReusePayload,
    SkippedAction,
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to the engine."""

    request_id: str
    tokens: array[int]
    payload: EditPayload | None = None
    reuse: ReusePayload | None = None
    prove: ProvePayload | None = None
    """The demand for a proof of what the payload forgets."""
    skipped: tuple[SkippedAction, ...] = ()
    max_new_tokens: int = 16
    admits: bool = True
    """True if KV that it computes may be kept for reuse, if claims agree."""
    forgot: ForgetCounts | None = None
    """Counts of what was forgotten for it before it was admitted."""
