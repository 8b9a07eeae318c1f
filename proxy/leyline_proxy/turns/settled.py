"""A turn that the engine has answered in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from leyline_engine.contract import CopySegment, Receipt, TurnRecord

from ..model.asides import Aside
from ..model.paid import Paid
from ..model.sentences import sentences_of
from ..model.session import RetainedTurn
from ..plan.busts import CacheAccount, expected_loss, settle
from ..plan.reach import unedited
from ..plan.synthesis import TurnPlan
from .accounting import cached_of_usage, retained_turn
from .recall_reports import RecallOutcome
from .turn import Turn


@dataclass(frozen=True, slots=True)
class SettledTurn:
    """A turn and its result."""

    turn: Turn
    receipt: Receipt
    """The receipt as the caller gets it."""
    record: TurnRecord | None
    """The engine's record; None if it gave none."""
    usage: Mapping[str, Any] | None
    """The engine's OpenAI ``usage``."""
    run: str
    """The engine's run; see ``UpstreamStatus.retains_as``."""
    source: RetainedTurn | None
    """The turn as a source for later ones."""
    cache: CacheAccount
    """The origin of the prompt's tokens."""
    model: str
    """The model as a metric label."""
    avoided_s: float
    """Estimated seconds of prefill that its splice saved."""
    aside: Aside | None = None
    """The proxy's own answer to the turn's calls of the recall tool."""
    recalled: tuple[RecallOutcome, ...] = ()
    """What became of the texts that were recalled into its prompt."""
    paid: Paid | None = None
    """The reasons for its prefilled tokens; None without the engine's counts."""
    written: str | None = None
    """The answer to a policy's question; None if the model gave none."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None if there was none."""
        return self.turn.request.clock.ttft_s

    @property
    def obeyed(self) -> bool:
        """True if the engine forgot as requested."""
        return is_obeyed(self.record)


def is_obeyed(record: TurnRecord | None) -> bool:
    """Return True if an engine's record confirms a forget."""
    return record is not None and record.receipt.forgot is not None


def source_of(
    turn: Turn,
    record: TurnRecord | None,
    receipt: Receipt,
    run: str,
    *,
    quotable: bool = False,
    key: bytes = b"",
) -> RetainedTurn | None:
    """Return the turn as a source of later ones; None if the engine doesn't hold it.

    Retaining a turn records that its demands to forget were met.

    Args:
        quotable: True if its answer is a text without calls.
        key: see :func:`~leyline_proxy.model.sentences.sentences_of`.
    """
    if turn.stranger or (turn.planned.plan.forgets and not is_obeyed(record)):
        return None
    source = retained_turn(turn, record, receipt, run)
    renderer = turn.status.rendering.renderer
    if source is not None and turn.asks is not None:
        return replace(source, for_policy=True)
    if source is None or not quotable or renderer is None:
        return source
    return replace(source, sentences=sentences_of(renderer.decode(source.output_ids), key))


def generated_tokens(record: TurnRecord | None, usage: Mapping[str, Any] | None) -> int | None:
    """Return the tokens of an answer; None if the engine doesn't report them."""
    told = usage.get("completion_tokens") if usage is not None else None
    if isinstance(told, int) and not isinstance(told, bool) and told >= 0:
        return told
    return len(record.output_ids) if record is not None else None


def cache_account(turn: Turn, receipt: Receipt, usage: Mapping[str, Any] | None) -> CacheAccount:
    """Return the origin of a turn's prompt tokens, and the lost part of its reach by cause."""
    plan, capability = turn.planned.plan, turn.status.capability
    layout = capability.kv if capability is not None else None
    return settle(
        plan.reach,
        receipt.tokens,
        copies=_copies(plan),
        extents=receipt.extents,
        told=cached_of_usage(usage),
        # A forget also removes KV that has read the text, cached or not.
        reconciled=not plan.forgets,
        page=layout.page_tokens if layout is not None else None,
    )


def planned_loss(turn: Turn) -> int:
    """Return the tokens that a turn will lose if its engine has, and does, all that is planned."""
    plan = turn.planned.plan
    return expected_loss(plan.reach, _copies(plan))


def planned_usage(turn: Turn) -> dict[str, Any] | None:
    """Return the counts of a turn's prompt as they are planned, as a chat completion's ``usage``;
    None if its tokens aren't known here."""
    rendered, plan, capability = turn.planned.rendered, turn.planned.plan, turn.status.capability
    if rendered is None or not rendered.tokens:
        return None
    prompt = len(rendered.tokens)
    layout = capability.kv if capability is not None else None
    page = layout.page_tokens if layout is not None else 1
    held = 0 if plan.reach.moved or plan.reach.estimated else unedited(plan.reach) // page * page
    copied = sum(end - max(start, held) for start, end in _copies(plan) if end > held)
    # The last token is always computed.
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": min(held + copied, prompt - 1)},
    }


def _copies(plan: TurnPlan) -> list[tuple[int, int]]:
    return [(s.dest, s.dest_end) for s in plan.segments if isinstance(s, CopySegment)]
