"""This turn's demands to forget, and the places in earlier turns that may have read the text.

They come from the caller's own messages and their names, not from the sent ones: policies may
shorten, drop or move the message, and this must not hide a demand. If it is uncertain which message
was meant or where it was, all possible ones count, from the earliest place on; that costs a
prefill, never a secret.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from leyline_engine.contract import MAX_FORGOTTEN, output_span

from ..model.history import CONTINUES
from ..model.messages import text_of
from ..model.prepared import Prepared
from ..model.session import RetainedTurn, Session
from ..model.spans import ANYTHING, SpanName, SpanNames, outer_extents, turn_index


@dataclass(frozen=True, slots=True)
class Demand:
    """A message to forget, and the source tokens ``[start, end)`` that may be its own."""

    client_index: int
    """Index in this turn's client list."""
    start: int
    end: int


def new_demands(source: RetainedTurn, prepared: Prepared, names: SpanNames) -> tuple[Demand, ...]:
    """Return demands of this turn that the source didn't meet already.

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
            # If that turn didn't send it, only an earlier splice can remember it.
            own.append((len(source.tokens), len(source.tokens)))
        if own:
            starts, ends = zip(*own, strict=True)
            demands.append(Demand(place, min(starts), max(ends)))
    return tuple(demands)


def spans_to_forget(
    turn: str, prepared: Prepared, names: SpanNames, session: Session | None, *, named: bool
) -> tuple[str, ...]:
    """Return the names whose readers must all be removed, wherever the session held them.

    Args:
        turn: this turn's name.
        session: None if the proxy knows none by its id.
        named: True if the caller gave the session its id.

    Returns:
        :data:`~.spans.ANYTHING` alone if the engine may hold KV without a name here; empty if every
        demand was met before or concerns text never sent before.
    """
    if prepared.forgets_recalled:
        return (ANYTHING,)  # no name of the client's messages reaches it
    if not prepared.forget_marks:
        return ()
    if is_unvouched(session, named=named) or (session is not None and session.unnamed):
        return (ANYTHING,)
    fresh = fresh_marks(turn, prepared, names, session)
    if fresh and session is not None and (session.in_flight or session.recalled):
        # Another request, or a recall, may have brought the text under another name.
        return (ANYTHING,)
    found = dict.fromkeys(
        name
        for place in fresh
        for name in names.client[place].all
        if not name.startswith(f"{turn}.")
    )
    return all_to_forget(found)


def all_to_forget(*demands: Iterable[str]) -> tuple[str, ...]:
    """Return the names of several demands, each once; :data:`~.spans.ANYTHING` alone if one is for
    all, or if they are too many."""
    found = dict.fromkeys(chain.from_iterable(demands))
    exceeds = ANYTHING in found or len(found) > MAX_FORGOTTEN
    return (ANYTHING,) if exceeds else tuple(found)


def fresh_marks(
    turn: str, prepared: Prepared, names: SpanNames, session: Session | None
) -> tuple[int, ...]:
    """Return the indices of messages that are to be forgotten and that no earlier turn met.

    Args:
        turn: this turn's name.
    """
    turns = session.turns if session is not None else ()
    found: list[int] = []
    for place in prepared.forget_marks:
        wanted = dict.fromkeys(
            name for name in names.client[place].all if not name.startswith(f"{turn}.")
        )
        written = any(output_span(source.turn) in wanted for source in turns)
        if written or _is_new(prepared, place, wanted, turns):
            found.append(place)
    return tuple(found)


def forgotten_texts(
    prepared: Prepared, names: SpanNames | None, session: Session | None
) -> frozenset[str] | None:
    """Return the texts of the messages that a turn forgets or has in quarantine, in all forms that
    its list and retained turns have; None if one may be any, as only the caller knows what it was.

    Args:
        names: of this turn's messages; None if unknown.
    """
    turns = session.turns if session is not None else ()
    prints = prepared.client_fingerprints
    found: set[str] = set()
    for place in {*prepared.forget_marks, *prepared.quarantined}:
        mark = prepared.forget_marks.get(place)
        remains = mark is not None and mark.result == prints[place]
        wanted = names.client[place].all if names is not None else (ANYTHING,)
        held = [(turn.prepared, at) for turn in turns for at in _places(turn, wanted, prints)]
        if remains and not held and session is not None and session.answered:
            return None
        if not remains:
            found.add(text_of(prepared.client[place]))
        found.update(
            text_of(then.client[at])
            for then, at in held
            if not remains or then.client_fingerprints[at] != prints[place]
        )
    return frozenset(found - {""})


def texts_named(session: Session, names: Collection[str]) -> frozenset[str] | None:
    """Return the texts that a session's messages of these names have had; all of them for no names;
    None if one may be any."""
    found: set[str] = set()
    for name in names:
        turns = [turn for turn in session.turns if name in turn.names.index]
        if not turns:
            return None
        found.update(text_of(turn.prepared.client[turn.names.index[name]]) for turn in turns)
    if not names:
        found.update(text_of(each) for turn in session.turns for each in turn.prepared.client)
    return frozenset(found - {""})


def _places(turn: RetainedTurn, wanted: Sequence[str], prints: Sequence[int]) -> Iterator[int]:
    """Yield the places of the messages of these names in a turn's list; of too many names, all that
    are gone since."""
    if ANYTHING in wanted:
        still = set(prints)
        yield from (
            at for at, each in enumerate(turn.prepared.client_fingerprints) if each not in still
        )
    yield from (turn.names.index[name] for name in wanted if name in turn.names.index)


def is_unvouched(session: Session | None, *, named: bool) -> bool:
    """Return True if a session's name may have been in use before this proxy learned of it.

    That may be with another proxy, before a restart, or before the session was pushed out of
    memory. The proxy never reuses its own ids, so a new one has no earlier KV.
    """
    return named if session is None else session.unvouched


def untraced_before(prepared: Prepared, session: Session | None, *, traced: bool) -> int:
    """Return the number of the turn before which messages may be out of reach of any forget; see
    :attr:`~.session.Session.untraced`.

    Args:
        traced: True if any turns before the session was known here are under its id, in engines
            that take forgets.
    """
    if session is not None:
        return session.untraced
    return int(not traced and any(each.get("role") in CONTINUES for each in prepared.client))


def is_unreachable(
    prepared: Prepared,
    names: SpanNames | None,
    session: Session | None,
    *,
    traced: bool,
    demanded: bool = False,
) -> bool:
    """Return True if this turn must forget text that may be cached beyond any forget's reach.

    Args:
        names: of this turn's messages; None if unknown.
        traced: as for :func:`untraced_before`.
        demanded: True if the caller names what is to be forgotten: text that was sent, in a
            conversation that isn't known here. A policy also forgets what was never sent.
    """
    if session is None and demanded and not traced and prepared.forget_marks:
        return True
    before = untraced_before(prepared, session, traced=traced)
    if not prepared.forget_marks or not before:
        return False
    if session is None or names is None:
        return True
    return any(
        _came_before(names.client[place], before)
        and _is_new(prepared, place, dict.fromkeys(names.client[place].all), session.turns)
        for place in prepared.forget_marks
    )


def _came_before(name: SpanName, turn: int) -> bool:
    """Return True if a message may have come with a turn before that number."""
    indices = [turn_index(each) for each in name.all]
    return any(index is None or index < turn for index in indices)


def _is_new(
    prepared: Prepared, place: int, wanted: dict[str, None], turns: Sequence[RetainedTurn]
) -> bool:
    """Return True if no retained turn has met the demand to forget the message of these names."""
    known = [turn for turn in turns if not wanted.keys().isdisjoint(turn.names.index)]
    return not known or any(_unmet(turn, prepared, place, wanted) for turn in known)


def _unmet(source: RetainedTurn, prepared: Prepared, place: int, wanted: Iterable[str]) -> set[str]:
    """Return unmet names of source messages that may be the one at ``place``."""
    mark, value = prepared.forget_marks[place], prepared.client_fingerprints[place]
    known, prints = source.prepared.forget_marks, source.prepared.client_fingerprints
    return {
        name
        for name in wanted
        if (old := source.names.index.get(name)) is not None
        and not (prints[old] == value and known.get(old) == mark)
    }
