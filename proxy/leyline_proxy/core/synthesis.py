"""From a turn's changes to directives and segments in a retained turn's token coordinates."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from leyline_engine.contract import (
    ATTENTION_SINK,
    CopySegment,
    Directive,
    LineageRun,
    LiteralSegment,
    Mode,
    Outcome,
    Reason,
    Segment,
    SourceRef,
)

from .causes import Cause, CauseFinder, strictest
from .diff import diff_messages
from .options import UndeclaredRules
from .prepare import Prepared
from .rendered import Rendered
from .session import EditMode, EditRecord, RetainedTurn
from .token_diff import Hunk, Kept, SourceView, TokenDiff, diff_tokens


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """What to ask of the engine for one turn, and the account of why."""

    sources: tuple[SourceRef, ...] = ()
    directives: tuple[Directive, ...] = ()
    segments: tuple[Segment, ...] = ()
    lineage: tuple[LineageRun, ...] = ()
    edits: tuple[EditRecord, ...] = ()
    planned: Outcome = Outcome.UNEDITED
    reason: Reason | None = None
    reusable_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Edit:
    """A hunk with its explanation."""

    hunk: Hunk
    causes: tuple[Cause, ...]
    mode: EditMode
    behind: bool
    """Whether anything kept lies behind it."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One retained turn as a source: what it would contribute."""

    turn: RetainedTurn
    diff: TokenDiff
    edits: tuple[_Edit, ...]
    copies: tuple[Kept, ...]
    """Kept runs that may be used, the common prefix among them."""
    forgets: bool = False
    reusable: int = field(default=0)


def synthesize(
    turns: Sequence[RetainedTurn],
    prepared: Prepared,
    rendered: Rendered,
    rules: UndeclaredRules,
    *,
    model_fingerprint: str,
    sink: int = ATTENTION_SINK,
    boundary: int = 0,
) -> TurnPlan:
    """Plan one turn against the session's retained turns.

    Args:
        turns: newest last; those of another model are no sources.
        rendered: this turn's prompt.
        rules: what undeclared edits may be.
        sink: leading positions that the engine computes anew whatever it is offered.
        boundary: tokens behind each edit to compute anew.

    Returns:
        A plan whose segments reproduce the prompt; without directives where nothing was edited,
        or where no edit leaves anything to copy.
    """
    best: _Candidate | None = None
    for turn in reversed(turns):
        if turn.model_fingerprint != model_fingerprint:
            continue
        candidate = _consider(turn, prepared, rendered, rules, boundary)
        if best is None or candidate.reusable > best.reusable:
            best = candidate
        if not candidate.edits:
            break  # the turn goes on where this one ended; no older one can do better
    if best is None:
        return TurnPlan()
    return _plan(best, rendered.tokens, sink)


def _consider(
    turn: RetainedTurn,
    prepared: Prepared,
    rendered: Rendered,
    rules: UndeclaredRules,
    boundary: int,
) -> _Candidate:
    messages = diff_messages(
        turn.prepared.messages,
        prepared.messages,
        old_fingerprints=turn.prepared.sent_fingerprints,
        new_fingerprints=prepared.sent_fingerprints,
    )
    view = SourceView(turn.tokens, turn.rendered.spans, len(turn.rendered.tokens))
    diff = diff_tokens(view, rendered, messages)
    finder = CauseFinder(turn.prepared, prepared, messages, rules)
    edits = tuple(_edits(diff, finder))
    copies = _usable(diff, edits, turn, boundary)
    return _Candidate(
        turn,
        diff,
        edits,
        copies,
        any(edit.mode == "forget" for edit in edits),
        sum(run.length for run in copies),
    )


def _edits(diff: TokenDiff, finder: CauseFinder) -> list[_Edit]:
    """Explained hunks; the last one is a new turn's tail unless it demands forgetting."""
    edits: list[_Edit] = []
    for hunk in diff.hunks:
        behind = hunk.new_start < diff.tail
        if not behind and not hunk.old_messages:
            continue
        causes = finder.explain(hunk)
        mode = strictest(causes)
        if behind or mode == "forget":
            edits.append(_Edit(hunk, causes, mode, behind))
    return edits


