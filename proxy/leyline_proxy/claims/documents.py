"""Callers' claims: checked, and mapped to tokens of a retained turn. Pure.

A caller means tokens of one of its session's turns, or messages of its newest list; the engine
knows only tokens of sources. Accounts of claims go back without tenants, and without names of turns
other than the claim's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from leyline_engine.contract import Claim, ClaimError, ClaimKind, ClaimStatus, Predicate

from ..model.name_rule import NameRule
from ..model.session import RetainedTurn
from ..model.spans import outer_extents

CLAIM_ID = NameRule("[A-Za-z0-9._:@-]", "letters, digits and . _ : @ -", 128)
"""Ids that fit into a path unchanged."""

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_NAMED = re.compile(r"(?:missing required|unknown) field `([^`]*)`")


class ClaimBodyError(ValueError):
    """A claim that isn't valid or can't be mapped; ``param`` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param


class SpanBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The claimed tokens: of a turn, or of some of the client's messages."""

    source: str | None = None
    """A retained turn; without it, the session's newest."""
    start: int | None = None
    """First token; by default, the turn's first."""
    end: int | None = None
    """End of the tokens; by default, of the turn's KV."""
    messages: tuple[int, int] | None = None
    """``[first, last)`` of the client's messages of the newest retained turn."""
    share: float = 1.0


class ClaimBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim as a caller asks for it."""

    session: str
    predicate: SpanBody
    id: str | None = None
    kind: ClaimKind = ClaimKind.SOFT
    priority: int = 0
    ttl_s: int | None = None
    write_no_admit: bool = False
    revision: int = 1
    reason: str = ""


class RevisionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes of a later revision; the rest stays."""

    revision: int
    predicate: SpanBody | msgspec.UnsetType = msgspec.UNSET
    kind: ClaimKind | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    ttl_s: int | msgspec.UnsetType | None = msgspec.UNSET
    write_no_admit: bool | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET


def read_claim(body: Mapping[str, Any]) -> ClaimBody:
    """Return a new claim. Raises ClaimBodyError."""
    claim = _read(body, ClaimBody)
    if claim.id is not None and (broken := CLAIM_ID.broken(claim.id)) is not None:
        raise ClaimBodyError("id", broken)
    return claim


def read_revision(body: Mapping[str, Any]) -> RevisionBody:
    """Return a later revision. Raises ClaimBodyError."""
    return _read(body, RevisionBody)


def claim_of(
    body: ClaimBody, turns: Sequence[RetainedTurn], *, name: str, tenant: str, session: str
) -> Claim:
    """Return the claim for the engine.

    Args:
        turns: the session's turns that the engine may still hold, newest last.
        name: the id if the body has none.
        tenant: the scope by which the engine knows the tenant.
        session: the session's name in the engine.

    Raises:
        ClaimBodyError: names the field.
    """
    return _checked(
        lambda: Claim(
            id=body.id or name,
            tenant=tenant,
            session=session,
            kind=body.kind,
            predicate=predicate_of(body.predicate, turns),
            priority=body.priority,
            ttl_s=body.ttl_s,
            write_no_admit=body.write_no_admit,
            revision=body.revision,
            reason=body.reason,
        )
    )


def revised(claim: Claim, body: RevisionBody, predicate: Predicate) -> Claim:
    """Return the claim's next revision. Raises ClaimBodyError."""
    given = {
        field: value
        for field in body.__struct_fields__
        if field != "predicate" and (value := getattr(body, field)) is not msgspec.UNSET
    }
    return _checked(lambda: msgspec.structs.replace(claim, **given, predicate=predicate))


def predicate_of(span: SpanBody, turns: Sequence[RetainedTurn]) -> Predicate:
    """Return the predicate for a span's tokens.

    Args:
        turns: the session's, newest last.

    Raises:
        ClaimBodyError: names the field.
    """
    turn = _source(span, turns)
    if span.messages is not None:
        for field in ("source", "start", "end"):
            if getattr(span, field) is not None:
                raise ClaimBodyError(
                    f"predicate.{field}", "give messages, or tokens of a source, not both"
                )
        start, end = _tokens_of(turn, *span.messages)
    else:
        length = claimable(turn)
        start = 0 if span.start is None else span.start
        end = length if span.end is None else span.end
        if end > length:
            raise ClaimBodyError(
                "predicate.end",
                f"{end} is past the end of turn {turn.turn}, which has KV of {length} tokens",
            )
    return _checked(lambda: Predicate(turn.turn, start, end, span.share))


