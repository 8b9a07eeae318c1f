"""Recalled texts in a turn's messages: asides in their places, and texts in place of references.

A line of a user's message or of a tool result that is nothing but a reference
(``leyline://sha256/…``) becomes the text. See :mod:`..model.asides` for asides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import Memo
from leyline_policies.conversation import RESULT_ROLES
from leyline_policies.verbs import is_condemned, is_forgotten

from ..model.asides import RECALL_TOOL, Aside, RecallCall, RecalledTexts, note_of, places_of
from ..model.messages import Message, call_ids, is_text_part
from ..model.prepared import Change, SentMessage
from ..model.vocabulary import RECALL
from .stage import Stage

CHANGE = Change(RECALL, Mode.AMORTIZE)
"""The change of a message that a recall put in or filled."""

MARK = re.compile(rb"leyline:\\?/\\?/sha256")
"""Bytes of a body that may have references."""

_REFERENCE = re.compile(r"^[ \t]*leyline://(sha256)/([0-9a-f]{12,64})[ \t\r]*$", re.MULTILINE)
_ROLES = frozenset({"user", *RESULT_ROLES})
_REFERS = "refers"
_FILLED = "filled"
_ASIDE = "aside"


def references_in(messages: Iterable[Message]) -> Iterator[str]:
    """Yield the addresses that messages refer to, as written; some may come twice."""
    for message in messages:
        if message.get("role") in _ROLES:
            for text in _texts(message.get("content")):
                yield from (":".join(found) for found in _REFERENCE.findall(text))


def put_back(
    stage: Stage,
    prints: Sequence[int],
    asides: Sequence[Aside],
    told: RecalledTexts,
    memo: Memo,
    *,
    gone: Collection[int] = (),
) -> Stage:
    """Return the list with asides and with texts in place of references.

    Args:
        stage: the client's list, perhaps with its declared edits.
        prints: fingerprints of the client's messages.
        asides: the session's, oldest first.
        told: the texts.
        gone: indices of messages in quarantine.
    """
    stage = _filled(stage, told, memo)
    found = _placed(stage, prints, asides, gone)
    if not found:
        return stage
    sent: list[SentMessage] = []
    for entry in stage.sent:
        group = found.pop(entry.client_index, ()) if entry.client_index is not None else ()
        if group:
            key = (_ASIDE, group, _results(group, told))
            sent += memo.get(entry, key, partial(_with_group, group, told))
        else:
            sent.append(entry)
    # The rest comes after the client's last message.
    last = [aside for group in found.values() for aside in group if not aside.joined]
    sent += [put for aside in last for put in _inserted(aside, told)]
    return replace(stage, sent=tuple(sent))


def unread_places(sent: Sequence[SentMessage]) -> Iterator[int]:
    """Yield the places of recalled texts that the model hasn't answered yet.

    A policy that evicts them again would leave the model's call without an answer.
    """
    for at in range(last_answer(sent) + 1, len(sent)):
        if sent[at].client_index is None and CHANGE in sent[at].changes:
            yield at


def last_answer(sent: Sequence[SentMessage]) -> int:
    """Return the place of the model's last message; -1 if there is none."""
    places = range(len(sent) - 1, -1, -1)
    return next((at for at in places if sent[at].message.get("role") == "assistant"), -1)


def _placed(
    stage: Stage, prints: Sequence[int], asides: Sequence[Aside], gone: Collection[int]
) -> dict[int, tuple[Aside, ...]]:
    """Return asides by the client's message that comes after them.

    That is the model's answer, of which they hold the beginning. If the client has taken the answer
    back, or it must be forgotten, the asides that led to it go, too.
    """
    groups: dict[int, tuple[Aside, ...]] = {}
    places = places_of({aside.anchor for aside in asides}, prints) if asides else {}
    for aside in asides:
        place = places.get(aside.anchor)
        if place is not None:
            groups[place + 1] = (*groups.get(place + 1, ()), aside)
    answers = {
        entry.client_index
        for entry in stage.sent
        if entry.client_index in groups and _is_kept_answer(entry.message)
    }
    answers -= set(gone)
    return {
        place: group for place, group in groups.items() if place == len(prints) or place in answers
    }


def _is_kept_answer(message: Message) -> bool:
    said = message.get("role") == "assistant"
    return said and not is_forgotten(message) and not is_condemned(message)


def _results(group: Sequence[Aside], told: RecalledTexts) -> tuple[str, ...]:
    return tuple(_result(call, told) for aside in group for call in aside.calls)


def _result(call: RecallCall, told: RecalledTexts) -> str:
    return note_of(call.cause) if call.cause is not None else told.text_of(call.address)


