"""The final word on what changed: rendered tokens of a source against those of this turn.

The message alignment guides the comparison, so each difference knows which messages it touches::

    source   ─ glue ─┤ content j ├─ glue ─┤ content j+1 ├─ … ─┤ tail │ output
    prompt   ─ glue ─┤ content i ├──────── glue ─────────┤ … ─┤ tail

Regions between aligned contents are compared one by one. What is equal is kept; inside a region
that isn't, a longest common subsequence finds the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rapidfuzz.distance import LCSseq

from leyline_engine.contract import common_prefix

from .diff import MessageDiff
from .rendered import MessageSpan, Rendered

MIN_RUN = 4
"""Shorter kept runs between two hunks are coincidences; they are prefilled with the hunks."""

MAX_REFINED_CELLS = 1 << 26
"""Larger regions (source tokens x prompt tokens) are compared at both ends only: 8 MB of bits."""


@dataclass(frozen=True, slots=True)
class SourceView:
    """A retained turn as the comparison sees it."""

    tokens: array[int]
    """Prompt and generated tokens."""
    spans: tuple[MessageSpan, ...]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Source tokens ``[start, end)`` stand at ``dest`` of the prompt."""

    start: int
    end: int
    dest: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def dest_end(self) -> int:
        return self.dest + self.end - self.start


@dataclass(frozen=True, slots=True)
class Hunk:
    """Source tokens ``[start, end)`` became prompt tokens ``[new_start, new_end)``."""

    start: int
    end: int
    new_start: int
    new_end: int
    old_messages: tuple[int, ...] = ()
    new_messages: tuple[int, ...] = ()
    """Indices in the sent lists of source and turn; both empty where the template did it."""


@dataclass(frozen=True, slots=True)
class TokenDiff:
    """Kept runs and hunks tile the source up to where it ends, and the prompt up to ``tail``."""

    kept: tuple[Kept, ...]
    hunks: tuple[Hunk, ...]
    tail: int
    """From here on the prompt is simply new."""

    @property
    def kept_tokens(self) -> int:
        return sum(run.length for run in self.kept)


class _Region(NamedTuple):
    a0: int
    a1: int
    b0: int
    b1: int
    old_messages: tuple[int, ...]
    new_messages: tuple[int, ...]


def diff_tokens(
    source: SourceView, prompt: Rendered, messages: MessageDiff, *, min_run: int = MIN_RUN
) -> TokenDiff:
    """Compare a source with a prompt.

    Args:
        messages: alignment of the source's sent messages with the turn's.
        min_run: see :data:`MIN_RUN`.
    """
    new = prompt.tokens
    shared = common_prefix(source.tokens, new)
    if shared >= source.prompt_length or shared == len(new):
        # The prompt continues the source, or is a beginning of it.
        kept = (Kept(0, shared, 0),) if shared else ()
        return TokenDiff(kept, (), shared)
    runs: list[Kept] = []
    hunks: list[Hunk] = []
    regions, tail = _regions(source, prompt, messages)
    for region in regions:
        _compare(source.tokens, new, region, runs, hunks)
    _compare_tail(source.tokens, new, tail, runs, hunks)
    return _assemble(runs, hunks, min_run)


def _regions(
    source: SourceView, prompt: Rendered, messages: MessageDiff
) -> tuple[list[_Region], _Region]:
    """Alternating glue and content regions, then the tail behind the last aligned content."""
    regions: list[_Region] = []
    a = b = 0
    gone: list[int] = []
    came: list[int] = []
    for old, new, replaced in _anchors(source, prompt, messages, gone, came):
        if old.start < a or new.start < b:
            continue  # the template moved it; its tokens fall into the neighbouring glue
        regions.append(_Region(a, old.start, b, new.start, tuple(gone), tuple(came)))
        gone.clear()
        came.clear()
        touched = ((old.message,), (new.message,)) if replaced else ((), ())
        regions.append(_Region(old.start, old.end, new.start, new.end, *touched))
        a, b = old.end, new.end
    tail = _Region(a, len(source.tokens), b, len(prompt.tokens), tuple(gone), tuple(came))
    return regions, tail


def _anchors(
    source: SourceView,
    prompt: Rendered,
    messages: MessageDiff,
    gone: list[int],
    came: list[int],
) -> Iterator[tuple[MessageSpan, MessageSpan, bool]]:
    """Aligned contents; what has no counterpart is noted in ``gone`` and ``came`` on the way."""
    old_spans = {span.message: span for span in source.spans}
    new_spans = {span.message: span for span in prompt.spans}
    for step in messages.steps:
        old = old_spans.get(step.old) if step.old is not None else None
        new = new_spans.get(step.new) if step.new is not None else None
        if old is not None and new is not None:
            if step.kind == "replaced":
                # Tool calls are rendered around the content, so the glue may differ as well.
                gone.append(old.message)
                came.append(new.message)
            yield old, new, step.kind == "replaced"
            if step.kind == "replaced":
                gone.append(old.message)
                came.append(new.message)
        elif step.kind != "kept":
            if step.old is not None:
                gone.append(step.old)
            if step.new is not None:
                came.append(step.new)


