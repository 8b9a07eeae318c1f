"""The time at which an edit is worth its cost to the cache.

An engine that splices moves the KV after an edit; any other computes it again. So an edit may wait,
and a batch of edits then costs as much as one. Edits that reclaim tokens wait until

* the reclaimed tokens pay for those computed again:
  ``reclaimed * (carry * expected turns + need * fullness) >= computed again``, or
* the prompt would fill too much of the model's window.

``carry`` is the cost per turn of a token that stays in the context (attention over it during
decoding, memory), as a share of its prefill. The number of a session's remaining turns isn't known;
the estimate without tuning is the number so far (a session's age is the best guess of its rest if
nothing else is known of it). ``need`` makes room early where that is cheap: an edit near the end of
the prompt costs little, and saves an expensive one later. ``python -m leyline_lab edit-timing``
found the defaults.

Where a model keeps state per sequence, copies end in front of new text, and go on after it, only at
anchors. On average, half of the tokens between two anchors are computed again on either side, and
states are copied at the price of the rows that take as much memory. Only the engine knows its
anchors: one at its own place makes an edit cheaper than this; those of decoding lie further apart.

Edits that forget never wait, nor do edits of messages that the engine hasn't seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import EditCost, Note
from leyline_policies.verbs import Verbs, unannotated

from ..model.messages import Message
from ..model.prepared import DECLARED, Change, Prepared, SentMessage
from ..model.vocabulary import Decision
from .stage import find_fault

SCHEDULER = "scheduler"
_VERBS = f"policy:{Verbs.name}:"


@dataclass(frozen=True, slots=True)
class Timing:
    """The scheduler's settings."""

    carry: float = 0.002
    """Cost of a token that stays, per turn, as a share of its prefill."""
    need: float = 0.25
    """Worth of a reclaimed token, in tokens prefilled, if the prompt is about to fill its part of
    the window; less in proportion for a shorter prompt."""
    pressure: float = 0.8
    """Share of the window beyond which no edit waits."""
    longest_turns: int = 200
    """Upper bound of the expected remaining turns."""
    splicing_waits: bool = True
    """True if edits also wait on an engine that splices."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The cost and benefit of committing the pending edits, in tokens."""

    reclaimed: int
    """Tokens by which the prompt would be shorter."""
    recomputed: int
    """Prompt tokens after the first pending edit: a plain engine prefills them again."""
    inserted: int
    """Tokens of messages that the edits wrote; prefilled on any engine."""
    prompt: int
    """Tokens of the prompt without the pending edits."""
    gaps: int = 0
    """Places after which messages that the edits wrote are followed by others."""


def pending(last: Prepared, now: Prepared) -> Prepared | None:
    """Return ``now`` with the edits of earlier messages as in ``last``; None if they can't wait.

    They can wait if the client's list only grew, no new forget or declared edit of the caller
    concerns the old part, and the result is a valid list with all new messages.
    """
    count = len(last.client)
    if (
        len(now.client) == count
        or now.client_fingerprints[:count] != last.client_fingerprints
        or any(now.forget_marks.get(i) != last.forget_marks.get(i) for i in range(count))
        or _declared(now, count) != _declared(last, count)
    ):
        return None
    first_new = next(
        (
            place
            for place, entry in enumerate(now.sent)
            if entry.client_index is not None and entry.client_index >= count
        ),
        len(now.sent),
    )
    ahead, new = now.sent[:first_new], now.sent[first_new:]
    insertions_forget = _forgotten_insertions(ahead) - _forgotten_insertions(last.sent)
    if insertions_forget or _has_moved(last, now, ahead, new):
        return None
    sent = (*(_as_it_is(entry, now.client) for entry in last.sent), *new)
    dropped = (*last.dropped, *(d for d in now.dropped if d.client_index >= count))
    if _same(sent, now.sent) or find_fault(
        [entry.message for entry in now.sent], [entry.message for entry in sent]
    ):
        return None
    return replace(now, sent=sent, dropped=dropped)


def balance(held: Prepared, now: Prepared, seen: int, tokens: Callable[[Message], int]) -> Balance:
    """Return the cost and benefit of sending ``now`` instead of ``held``.

    Args:
        seen: number of messages of ``held`` that the engine read on the turn before.
    """
    prefix = _common(held.sent, now.sent)
    # New messages of this turn are prefilled either way.
    fresh = len(held.sent) - seen
    known = {id(entry.message) for entry in held.sent}
    behind = [entry.message for entry in now.sent[prefix : len(now.sent) - fresh]]
    written = [id(message) not in known for message in behind]
    return Balance(
        reclaimed=_total(held.sent, tokens) - _total(now.sent, tokens),
        recomputed=sum(map(tokens, behind)),
        inserted=sum(tokens(message) for message in compress(behind, written)),
        prompt=_total(held.sent, tokens),
        gaps=sum(new and not after for new, after in pairwise(written)),
    )


