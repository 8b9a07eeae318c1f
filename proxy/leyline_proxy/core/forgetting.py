"""What this turn demands to be forgotten that a retained turn may have read, and from where on.

Told from the caller's own lists, not from what was sent: policies in between may shorten, drop or
move the message, and none of that may hide a demand. Where the place isn't certain, the earliest
possible one is taken; that costs a prefill, never a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .diff import MessageDiff, Step
from .prepare import Prepared
from .session import RetainedTurn


@dataclass(frozen=True, slots=True)
class Demand:
    """A message that is to be forgotten, and the first source token that may belong to it."""

    client_index: int
    """In this turn's client list."""
    position: int


def new_demands(
    source: RetainedTurn, prepared: Prepared, client: MessageDiff
) -> tuple[Demand, ...]:
    """Demands of this turn that the source didn't meet already.

    Args:
        client: alignment of the source's client list with this turn's.
    """
    marks, known = prepared.forget_marks, source.prepared.forget_marks
    demands: list[Demand] = []
    for kept, gap in _runs(client.steps):
        if kept is not None:
            old, new = kept
            if new in marks and known.get(old) != marks[new]:
                demands.append(Demand(new, _position(source, old)))
            continue
        olds = [step.old for step in gap if step.old is not None]
        news = [step.new for step in gap if step.new is not None and step.new in marks]
        position = _gap_position(source, prepared, olds, gap)
        if position is not None:
            demands.extend(Demand(new, position) for new in news)
    return tuple(demands)


def _runs(steps: Sequence[Step]) -> Iterator[tuple[tuple[int, int] | None, list[Step]]]:
    """Kept messages one by one, and between them all that differs, as one gap."""
    gap: list[Step] = []
    for step in steps:
        if step.kind != "kept" or step.old is None or step.new is None:
            gap.append(step)
            continue
        if gap:
            yield None, gap
            gap = []
        yield (step.old, step.new), []
    if gap:
        yield None, gap


def _gap_position(
    source: RetainedTurn, prepared: Prepared, olds: Sequence[int], gap: Sequence[Step]
) -> int | None:
    """Where in the source a message of a gap may have been read; None where it can't have been.

    A message that the caller rewrote stood in one of the gap's old ones. One that is simply new
    was in no list of the source, but the model may have written it: then it is the answer.
    """
    if olds:
        return min(_position(source, old) for old in olds)
    news = [step.new for step in gap if step.new is not None]
    follows = news[0] >= len(source.prepared.client) if news else False
    answers = any(prepared.client[new].get("role") == "assistant" for new in news)
    if source.output_ids and answers and (follows or _at_the_end(source, prepared, news)):
        return len(source.rendered.tokens)
    return None


def _at_the_end(source: RetainedTurn, prepared: Prepared, news: Sequence[int]) -> bool:
    """Whether nothing that the source knew follows: the gap is where its answer would stand."""
    known = set(source.prepared.client_fingerprints)
    later = prepared.client_fingerprints[news[-1] + 1 :] if news else ()
    return not known.intersection(later)


def _position(source: RetainedTurn, client_index: int) -> int:
    """First source token that a client message may have become."""
    sent = next(
        (i for i, entry in enumerate(source.prepared.sent) if entry.client_index == client_index),
        None,
    )
    if sent is None:
        # Not sent in that turn; only an earlier splice can remember it.
        return len(source.tokens)
    start = 0
    for span in source.rendered.spans:
        if span.message == sent:
            return span.start
        if span.message < sent:
            start = max(start, span.end)
    return start