def _compare(
    old: array[int],
    new: array[int],
    region: _Region,
    runs: list[Kept],
    hunks: list[Hunk],
) -> None:
    a0, a1, b0, b1, old_messages, new_messages = region
    before, after = old[a0:a1], new[b0:b1]
    if before == after:
        if a1 > a0:
            runs.append(Kept(a0, a1, b0))
        return
    for equal, (s, t, u, v) in _refine(before, after):
        if equal:
            runs.append(Kept(a0 + s, a0 + t, b0 + u))
        else:
            hunks.append(Hunk(a0 + s, a0 + t, b0 + u, b0 + v, old_messages, new_messages))


def _refine(
    before: array[int], after: array[int]
) -> Iterator[tuple[bool, tuple[int, int, int, int]]]:
    """Equal and differing stretches of a region, in order."""
    head = common_prefix(before, after)
    rest = min(len(before), len(after)) - head
    tail = common_prefix(before[len(before) - rest :][::-1], after[len(after) - rest :][::-1])
    a1, b1 = len(before) - tail, len(after) - tail
    if head:
        yield True, (0, head, 0, head)
    middle_a, middle_b = before[head:a1], after[head:b1]
    if not middle_a or not middle_b or len(middle_a) * len(middle_b) > MAX_REFINED_CELLS:
        if middle_a or middle_b:
            yield False, (head, a1, head, b1)
    else:
        for op in LCSseq.opcodes(middle_a.tolist(), middle_b.tolist()):
            yield (
                op.tag == "equal",
                (
                    head + op.src_start,
                    head + op.src_end,
                    head + op.dest_start,
                    head + op.dest_end,
                ),
            )
    if tail:
        yield True, (a1, len(before), b1, len(after))


def _compare_tail(
    old: array[int],
    new: array[int],
    region: _Region,
    runs: list[Kept],
    hunks: list[Hunk],
) -> None:
    """Behind the last aligned content only a common beginning counts: the rest is a new turn."""
    a0, a1, b0, b1, old_messages, new_messages = region
    shared = common_prefix(old[a0:a1], new[b0:b1])
    if shared:
        runs.append(Kept(a0, a0 + shared, b0))
    if a0 + shared < a1 or b0 + shared < b1:
        hunks.append(Hunk(a0 + shared, a1, b0 + shared, b1, old_messages, new_messages))


def _assemble(runs: Sequence[Kept], hunks: Sequence[Hunk], min_run: int) -> TokenDiff:
    """Join what touches, dissolve runs too short to be more than a coincidence."""
    solid = [run for run in _join_runs(runs) if run.length >= min_run or run.start == run.dest == 0]
    end = max([(h.end, h.new_end) for h in hunks] + [(r.end, r.dest_end) for r in runs])
    joined: list[Hunk] = []
    cursor = (0, 0)
    for run in solid:
        joined.extend(_hunk_between(cursor, (run.start, run.dest), hunks))
        cursor = (run.end, run.dest_end)
    joined.extend(_hunk_between(cursor, end, hunks))
    return TokenDiff(tuple(solid), tuple(joined), cursor[1])


def _hunk_between(
    begin: tuple[int, int], end: tuple[int, int], hunks: Sequence[Hunk]
) -> Iterator[Hunk]:
    """One hunk for all that differs between two kept runs, touching what its parts touch."""
    if begin == end:
        return
    inside = [
        h
        for h in hunks
        if begin[0] <= h.start
        and begin[1] <= h.new_start
        and h.end <= end[0]
        and h.new_end <= end[1]
    ]
    yield Hunk(
        begin[0],
        end[0],
        begin[1],
        end[1],
        tuple(sorted({message for h in inside for message in h.old_messages})),
        tuple(sorted({message for h in inside for message in h.new_messages})),
    )


def _join_runs(runs: Sequence[Kept]) -> list[Kept]:
    joined: list[Kept] = []
    for run in runs:
        if joined and (joined[-1].end, joined[-1].dest_end) == (run.start, run.dest):
            joined[-1] = Kept(joined[-1].start, run.end, joined[-1].dest)
        else:
            joined.append(run)
    return joined
