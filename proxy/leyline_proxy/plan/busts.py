"""What became of the KV that a prompt could have had. Pure.

The retained turn that a prompt goes on from says what was within reach; the engine's receipt says
what was used. Every prompt token is one of these::

    prompt    0 ──────────────────────────────────────────── n
    reach     ═════════════════╗ edit ══════════╗ edit ═══
    receipt   cached ──────┤     spliced ───────┤   prefilled
              cached       lost  new   spliced    new  lost  new

Lost is what was within reach and was prefilled all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from leyline_engine.contract import TokenCounts

from ..model.diff import diff_messages
from ..model.messages import text_of
from ..model.prepared import Prepared
from ..model.session import RetainedTurn
from ..model.vocabulary import CAUSES
from .candidates import Candidate, Edit

Moved = Literal["", "failover", "engine"]

PAGE = 64
"""Fewer tokens are what an engine rounds down to whole pages of its pool, and no loss of its."""

_MESSAGE_WEIGHT = 16
"""Characters that a message's role and marks stand for."""

Interval = tuple[int, int]


class Stretch(NamedTuple):
    """Prompt tokens ``[start, end)`` that the retained turn has, and what lies before them."""

    start: int
    end: int
    first: str
    """Cause of the first edit before; empty where nothing was edited."""
    hard: str
    """Cause of the first edit before that can't be spliced over; empty where there is none."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What of a prompt one retained turn has."""

    stretches: tuple[Stretch, ...] = ()
    """By position. Where :attr:`estimated` is set, only lengths count, and only of what lies behind
    the first edit, if there is one."""
    known: bool = False
    """Whether there was a retained turn to compare with."""
    estimated: bool = False
    """Told from messages: the tokens aren't known here."""
    moved: Moved = ""
    """Why the engine that serves the turn can't have the KV: it lies on another one, or this one
    was restarted."""
    context: str = ""
    """As :attr:`~leyline_proxy.model.rendered.Rendered.context`, for turns without tokens."""


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """Where a turn's prompt tokens came from; with what was lost, the numbers add up to all."""

    cached: int = 0
    spliced: int = 0
    fresh: int = 0
    busts: Mapping[str, int] = field(default_factory=dict)
    """Tokens that were lost, by cause; none is 0."""
    missing: int = 0
    """Tokens that the proxy expected to be cached and the engine hadn't."""
    found: int = 0
    """Tokens that the engine had and the proxy didn't expect."""


def reach_of(candidate: Candidate, moved: Moved = "") -> Reach:
    """What a retained turn has of a prompt, by the comparison of both."""
    turn = candidate.turn
    # What was generated last has never been read, so there is no KV of it.
    limit = len(turn.tokens) - bool(turn.output_ids)
    stretches: list[Stretch] = []
    ahead = deque(sorted(candidate.edits, key=lambda edit: edit.hunk.new_start))
    first = hard = ""
    for run in candidate.diff.kept:
        left, end = run.dest, run.dest + min(run.end, limit) - run.start
        while left < end:
            while ahead and ahead[0].hunk.new_start <= left:
                edit = ahead.popleft()
                first = first or _cause(edit)
                hard = hard or (_cause(edit) if edit.mode != "amortize" else "")
            right = min(end, ahead[0].hunk.new_start) if ahead else end
            stretches.append(Stretch(left, right, first, hard))
            left = right
    return Reach(tuple(stretches), known=True, moved=moved)


def reach_by_messages(
    last: RetainedTurn, prepared: Prepared, first: str, context: str, moved: Moved = ""
) -> Reach:
    """What a retained turn has of a prompt, where tokens aren't known: by the engine's own count of
    its prompt, shared out by the length of messages.

    Args:
        first: cause of the first edit since; empty where there is none.
        context: of this prompt.
    """
    held = last.receipt.tokens.prompt if last.receipt is not None else 0
    behind = _kept_behind(last.prepared, prepared)
    length = held
    if last.rendered.context != context:
        first = "tools"
    elif first or behind:
        first, length = first or "undeclared", int(held * behind)
    cause = cause_label(first)
    stretches = (Stretch(0, length, cause, cause),) if length > 0 else ()
    return Reach(stretches, held > 0, estimated=True, moved=moved, context=context)


def cause_label(cause: str) -> str:
    """The cause of an edit without names."""
    kind = cause.partition(":")[0]
    return kind if kind in CAUSES or not kind else "policy"


