"""Edits that the caller declares itself, in the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from leyline_engine.contract import Mode

from .messages import Message
from .prepared import DECLARED, Change, DroppedMessage, SentMessage
from .stage import Stage, declared_demands, find_fault
from .text_edit import TextEditError, replace_spans, replace_text


class DeclaredEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An edit that the caller declares itself.

    ``replacement`` without ``chars`` replaces the message's whole text; ``drop`` removes the
    message; neither says that the caller's own change at that message is meant, with this mode.
    """

    message: int
    mode: Mode = Mode.AMORTIZE
    chars: tuple[int, int] | None = None
    replacement: str | None = None
    drop: bool = False

    @property
    def rewrites(self) -> bool:
        """Whether the edit itself changes what is sent."""
        return self.drop or self.replacement is not None


def apply_declared(stage: Stage, declared: Sequence[DeclaredEdit]) -> Stage:
    """The client's list with the edits that it declares, all or none."""
    by_message: dict[int, list[DeclaredEdit]] = {}
    for edit in declared:
        by_message.setdefault(edit.message, []).append(edit)
    if any(not 0 <= index < len(stage.sent) for index in by_message):
        return stage.fault(DECLARED, "bad_message")
    sent: list[SentMessage] = []
    dropped: list[DroppedMessage] = []
    for index, entry in enumerate(stage.sent):
        edits = by_message.get(index, [])
        changes = tuple(
            dict.fromkeys(Change(DECLARED, edit.mode, not edit.rewrites) for edit in edits)
        )
        if any(edit.drop for edit in edits):
            mode = Mode.FORGET if any(c.mode is Mode.FORGET for c in changes) else Mode.AMORTIZE
            dropped.append(DroppedMessage(index, Change(DECLARED, mode)))
            continue
        try:
            message = _rewritten(entry.message, edits)
        except TextEditError:
            return stage.fault(DECLARED, "bad_message")
        sent.append(SentMessage(message, index, changes) if edits else entry)
    fault = find_fault(stage.messages, [entry.message for entry in sent])
    if fault is not None:
        return stage.fault(DECLARED, fault)
    demands = declared_demands(sent, dropped)
    return replace(stage, sent=tuple(sent), dropped=tuple(dropped), demands=demands)


def _rewritten(message: Message, edits: Sequence[DeclaredEdit]) -> Message:
    spans = sorted(
        (edit.chars[0], edit.chars[1], edit.replacement)
        for edit in edits
        if edit.chars is not None and edit.replacement is not None
    )
    whole = [edit.replacement for edit in edits if edit.chars is None]
    texts = [text for text in whole if text is not None]
    if spans and texts:
        raise TextEditError("a message's text is replaced both as a whole and in part")
    if spans:
        return replace_spans(message, spans)
    return replace_text(message, texts[-1]) if texts else message
