"""Checks of an edit payload against the engine's own record, before anything is changed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.admit.plan import clip_copies, forget_limit
from leyline_engine.contract import (
    CopySegment,
    Directive,
    DirectiveError,
    EditPayload,
    LineageRun,
    Mode,
    Reason,
    Recompute,
    ReuseKind,
    Segment,
    SpanLabel,
    check_directives,
    lower_directives,
    recomputed,
    uncovered,
)
from leyline_engine.records.ledger import SpanKey, SpanLedger
from leyline_engine.records.lineage import first_unlabelled
from leyline_engine.records.sources import SourceRegistry, SourceTurn


class EditRefusedError(Exception):
    """The edit isn't applied; the request runs as an ordinary prefill."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ResolvedEdit:
    """A payload whose sources exist and whose copies agree with the prompt."""

    payload: EditPayload
    sources: tuple[SourceTurn, ...]
    copies: tuple[CopySegment, ...]
    """Copies, clipped to tokens that can't have read a forgotten span."""
    forgotten: frozenset[SpanKey] | None
    """Spans that the edit forgets, by their ledger names; None if the ledger doesn't know them."""
    kinds: tuple[ReuseKind | None, ...] = ()
    """By source, the kind of reuse that its copies are, None for an edit's; empty if all are
    edits'."""

    @property
    def own_copies(self) -> tuple[CopySegment, ...]:
        """Copies that aren't reuse."""
        if not self.kinds:
            return self.copies
        return tuple(copy for copy in self.copies if self.kinds[copy.source] is None)


def carries_edit(payload: EditPayload | None) -> bool:
    """Return True if a payload asks for more than the registration of its turn."""
    return payload is not None and bool(payload.directives or payload.segments or payload.sources)


def forgets(payload: EditPayload | None) -> bool:
    """Return True if a payload demands forgetting."""
    return payload is not None and bool(
        payload.forget or any(d.mode is Mode.FORGET for d in payload.directives)
    )


def resolve_edit(
    payload: EditPayload,
    prompt: array[int],
    registry: SourceRegistry,
    ledger: SpanLedger,
    recompute: Recompute = Recompute(),  # noqa: B008 - immutable
) -> ResolvedEdit:
    """Check sources, directives and segments.

    Args:
        recompute: tokens after amortized edits that aren't copied, whatever the payload says.

    Raises:
        EditRefusedError: holds the reason for the receipt.
    """
    sources = tuple(
        _resolve_source(payload, index, registry) for index in range(len(payload.sources))
    )
    _check_directives(payload.directives, sources)
    copies = _check_segments(_segments(payload, sources, prompt), sources, prompt)
    _check_agreement(payload.directives, copies)
    copies = _without_recomputed(copies, payload.directives, sources, recompute)
    forgotten = forgotten_spans(payload, sources, ledger)
    if forgets(payload):
        copies = clip_copies(copies, _limits(payload, sources, ledger, forgotten))
    return ResolvedEdit(payload, sources, copies, forgotten)


def forgotten_spans(
    payload: EditPayload, sources: Sequence[SourceTurn], ledger: SpanLedger
) -> frozenset[SpanKey] | None:
    """Return the spans that a payload forgets: by name, and under its forget directives.

    Args:
        sources: sources of the payload; empty if they couldn't be resolved.

    Returns:
        None if the ledger doesn't know them all.
    """
    names = set(payload.forget)
    for directive in payload.directives:
        if directive.mode is not Mode.FORGET:
            continue
        if directive.source >= len(sources):
            return None
        source = sources[directive.source]
        touched = [
            label
            for label in source.spans
            if label.start < max(directive.end, directive.start + 1) and label.end > directive.start
        ]
        if first_unlabelled(source.spans, len(source.tokens)) < directive.end:
            return None
        names.update(label.span for label in touched)
    if not ledger.knows((payload.scope, payload.session), names):
        return None
    return frozenset(SpanKey(payload.scope, payload.session, name) for name in names)


def _limits(
    payload: EditPayload,
    sources: Sequence[SourceTurn],
    ledger: SpanLedger,
    forgotten: frozenset[SpanKey] | None,
) -> list[int]:
    """Return, per source, the number of leading tokens that can't have read a forgotten span."""
    if forgotten is not None:
        return [ledger.first_reader(source, forgotten) for source in sources]
    if payload.forget:
        # Its place is unknown; what the prompt itself has in exact KV needs no copy.
        return [0] * len(sources)
    limits = [
        forget_limit(payload.directives, index, source.lineage, len(source.tokens))
        for index, source in enumerate(sources)
    ]
    # A span may be in several sources at different places, so another source lends only what it has
    # in common with each source that a forget directive names.
    for named in {d.source for d in payload.directives if d.mode is Mode.FORGET}:
        for index, source in enumerate(sources):
            shared = source.shared_keys(sources[named])
            limits[index] = min(limits[index], shared, limits[named])
    return limits


