"""The reasons for a turn's prefilled tokens: each loss with its message, cause and price."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_engine.contract import Outcome, Receipt

from ..model.messages import Message
from ..model.paid import Bust, Origin, Paid, Price, largest
from ..model.rendered import MessageSpan
from ..plan.busts import CacheAccount, Loss
from ..plan.reach import cause_label
from .turn import Turn

_NOT_COPIED = "not_spliced"
"""An edit's ``why`` if the engine was asked for no splice."""

_LONGEST_NAME = 64
"""Characters of a tool's name; the caller's own, so of any length."""


def paid_for(
    turn: Turn,
    receipt: Receipt,
    cache: CacheAccount,
    *,
    prefill_us: float | None,
    price: Price | None,
    generated: int | None,
) -> Paid | None:
    """Return the reasons for a turn's prefilled tokens; None without the engine's counts.

    Args:
        prefill_us: microseconds per prefilled token; None if unknown.
        generated: tokens of the answer; None if unknown.
    """
    if receipt.tokens.prompt <= 0:
        return None
    reach = turn.planned.plan.reach
    lost = sum(loss.tokens for loss in cache.losses)
    return Paid(
        compared=reach.turn if reach.known else "",
        estimated=reach.estimated and reach.known,
        lost=lost,
        new=cache.fresh + sum(cache.busts.values()) - lost,
        cached=cache.cached + cache.spliced + cache.reused,
        generated=generated,
        busts=largest(_busts(turn, receipt, cache.losses)),
        prefill_us=prefill_us or None,
        price=price,
        thinking=(cache.after_thinking, cache.thinking),
    )


def _busts(turn: Turn, receipt: Receipt, losses: Sequence[Loss]) -> list[Bust]:
    rendered = turn.planned.rendered
    spans = rendered.spans if rendered is not None else ()
    ends, starts = [span.end for span in spans], [span.start for span in spans]
    found: dict[Origin, Bust] = {}
    for loss in losses:
        origin = _origin(turn, receipt, loss)
        at = loss.start if loss.placed else None
        held = None
        if at is not None:
            # What the template adds counts as part of the message after it.
            first = bisect_right(ends, at)
            last = bisect_left(starts, at + loss.tokens)
            held = _in_client(turn, spans[first : max(last, first + 1)])
        before = found.get(origin)
        if before is not None:
            at = before.at
            held = _joined(before.messages, held)
        tokens = loss.tokens + (before.tokens if before is not None else 0)
        found[origin] = Bust(origin, tokens, at, held)
    return list(found.values())


def _origin(turn: Turn, receipt: Receipt, loss: Loss) -> Origin:
    client, cut = turn.planned.prepared.client, loss.cut
    if cut is None and not loss.placed:
        # An estimate blames the first edit, which only the plan knows.
        edits = (each for each in turn.planned.plan.edits if cause_label(each.cause) == loss.cause)
        if (edit := next(edits, None)) is not None:
            tool = _tool_of(client, edit.message)
            return Origin(edit.cause, edit.message, edit.role, tool, edit.mode, _NOT_COPIED)
    if cut is None:
        return Origin(loss.cause)
    if cut.withheld:
        why = "unnamed_session"
    elif cut.mode != "amortize":
        why = cut.mode
    elif receipt.outcome is Outcome.SPLICED:
        # Tokens that the engine computed again: the boundary, quotes, the sink, partial pages.
        why = "computed_again"
    else:
        why = receipt.reason.value if receipt.reason is not None else _NOT_COPIED
    tool = _tool_of(client, cut.message)
    return Origin(cut.cause, cut.message, cut.role, tool, cut.mode, why)


def _in_client(turn: Turn, spans: Sequence[MessageSpan]) -> tuple[int, int] | None:
    """Return the first and last message of the client's list among some of those sent."""
    sent = turn.planned.prepared.sent
    places = [index for span in spans if (index := sent[span.message].client_index) is not None]
    return (min(places), max(places)) if places else None


def _joined(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


def _tool_of(client: Sequence[Message], index: int | None) -> str:
    """Return the name of the tool that a message calls first or is the result of; empty if none."""
    if index is None or not 0 <= index < len(client):
        return ""
    message = client[index]
    wanted = message.get("tool_call_id")
    if wanted is None:
        return _name_of(next(iter(_calls(message)), None))
    for earlier in reversed(client[:index]):
        for call in _calls(earlier):
            if call.get("id") == wanted:
                return _name_of(call)
    return ""


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [each for each in calls if isinstance(each, Mapping)] if isinstance(calls, list) else ()


def _name_of(call: Mapping[str, Any] | None) -> str:
    function = call.get("function") if call is not None else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name[:_LONGEST_NAME] if isinstance(name, str) else ""