def settle(
    reach: Reach,
    tokens: TokenCounts,
    *,
    copies: Sequence[Interval] = (),
    told: int | None = None,
    reconciled: bool = True,
) -> CacheAccount:
    """Account for every token of a prompt.

    Args:
        tokens: as the engine told; numbers that contradict each other are taken as far as they fit.
        copies: prompt positions that the engine was asked to splice, by position.
        told: ``cached_tokens`` of the engine's usage; None where there was none.
        reconciled: whether what was cached can be expected to be as planned.
    """
    prompt = max(0, tokens.prompt)
    cached = min(max(0, tokens.prefix), prompt)
    spliced = min(max(0, tokens.spliced), prompt - cached)
    prefilled = prompt - cached - spliced
    busts = _shared_out(_lost(reach, prompt, cached, _done(copies, cached, spliced)), prefilled)
    if busts.get("engine", 0) < PAGE:
        busts.pop("engine", None)
    fresh = prefilled - sum(busts.values())
    missing = found = 0
    if reconciled and reach.known and prompt:
        actual = cached + spliced if told is None else told
        missing, found = _discrepancy(reach, copies, prompt, actual)
    return CacheAccount(cached, spliced, fresh, busts, missing, found)


def _cause(edit: Edit) -> str:
    """The one that gives the edit its mode."""
    strict = (cause.cause for cause in edit.causes if cause.mode == edit.mode)
    return cause_label(next(strict, "template"))


def _kept_behind(last: Prepared, now: Prepared) -> float:
    """Which share of the last prompt lies behind the first edit and was kept."""
    before, after = last.sent_fingerprints, now.sent_fingerprints
    if after[: len(before)] == before:
        return 0.0
    steps = diff_messages(
        last.messages,
        now.messages,
        old_fingerprints=before,
        new_fingerprints=after,
    ).steps
    behind = whole = 0
    edited = False
    for step in steps:
        if step.old is None:
            edited = True
            continue
        weight = len(text_of(last.messages[step.old])) + _MESSAGE_WEIGHT
        whole += weight
        edited = edited or step.kind != "kept"
        behind += weight if edited and step.kind == "kept" else 0
    return behind / whole if whole else 0.0


def _done(copies: Sequence[Interval], cached: int, spliced: int) -> list[Interval]:
    """The copies that were made. An engine leaves out the first ones: those that its own cache
    has, and the beginning of the prompt, which it always computes."""
    ahead = [(max(start, cached), end) for start, end in copies if end > cached]
    left_out = max(0, sum(end - start for start, end in ahead) - spliced)
    done: list[Interval] = []
    for start, end in ahead:
        skipped = min(left_out, end - start)
        left_out -= skipped
        if start + skipped < end:
            done.append((start + skipped, end))
    return done


def _lost(
    reach: Reach, prompt: int, cached: int, done: Sequence[Interval]
) -> Iterator[tuple[str, int]]:
    """Causes and numbers of tokens within reach that were neither cached nor spliced."""
    at = 0
    for stretch in reach.stretches:
        cause = _blamed(reach, stretch, spliced=bool(done))
        if reach.estimated and stretch.first:
            yield cause, stretch.end - stretch.start
            continue
        # The last token of a prompt is always computed.
        start, end = max(stretch.start, cached), min(stretch.end, prompt - 1)
        while at < len(done) and done[at][1] <= start:
            at += 1
        covered, place = 0, at
        while place < len(done) and done[place][0] < end:
            covered += max(0, min(end, done[place][1]) - max(start, done[place][0]))
            place += 1
        yield cause, max(0, end - start - covered)


def _blamed(reach: Reach, stretch: Stretch, *, spliced: bool) -> str:
    if reach.moved:
        return stretch.hard or reach.moved
    return (stretch.hard if spliced else "") or stretch.first or "engine"


def _shared_out(lost: Iterable[tuple[str, int]], prefilled: int) -> dict[str, int]:
    """Sums by cause, of no more tokens than were prefilled."""
    busts: dict[str, int] = {}
    for cause, count in lost:
        taken = min(count, prefilled)
        prefilled -= taken
        if taken > 0:
            busts[cause] = busts.get(cause, 0) + taken
    return busts


def _discrepancy(
    reach: Reach, copies: Collection[Interval], prompt: int, actual: int
) -> tuple[int, int]:
    """Tokens fewer and more than expected, from :data:`PAGE` on."""
    if reach.estimated and any(stretch.first for stretch in reach.stretches):
        return 0, 0
    intact = [] if reach.moved else [(s.start, s.end) for s in reach.stretches if not s.first]
    expected = min(_covered([*intact, *copies]), max(0, prompt - 1))
    missing, found = expected - actual, actual - expected
    # How long an answer was that an unknown template left in the prompt can't be said.
    found = 0 if reach.estimated else found
    return (missing if missing >= PAGE else 0), (found if found >= PAGE else 0)


def _covered(intervals: Iterable[Interval]) -> int:
    """Positions in any of the intervals."""
    total = at = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, at))
        at = max(at, end)
    return total