def _with_group(
    group: Sequence[Aside], told: RecalledTexts, entry: SentMessage
) -> list[SentMessage]:
    """Return an answer with the asides in front of it, and those within it."""
    if any(change.mode is Mode.FORGET for change in entry.changes):
        # Whatever of the answer it concerns, the model may have written it in them, too.
        bare = (replace(each, calls=tuple(map(_bare, each.calls))) for each in group)
        group = [_silent(each) for each in bare]
    own = [aside for aside in group if not aside.joined]
    message, told_before = _without_start(entry.message, [aside.text for aside in own])
    # The client has changed the beginning of its answer, or took back an earlier one.
    own = [*map(_silent, own[:told_before]), *own[told_before:]]
    made = call_ids(message)
    joined = [aside for aside in group if aside.joined and aside.own == made]
    for aside in joined:
        message = {**message, "tool_calls": _with_calls(message["tool_calls"], aside.calls)}
    if message is not entry.message:
        changes = (*entry.changes, CHANGE)
        entry = msgspec.structs.replace(entry, message=message, changes=changes)
    results = [_put_in(_answered(call, told)) for aside in joined for call in aside.calls]
    return [*(put for aside in own for put in _inserted(aside, told)), entry, *results]


def _inserted(aside: Aside, told: RecalledTexts) -> Iterator[SentMessage]:
    said: Message = {
        "role": "assistant",
        "content": aside.text or None,
        "tool_calls": [_called(call) for call in aside.calls],
    }
    if aside.reasoning:
        said["reasoning_content"] = aside.reasoning
    yield _put_in(said)
    for call in aside.calls:
        yield _put_in(_answered(call, told))


def _put_in(message: Message) -> SentMessage:
    return SentMessage(message, None, (CHANGE,))


def _called(call: RecallCall) -> dict[str, Any]:
    function = {"name": RECALL_TOOL, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _answered(call: RecallCall, told: RecalledTexts) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": _result(call, told)}


def _with_calls(own: object, calls: Sequence[RecallCall]) -> list[Any]:
    """Return the client's calls with those of the recall tool in their places."""
    joined = list(own) if isinstance(own, list) else []
    for call in sorted(calls, key=lambda call: call.place):
        joined.insert(call.place, _called(call))
    return joined


def _without_start(message: Message, texts: Sequence[str]) -> tuple[Message, int]:
    """Return an answer without the texts of asides that it begins with, and the number of asides
    whose texts aren't in it."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    first = parts[0] if parts and isinstance(parts[0], Mapping) else {}
    text = first.get("text")
    rests = (("".join(texts[at:]), at) for at in range(len(texts)) if texts[at])
    said = text if isinstance(text, str) else ""
    start, at = next(((each, at) for each, at in rests if said.startswith(each)), ("", len(texts)))
    if not start:
        return message, max((n + 1 for n, each in enumerate(texts) if each), default=0)
    rest = said[len(start) :]
    if not isinstance(content, list):
        return {**message, "content": rest or None}, at
    kept = [{**first, "text": rest}] if rest else []
    return {**message, "content": [*kept, *content[1:]] or None}, at


def _silent(aside: Aside) -> Aside:
    """Return an aside without what the model wrote in front of its calls."""
    return replace(aside, text="", reasoning="")


def _bare(call: RecallCall) -> RecallCall:
    """Return a call without what the model wrote in its arguments, but for the address."""
    return replace(call, arguments=f'{{"address":"{call.address}"}}' if call.address else "{}")


def _filled(stage: Stage, told: RecalledTexts, memo: Memo) -> Stage:
    """Return the list with texts in place of references."""
    if not (told.texts or told.causes):
        return stage
    refers = memo.map(stage.messages, _REFERS, lambda each: (*references_in([each]),), _REFERS)
    if not any(refers):
        return stage
    sent: list[SentMessage] = []
    for entry, named, causes in zip(stage.sent, refers, told.judged(refers), strict=True):
        pairs = zip(named, causes, strict=True)
        texts = tuple(told.text_of(a) if c is None else note_of(c) for a, c in pairs)
        fill = partial(_with_texts, texts)
        sent.append(memo.get(entry, (_FILLED, texts), fill) if texts else entry)
    return replace(stage, sent=tuple(sent))


def _with_texts(texts: Sequence[str], entry: SentMessage) -> SentMessage:
    """Return a message with one text in place of each reference."""
    left = iter(texts)

    def fill(text: str) -> str:
        return _REFERENCE.sub(lambda _: next(left), text)

    content = entry.message.get("content")
    filled: Any = fill(content) if isinstance(content, str) else content
    if isinstance(content, list):
        filled = [
            {**part, "text": fill(part["text"])} if is_text_part(part) else part for part in content
        ]
    message = {**entry.message, "content": filled}
    return msgspec.structs.replace(entry, message=message, changes=(*entry.changes, CHANGE))


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if is_text_part(part):
                yield part["text"]
