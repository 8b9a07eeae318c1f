"""The effects of edits: erased, or possibly still an influence. Pure.

They follow from the records alone, so they can be found in a log years later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from ..model.spans import ANYTHING

Effect = Literal[
    "erased",
    "shared",
    "pending",
    "unconfirmed",
    "unreachable",
    "amortized",
    "recomputed",
    "never_sent",
    "unknown",
]

MEANINGS: dict[Effect, str] = {
    "erased": "everything that was computed after reading it was overwritten",
    "shared": "erased for this session; other sessions that sent the same tokens keep theirs",
    "pending": "out of reach for requests, and not overwritten yet on every engine",
    "unconfirmed": "to be forgotten; no engine has confirmed it",
    "unreachable": "may lie in a cache where no forget finds it: the conversation had no name",
    "amortized": "what was read may still influence later turns",
    "recomputed": "nothing after the edit was reused; the old entries wait for eviction",
    "never_sent": "edited before any engine was given the text",
    "unknown": "unclear: another proxy, or an engine without a receipt, had the text",
}

_LASTING: frozenset[Effect] = frozenset({"amortized", "unknown", "unconfirmed", "unreachable"})
_FORGOTTEN: frozenset[Effect] = frozenset({"erased", "shared"})


@dataclass(frozen=True, slots=True)
class EditView:
    """One edit, as shown."""

    time: str
    tenant: str
    session: str
    turn: str
    index: int
    status: str
    engine: str | None
    edit: Mapping[str, Any]
    effect: Effect
    erased_by: int | None = None
    """Index of the later turn whose forget reached it."""

    @property
    def may_influence(self) -> bool:
        """True if the removed text may still influence later turns, as far as the log shows."""
        return self.effect in _LASTING and self.erased_by is None


@dataclass(frozen=True, slots=True)
class _Forget:
    place: int
    index: int
    names: frozenset[str]


class _Forgot(msgspec.Struct):
    pending: int
    shared_retained: int


class _Edit(msgspec.Struct):
    message: int | None
    role: str
    cause: str
    mode: str
    removed_tokens: int | None
    inserted_tokens: int | None
    sent_before: bool | None
    names: list[str]


class _Turn(msgspec.Struct):
    time: str
    tenant: str
    session: str
    turn: str
    index: int
    status: str
    message_id: str
    engine: str | None
    planned: str
    outcome: str | None
    receipt: bool
    forgot: _Forgot | None
    forget: list[str]
    edits: list[_Edit]
    owed: list[str] = []
    unreachable: bool = False


class _Receipt(msgspec.Struct):
    message_id: str
    forgot: _Forgot | None


class _Erasure(msgspec.Struct):
    tenant: str
    session: str
    engine: str
    result: str


def _is_readable(record: Mapping[str, Any]) -> bool:
    """Return True if a record has the members used here: a damaged log's may lack any."""
    shapes = {"turn": _Turn, "receipt": _Receipt, "erasure": _Erasure}
    shape = shapes.get(str(record.get("kind")))
    if shape is None:
        return False
    try:
        msgspec.convert(record, shape)
    except msgspec.ValidationError:
        return False
    return True


def edits_of(records: Iterable[Mapping[str, Any]]) -> list[EditView]:
    """Return all edits of the turns among ``records``, in order, each with its effect.

    Records not in this proxy's form are skipped.
    """
    turns: list[Mapping[str, Any]] = []
    receipts: dict[str, Mapping[str, Any]] = {}
    erasures: dict[tuple[str, str, str], int] = {}
    for place, record in enumerate(filter(_is_readable, records)):
        if record["kind"] == "turn":
            turns.append({**record, "place": place})
        elif record["kind"] == "receipt" and record.get("forgot") is not None:
            receipts[record["message_id"]] = record["forgot"]
        elif record["kind"] == "erasure" and record["result"] in ("erased", "gone"):
            erasures[record["tenant"], record["session"], record["engine"]] = place
    views = [view for turn in turns for view in _views(turn, receipts, erasures)]
    return _with_later_forgets(views, turns, receipts, erasures)


def _views(
    turn: Mapping[str, Any],
    receipts: Mapping[str, Mapping[str, Any]],
    erasures: Mapping[tuple[str, str, str], int],
) -> list[EditView]:
    return [
        EditView(
            time=turn["time"],
            tenant=turn["tenant"],
            session=turn["session"],
            turn=turn["turn"],
            index=turn["index"],
            status=turn["status"],
            engine=turn["engine"],
            edit=edit,
            effect=effect_of(edit, turn, receipts, erasures),
        )
        for edit in turn["edits"]
    ]


def effect_of(
    edit: Mapping[str, Any],
    turn: Mapping[str, Any],
    receipts: Mapping[str, Mapping[str, Any]],
    erasures: Mapping[tuple[str, str, str], int],
) -> Effect:
    """Return the effect of one edit, from its own turn.

    Args:
        receipts: later results of forgets, by message id.
        erasures: places of the log's records of forgets that were carried to other engines.
    """
    if edit["sent_before"] is False:
        return "never_sent"
    if edit["mode"] == "forget":
        return _forgotten(turn, receipts, erasures)
    if edit["sent_before"] is None:
        return "unknown"
    if edit["mode"] == "exact":
        return "recomputed"
    if turn["outcome"] is None or (not turn["receipt"] and turn["planned"] == "spliced"):
        return "unknown"
    return "amortized" if turn["outcome"] == "spliced" else "recomputed"


def _forgotten(
    turn: Mapping[str, Any],
    receipts: Mapping[str, Mapping[str, Any]],
    erasures: Mapping[tuple[str, str, str], int],
) -> Effect:
    if turn.get("unreachable"):
        return "unreachable"
    forgot = receipts.get(turn["message_id"], turn["forgot"])
    if forgot is None:
        return "unconfirmed"
    owner = turn["tenant"], turn["session"]
    owed = [e for e in turn.get("owed", ()) if erasures.get((*owner, e), -1) < turn["place"]]
    if forgot["pending"] or owed:
        return "pending"
    return "shared" if forgot["shared_retained"] else "erased"


def _with_later_forgets(
    views: list[EditView],
    turns: list[Mapping[str, Any]],
    receipts: Mapping[str, Mapping[str, Any]],
    erasures: Mapping[tuple[str, str, str], int],
) -> list[EditView]:
    """Return the edits, with the later turn of the session that forgot each text."""
    forgets: dict[tuple[str, str], list[_Forget]] = {}
    for turn in turns:
        if turn["forget"] and _forgotten(turn, receipts, erasures) in _FORGOTTEN:
            found = _Forget(turn["place"], turn["index"], frozenset(turn["forget"]))
            forgets.setdefault((turn["tenant"], turn["session"]), []).append(found)
    places = {turn["turn"]: turn["place"] for turn in turns}
    return [_later(view, forgets, places[view.turn]) for view in views]


def _later(
    view: EditView, forgets: Mapping[tuple[str, str], list[_Forget]], place: int
) -> EditView:
    if view.effect in _FORGOTTEN or view.effect == "never_sent":
        return view
    names = frozenset((*view.edit["names"], ANYTHING))
    for forget in forgets.get((view.tenant, view.session), ()):
        if forget.place > place and not names.isdisjoint(forget.names):
            return replace(view, erased_by=forget.index)
    return view
