"""The fate of the KV that a prompt could have had. Pure.

The retained turn that a prompt continues shows the KV within reach; the engine's receipt shows the
KV used. Every prompt token is one of these::

    prompt    0 ──────────────────────────────────────────── n
    reach     ═════════════════╗ edit ══════════╗ edit ═══
    receipt   cached ──────┤     spliced ───────┤   prefilled
              cached       lost  new   spliced    new  lost  new

Lost tokens were within reach but were prefilled. Tokens that were reused from elsewhere count by
themselves; the engine doesn't report their places, so they reduce what was lost last.
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
"""Smallest loss that counts as the engine's, which rounds down to whole pages of its pool."""

_MESSAGE_WEIGHT = 16
"""Characters counted for a message's role and marks."""

Interval = tuple[int, int]


class Stretch(NamedTuple):
    """Prompt tokens ``[start, end)`` of the retained turn, with the causes of edits before them."""

    start: int
    end: int
    first: str
    """Cause of the first edit before; empty if there is none."""
    hard: str
    """Cause of the first edit before that can't be spliced over; empty if there is none."""
    thinking: bool = False
    """True if the template stripped thinking before."""
    kept_out: bool = False
    """True if nothing but such exact edits is in the way."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The parts of a prompt that one retained turn has."""

    stretches: tuple[Stretch, ...] = ()
    """Stretches by position. If :attr:`estimated` is set, only their lengths count, and only tokens
    after the first edit, if any."""
    known: bool = False
    """True if there was a retained turn to compare with."""
    estimated: bool = False
    """True if derived from messages: the tokens aren't known here."""
    moved: Moved = ""
    """The reason that the serving engine can't have the KV: it is on another engine, or this one
    was restarted."""
    context: str = ""
    """:attr:`~leyline_proxy.model.rendered.Rendered.context` of a turn without tokens."""


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """The origin of a turn's prompt tokens; with the lost ones, the numbers add up to all."""

    cached: int = 0
    spliced: int = 0
    reused: int = 0
    fresh: int = 0
    busts: Mapping[str, int] = field(default_factory=dict)
    """Lost tokens by cause; none is 0."""
    missing: int = 0
    """Tokens that the proxy expected to be cached but the engine didn't have."""
    found: int = 0
    """Tokens that the engine had but the proxy didn't expect."""
    after_thinking: int = 0
    """Copied tokens after thinking that the template stripped: prefilled, were such edits exact."""
    thinking: int = 0
    """Lost tokens that would have been copied, were such edits amortized."""


def reach_of(candidate: Candidate, moved: Moved = "") -> Reach:
    """Return the parts of a prompt that a retained turn has, from the comparison of both."""
    turn = candidate.turn
    # The last generated token has never been read and has no KV.
    limit = len(turn.tokens) - bool(turn.output_ids)
    stretches: list[Stretch] = []
    ahead = deque(sorted(candidate.edits, key=lambda edit: edit.hunk.new_start))
    first = hard = other = ""
    thinking = False
    for run in candidate.diff.kept:
        left, end = run.dest, run.dest + min(run.end, limit) - run.start
        while left < end:
            while ahead and ahead[0].hunk.new_start <= left:
                edit = ahead.popleft()
                first = first or _cause(edit)
                cause = _cause(edit) if edit.mode != "amortize" else ""
                hard = hard or cause
                strips = all(each.thinking for each in edit.causes)
                thinking = thinking or strips
                other = other or ("" if strips else cause)
            right = min(end, ahead[0].hunk.new_start) if ahead else end
            kept_out = bool(hard) and not other
            stretches.append(Stretch(left, right, first, hard, thinking, kept_out))
            left = right
    return Reach(tuple(stretches), known=True, moved=moved)