def claimable(turn: RetainedTurn) -> int:
    """Return the number of a turn's tokens with KV; the last one was generated and never read."""
    return max(0, len(turn.tokens) - 1)


def message_spans(turn: RetainedTurn) -> dict[int, tuple[int, int]]:
    """Return the token spans of the client's messages in a turn's prompt, by index. A message that
    isn't sent, or has no tokens, has none.

    A span reaches from the content before it to the content after it, including role marks and tool
    calls; spans of neighbours overlap by the template's text between them.
    """
    sent, length = turn.prepared.sent, claimable(turn)
    spans: dict[int, tuple[int, int]] = {}
    for entry, (start, behind) in zip(sent, outer_extents(turn.rendered, len(sent)), strict=True):
        end = min(behind, length)
        if entry.client_index is None or end <= start:
            continue
        known = spans.get(entry.client_index, (start, end))
        spans[entry.client_index] = (min(start, known[0]), max(end, known[1]))
    return spans


def claim_document(status: ClaimStatus) -> dict[str, Any]:
    """Return a claim's document for its owner."""
    document: dict[str, Any] = msgspec.to_builtins(status.claim)
    del document["tenant"]
    remaining = status.remaining_ms
    return document | {
        "state": status.state.value,
        "cause": status.cause,
        "age_s": status.age_ms / 1000,
        "expires_in_s": None if remaining is None else remaining / 1000,
        "resident_tokens": status.resident_tokens,
        "required_tokens": status.required_tokens,
        "hits": status.hits,
        "pressure": status.pressure,
    }


def event_document(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's document for the claim's owner.

    Pages are given by number only: their names come from the turn that first brought them, which
    may be another tenant's."""
    document = {key: value for key, value in event.items() if key not in ("tenant", "runs")}
    runs = event.get("runs")
    if isinstance(runs, list | tuple):
        document["pages"] = sum(end - start for _, start, end in runs)
    return document


def _checked(make: Callable[[], T]) -> T:
    """Return the result of ``make``, with a field's violated bounds as a ClaimBodyError."""
    try:
        return make()
    except ClaimError as error:
        raise ClaimBodyError(error.field, str(error).removeprefix(f"{error.field}: ")) from error


def _read(body: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        text = str(error)
    path = _PATH.search(text)
    where = path.group(1) if path else ""
    what = _PATH.sub("", text)
    if named := _NAMED.search(what):
        where = f"{where}.{named.group(1)[:80]}" if where else named.group(1)[:80]
        what = "is missing" if "missing" in what else "there is no such field"
    raise ClaimBodyError(where, what)


def _source(span: SpanBody, turns: Sequence[RetainedTurn]) -> RetainedTurn:
    if not turns:
        raise ClaimBodyError(
            "predicate.source", "the session has no turn whose tokens the engine still holds"
        )
    if span.source is None:
        return turns[-1]
    for turn in turns:
        if turn.turn == span.source:
            return turn
    names = ", ".join(turn.turn for turn in reversed(turns))
    raise ClaimBodyError("predicate.source", f"no retained turn has this name; there are {names}")


def _tokens_of(turn: RetainedTurn, first: int, last: int) -> tuple[int, int]:
    count = len(turn.prepared.client)
    if not 0 <= first < last:
        raise ClaimBodyError("predicate.messages", f"[{first}, {last}) holds no message")
    if last > count:
        raise ClaimBodyError(
            "predicate.messages", f"{last} is past the end of turn {turn.turn}, {count} messages"
        )
    spans = message_spans(turn)
    found = [spans[index] for index in range(first, last) if index in spans]
    if not found:
        raise ClaimBodyError("predicate.messages", "none of these messages was sent")
    return min(start for start, _ in found), max(end for _, end in found)
