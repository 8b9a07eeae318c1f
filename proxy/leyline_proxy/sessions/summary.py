"""Sessions as documents for people and tools: numbers and names, never prompt text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from leyline_engine.contract import Receipt

from ..model.paid import paid_account
from ..model.session import EditRecord, Session, TurnSummary


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """Sums over the turns still in the session's history."""

    turns: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens that were not prefilled: prefix hits, spliced and reused ones."""
    spliced_tokens: int
    reused_tokens: int = 0

    @property
    def hit_ratio(self) -> float | None:
        """Share of prompt tokens that were not prefilled; None without prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def session_totals(session: Session) -> SessionTotals:
    """Return the session's sums."""
    tokens = [turn.receipt.tokens for turn in session.history if turn.receipt is not None]
    return SessionTotals(
        turns=session.next_index,
        prompt_tokens=sum(item.prompt for item in tokens),
        cached_tokens=sum(item.served for item in tokens),
        spliced_tokens=sum(item.spliced for item in tokens),
        reused_tokens=sum(item.reused for item in tokens),
    )


@dataclass(frozen=True, slots=True)
class SessionOverview:
    """One line of the list of sessions; stored with each session, so that a list needs no more."""

    id: str
    created: float
    updated: float
    """Both times are in seconds since the epoch."""
    totals: SessionTotals
    model: str = ""
    """The model of its last turn; empty if it isn't known."""
    client: str = ""
    """The program that sent its last turn, by its own word."""
    name: str = ""
    """See :attr:`~leyline_proxy.model.session.Session.name`."""

    @property
    def answered(self) -> bool:
        """See :attr:`~leyline_proxy.model.session.Session.answered`."""
        return self.totals.turns > 0


def overview(session: Session) -> SessionOverview:
    """Return the session's line."""
    last = session.history[-1] if session.history else None
    return SessionOverview(
        session.id,
        session.created,
        session.updated,
        session_totals(session),
        last.model if last is not None else "",
        last.client if last is not None else "",
        session.name,
    )


def receipt_account(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt for callers. Lineages are names inside the engine, so callers get only the
    start of the first: KV from there on may remember text that the prompt doesn't show. Refusals
    because of claims are left out: their error hides the amount that others claim."""
    account: dict[str, Any] = msgspec.to_builtins(receipt)
    del account["refused"]
    first = min((run.start for run in receipt.lineage), default=None)
    account["lineage"] = None if first is None else {"from": first}
    return account


def edit_account(edit: EditRecord) -> dict[str, Any]:
    """Return one edit, for callers."""
    return {
        "message": edit.message,
        "role": edit.role,
        "cause": edit.cause,
        "mode": edit.mode,
        "span": edit.span,
        "replacement_tokens": edit.replacement_tokens,
        "cached": edit.cached,
    }


def session_overview(seen: SessionOverview) -> dict[str, Any]:
    """Return one line of the list of sessions, for callers."""
    totals = seen.totals
    return {
        "id": seen.id,
        "name": seen.name or seen.id,
        "model": seen.model,
        "client": seen.client,
        "turns": totals.turns,
        "updated": seen.updated,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "spliced_tokens": totals.spliced_tokens,
        "reused_tokens": totals.reused_tokens,
        "hit_ratio": totals.hit_ratio,
    }


def session_document(session: Session) -> dict[str, Any]:
    """Return a whole session: its turns, oldest first, and the turns retained as sources."""
    return {
        **session_overview(overview(session)),
        "retained": [turn.turn for turn in session.turns],
        "history": [turn_document(turn) for turn in session.history],
    }


def turn_document(turn: TurnSummary) -> dict[str, Any]:
    """Return one turn, for callers."""
    return {
        "index": turn.index,
        "turn": turn.turn,
        "created": turn.created,
        "planned": turn.planned.value,
        "edits": [edit_account(edit) for edit in turn.edits],
        "receipt": receipt_account(turn.receipt) if turn.receipt is not None else None,
        "busts": paid_account(turn.paid),
    }
