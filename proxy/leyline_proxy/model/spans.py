"""Names of a session's messages in the engine's ledger, and their places in a prompt.

A message keeps its name from turn to turn, however an edit or a policy changes its text. So a
forget finds all KV that has read it::

    turn 1   system t0-a.0 │ task t0-a.1
    turn 2   system t0-a.0 │ task t0-a.1 │ answer t0-a.out │ result t1-b.3

If it is uncertain which message an earlier one has become, it gets a new name and the list of its
possible former names; a forget then names all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import lt

from leyline_engine.contract import MAX_SPANS, SpanLabel

from .rendered import Rendered

ANYTHING = "*"
"""A name that no span ever has: a ledger asked to forget it forgets the whole session."""

_TURN_NAME = re.compile(r"t(\d+)\b")


def turn_index(name: str) -> int | None:
    """Return the number in the name of a turn, or of a message that a turn brought; else None."""
    found = _TURN_NAME.match(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class SpanName:
    """One message's name."""

    id: str
    former: tuple[str, ...] = ()
    """Other names under which an earlier turn may have known it; ``ANYTHING`` if too many."""

    @property
    def all(self) -> tuple[str, ...]:
        """Every name that a forget of the message must reach."""
        return (self.id, *self.former)


@dataclass(frozen=True, slots=True)
class SpanNames:
    """The names of the messages in one turn."""

    client: tuple[SpanName, ...] = ()
    """Names by index in the client's list, for unsent messages too."""
    sent: tuple[tuple[str, ...], ...] = ()
    """Names of the texts that each sent message holds; several if a policy put the message in place
    of others."""
    index: dict[str, int] = field(init=False, compare=False, repr=False)
    """Place in the client's list by name."""

    def __post_init__(self) -> None:
        places = {name.id: place for place, name in enumerate(self.client)}
        object.__setattr__(self, "index", places)


def outer_extents(prompt: Rendered, count: int) -> list[tuple[int, int]]:
    """Return, for each of ``count`` sent messages, all tokens that may be its own.

    A range reaches from the end of the content before it to the start of the content after it: role
    marks, tool calls and other text that the template writes around a content may belong to either
    neighbour. A message without a located content may own any part of its gap.

    Returns:
        Half-open token ranges; the first starts at 0 and the last ends with the prompt.
    """
    length = len(prompt.tokens)
    order = [span.message for span in prompt.spans]
    ends = [0, *(span.end for span in prompt.spans)]
    starts = [*(span.start for span in prompt.spans), length]
    if not all(map(lt, order, order[1:])):  # the template moves messages: anywhere
        located = dict(zip(order, zip(ends, starts[1:], strict=False), strict=True))
        return [located.get(message, (0, length)) for message in range(count)]
    result: list[tuple[int, int]] = []
    at = 0
    order.append(count)
    for message in range(count):
        if order[at] == message:
            result.append((ends[at], starts[at + 1]))
            at += 1
        else:
            result.append((ends[at], starts[at]))
    return result


def span_labels(prompt: Rendered, sent: Sequence[tuple[str, ...]]) -> tuple[SpanLabel, ...]:
    """Return the labels of a prompt, sorted by start; they overlap between contents.

    Args:
        sent: for each sent message, the names of the texts it holds.

    Returns:
        Labels that cover the prompt; none if a payload can't hold so many, and then only the whole
        session can be forgotten.
    """
    extents = outer_extents(prompt, len(sent))
    labels = [
        SpanLabel(name, *extent)
        for names, extent in zip(sent, extents, strict=True)
        for name in names
    ]
    labels.sort(key=lambda label: (label.start, label.end))
    return tuple(labels) if len(labels) <= MAX_SPANS else ()
