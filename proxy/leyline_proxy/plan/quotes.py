"""Quotes: answers of retained turns that new messages of a prompt repeat, token by token. Pure.

A harness that compacts its history has a model write a summary, and begins again with it: as a user
message, with a preamble, or in the system prompt. The engine decoded those very tokens, with the
whole history in view, so their KV exists::

    summary request   ─ system ─ history ────────── instruction ┤ answer: t0 … tn
    next turn         ─ system ─┤ "Summary so far:" t0 … tn ├─ kept messages ─ new
                                                    ╰ quote

An answer that stands where the model wrote it, after the messages that it answers, is no quote.

A policy's question is a turn, too, and its answer a quote where the policy's own edit puts it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ..model.diff import MessageDiff
from ..model.history import CONTINUES
from ..model.prepared import Prepared
from ..model.rendered import MessageSpan, Rendered
from ..model.session import RetainedTurn
from .token_diff import Kept

MIN_QUOTE = 64
"""Fewest tokens of an answer, in runs of :data:`MIN_QUOTE_RUN`, that show that it is quoted."""

MIN_QUOTE_RUN = 32
"""Shortest run that is found for certain; more of it is then found on both sides."""

_BLOCK = MIN_QUOTE_RUN // 2
"""An answer is cut into blocks of this length: each run holds a whole one."""

_BYTES = 8


@dataclass(frozen=True, slots=True)
class Quotes:
    """The quotes of a prompt."""

    of_turn: tuple[tuple[Kept, ...], ...] = ()
    """For each retained turn, runs of its answer in the order of the prompt, disjoint."""
    messages: frozenset[int] = field(default=frozenset())
    """Indices of the sent messages that quote what the caller got. If there are none, the quotes
    show nothing about the caller."""
    end: int = 0
    """End of the last quote in the prompt."""

    def __bool__(self) -> bool:
        return bool(self.messages)


def callers_own(turns: Sequence[RetainedTurn], client: Sequence[int]) -> frozenset[int]:
    """Return the fingerprints of a caller's list if it only adds to the newest turn's, else none.

    The caller's messages then quote nothing in place of what is gone; only a policy's own can.
    """
    if not turns:
        return frozenset()
    before = turns[-1].prepared.client_fingerprints
    grew = tuple(client[: len(before)]) == tuple(before)
    return frozenset(client) if grew else frozenset()


def find_quotes(
    turns: Sequence[RetainedTurn],
    prompt: Rendered,
    fingerprints: Sequence[int],
    own: Collection[int] = frozenset(),
) -> Quotes:
    """Return the answers that a prompt quotes, each with at least :data:`MIN_QUOTE` tokens.

    Args:
        turns: retained turns, newest last. None is found if the prompt begins with the caller's
            newest.
        own: fingerprints of messages that quote nothing; see :func:`callers_own`.
        fingerprints: of the messages that the prompt was made of.
    """
    newest = next((turn for turn in reversed(turns) if not turn.is_apart), None)
    if not turns or (newest is not None and _begins_with(fingerprints, newest)):
        return Quotes()
    known = {value for turn in turns for value in turn.prepared.sent_fingerprints}
    # A list that keeps all messages of a turn has its answer where it belongs.
    went_on = [_begins_with(fingerprints, turn) for turn in turns]
    known.update(own)
    spans = [span for span in prompt.spans if fingerprints[span.message] not in known]
    taken: list[Kept] = []
    callers: list[Kept] = []
    found: list[tuple[Kept, ...]] = [()] * len(turns)
    for at in range(len(turns) - 1, -1, -1):
        turn = turns[at]
        is_quotable = turn.sentences or turn.for_policy
        if went_on[at] or not is_quotable or len(turn.output_ids) < MIN_QUOTE:
            continue
        runs = _quoted(turn, prompt.tokens, spans, taken)
        if sum(run.length for run in runs) >= MIN_QUOTE:
            found[at] = tuple(sorted(runs, key=lambda run: run.dest))
            taken += runs
            callers += () if turn.for_policy else runs
    messages = frozenset(
        span.message for span in spans if any(_lies_in(run, span) for run in callers)
    )
    return Quotes(tuple(found), messages, max((run.dest_end for run in taken), default=0))


def is_vouched(turn: RetainedTurn, prepared: Prepared, prompt: Rendered) -> bool:
    """Return True if a turn's answer may be moved wherever the prompt quotes it.

    The answer to a policy's question has read the whole list, so the caller must still send all of
    it: then nothing but edits of policies has removed what the answer remembers.
    """
    if not turn.for_policy:
        return True
    shown = set(turn.prepared.client_fingerprints).issubset(prepared.client_fingerprints)
    return shown and turn.rendered.context == prompt.context


def compacted_messages(
    turn: RetainedTurn, sent: MessageDiff, client: MessageDiff, quotes: Quotes
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the sent messages that a compaction removed, and those that came for them.

    The caller removes answers or results, and quotes an answer instead. All that comes beside the
    quote comes with it; in other places a compaction only removes.

    Args:
        sent: alignment of a retained turn's sent messages with the prompt's.
        client: alignment of the caller's own lists.
    """
    went = {step.old for step in client.steps if step.kind != "kept" and step.old is not None}
    roles = {str(turn.prepared.client[each].get("role")) for each in went}
    if not quotes or CONTINUES.isdisjoint(roles):
        return frozenset(), frozenset()
    gone: set[int] = set()
    came: set[int] = set()
    for old, new in _gaps(sent):
        if not new or not quotes.messages.isdisjoint(new):
            gone.update(old)
            came.update(new)
    return frozenset(gone), frozenset(came)


