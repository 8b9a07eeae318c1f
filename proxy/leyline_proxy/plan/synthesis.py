"""Directives and segments for a turn's changes, in token coordinates of retained turns.

One source is the turn's own past: its directives are the account of the changes. If other branches
of the session hold more of the prompt, pieces of theirs are added, each with the directives that
come before it in its own source.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from leyline_engine.contract import (
    ATTENTION_SINK,
    CopySegment,
    Directive,
    LineageRun,
    LiteralSegment,
    Mode,
    Outcome,
    Reason,
    Recompute,
    Segment,
    SourceRef,
    SpanLabel,
)

from ..model.prepared import Prepared
from ..model.rendered import Rendered
from ..model.session import EditRecord, RetainedTurn
from ..model.spans import ANYTHING, SpanNames, span_labels
from ..model.undeclared import COMPACTION, UndeclaredRules
from .candidates import Candidate, Edit, consider, demand_cause, quoting, record_of, records_of
from .quotes import Quotes, callers_own, find_quotes, is_vouched
from .reach import Reach, reach_of
from .stripped import Decode
from .token_diff import Kept
from .uncached import StandingEdits

MIN_SWITCH = 32
"""Fewer tokens aren't worth another source."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens copied from source ``source``."""

    source: int
    run: Kept


class _Runs:
    """One source's kept runs by destination; disjoint and sorted."""

    def __init__(self, runs: Sequence[Kept]) -> None:
        self._runs = runs
        self._starts = [run.dest for run in runs]

    def at(self, position: int) -> Kept | None:
        """Return the source's run from ``position`` on, if it has the token there."""
        index = bisect_right(self._starts, position) - 1
        run = self._runs[index] if index >= 0 else None
        return _cut(run, position, run.dest_end) if run and run.dest_end > position else None

    def next_start(self, position: int) -> int | None:
        """Return the start of the next run after ``position``."""
        index = bisect_right(self._starts, position)
        return self._starts[index] if index < len(self._starts) else None


def cover(sources: Sequence[Sequence[Kept]], preferred: int) -> tuple[Piece, ...]:
    """Cover as much of a prompt as the sources together have, with few changes of source.

    Args:
        sources: for each source its usable runs, sorted by destination and disjoint.
        preferred: used alone unless others have :data:`MIN_SWITCH` tokens more.

    Returns:
        Pieces by destination, disjoint. They hold every token that ``preferred`` has, and from
        others no stretch shorter than :data:`MIN_SWITCH`.
    """
    pieces = tuple(_joined(_sweep([_Runs(kept) for kept in sources], preferred)))
    gained = sum(p.run.length for p in pieces) - sum(run.length for run in sources[preferred])
    if gained < MIN_SWITCH:
        return tuple(Piece(preferred, run) for run in sources[preferred])
    return pieces


def _sweep(sources: Sequence[_Runs], preferred: int) -> Iterator[Piece]:
    """Go from left to right: use the current source while possible, else the preferred, else the
    furthest.

    The first piece is from the source that reaches furthest, because a prefix is found without a
    copy.
    """
    position = 0
    used = preferred
    while True:
        here = {
            index: run
            for index, runs in enumerate(sources)
            if (run := runs.at(position)) is not None
            and (index in (used, preferred) or run.length >= MIN_SWITCH)
        }
        if here:
            if position == 0 or not {used, preferred} & here.keys():
                used = max(here, key=lambda index: (here[index].dest_end, index == preferred))
            elif used not in here:
                used = preferred
            yield Piece(used, here[used])
            position = here[used].dest_end
            continue
        ahead = [start for runs in sources if (start := runs.next_start(position)) is not None]
        if not ahead:
            return
        position = min(ahead)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours that continue each other in the same source."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source == piece.source
            and (last.run.end, last.run.dest_end) == (piece.run.start, piece.run.dest)
        ):
            joined[-1] = Piece(last.source, Kept(last.run.start, piece.run.end, last.run.dest))
        else:
            joined.append(piece)
    return joined


def _cut(run: Kept, dest: int, dest_end: int) -> Kept:
    start = run.start + dest - run.dest
    return Kept(start, start + dest_end - dest, dest)


