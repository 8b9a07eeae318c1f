"""A session's ledger for its tenant: which messages it held, who read them, and what became of
them. Names, numbers and states, no text and no hashes of text. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leyline_engine.contract import Mode, output_span

from ..model.prepared import Prepared
from ..model.session import RetainedTurn, Session
from ..model.spans import outer_extents, turn_index
from ..model.verdicts import Verdict

MAX_LISTED = 1000
State = Literal["held", "edited", "forgotten", "quarantined", "gone"]


@dataclass(slots=True)
class _Span:
    """One message through the retained turns, oldest first."""

    span: str
    role: str | None = None
    message: int | None = None
    """Index in the newest list; None if that lacks it."""
    tokens: int | None = None
    until: int | None = None
    """Number of the first turn without it."""
    state: State = "gone"
    readers: list[tuple[str, int]] = field(default_factory=list)
    """Turns, and the first position in each that holds or may have read it."""


def session_ledger(session: Session, *, offset: int = 0, limit: int = MAX_LISTED) -> dict[str, Any]:
    """Return the ledger's document, oldest messages first.

    Args:
        offset: number of messages to leave out.
        limit: largest number of messages to list.
    """
    found: dict[str, _Span] = {}
    for turn in session.turns:
        _read(turn, found, newest=turn is session.last)
        _read_answer(turn, found, newest=turn is session.last)
    past = [name for names in session.departed.messages.values() for name in names]
    for name in (*past, *session.departed.outputs):
        found.setdefault(name, _Span(name))
    condemned: dict[str, Verdict] = {}
    for verdict in session.verdicts:
        condemned.update(dict.fromkeys(verdict.spans, verdict))
    for name in condemned.keys() - found.keys():
        found[name] = _Span(name, role=condemned[name].role or None)
    listed = sorted(found.values(), key=lambda each: _order(each.span))
    shown = listed[offset : offset + limit]
    return {
        "session": session.id,
        "spans": [_document(each, each.span in condemned) for each in shown],
        "total": len(listed),
        "truncated": offset + len(shown) < len(listed),
    }


def session_spans(session: Session) -> frozenset[str]:
    """Return the names of all messages that the session is known to have held."""
    found = {name for turn in session.turns for name in turn.names.index}
    found.update(output_span(turn.turn) for turn in session.turns if turn.output_ids)
    found.update(name for names in session.departed.messages.values() for name in names)
    found.update(name for verdict in session.verdicts for name in verdict.spans)
    return frozenset({*found, *session.departed.outputs})


def _read(turn: RetainedTurn, found: dict[str, _Span], *, newest: bool) -> None:
    """Enter a turn's messages, and note what it read of earlier ones."""
    prepared, names = turn.prepared, turn.names
    for each in found.values():
        each.message, each.tokens = None, None
        if each.until is None:
            each.until = turn.index
    for place, name in enumerate(names.client):
        each = found.setdefault(name.id, _Span(name.id))
        each.role = str(prepared.client[place].get("role", ""))
        each.message = place if newest else None
        each.until = None
    shown = _shown(turn)
    private = min((run.start for run in turn.lineage), default=None)
    for each in found.values():
        extent = shown.get(each.span)
        if extent is not None:
            each.tokens = extent[1] - extent[0]
            each.readers.append((turn.turn, extent[0]))
        elif private is not None and each.readers:
            # Spliced KV remembers text that its prompt no longer shows.
            each.readers.append((turn.turn, private))
        each.state = _state(each.span, names.index, prepared) if newest else "gone"


def _read_answer(turn: RetainedTurn, found: dict[str, _Span], *, newest: bool) -> None:
    """Enter a turn's answer, which no list has yet."""
    name = output_span(turn.turn)
    if turn.output_ids and name not in found:
        state: State = "held" if newest else "gone"
        count, start = len(turn.output_ids), len(turn.rendered.tokens)
        readers = [(turn.turn, start)]
        found[name] = _Span(name, "assistant", tokens=count, state=state, readers=readers)


def _shown(turn: RetainedTurn) -> Mapping[str, tuple[int, int]]:
    """Return the tokens of each message that the turn's prompt holds as the client sent it."""
    if not turn.rendered.tokens:
        return {}
    extents = outer_extents(turn.rendered, len(turn.prepared.sent))
    whole = {
        entry.client_index: extent
        for entry, extent in zip(turn.prepared.sent, extents, strict=True)
        if entry.client_index is not None and not entry.changes
    }
    names = turn.names.client
    return {names[place].id: extent for place, extent in whole.items()}


def _state(span: str, places: Mapping[str, int], prepared: Prepared) -> State:
    """Return a message's state in the newest turn."""
    place = places.get(span)
    if place is None:
        return "gone"
    if place in prepared.forget_marks:
        return "forgotten"
    return "edited" if place in _edited(prepared) else "held"


def _edited(prepared: Prepared) -> Collection[int]:
    changed = {
        entry.client_index
        for entry in prepared.sent
        if any(not change.callers_own or change.mode is Mode.FORGET for change in entry.changes)
    }
    changed |= {item.client_index for item in prepared.dropped}
    return {place for place in changed if place is not None}


def _document(span: _Span, condemned: bool) -> dict[str, Any]:
    return {
        "span": span.span,
        "message": span.message,
        "role": span.role,
        "tokens": span.tokens,
        "state": "quarantined" if condemned else span.state,
        "since": turn_index(span.span),
        "until": span.until,
        "read_by": [{"turn": turn, "from": start} for turn, start in span.readers],
    }


def _order(span: str) -> tuple[int, int, str]:
    """Return a key that sorts names by their turn, and by their place in it."""
    place = span.rpartition(".")[2]
    first = turn_index(span)
    return (first if first is not None else -1, int(place) if place.isdecimal() else 1 << 30, span)