def _gaps(messages: MessageDiff) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the messages between two kept ones: those that went, and those that came."""
    old: list[int] = []
    new: list[int] = []
    for step in messages.steps:
        if step.kind != "kept":
            old += [step.old] if step.old is not None else []
            new += [step.new] if step.new is not None else []
        elif old or new:
            yield old, new
            old, new = [], []
    if old or new:
        yield old, new


def _begins_with(fingerprints: Sequence[int], turn: RetainedTurn) -> bool:
    before = turn.prepared.sent_fingerprints
    return tuple(fingerprints[: len(before)]) == tuple(before)


def _lies_in(run: Kept, span: MessageSpan) -> bool:
    return run.dest < span.end and span.start < run.dest_end


def _quoted(
    turn: RetainedTurn, prompt: array[int], spans: Sequence[MessageSpan], taken: Sequence[Kept]
) -> list[Kept]:
    """Return runs of a turn's answer within spans of the prompt, apart from those taken."""
    answer, offset = array("q", turn.output_ids), len(turn.rendered.tokens)
    runs: list[Kept] = []
    for span in spans:
        text = prompt[span.start : span.end]
        searched, written = text.tobytes(), 0
        for start in range(0, len(answer) - _BLOCK + 1, _BLOCK):
            if start < written:
                continue
            place = _find(searched, answer[start : start + _BLOCK].tobytes())
            if place is None:
                continue
            run = _extended(answer, start, text, place, floor=written)
            found = Kept(offset + run.start, offset + run.end, span.start + run.dest)
            if found.length >= MIN_QUOTE_RUN and not any(
                _overlap(found, other) for other in (*runs, *taken)
            ):
                runs.append(found)
                written = run.end
    return runs


def _find(text: bytes, block: bytes) -> int | None:
    """Return the first place of a block in a text, in tokens; both are tokens as bytes."""
    at = text.find(block)
    while at >= 0 and at % _BYTES:
        at = text.find(block, at + 1)
    return at // _BYTES if at >= 0 else None


def _extended(answer: array[int], start: int, text: array[int], place: int, *, floor: int) -> Kept:
    """Return the longest common run around a common block; in the answer, from ``floor`` on."""
    end, dest_end = start + _BLOCK, place + _BLOCK
    while end < len(answer) and dest_end < len(text) and answer[end] == text[dest_end]:
        end, dest_end = end + 1, dest_end + 1
    while start > floor and place > 0 and answer[start - 1] == text[place - 1]:
        start, place = start - 1, place - 1
    return Kept(start, end, place)


def _overlap(one: Kept, other: Kept) -> bool:
    return one.dest < other.dest_end and other.dest < one.dest_end
