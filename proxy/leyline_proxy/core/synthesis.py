"""From a turn's changes to directives and segments in a retained turn's token coordinates."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

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
from .forgetting import Demand, new_demands
from .options import UndeclaredRules
from .prepare import Prepared
from .rendered import Rendered
from .session import EditMode, EditRecord, RetainedTurn
from .token_diff import Hunk, Kept, SourceView, TokenDiff, diff_tokens

MIN_SPLICED = 32
"""Fewer tokens behind the edits are prefilled: not worth a private lineage for what follows."""


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

    @property
    def forgets(self) -> bool:
        """Whether the engine is told to forget something of this session."""
        return any(directive.mode is Mode.FORGET for directive in self.directives)


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

    @property
    def forgets(self) -> bool:
        return any(edit.mode == "forget" for edit in self.edits)

    @property
    def reusable(self) -> int:
        return sum(run.length for run in self.copies)


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
    usable = [turn for turn in turns if turn.model_fingerprint == model_fingerprint]
    # A forget binds wherever the span may be held, not only in the turn that is drawn on.
    thorough = bool(prepared.forget_marks)
    candidates: list[_Candidate] = []
    for index in range(len(usable) - 1, -1, -1):
        candidate = _consider(usable[index], prepared, rendered, rules, boundary)
        candidates.append(candidate)
        longest_left = max((len(turn.tokens) for turn in usable[:index]), default=0)
        if not (candidate.edits or thorough) and candidate.reusable >= longest_left:
            break  # the turn goes on where this one ended; no older one can offer more
    if not candidates:
        return TurnPlan()
    best = max(candidates, key=lambda candidate: candidate.reusable)  # the newest of equals
    others = [other for other in candidates if other is not best and other.forgets]
    return _plan(best, others, rendered.tokens, sink)


def _consider(
    turn: RetainedTurn,
    prepared: Prepared,
    rendered: Rendered,
    rules: UndeclaredRules,
    boundary: int,
) -> _Candidate:
    before = turn.prepared
    sent = diff_messages(
        before.messages,
        prepared.messages,
        old_fingerprints=before.sent_fingerprints,
        new_fingerprints=prepared.sent_fingerprints,
    )
    client = sent
    if not (before.sent_as_given and prepared.sent_as_given):
        client = diff_messages(
            before.client,
            prepared.client,
            old_fingerprints=before.client_fingerprints,
            new_fingerprints=prepared.client_fingerprints,
        )
    view = SourceView(turn.tokens, turn.rendered.spans, len(turn.rendered.tokens))
    diff = diff_tokens(view, rendered, sent)
    demands = new_demands(turn, prepared, client)
    finder = CauseFinder(
        before,
        prepared,
        sent,
        client,
        rules,
        demanded={demand.client_index for demand in demands},
        same_context=turn.rendered.context == rendered.context,
    )
    edits = tuple(_with_demands(_edits(diff, finder), demands, diff, turn, prepared))
    return _Candidate(turn, diff, edits, _usable(diff, edits, turn, boundary))


def _edits(diff: TokenDiff, finder: CauseFinder) -> list[_Edit]:
    """Explained hunks in order; what lies in the tail counts only where it demands forgetting."""
    edits: list[_Edit] = []
    for hunk in diff.hunks:
        behind = hunk.new_start < diff.tail
        causes = finder.explain(hunk) if behind or hunk.old_messages else ()
        mode = strictest(causes)
        if behind or mode == "forget":
            edits.append(_Edit(hunk, causes, mode, behind))
    return edits


def _with_demands(
    edits: list[_Edit],
    demands: Sequence[Demand],
    diff: TokenDiff,
    turn: RetainedTurn,
    prepared: Prepared,
) -> list[_Edit]:
    """The edits, and a forget of all from the first demanded position on where they lack one.

    A demand binds even where no token of the source differs: an earlier edit may have taken the
    span out while what read it stayed, or the model may have written it.
    """
    if not demands:
        return edits
    start = min(demand.position for demand in demands)
    if any(edit.mode == "forget" and edit.hunk.start <= start for edit in edits):
        return edits
    causes = tuple(_demand_cause(demand, prepared) for demand in demands)
    for index, edit in enumerate(edits):
        if edit.hunk.start <= start <= max(edit.hunk.start, edit.hunk.end - 1):
            forgetting = _Edit(edit.hunk, (*edit.causes, *causes), "forget", edit.behind)
            return [*edits[:index], forgetting, *edits[index + 1 :]]
    place = _destination(diff, start)
    unseen = _Edit(Hunk(start, len(turn.tokens), place, place), causes, "forget", behind=False)
    return sorted([*edits, unseen], key=lambda edit: (edit.hunk.start, edit.hunk.new_start))


def _demand_cause(demand: Demand, prepared: Prepared) -> Cause:
    mark = prepared.forget_marks[demand.client_index]
    role = str(prepared.client[demand.client_index].get("role"))
    return Cause(mark.cause, "forget", role, demand.client_index)


def _destination(diff: TokenDiff, position: int) -> int:
    """Where in the prompt the first kept source token from ``position`` on stands."""
    for run in diff.kept:
        if run.end > position:
            return run.dest + max(0, position - run.start)
    return diff.tail


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


def _plan(
    chosen: _Candidate, others: Sequence[_Candidate], prompt: array[int], sink: int
) -> TurnPlan:
    """The plan for the chosen source; ``others`` are turns that hold something to forget."""
    turn = chosen.turn
    forgets = chosen.forgets or bool(others)
    edits = tuple(_records([*chosen.edits, *(edit for other in others for edit in other.edits)]))
    if not edits:
        lineage = _lineage_before(turn, chosen.diff.tail)
        return TurnPlan(lineage=lineage, reusable_tokens=chosen.reusable)
    first = min((edit.hunk.new_start for edit in chosen.edits), default=len(prompt))
    lineage = () if forgets else _lineage_before(turn, first)
    moved = [run for run in chosen.copies if run.dest >= first and run.dest_end > sink]
    worth_it = sum(run.dest_end - max(run.dest, sink) for run in moved) >= MIN_SPLICED
    if not worth_it and not forgets:
        return TurnPlan(
            lineage=lineage,
            edits=edits,
            planned=Outcome.REPREFILLED,
            reason=Reason.NOT_WORTH_IT if moved else Reason.REPREFILLED,
            reusable_tokens=chosen.reusable,
        )
    segments = _segments(chosen.copies, len(prompt))
    if not _reproduces(segments, turn.tokens, prompt):
        return TurnPlan(edits=edits, planned=Outcome.REPREFILLED, reason=Reason.TOKEN_MISMATCH)
    held = [chosen, *others]
    return TurnPlan(
        sources=tuple(SourceRef(c.turn.turn, len(c.turn.tokens), c.turn.digest) for c in held),
        directives=tuple(
            directive
            for index, candidate in enumerate(held)
            for directive in _directives(candidate, index, prompt, forget_only=index > 0)
        ),
        segments=segments,
        lineage=lineage,
        edits=edits,
        planned=Outcome.SPLICED if moved else Outcome.REPREFILLED,
        reason=Reason.SPLICED if moved else Reason.REPREFILLED,
        reusable_tokens=chosen.reusable,
    )


def _lineage_before(turn: RetainedTurn, position: int) -> tuple[LineageRun, ...]:
    return tuple(run for run in turn.lineage if run.start < position)


def _directives(
    candidate: _Candidate, source: int, prompt: array[int], *, forget_only: bool
) -> list[Directive]:
    """Amortized edits before the first exact one, and every edit that demands forgetting."""
    directives: list[Directive] = []
    amortizing = not forget_only
    covered = -1
    for edit in candidate.edits:
        hunk = edit.hunk
        amortizing = amortizing and edit.mode == "amortize"
        if hunk.start < covered or (hunk.start == covered and hunk.end == covered):
            continue  # within a span that is forgotten already
        if edit.mode == "forget" or amortizing:
            covered = max(hunk.end, hunk.start)
            # Of a tail only the old tokens are meant; what follows is the new turn.
            end = hunk.new_end if edit.behind else hunk.new_start
            replacement = tuple(prompt[hunk.new_start : end])
            mode = Mode(edit.mode)
            directives.append(Directive(hunk.start, hunk.end, replacement, mode, source))
    return directives


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
