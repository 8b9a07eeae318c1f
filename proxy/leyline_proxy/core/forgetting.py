"""What this turn demands to be forgotten that an earlier turn may have read, and from where on.

Told from the caller's own messages and their names, not from what was sent: policies in between may
shorten, drop or move the message, and none of that may hide a demand. Where it isn't certain which
message was meant or where it stood, all that it may have been counts, from the earliest place on;
that costs a prefill, never a secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leyline_engine.contract import MAX_FORGOTTEN, output_span

from .prepared import Prepared
from .session import RetainedTurn, Session
from .spans import ANYTHING, SpanNames, outer_extents


@dataclass(frozen=True, slots=True)
class Demand:
    """A message that is to be forgotten, and the source tokens ``[start, end)`` that may be its."""

    client_index: int
    """In this turn's client list."""
    start: int
    end: int


def new_demands(source: RetainedTurn, prepared: Prepared, names: SpanNames) -> tuple[Demand, ...]:
    """Demands of this turn that the source didn't meet already.

    Args:
        names: of this turn's messages.
    """
    if not prepared.forget_marks:
        return ()
    extents = outer_extents(source.rendered, len(source.prepared.sent))
    demands: list[Demand] = []
    for place in prepared.forget_marks:
        name = names.client[place]
        if name.id in source.names.index and not _unmet(source, prepared, place, [name.id]):
            continue
        wanted = set(name.all)
        if ANYTHING in wanted:
            demands.append(Demand(place, 0, len(source.tokens)))
            continue
        held = _unmet(source, prepared, place, wanted)
        own = [
            extent
            for extent, told in zip(extents, source.names.sent, strict=True)
            if not held.isdisjoint(told)
        ]
        if output_span(source.turn) in wanted and source.output_ids:
            own.append((len(source.rendered.tokens), len(source.tokens)))
        if held and not own:
            # What that turn didn't send, only an earlier splice can remember.
            own.append((len(source.tokens), len(source.tokens)))
        if own:
            starts, ends = zip(*own, strict=True)
            demands.append(Demand(place, min(starts), max(ends)))
    return tuple(demands)


def spans_to_forget(
    turn: str, prepared: Prepared, names: SpanNames, session: Session | None
) -> tuple[str, ...]:
    """Names of which no reader may survive, wherever the session held them.

    Args:
        turn: this turn's name.
        session: None where the proxy knows none by its id.

    Returns:
        :data:`~.spans.ANYTHING` alone where the engine may hold what has no name here; nothing
        where every demand was met before, or concerns what was never sent before.
    """
    if not prepared.forget_marks:
        return ()
    if losses_of_account(prepared, session) or (session is not None and session.in_flight):
        return (ANYTHING,)
    turns = session.turns if session is not None else ()
    found: dict[str, None] = {}
    for place in prepared.forget_marks:
        wanted = dict.fromkeys(
            name for name in names.client[place].all if not name.startswith(f"{turn}.")
        )
        known = [source for source in turns if not wanted.keys().isdisjoint(source.names.index)]
        unmet = any(_unmet(source, prepared, place, wanted.keys()) for source in known)
        written = any(output_span(source.turn) in wanted for source in turns)
        if unmet or written or not known:
            found.update(wanted)
    exceeds = ANYTHING in found or len(found) > MAX_FORGOTTEN
    return (ANYTHING,) if exceeds else tuple(found)


def losses_of_account(prepared: Prepared, session: Session | None) -> int:
    """How often the engine may have been given something of this session that has no name here.

    A conversation with an answer in it that comes to a proxy which doesn't know it was held by
    another, or by this one before it was restarted.
    """
    if session is not None:
        return session.unnamed
    return int(any(message.get("role") == "assistant" for message in prepared.client))


def _unmet(source: RetainedTurn, prepared: Prepared, place: int, wanted: Iterable[str]) -> set[str]:
    """Names of the source's messages that the one at ``place`` may be, less those dealt with."""
    mark, value = prepared.forget_marks[place], prepared.client_fingerprints[place]
    known, prints = source.prepared.forget_marks, source.prepared.client_fingerprints
    return {
        name
        for name in wanted
        if (old := source.names.index.get(name)) is not None
        and not (prints[old] == value and known.get(old) == mark)
    }