MIN_SPLICED = 32
"""Smallest number of spliced tokens after the edits that is worth a private lineage; beside state
per sequence, the cost of that is added."""


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The requests to the engine for one turn, and their reasons."""

    sources: tuple[SourceRef, ...] = ()
    directives: tuple[Directive, ...] = ()
    segments: tuple[Segment, ...] = ()
    lineage: tuple[LineageRun, ...] = ()
    spans: tuple[SpanLabel, ...] = ()
    forget: tuple[str, ...] = ()
    """Names in the engine's ledger."""
    retire: tuple[str, ...] = ()
    """Retained turns that none will continue any more."""
    unreachable: bool = False
    """True if text to forget may be in a place that no forget finds."""
    edits: tuple[EditRecord, ...] = ()
    """Edits of cached KV come first."""
    omitted: int = 0
    """Number of edits that are too many to list."""
    standing: tuple[StandingEdits, ...] = ()
    """Edits that the cache already reflects."""
    planned: Outcome = Outcome.UNEDITED
    reason: Reason | None = None
    reusable_tokens: int = 0
    reach: Reach = field(default_factory=Reach, compare=False)
    """The parts of the prompt in the session's retained turns, for the account only."""

    @property
    def forgets(self) -> bool:
        """True if the engine is asked to forget something of this session."""
        return bool(self.forget) or any(d.mode is Mode.FORGET for d in self.directives)


def synthesize(
    turns: Sequence[RetainedTurn],
    prepared: Prepared,
    rendered: Rendered,
    rules: UndeclaredRules,
    *,
    names: SpanNames,
    forget: tuple[str, ...] = (),
    model_fingerprint: str,
    model: str | None = None,
    sink: int = ATTENTION_SINK,
    recompute: Recompute = Recompute(),  # noqa: B008 - immutable
    decode: Decode | None = None,
    overhead: int = 0,
) -> TurnPlan:
    """Plan one turn against the session's retained turns.

    Args:
        turns: newest last; those of another model aren't sources.
        rendered: this turn's prompt.
        rules: for undeclared edits.
        names: of this turn's messages.
        forget: names whose readers must all be removed.
        model: name of the model and adapter that turns must be of; None for any.
        sink: leading positions that the engine always computes again.
        recompute: tokens after each edit to compute again.
        decode: see :func:`.candidates.consider`.
        overhead: tokens that a splice must move beyond :data:`MIN_SPLICED` to pay for state.

    Returns:
        A plan whose segments reproduce the prompt; without directives if no edit leaves copies.
    """
    usable = _of_model(turns, model_fingerprint, model)
    # A forget binds wherever the span may be held, not only in the turn that serves as source.
    thorough = bool(prepared.forget_marks)
    quotes, quoted = _quoted(usable, prepared, rendered)
    compare = partial(consider, recompute=recompute, decode=decode, quotes=quotes)
    # Neither a policy's question nor a transcript holds anything of a prompt but its answer that no
    # other turn has.
    compared = usable if thorough else [turn for turn in usable if not turn.is_apart]
    candidates: list[Candidate] = []
    for index, turn in reversed([*enumerate(compared)]):
        candidate = compare(turn, prepared, rendered, rules, names, later=compared[index + 1 :])
        candidates.append(candidate)
        longest_left = max((len(turn.tokens) for turn in compared[:index]), default=0)
        if not thorough and candidate.reusable >= longest_left and not _has_holes(candidate):
            break  # the turn continues this one; no older one can offer more
    if any(candidate.forgets for candidate in candidates):
        plan = _forgetting_plan(candidates, forget, rendered.tokens, sink)
    elif forget:
        plan = _unheld_plan(candidates, prepared)
    elif candidates:
        plan = _splicing_plan(candidates, rendered.tokens, sink, quoted, MIN_SPLICED + overhead)
    else:
        plan = TurnPlan()
    if any(map(_is_compacted, candidates)):
        plan = replace(plan, retire=tuple(turn.turn for turn in usable))
    best = candidates[_most_reusable(candidates)] if candidates else None
    reach = reach_of(best, quotes=quoted) if best is not None else Reach()
    return replace(plan, spans=span_labels(rendered, names.sent), forget=forget, reach=reach)


def _quoted(
    turns: Sequence[RetainedTurn], prepared: Prepared, rendered: Rendered
) -> tuple[Quotes, tuple[Candidate, ...]]:
    """Return the answers that a prompt quotes, as quotes and as sources."""
    vouched = [turn for turn in turns if is_vouched(turn, prepared, rendered)]
    callers = [turn for turn in vouched if not turn.is_apart]
    own = callers_own(callers, prepared.client_fingerprints)
    quotes = find_quotes(vouched, rendered, prepared.sent_fingerprints, own)
    return quotes, quoting(vouched, quotes)


def _of_model(
    turns: Sequence[RetainedTurn], fingerprint: str, model: str | None
) -> list[RetainedTurn]:
    return [
        turn
        for turn in turns
        if turn.model_fingerprint == fingerprint and model in (None, turn.model)
    ]


def demands_of(prepared: Prepared) -> tuple[EditRecord, ...]:
    """Return the records of all forgets that a turn demands, if no source shows them."""
    return tuple(record_of(demand_cause(prepared, place), None) for place in prepared.forget_marks)


