"""The final comparison: rendered tokens of a source against those of this turn.

The message alignment guides it, so each difference knows its messages::

    source   ─ glue ─┤ content j ├─ glue ─┤ content j+1 ├─ … ─┤ tail │ output
    prompt   ─ glue ─┤ content i ├──────── glue ─────────┤ … ─┤ tail

Regions between aligned contents are compared one by one. Equal regions are kept; inside a region
that differs, a longest common subsequence finds the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rapidfuzz.distance import LCSseq

from leyline_engine.contract import common_prefix

from ..model.diff import MessageDiff
from ..model.rendered import MessageSpan, Rendered

MIN_RUN = 4
"""Smallest kept run between two hunks; shorter coincidences are prefilled with the hunks."""

MIN_ANSWER_RUN = 16
"""Smallest kept run within an answer, as the compared message may not be an answer."""

MAX_ANSWER_GLUE = 8
"""Largest gain, in tokens, of an answer that counts as cut by the template."""

MAX_REFINED_CELLS = 1 << 26
"""Largest region (source tokens x prompt tokens) that is fully compared, with 8 MB of bits; larger
ones are compared only at both ends."""


@dataclass(frozen=True, slots=True)
class SourceView:
    """A retained turn in the form for comparison."""

    tokens: array[int]
    """Prompt and generated tokens."""
    spans: tuple[MessageSpan, ...]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Source tokens ``[start, end)`` that occur at ``dest`` of the prompt."""

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
    """Source tokens ``[start, end)`` that became prompt tokens ``[new_start, new_end)``."""

    start: int
    end: int
    new_start: int
    new_end: int
    old_messages: tuple[int, ...] = ()
    new_messages: tuple[int, ...] = ()
    """Indices in the sent lists of source and turn; both empty if the template caused it."""


@dataclass(frozen=True, slots=True)
class TokenDiff:
    """Kept runs and hunks that tile the source to its end, and the prompt up to ``tail``."""

    kept: tuple[Kept, ...]
    hunks: tuple[Hunk, ...]
    tail: int
    """Start of the part of the prompt that is new."""

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
    shared = common_prefix(source.tokens, prompt.tokens)
    same = _continued(source, prompt, shared)
    return same if same is not None else _compared(source, prompt, messages, shared, min_run)


def continued(source: SourceView, prompt: Rendered) -> TokenDiff | None:
    """Do the work of :func:`diff_tokens` without messages, if the prompt continues the source or is
    a beginning of it. Otherwise return None."""
    return _continued(source, prompt, common_prefix(source.tokens, prompt.tokens))


def _continued(source: SourceView, prompt: Rendered, shared: int) -> TokenDiff | None:
    continues = shared >= source.prompt_length and len(source.tokens) - shared < MIN_ANSWER_RUN
    if not continues and shared != len(prompt.tokens):
        return None
    kept = (Kept(0, shared, 0),) if shared else ()
    return TokenDiff(kept, (), shared)


def _compared(
    source: SourceView, prompt: Rendered, messages: MessageDiff, shared: int, min_run: int
) -> TokenDiff:
    walk = _Walk(source.tokens, prompt.tokens, shared)
    old_spans = {span.message: span for span in source.spans}
    new_spans = {span.message: span for span in prompt.spans}
    for kind, old, new_index, _ in messages.steps:
        before = old_spans.get(old) if old is not None else None
        after = new_spans.get(new_index) if new_index is not None else None
        if before is not None and after is not None:
            walk.aligned(before, after, replaced=kind == "replaced")
        elif kind != "kept":
            walk.unaligned(old, new_index)
    walk.finish(source.prompt_length, prompt.spans)
    return _assemble(source.tokens, prompt.tokens, walk, min_run)