def _resolve_source(payload: EditPayload, index: int, registry: SourceRegistry) -> SourceTurn:
    wanted = payload.sources[index]
    if wanted.session:
        raise EditRefusedError(Reason.INVALID_EDIT, f"source {index} is of another session")
    source = registry.get((payload.scope, payload.session), wanted.turn)
    if source is None:
        raise EditRefusedError(Reason.MISSING_SOURCE, f"source {index} is not retained here")
    if not registry.is_that(source, wanted):
        raise EditRefusedError(
            Reason.TOKEN_MISMATCH, f"source {index} differs from the engine's record of that turn"
        )
    return source


def _check_directives(directives: Sequence[Directive], sources: Sequence[SourceTurn]) -> None:
    by_source: dict[int, list[Directive]] = {}
    for position, directive in enumerate(directives):
        if not 0 <= directive.source < len(sources):
            raise EditRefusedError(
                Reason.INVALID_DIRECTIVE, f"directive {position} names no source of this payload"
            )
        by_source.setdefault(directive.source, []).append(directive)
    for index, group in by_source.items():
        try:
            check_directives(group, len(sources[index].tokens))
        except DirectiveError as error:
            raise EditRefusedError(Reason.INVALID_DIRECTIVE, str(error)) from error


def check_lineage(runs: Sequence[LineageRun]) -> None:
    """Refuse a lineage map that isn't sorted.

    Raises:
        EditRefusedError: holds the reason for the receipt.
    """
    starts = [run.start for run in runs]
    if starts != sorted(set(starts)):
        raise EditRefusedError(Reason.INVALID_EDIT, "lineage runs must be sorted by start")


def check_spans(labels: Sequence[SpanLabel], length: int) -> None:
    """Refuse labels that aren't sorted or lie outside the prompt.

    Raises:
        EditRefusedError: holds the reason for the receipt.
    """
    start = 0
    for index, label in enumerate(labels):
        if not start <= label.start <= label.end <= length:
            raise EditRefusedError(
                Reason.INVALID_EDIT, f"span label {index} is unsorted or outside the prompt"
            )
        start = label.start


def _segments(
    payload: EditPayload, sources: Sequence[SourceTurn], prompt: array[int]
) -> tuple[Segment, ...]:
    """Return the payload's segments, or its lowered directives if it has none."""
    if payload.segments or len(sources) != 1:
        return payload.segments
    return lower_directives(payload.directives, len(sources[0].tokens), len(prompt))


def _check_agreement(directives: Sequence[Directive], copies: Sequence[CopySegment]) -> None:
    """Refuse copies that bring back tokens that a directive removes from the same source."""
    for index, directive in enumerate(directives):
        for copy in copies:
            overlap = min(copy.end, directive.end) - max(copy.start, directive.start)
            if copy.source == directive.source and overlap > 0:
                raise EditRefusedError(
                    Reason.INVALID_EDIT, f"a segment copies what directive {index} removes"
                )


def _without_recomputed(
    copies: Sequence[CopySegment],
    directives: Sequence[Directive],
    sources: Sequence[SourceTurn],
    how: Recompute,
) -> tuple[CopySegment, ...]:
    """Return the copies without the tokens after amortized edits that are computed again."""
    if how == Recompute():
        return tuple(copies)
    again: dict[int, list[tuple[int, int]]] = {}
    for index, source in enumerate(sources):
        cuts = [
            (directive.start, directive.end)
            for directive in directives
            if directive.source == index and directive.mode is Mode.AMORTIZE
        ]
        again[index] = recomputed(source.tokens, cuts, how) if cuts else []
    return tuple(
        CopySegment(copy.source, start, end, copy.dest + start - copy.start)
        for copy in copies
        for start, end in uncovered((copy.start, copy.end), again[copy.source])
    )


def _check_segments(
    segments: Sequence[Segment], sources: Sequence[SourceTurn], prompt: array[int]
) -> tuple[CopySegment, ...]:
    cursor = 0
    copies: list[CopySegment] = []
    for index, segment in enumerate(segments):
        if segment.dest != cursor or segment.dest_end < cursor:
            raise EditRefusedError(
                Reason.INVALID_EDIT, f"segment {index} doesn't continue where the last one ends"
            )
        cursor = segment.dest_end
        match segment:
            case CopySegment(source=source, start=start, end=end, dest=dest):
                if not 0 <= source < len(sources) or not 0 <= start <= end <= len(
                    sources[source].tokens
                ):
                    raise EditRefusedError(
                        Reason.INVALID_EDIT, f"segment {index} lies outside its source"
                    )
                if sources[source].tokens[start:end] != prompt[dest : segment.dest_end]:
                    raise EditRefusedError(
                        Reason.TOKEN_MISMATCH, f"segment {index} differs from the prompt"
                    )
                copies.append(segment)
            case _:
                pass
    if segments and cursor != len(prompt):
        raise EditRefusedError(
            Reason.TOKEN_MISMATCH, f"segments cover {cursor} tokens, the prompt has {len(prompt)}"
        )
    return tuple(copies)