def _has_holes(candidate: Candidate) -> bool:
    """Return True if gaps before the tail are large enough for another source."""
    cursor = 0
    for run in candidate.copies:
        if run.dest - cursor >= MIN_SWITCH:
            return True
        cursor = run.dest_end
    return candidate.diff.tail - cursor >= MIN_SWITCH


def _most_reusable(candidates: Sequence[Candidate]) -> int:
    """Return the index of the most reusable candidate; of equals the newest, which comes first."""
    return max(range(len(candidates)), key=lambda index: (candidates[index].reusable, -index))


def _splicing_plan(
    candidates: Sequence[Candidate],
    prompt: array[int],
    sink: int,
    quotes: Sequence[Candidate],
    least: int,
) -> TurnPlan:
    """Return the plan of a turn that forgets nothing.

    Args:
        quotes: answers that the prompt quotes, as sources of their own.
        least: fewest moved tokens that are worth a splice.
    """
    best = _most_reusable(candidates)
    chosen = candidates[best]
    compacts = any(map(_compacts, candidates))
    quoted = [quote for quote in quotes if compacts or quote.turn.for_policy]
    candidates = (*candidates, *(quote for quote in quoted if _may_quote(chosen, quote)))
    pieces = cover([candidate.copies for candidate in candidates], best)
    order = [best, *sorted({piece.source for piece in pieces} - {best})]
    used = [candidates[index] for index in order]
    reach = [max((p.run.dest_end for p in pieces if p.source == at), default=0) for at in order]
    edits = _account(used, reach)
    head = next((piece for piece in pieces if piece.run.start == piece.run.dest == 0), None)
    first = head.run.dest_end if head is not None else 0
    plan = TurnPlan(
        lineage=_lineage_before(candidates[head.source].turn, first) if head is not None else (),
        edits=edits,
        reusable_tokens=sum(piece.run.length for piece in pieces),
    )
    moved = [p.run for p in pieces if p.run.dest >= first and p.run.dest_end > sink]
    worth_it = sum(run.dest_end - max(run.dest, sink) for run in moved) >= least
    if not worth_it:
        own = records_of(chosen.edits, ())
        reason = Reason.NOT_WORTH_IT if moved else Reason.REPREFILLED
        if _lacks_a_name(chosen.edits):
            reason = Reason.UNNAMED_SESSION
        refill = replace(plan, edits=own, planned=Outcome.REPREFILLED, reason=reason)
        return refill if own else replace(plan, edits=())
    places = [Piece(order.index(piece.source), piece.run) for piece in pieces]
    if not _reproduces(places, used, prompt):
        return _mismatch(edits)
    return replace(
        plan,
        sources=tuple(map(_reference, used)),
        directives=tuple(
            directive
            for at, candidate in enumerate(used)
            for directive in _amortized(
                candidate, at, prompt, len(prompt) if at == 0 else reach[at]
            )
        ),
        segments=_segments(places, len(prompt)),
        planned=Outcome.SPLICED,
        reason=Reason.SPLICED,
    )


def _is_compacted(candidate: Candidate) -> bool:
    """Return True if the caller's list has a summary where it had what a turn had."""
    causes = [cause for edit in candidate.edits for cause in edit.causes]
    return any(cause.cause == COMPACTION and not cause.withheld for cause in causes)


def _compacts(candidate: Candidate) -> bool:
    """Return True if a compaction that may be spliced is among the changes since a turn."""
    causes = [cause for edit in candidate.edits for cause in edit.causes]
    return any(cause.cause == COMPACTION and cause.mode == "amortize" for cause in causes)


def _may_quote(chosen: Candidate, quote: Candidate) -> bool:
    """Return True if no exact edit comes before the end of a quote."""
    return all(
        edit.mode == "amortize" for edit in chosen.edits if edit.hunk.new_start < quote.diff.tail
    )


def _lacks_a_name(edits: Sequence[Edit]) -> bool:
    """Return True if a certain session name would let the first exact edit be spliced over."""
    first = next((edit for edit in edits if edit.mode == "exact"), None)
    exact = [cause for cause in first.causes if cause.mode == "exact"] if first is not None else ()
    return bool(exact) and all(cause.withheld for cause in exact)