def _usable(
    diff: TokenDiff, edits: Sequence[_Edit], turn: RetainedTurn, boundary: int
) -> tuple[Kept, ...]:
    """Kept runs before the first exact or forget edit, less boundaries and hidden readers."""
    cut = min((e.hunk.new_start for e in edits if e.mode != "amortize"), default=None)
    limit = len(turn.tokens)
    forgotten = [e.hunk.start for e in edits if e.mode == "forget"]
    if forgotten:
        # KV behind an earlier splice may have read the span before it was moved.
        limit = min([*forgotten, *(run.start for run in turn.lineage)])
    usable: list[Kept] = []
    for run in diff.kept:
        if cut is not None and run.dest >= cut:
            break
        skip = boundary if run.dest > 0 else 0
        end = min(run.end, limit)
        if end - run.start > skip:
            usable.append(Kept(run.start + skip, end, run.dest + skip))
    return tuple(usable)


def _plan(chosen: _Candidate, prompt: array[int], sink: int) -> TurnPlan:
    turn = chosen.turn
    if not chosen.edits:
        lineage = _lineage_before(turn, chosen.diff.tail)
        return TurnPlan(lineage=lineage, reusable_tokens=chosen.reusable)
    first = min(edit.hunk.new_start for edit in chosen.edits)
    lineage = () if chosen.forgets else _lineage_before(turn, first)
    edits = tuple(_records(chosen.edits))
    moved = [run for run in chosen.copies if run.dest >= first and run.dest_end > sink]
    if not moved and not chosen.forgets:
        return TurnPlan(
            lineage=lineage,
            edits=edits,
            planned=Outcome.REPREFILLED,
            reason=Reason.REPREFILLED,
            reusable_tokens=chosen.reusable,
        )
    segments = _segments(chosen.copies, len(prompt))
    if not _reproduces(segments, turn.tokens, prompt):
        return TurnPlan(edits=edits, planned=Outcome.REPREFILLED, reason=Reason.TOKEN_MISMATCH)
    return TurnPlan(
        sources=(SourceRef(turn.turn, len(turn.tokens), turn.digest),),
        directives=_directives(chosen, prompt),
        segments=segments,
        lineage=lineage,
        edits=edits,
        planned=Outcome.SPLICED if moved else Outcome.REPREFILLED,
        reason=Reason.SPLICED if moved else Reason.REPREFILLED,
        reusable_tokens=chosen.reusable,
    )


def _lineage_before(turn: RetainedTurn, position: int) -> tuple[LineageRun, ...]:
    return tuple(run for run in turn.lineage if run.start < position)


def _directives(chosen: _Candidate, prompt: array[int]) -> tuple[Directive, ...]:
    """Amortized edits before the first exact one, and every edit that demands forgetting."""
    directives: list[Directive] = []
    exact = False
    for edit in chosen.edits:
        hunk = edit.hunk
        if edit.mode == "forget":
            # Of a tail only the old tokens are meant; what follows is the new turn.
            end = hunk.new_end if edit.behind else hunk.new_start
            replacement = tuple(prompt[hunk.new_start : end])
            directives.append(Directive(hunk.start, hunk.end, replacement, Mode.FORGET))
        elif edit.mode == "amortize" and not exact:
            replacement = tuple(prompt[hunk.new_start : hunk.new_end])
            directives.append(Directive(hunk.start, hunk.end, replacement, Mode.AMORTIZE))
        exact = exact or edit.mode != "amortize"
    return tuple(directives)


def _segments(copies: Sequence[Kept], length: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    cursor = 0
    for run in copies:
        if run.dest > cursor:
            segments.append(LiteralSegment(cursor, run.dest - cursor))
        segments.append(CopySegment(0, run.start, run.end, run.dest))
        cursor = run.dest_end
    if cursor < length:
        segments.append(LiteralSegment(cursor, length - cursor))
    return tuple(segments)


def _reproduces(segments: Sequence[Segment], source: array[int], prompt: array[int]) -> bool:
    """Whether every copy is what stands at its destination."""
    return all(
        source[segment.start : segment.end] == prompt[segment.dest : segment.dest_end]
        for segment in segments
        if isinstance(segment, CopySegment)
    )


def _records(edits: Sequence[_Edit]) -> list[EditRecord]:
    return [
        EditRecord(
            message=cause.message,
            role=cause.role,
            cause=cause.cause,
            mode=cause.mode,
            span=(edit.hunk.start, edit.hunk.end),
            replacement_tokens=edit.hunk.new_end - edit.hunk.new_start if edit.behind else 0,
        )
        for edit in edits
        for cause in edit.causes
    ]
