"""A turn that the engine has answered in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leyline_engine.contract import CopySegment, Receipt, TurnRecord

from ..model.session import RetainedTurn
from ..plan.busts import CacheAccount, settle
from .accounting import cached_of_usage, retained_turn
from .turn import Turn


@dataclass(frozen=True, slots=True)
class SettledTurn:
    """A turn and what became of it."""

    turn: Turn
    receipt: Receipt
    """As the caller gets it."""
    record: TurnRecord | None
    """The engine's; None where it gave none."""
    usage: Mapping[str, Any] | None
    """The engine's OpenAI ``usage``."""
    ttft_s: float | None
    """Seconds to the first token; None where there was none."""
    run: str
    """Of the engine; see ``UpstreamStatus.retains_as``."""
    source: RetainedTurn | None
    """What later turns may draw on."""
    cache: CacheAccount
    """Where the prompt's tokens came from."""
    model: str
    """As a metric label."""
    avoided_s: float
    """Seconds of prefill that its splice spared; an estimate."""

    @property
    def obeyed(self) -> bool:
        """Whether the engine forgot what it was told to."""
        return is_obeyed(self.record)


def is_obeyed(record: TurnRecord | None) -> bool:
    """Whether an engine's record confirms a forget."""
    return record is not None and record.receipt.forgot is not None


def source_of(
    turn: Turn, record: TurnRecord | None, receipt: Receipt, run: str
) -> RetainedTurn | None:
    """The turn as a source of later ones; None where the engine doesn't hold it.

    Retained, a turn says that its demands to forget were met.
    """
    met = is_obeyed(record) or not turn.planned.plan.forgets
    return retained_turn(turn, record, receipt, run) if met else None


def cache_account(turn: Turn, receipt: Receipt, usage: Mapping[str, Any] | None) -> CacheAccount:
    """Where a turn's prompt tokens came from, and what of its reach was lost to which cause."""
    plan = turn.planned.plan
    return settle(
        plan.reach,
        receipt.tokens,
        copies=[(s.dest, s.dest_end) for s in plan.segments if isinstance(s, CopySegment)],
        told=cached_of_usage(usage),
        # What is forgotten takes along whatever has read it, cached or not.
        reconciled=not plan.forgets,
    )