def _forgetting_plan(
    candidates: Sequence[Candidate], forget: tuple[str, ...], prompt: array[int], sink: int
) -> TurnPlan:
    """Return the plan of a turn that forgets text in retained turns: one source that never read it.

    The plan names the other sources that hold the text, so it is forgotten everywhere.
    """
    chosen = candidates[_most_reusable(candidates)]
    held = [chosen, *(other for other in candidates if other is not chosen and other.forgets)]
    edits = records_of(chosen.edits, [edit for other in held[1:] for edit in other.edits])
    # KV without a name in the engine may have read anything.
    copies = () if ANYTHING in forget else chosen.copies
    pieces = [Piece(0, run) for run in copies]
    if not _reproduces(pieces, held, prompt):
        return _mismatch(edits)
    first = min((edit.hunk.new_start for edit in chosen.edits), default=len(prompt))
    spliced = any(run.dest >= first and run.dest_end > sink for run in copies)
    return TurnPlan(
        sources=tuple(map(_reference, held)),
        directives=tuple(
            directive
            for at, candidate in enumerate(held)
            for directive in _forgotten(candidate, at, prompt, amortizes=at == 0)
        ),
        segments=_segments(pieces, len(prompt)),
        edits=edits,
        planned=Outcome.SPLICED if spliced else Outcome.REPREFILLED,
        reason=Reason.SPLICED if spliced else Reason.REPREFILLED,
        reusable_tokens=sum(run.length for run in copies),
    )


def _unheld_plan(candidates: Sequence[Candidate], prepared: Prepared) -> TurnPlan:
    """Return the plan of a turn that forgets text that no retained turn holds: nothing is copied.

    Any splice may have read the text, so only the exact prefix is safe.
    """
    edits = candidates[_most_reusable(candidates)].edits if candidates else ()
    return TurnPlan(
        edits=(*records_of(edits, ()), *demands_of(prepared)),
        planned=Outcome.REPREFILLED,
        reason=Reason.REPREFILLED,
    )


def _mismatch(edits: tuple[EditRecord, ...]) -> TurnPlan:
    return TurnPlan(edits=edits, planned=Outcome.REPREFILLED, reason=Reason.TOKEN_MISMATCH)


def _account(used: Sequence[Candidate], reach: Sequence[int]) -> tuple[EditRecord, ...]:
    """Return the first source's edits, plus those only others show before their copies."""
    records = list(records_of(used[0].edits, ()))
    told = {(record.message, record.role, record.cause) for record in records}
    for candidate, end in zip(used[1:], reach[1:], strict=True):
        drawn = [edit for edit in candidate.edits if edit.hunk.new_start < end]
        for record in records_of(drawn, ()):
            key = (record.message, record.role, record.cause)
            if key not in told:
                told.add(key)
                records.append(record)
    return tuple(records)


def _lineage_before(turn: RetainedTurn, position: int) -> tuple[LineageRun, ...]:
    return tuple(run for run in turn.lineage if run.start < position)


def _reference(candidate: Candidate) -> SourceRef:
    turn = candidate.turn
    return SourceRef(turn.turn, len(turn.tokens), turn.digest)


def _amortized(
    candidate: Candidate, source: int, prompt: array[int], end: int
) -> Iterator[Directive]:
    """Yield amortized edits before the first exact one and before prompt position ``end``."""
    for edit in candidate.edits:
        if edit.mode != "amortize" or edit.hunk.new_start >= end:
            return
        yield _directive(edit, source, prompt)


def _forgotten(
    candidate: Candidate, source: int, prompt: array[int], *, amortizes: bool
) -> Iterator[Directive]:
    """Yield edits that forget and, if ``amortizes``, amortized ones before the first exact one."""
    covered = -1
    for edit in candidate.edits:
        hunk = edit.hunk
        amortizes = amortizes and edit.mode == "amortize"
        if hunk.start < covered or (hunk.start == covered and hunk.end == covered):
            continue  # within a span that is already forgotten
        if edit.mode == "forget" or amortizes:
            covered = max(hunk.end, hunk.start)
            yield _directive(edit, source, prompt)


def _directive(edit: Edit, source: int, prompt: array[int]) -> Directive:
    hunk = edit.hunk
    # In a tail only the old tokens count; the rest is the new turn.
    end = hunk.new_end if edit.behind else hunk.new_start
    replacement = tuple(prompt[hunk.new_start : end])
    return Directive(hunk.start, hunk.end, replacement, Mode(edit.mode), source)


def _segments(pieces: Sequence[Piece], length: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    cursor = 0
    for piece in pieces:
        run = piece.run
        if run.dest > cursor:
            segments.append(LiteralSegment(cursor, run.dest - cursor))
        segments.append(CopySegment(piece.source, run.start, run.end, run.dest))
        cursor = run.dest_end
    if cursor < length:
        segments.append(LiteralSegment(cursor, length - cursor))
    return tuple(segments)


def _reproduces(
    pieces: Sequence[Piece], candidates: Sequence[Candidate], prompt: array[int]
) -> bool:
    """Return True if every copy equals the prompt at its destination."""
    return all(
        candidates[piece.source].turn.tokens[piece.run.start : piece.run.end]
        == prompt[piece.run.dest : piece.run.dest_end]
        for piece in pieces
    )
