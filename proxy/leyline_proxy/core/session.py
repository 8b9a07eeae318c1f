"""What the proxy remembers of a conversation: turns as sources, and an account without text."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from leyline_engine.contract import LineageRun, Outcome, Reason, Receipt

from .prepare import Prepared
from .rendered import Rendered

MAX_HISTORY = 512

EditMode = Literal["amortize", "forget", "exact"]
"""How an edit reaches the cache; ``exact`` is an ordinary re-prefill behind it."""


@dataclass(frozen=True)  # no slots: the token sequence is computed once
class RetainedTurn:
    """A turn whose KV the engine may still hold."""

    turn: str
    """Name under which the engine retains it."""
    index: int
    prepared: Prepared
    rendered: Rendered
    """The prompt alone."""
    output_ids: tuple[int, ...]
    lineage: tuple[LineageRun, ...]
    receipt: Receipt | None
    digest: str
    """:func:`leyline_engine.contract.token_digest` over :attr:`tokens`."""
    model_fingerprint: str
    weight: int = 0
    """Bytes that the turn takes in memory, roughly."""

    @cached_property
    def tokens(self) -> array[int]:
        """Prompt and generated tokens."""
        return self.rendered.tokens + array("q", self.output_ids)


@dataclass(frozen=True, slots=True)
class EditRecord:
    """One edit of a turn, for the caller, the metrics and the audit log."""

    message: int | None
    """Index into the client's messages; None where the message is gone or none is concerned."""
    role: str
    cause: str
    """``policy:NAME``, ``declared``, ``undeclared``, ``template`` or ``tools``."""
    mode: EditMode
    span: tuple[int, int] | None
    """Tokens of the source, half open; None where tokens are unknown."""
    replacement_tokens: int


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """A turn without its text."""

    index: int
    turn: str
    created: float
    """Seconds since the epoch."""
    planned: Outcome
    reason: Reason | None
    edits: tuple[EditRecord, ...]
    receipt: Receipt | None


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation of one tenant."""

    id: str
    tenant: str
    key: str
    turns: tuple[RetainedTurn, ...]
    """Newest last."""
    history: tuple[TurnSummary, ...]
    next_index: int
    updated: float

    @property
    def weight(self) -> int:
        """Bytes that the retained turns take, roughly."""
        return sum(turn.weight for turn in self.turns)

    def retain(
        self, turn: RetainedTurn | None, summary: TurnSummary, *, keep: int, now: float
    ) -> Session:
        """The session after a turn: the last ``keep`` turns stay as sources.

        Without ``turn`` (the engine doesn't hold it) only the account grows.
        """
        turns = self.turns if turn is None else (*self.turns, turn)
        return replace(
            self,
            turns=turns[-keep:] if keep > 0 else (),
            history=(*self.history, summary)[-MAX_HISTORY:],
            next_index=max(self.next_index, summary.index) + 1,
            updated=now,
        )

    def forget_sources(self) -> Session:
        """The session without its sources: token ids are prompt text and go with a forget."""
        return replace(self, turns=())
