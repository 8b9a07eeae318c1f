"""Edits that the caller declares in the request: all are made, or the request is refused.

A caller that declares an edit relies on it, most of all on a forget. So no part of it is ever left
out: an edit that can't be carried out is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec

from leyline_engine.contract import Mode
from leyline_policies.conversation import nth_last
from leyline_policies.verbs import ANNOTATION, frame_of, is_condemned, is_forgotten

from ..model.diff import CharEdit, apply_chars
from ..model.messages import Message, MessageError, call_ids, check_messages, is_text_part, text_of
from ..model.prepared import DECLARED, Change, DroppedMessage, SentMessage


class TextEditError(ValueError):
    """Character spans that don't fit the message's text."""


def replace_spans(message: Message, spans: Sequence[tuple[int, int, str]]) -> Message:
    """Return ``message`` with characters ``[start, end)`` of its text replaced.

    Args:
        spans: sorted by start.

    Raises:
        TextEditError: spans overlap or reach beyond the text.
    """
    text, cursor = text_of(message), 0
    for start, end, _ in spans:
        if start < cursor or end < start or end > len(text):
            raise TextEditError("character spans overlap or reach beyond the text")
        cursor = end
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": apply_chars(content, [CharEdit(*span) for span in spans])}
    parts = content if isinstance(content, list) else []
    if spans and not any(map(is_text_part, parts)):  # only empty spans fit, and need a place
        inserted = "".join(replacement for _, _, replacement in spans)
        first = {"type": "text", "text": inserted}
        return {**message, "content": [first, *parts] if parts else inserted}
    return {**message, "content": list(_edited(parts, spans))}


def replaced(message: Message, text: str) -> Message:
    """Return ``message`` with ``text`` in place of all that it says.

    Besides, it keeps only what others need of it (:func:`~leyline_policies.verbs.frame_of`) and its
    annotation: parts, reasoning, refusals and arguments of calls are for the model to read, too.
    """
    note = {ANNOTATION: message[ANNOTATION]} if ANNOTATION in message else {}
    return {**frame_of(message), "content": text, **note}


def _edited(parts: Sequence[Any], spans: Sequence[tuple[int, int, str]]) -> Iterator[Any]:
    """Yield the parts after sorted spans, in one pass over both.

    A span over several parts puts its text into the first and empties the others.
    """
    offset, at, is_open = 0, 0, False
    for part in parts:
        if not is_text_part(part):
            yield part
            continue
        text = part["text"]
        edits: list[CharEdit] = []
        until = offset + len(text)
        while at < len(spans):
            start, end, replacement = spans[at]
            low = max(start, offset)
            if low > until or (low == until < end):
                break  # it begins in a later part
            edits.append(
                CharEdit(low - offset, min(end, until) - offset, "" if is_open else replacement)
            )
            if is_open := end > until:
                break
            at += 1
        yield {**part, "text": apply_chars(text, edits)} if edits else part
        offset = until


EDITS_FIELD = "leyline.edits"
MAX_REPLACEMENT = 1024 * 1024
"""Most characters of one replacement."""


class DeclaredEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An edit that the caller declares itself.

    ``replacement`` without ``chars`` stands in place of all that the message says, see
    :func:`~.text_edit.replaced`; ``drop`` removes the message; neither declares the caller's own
    change of the message, with this mode.
    """

    message: int
    mode: Mode = Mode.AMORTIZE
    chars: tuple[int, int] | None = None
    replacement: Annotated[str, msgspec.Meta(max_length=MAX_REPLACEMENT)] | None = None
    drop: bool = False

    @property
    def rewrites(self) -> bool:
        """True if the edit itself changes the sent messages."""
        return self.drop or self.replacement is not None


class DeclaredEditError(ValueError):
    """A declared edit that can't be carried out, so none is; ``param`` names its field."""

    def __init__(self, param: str, words: str) -> None:
        super().__init__(f"{param} {words}")
        self.param = param


def edits_by_characters(options: object, messages: Collection[int]) -> Iterator[tuple[str, int]]:
    """Yield the fields of edits of characters in certain messages, and the messages' indices.

    In texts that the proxy has written, the caller's counts would name other characters.

    Args:
        options: the request's member ``leyline``, unchecked.
        messages: their indices.
    """
    edits = options.get("edits") if isinstance(options, dict) else None
    for number, edit in enumerate(edits if isinstance(edits, list) else ()):
        if not isinstance(edit, dict) or edit.get("chars") is None:
            continue
        message = edit.get("message")
        if isinstance(message, int) and message in messages:
            yield f"{EDITS_FIELD}[{number}].chars", message


class _Placed(NamedTuple):
    """An edit, and its place in the request."""

    number: int
    edit: DeclaredEdit

    def field(self, name: str) -> str:
        return f"{EDITS_FIELD}[{self.number}].{name}"

    def error(self, field: str, words: str) -> DeclaredEditError:
        return DeclaredEditError(self.field(field), words)

    @property
    def main_field(self) -> str:
        """The field that gives the edit's action."""
        if self.edit.chars is not None:
            return "chars"
        if self.edit.drop:
            return "drop"
        return "replacement" if self.edit.replacement is not None else "mode"


def check_declared(messages: Sequence[Message], declared: Sequence[DeclaredEdit]) -> None:
    """Check that all edits of a request can be carried out.

    Raises:
        DeclaredEditError: names the first field that prevents it.
    """
    if declared:
        apply_declared(tuple(map(SentMessage, messages, range(len(messages)))), declared)