def decide(
    found: Balance, cost: EditCost, timing: Timing, *, turns: int, window: int | None
) -> Decision:
    """Decide whether to commit the pending edits now.

    Args:
        cost: costs on the engine in use.
        turns: number of the session's turns so far.
        window: the model's, in tokens; None if unknown.
    """
    if found.reclaimed <= 0 or (cost.splices and not timing.splicing_waits):
        return Decision.UNTIMED  # these edits have another reason than tokens
    if window is not None and found.prompt > timing.pressure * window:
        return Decision.PRESSURE
    moved = found.recomputed - found.inserted
    # Both are in tokens prefilled: moving a token costs a fraction of one.
    share = cost.splice_us / cost.prefill_us if cost.prefill_us > 0 else 0.0
    spent = found.inserted + (_moving(found, moved, cost, share) if cost.splices else moved)
    expected = min(max(turns, 1), timing.longest_turns)
    fullness = found.prompt / (timing.pressure * window) if window else 0.0
    gained = found.reclaimed * (timing.carry * expected + timing.need * fullness)
    return Decision.PAYS if gained >= spent else Decision.HELD


def _moving(found: Balance, moved: int, cost: EditCost, share: float) -> float:
    """Return the price of moving KV and states, in tokens prefilled; never more than a prefill's.

    Args:
        share: of a token's prefill that moving its KV costs.
    """
    again = found.gaps * (cost.anchor_tokens - 1)
    states = max(1, found.gaps) * cost.state_tokens
    return min(again + (moved + states) * share, float(moved))


def pays(found: Balance, cost: EditCost, timing: Timing, *, turns: int, window: int | None) -> bool:
    """Return True if :func:`decide` commits the pending edits."""
    return decide(found, cost, timing, turns=turns, window=window) is not Decision.HELD


def schedule(
    last: Prepared,
    now: Prepared,
    cost: EditCost,
    timing: Timing,
    *,
    tokens: Callable[[Message], int],
    turns: int,
    window: int | None,
) -> tuple[Prepared, Decision]:
    """Return ``now``, or the same turn with edits of earlier messages put off; and the decision.

    Args:
        last: the turn before, as sent.
    """
    held = pending(last, now)
    if held is None:
        return now, Decision.NOTHING
    found = balance(held, now, len(last.sent), tokens)
    decision = decide(found, cost, timing, turns=turns, window=window)
    if decision is not Decision.HELD:
        return now, decision
    note = Note(
        SCHEDULER,
        "edits_held",
        {"reclaimable_tokens": found.reclaimed, "recomputed_tokens": found.recomputed},
    )
    return replace(held, notes=(*now.notes, note)), decision


def _declared(prepared: Prepared, count: int) -> list[tuple[int, Message | None]]:
    """Return the index and result of each declared edit among the first ``count`` messages."""
    changed: list[tuple[int, Message | None]] = [
        (entry.client_index, entry.message)
        for entry in prepared.sent
        if entry.changes
        and entry.client_index is not None
        and entry.client_index < count
        and any(map(_is_callers, entry.changes))
    ]
    gone = [
        (item.client_index, None)
        for item in prepared.dropped
        if item.client_index < count and _is_callers(item.change)
    ]
    return changed + gone


def _is_callers(change: Change) -> bool:
    """Return True for an edit that the caller declared or annotated."""
    return change.cause == DECLARED or change.cause.startswith(_VERBS)


def _forgotten_insertions(entries: Sequence[SentMessage]) -> Counter[str]:
    """Count the causes of edits that forget and that concern messages inserted by policies."""
    return Counter(
        change.cause
        for entry in entries
        if entry.client_index is None
        for change in entry.changes
        if change.mode is Mode.FORGET
    )


def _has_moved(
    last: Prepared, now: Prepared, ahead: Sequence[SentMessage], new: Sequence[SentMessage]
) -> bool:
    """Return True if a message moved past the first new one: it would be missing, or sent twice."""
    count = len(last.client)
    if any(e.moved_from is not None and e.moved_from < count for e in new):
        return True
    if not any(item.client_index >= count for item in now.dropped):
        return False
    # A policy may have written a dropped message again further ahead.
    put_in = [e.message for e in ahead if e.client_index is None]
    known = [e.message for e in last.sent if e.client_index is None]
    return any(message not in known for message in put_in)


def _as_it_is(entry: SentMessage, client: Sequence[Message]) -> SentMessage:
    """Return a message that was sent before, with its current markers and form."""
    if entry.changes or entry.client_index is None:
        return entry
    message = unannotated(client[entry.client_index])
    if message is entry.message or message == entry.message:
        return entry
    return msgspec.structs.replace(entry, message=message)


def _same(left: Sequence[SentMessage], right: Sequence[SentMessage]) -> bool:
    return len(left) == len(right) and _common(left, right) == len(left)


def _common(left: Sequence[SentMessage], right: Sequence[SentMessage]) -> int:
    """Return the number of equal leading messages."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one.message is not other.message and one.message != other.message:
            return place
    return min(len(left), len(right))


def _total(entries: Sequence[SentMessage], tokens: Callable[[Message], int]) -> int:
    return sum(tokens(entry.message) for entry in entries)