class _Walk:
    """Walks through both sequences from one aligned content to the next, and compares.

    ::

        source   ── compared ──┤ stretch: glue, content, glue, content… ├─ a
        prompt   ── compared ──┤                                        ├─ b

    Kept contents at equal distances in both sequences make a stretch, which is compared at once;
    only if it differs are its regions examined.

    Args:
        shared: length of the sequences' common prefix.
    """

    def __init__(self, old: array[int], new: array[int], shared: int) -> None:
        self.runs: list[Kept] = []
        self.hunks: list[Hunk] = []
        self._old, self._new, self._shared = old, new, shared
        self._a = self._b = 0
        self._begin = (0, 0)
        """Start of the stretch."""
        self._stretch: list[tuple[MessageSpan, MessageSpan]] = []
        self._gone: list[int] = []
        self._came: list[int] = []

    def aligned(self, old: MessageSpan, new: MessageSpan, *, replaced: bool) -> None:
        """Compare a message that is in both."""
        if replaced:  # tool calls are rendered around the content, so the glue may differ as well
            self.unaligned(old.message, new.message)
        if old.start >= self._a and new.start >= self._b:
            plain = not (replaced or self._gone or self._came)
            if plain and self._continues(old, new):
                self._stretch.append((old, new))
                self._a, self._b = old.end, new.end
            else:
                self._close_stretch()
                touched = ((old.message,), (new.message,)) if replaced else ((), ())
                glue = (tuple(self._gone), tuple(self._came))
                self._compare(_Region(self._a, old.start, self._b, new.start, *glue))
                self._compare(_Region(old.start, old.end, new.start, new.end, *touched))
                self._gone.clear()
                self._came.clear()
                self._a, self._b = self._begin = old.end, new.end
        # Otherwise the template moved it, and its tokens are part of the neighbouring glue.
        if replaced:
            self.unaligned(old.message, new.message)

    def unaligned(self, old: int | None, new: int | None) -> None:
        """Note a message without a counterpart."""
        if old is not None:
            self._gone.append(old)
        if new is not None:
            self._came.append(new)

    def finish(self, prompt_length: int, spans: Sequence[MessageSpan]) -> None:
        """Compare the rest after the last aligned content.

        Args:
            prompt_length: of the source; the model's answer follows it.
            spans: of the prompt.
        """
        self._close_stretch()
        ends = len(self._old), len(self._new)
        glue = (tuple(self._gone), tuple(self._came))
        tail = _Region(self._a, ends[0], self._b, ends[1], *glue)
        if self._came and not self._gone and ends[0] - prompt_length >= MIN_ANSWER_RUN:
            # The part after the source's last message begins with the answer in the caller's form.
            answer = self._came[0]
            behind = (span.start for span in spans if span.message > answer)
            end = min(behind, default=ends[1])
            tail = self._compare_answer(tail, end)
        _compare_tail(self._old, self._new, tail, self.runs, self.hunks)

    def _compare_answer(self, tail: _Region, end: int) -> _Region:
        """Find the part of the source's answer that the prompt kept, such as all but the thinking.

        Args:
            end: latest end in the prompt of the message that may be the answer.

        Returns:
            The rest of the tail.
        """
        a0, a1, b0, _, _, came = tail
        kept = [
            Kept(a0 + s, a0 + t, b0 + u)
            for equal, (s, t, u, _) in _refine(self._old[a0:a1], self._new[b0:end])
            if equal and (t - s >= MIN_ANSWER_RUN or s == u == 0)
        ]
        if not kept or kept[-1].start == a0:
            return tail  # nothing after the common beginning
        last = kept[-1]
        gained = last.dest_end - b0 - sum(run.length for run in kept)
        touched = came[:1] if gained > MAX_ANSWER_GLUE else ()
        cursor = (a0, b0)
        for run in kept:
            if cursor != (run.start, run.dest):
                hunk = Hunk(cursor[0], run.start, cursor[1], run.dest, (), touched)
                self.hunks.append(hunk)
            cursor = (run.end, run.dest_end)
        self.runs.extend(kept)
        return tail._replace(a0=cursor[0], b0=cursor[1])

    def _continues(self, old: MessageSpan, new: MessageSpan) -> bool:
        distance = self._a - self._b
        return old.start - new.start == distance == old.end - new.end

    def _close_stretch(self) -> None:
        if not self._stretch:
            return
        a, b = self._begin
        equal = (a == b and self._a <= self._shared) or (
            self._old[a : self._a] == self._new[b : self._b]
        )
        if equal:
            self.runs.append(Kept(a, self._a, b))
        else:
            for old, new in self._stretch:
                self._compare(_Region(a, old.start, b, new.start, (), ()))
                self._compare(_Region(old.start, old.end, new.start, new.end, (), ()))
                a, b = old.end, new.end
        self._stretch.clear()

    def _compare(self, region: _Region) -> None:
        _compare(self._old, self._new, region, self.runs, self.hunks)


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
    """Yield equal and differing stretches of a region, in order."""
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
    """Compare the tail, where only a common beginning counts: the rest is a new turn."""
    a0, a1, b0, b1, old_messages, new_messages = region
    shared = common_prefix(old[a0:a1], new[b0:b1])
    if shared:
        runs.append(Kept(a0, a0 + shared, b0))
    if a0 + shared < a1 or b0 + shared < b1:
        hunks.append(Hunk(a0 + shared, a1, b0 + shared, b1, old_messages, new_messages))


def _assemble(old: array[int], new: array[int], walk: _Walk, min_run: int) -> TokenDiff:
    """Join neighbours and dissolve runs too short to be more than a coincidence."""
    runs, hunks = walk.runs, walk.hunks
    solid = [run for run in _join_runs(runs) if run.length >= min_run or run.start == run.dest == 0]
    end = max([(h.end, h.new_end) for h in hunks] + [(r.end, r.dest_end) for r in runs])
    kept: list[Kept] = []
    joined: list[Hunk] = []
    cursor = (0, 0)
    for each in solid:
        run = _extended_back(old, new, each, cursor)
        kept.append(run)
        joined.extend(_hunk_between(cursor, (run.start, run.dest), hunks))
        cursor = (run.end, run.dest_end)
    joined.extend(_hunk_between(cursor, end, hunks))
    return TokenDiff(tuple(kept), tuple(joined), cursor[1])


def _extended_back(old: array[int], new: array[int], run: Kept, begin: tuple[int, int]) -> Kept:
    """Return a run with the equal tokens in front of it that a dissolved one had.

    A message's end is the same everywhere, so it is often found too early.
    """
    start, dest = run.start, run.dest
    while start > begin[0] and dest > begin[1] and old[start - 1] == new[dest - 1]:
        start, dest = start - 1, dest - 1
    return Kept(start, run.end, dest)


def _hunk_between(
    begin: tuple[int, int], end: tuple[int, int], hunks: Sequence[Hunk]
) -> Iterator[Hunk]:
    """Yield one hunk for all differences between two kept runs, with the messages of its parts."""
    if begin == end:
        return
    inside = [
        h
        for h in hunks
        if begin[0] <= h.start
        and begin[1] <= h.new_start
        and h.start <= end[0]
        and h.new_start <= end[1]
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