def apply_declared(
    client: Sequence[SentMessage], declared: Sequence[DeclaredEdit]
) -> tuple[tuple[SentMessage, ...], tuple[DroppedMessage, ...]]:
    """Return the client's list with its declared edits, and the messages that they drop.

    Raises:
        DeclaredEditError: names the first field that prevents an edit.
    """
    by_message: dict[int, list[_Placed]] = {}
    for placed in map(_Placed, range(len(declared)), declared):
        if not 0 <= placed.edit.message < len(client):
            raise placed.error(
                "message",
                f"is {placed.edit.message}, but the request has messages 0 to {len(client) - 1}.",
            )
        by_message.setdefault(placed.edit.message, []).append(placed)
    for index, edits in sorted(by_message.items()):
        _check_together(client[index].message, edits)
    sent: list[SentMessage] = []
    dropped: list[DroppedMessage] = []
    for index, entry in enumerate(client):
        edits = by_message.get(index, [])
        changes = tuple(
            dict.fromkeys(Change(DECLARED, each.mode, not each.rewrites) for _, each in edits)
        )
        if any(each.drop for _, each in edits):
            dropped.append(DroppedMessage(index, Change(DECLARED, changes[0].mode)))
        elif edits:
            sent.append(SentMessage(_rewritten(entry.message, edits), index, changes))
        else:
            sent.append(entry)
    before, after = ([entry.message for entry in entries] for entries in (client, sent))
    _check_list(before, after, by_message)
    return tuple(sent), tuple(dropped)


def _check_together(message: Message, edits: Sequence[_Placed]) -> None:
    """Check that the edits of one message don't conflict."""
    first = edits[0]
    for other in edits[1:]:
        if other.edit.mode is not first.edit.mode:
            raise other.error(
                "mode",
                f"is {other.edit.mode.value}, but {first.field('mode')} gives message "
                f"{first.edit.message} the mode {first.edit.mode.value}; all edits of a message "
                "need the same mode (forget covers both).",
            )
    rewriting = [placed for placed in edits if placed.edit.rewrites]
    whole = next((placed for placed in rewriting if placed.edit.chars is None), None)
    for other in rewriting if whole is not None else ():
        if whole is not None and other is not whole:
            early, late = sorted((whole, other))
            raise late.error(
                late.main_field,
                f"meets {early.field(early.main_field)}, which concerns the same text of message "
                f"{first.edit.message}; make one edit of the two.",
            )
    _check_spans(len(text_of(message)), rewriting)
    drop = whole if whole is not None and whole.edit.drop else None
    if drop is not None and drop.edit.mode is not Mode.FORGET and is_forgotten(message):
        member = "verdict" if is_condemned(message) else "forget"
        raise drop.error(
            "mode", f"must be forget: messages[{drop.edit.message}].leyline.{member} demands it."
        )


def _check_spans(length: int, edits: Sequence[_Placed]) -> None:
    """Check that character spans are within a text of ``length`` characters and don't overlap."""
    spans = [(*placed.edit.chars, placed) for placed in edits if placed.edit.chars is not None]
    for start, end, placed in spans:
        if not 0 <= start <= end <= length:
            raise placed.error(
                "chars",
                f"is [{start}, {end}], but the text of message {placed.edit.message} has "
                f"{length} characters.",
            )
    spans.sort(key=lambda span: span[:2])
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            early, late = sorted((one, other))
            raise late.error(
                "chars", f"overlaps {early.field('chars')}; spans of a message lie apart."
            )


def _check_list(
    before: list[Message], after: list[Message], by_message: Mapping[int, Sequence[_Placed]]
) -> None:
    """Check that the remaining messages can be sent."""
    drops = {
        index: placed for index, edits in by_message.items() for placed in edits if placed.edit.drop
    }
    last_user = nth_last(before, "user", 1)
    if last_user is not None and last_user in drops:
        raise drops[last_user].error(
            "drop",
            f"can't remove message {last_user}: it is the user's last one, which the model "
            "answers; give a replacement instead.",
        )
    if not after:
        raise list(drops.values())[-1].error(
            "drop", "leaves no message to send; give a replacement instead."
        )
    for dropped, partner in _parted(before, drops):
        raise drops[dropped].error(
            "drop",
            f"would part message {dropped} from message {partner}, a tool call from its result; "
            "drop both, or give a replacement instead.",
        )
    try:
        check_messages(after)
    except MessageError as error:
        placed = next(iter(by_message.values()))[0]
        words = "makes a message list that can't be sent."
        raise placed.error(placed.main_field, words) from error


def _parted(messages: Sequence[Message], drops: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield dropped messages with the remaining call or result that needs each.

    A result answers the last call of its id before it; some models reuse their call ids in each
    answer.
    """
    caller: dict[object, int] = {}
    results: dict[tuple[int, object], list[int]] = {}
    for index, message in enumerate(messages):
        identifier = message.get("tool_call_id")
        if message.get("role") == "tool" and identifier in caller:
            results.setdefault((caller[identifier], identifier), []).append(index)
        caller.update(dict.fromkeys(call_ids(message), index))
    for (call, _), answers in results.items():
        left = [index for index in answers if index not in drops]
        if call in drops and left:
            yield call, left[0]
        elif call not in drops and not left:
            yield answers[0], call


def _rewritten(message: Message, edits: Sequence[_Placed]) -> Message:
    """Return a message with its text, or parts of it, replaced."""
    spans = [
        (*each.chars, each.replacement)
        for _, each in edits
        if each.chars is not None and each.replacement is not None
    ]
    for _, each in edits:
        if each.chars is None and each.replacement is not None:
            return replaced(message, each.replacement)
    return replace_spans(message, sorted(spans, key=lambda span: span[:2])) if spans else message