def reach_by_messages(
    last: RetainedTurn, prepared: Prepared, first: str, context: str, moved: Moved = ""
) -> Reach:
    """Estimate the part of a prompt that a retained turn has if tokens aren't known: the engine's
    count of its prompt, divided by the length of messages.

    Args:
        first: cause of the first edit since; empty if there is none.
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
    """Return the cause of an edit without names."""
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
        tokens: as the engine reports; contradictory numbers are used as far as they fit.
        copies: prompt ranges that the engine was asked to splice, by position.
        told: ``cached_tokens`` of the engine's usage; None if absent.
        reconciled: True if the cached tokens should agree with the plan.
    """
    prompt = max(0, tokens.prompt)
    cached = min(max(0, tokens.prefix), prompt)
    spliced = min(max(0, tokens.spliced), prompt - cached)
    reused = min(max(0, tokens.reused), prompt - cached - spliced)
    prefilled = prompt - cached - spliced - reused
    done = _done(copies, cached, spliced)
    lost = list(_lost(reach, prompt, cached, done))
    busts = _shared_out(((each.cause, each.tokens) for each in lost), prefilled)
    if busts.get("engine", 0) < PAGE:
        busts.pop("engine", None)
    fresh = prefilled - sum(busts.values())
    missing = found = 0
    if reconciled and reach.known and prompt:
        actual = cached + spliced + reused if told is None else told
        missing, found = _discrepancy(reach, copies, prompt, actual, reused)
    after_thinking = _covered(
        (max(start, stretch.start), min(end, stretch.end))
        for stretch in reach.stretches
        if stretch.thinking
        for start, end in done
    )
    thinking = min(prefilled, sum(each.tokens for each in lost if each.kept_out))
    return CacheAccount(
        cached, spliced, reused, fresh, busts, missing, found, after_thinking, thinking
    )


def _cause(edit: Edit) -> str:
    """Return the cause that gives the edit its mode."""
    strict = (cause.cause for cause in edit.causes if cause.mode == edit.mode)
    return cause_label(next(strict, "template"))


def _kept_behind(last: Prepared, now: Prepared) -> float:
    """Return the share of the last prompt that is kept after the first edit."""
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
    """Return the copies that were made. An engine leaves out the first ones: those in its own
    cache, and the beginning of the prompt, which it always computes."""
    ahead = [(max(start, cached), end) for start, end in copies if end > cached]
    left_out = max(0, sum(end - start for start, end in ahead) - spliced)
    done: list[Interval] = []
    for start, end in ahead:
        skipped = min(left_out, end - start)
        left_out -= skipped
        if start + skipped < end:
            done.append((start + skipped, end))
    return done


class _Lost(NamedTuple):
    """Tokens of a stretch that were prefilled again."""

    cause: str
    tokens: int
    kept_out: bool


def _lost(reach: Reach, prompt: int, cached: int, done: Sequence[Interval]) -> Iterator[_Lost]:
    """Yield tokens within reach that were neither cached nor spliced, by stretch."""
    at = 0
    for stretch in reach.stretches:
        cause = _blamed(reach, stretch, spliced=bool(done))
        if reach.estimated and stretch.first:
            yield _Lost(cause, stretch.end - stretch.start, False)
            continue
        # The last token of a prompt is always computed.
        start, end = max(stretch.start, cached), min(stretch.end, prompt - 1)
        while at < len(done) and done[at][1] <= start:
            at += 1
        covered, place = 0, at
        while place < len(done) and done[place][0] < end:
            covered += max(0, min(end, done[place][1]) - max(start, done[place][0]))
            place += 1
        yield _Lost(cause, max(0, end - start - covered), stretch.kept_out)


def _blamed(reach: Reach, stretch: Stretch, *, spliced: bool) -> str:
    if reach.moved:
        return stretch.hard or reach.moved
    return (stretch.hard if spliced else "") or stretch.first or "engine"


def _shared_out(lost: Iterable[tuple[str, int]], prefilled: int) -> dict[str, int]:
    """Return sums by cause, limited to the number of prefilled tokens."""
    busts: dict[str, int] = {}
    for cause, count in lost:
        taken = min(count, prefilled)
        prefilled -= taken
        if taken > 0:
            busts[cause] = busts.get(cause, 0) + taken
    return busts


def _discrepancy(
    reach: Reach, copies: Collection[Interval], prompt: int, actual: int, reused: int
) -> tuple[int, int]:
    """Return the missing and the surplus tokens; fewer than :data:`PAGE` count as 0.

    Reused tokens, of which there are ``reused`` among the ``actual``, are never a surplus.
    """
    if reach.estimated and any(stretch.first for stretch in reach.stretches):
        return 0, 0
    intact = [] if reach.moved else [(s.start, s.end) for s in reach.stretches if not s.first]
    expected = min(_covered([*intact, *copies]), max(0, prompt - 1))
    missing, found = expected - actual, actual - reused - expected
    # The length of an answer that an unknown template left in the prompt isn't known.
    found = 0 if reach.estimated else found
    return (missing if missing >= PAGE else 0), (found if found >= PAGE else 0)


def _covered(intervals: Iterable[Interval]) -> int:
    """Return the number of positions in any of the intervals."""
    total = at = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, at))
        at = max(at, end)
    return total
