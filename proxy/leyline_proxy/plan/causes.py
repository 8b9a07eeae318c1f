"""Origin of changes: causes and modes from the messages that a hunk touches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from leyline_engine.contract import Mode

from ..model.diff import MessageDiff
from ..model.prepared import Change, Prepared, SentMessage
from ..model.session import EditMode
from ..model.undeclared import COMPACTION, THINKING, UndeclaredRules
from .token_diff import Hunk

STRICTNESS: dict[EditMode, int] = {"amortize": 0, "exact": 1, "forget": 2}
"""Order of modes; changes in one hunk take the strictest."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One change that a hunk carries."""

    cause: str
    mode: EditMode
    role: str
    message: int | None
    """Index in the caller's list of this turn."""
    withheld: bool = False
    """True if it would be amortized, but for the session's uncertain name."""
    thinking: bool = False
    """True if the template only strips the model's own thinking."""


def strictest(causes: tuple[Cause, ...]) -> EditMode:
    """Return the mode of a hunk; a hunk without a cause is exact."""
    return max((cause.mode for cause in causes), key=STRICTNESS.__getitem__, default="exact")


class CauseFinder:
    """Explains hunks between a source's messages and this turn's.

    Args:
        source: the retained turn's messages.
        turn: this turn's.
        sent: alignment of the messages sent then with those sent now.
        client: alignment of the caller's own lists, which separates the caller's edits from others.
        rules: for undeclared edits.
        demanded: client indices of this turn with a forget that the source hasn't met yet. An older
            demand, met long ago, makes no later edit of the message a forget.
        same_context: True if tool definitions and template options are the source's.
        strips_thinking: returns True if a hunk only removes the model's own thinking.
        left_out: returns the caller's message of the source's answer if a hunk only removes a text
            that the caller didn't send back.
        compacted: sent messages that the caller's compaction removed, and those that came for them.
        edited_answer: first token of the source's answer, if the caller has sent it as a message
            and no longer sends that message as it was; else None.
    """

    def __init__(
        self,
        source: Prepared,
        turn: Prepared,
        sent: MessageDiff,
        client: MessageDiff,
        rules: UndeclaredRules,
        *,
        demanded: Collection[int] = (),
        same_context: bool = True,
        strips_thinking: Callable[[Hunk], bool] = lambda _: False,
        left_out: Callable[[Hunk], int | None] = lambda _: None,
        compacted: tuple[Collection[int], Collection[int]] = ((), ()),
        edited_answer: int | None = None,
    ) -> None:
        self._source = source
        self._turn = turn
        self._rules = rules
        self._demanded = demanded
        self._same_context = same_context
        self._strips_thinking = strips_thinking
        self._left_out = left_out
        self._gone, self._came = compacted
        self._edited_answer = edited_answer
        self._new_of = {s.old: s.new for s in sent.steps if s.kind == "replaced"}
        self._old_of = {new: old for old, new in self._new_of.items()}
        self._client_kept = {
            s.old: s.new
            for s in client.steps
            if s.kind == "kept" and s.old is not None and s.new is not None
        }
        self._client_came_from = {new: old for old, new in self._client_kept.items()}
        self._dropped = {item.client_index: item.change for item in turn.dropped}
        self._dropped_before = {item.client_index: item.change for item in source.dropped}
        self._edited = _last_changes(turn)
        self._edited_before = _last_changes(source)

    def explain(self, hunk: Hunk) -> tuple[Cause, ...]:
        """Return the changes that caused a hunk, each once."""
        found = dict.fromkeys(self._causes(hunk))
        return tuple(found) or (self._template(hunk),)

    def _causes(self, hunk: Hunk) -> Iterator[Cause]:
        for old in hunk.old_messages:
            new = self._new_of.get(old)
            is_compacted = old in self._gone
            if new is not None:
                before, after = self._source.sent[old], self._turn.sent[new]
                yield from self._replaced(before, after, is_compacted)
            else:
                yield self._removed(self._source.sent[old], is_compacted)
        for new in hunk.new_messages:
            if self._old_of.get(new) is None:
                yield self._inserted(self._turn.sent[new], new in self._came)
        if self._edited_answer is not None and hunk.end > self._edited_answer:
            yield self._callers("assistant", None, bool(self._gone))
        if not self._same_context:
            yield self._template(hunk)

    def _replaced(self, old: SentMessage, new: SentMessage, is_compacted: bool) -> Iterator[Cause]:
        role = str(new.message.get("role"))
        before = -1 if old.client_index is None else old.client_index
        callers_own = self._client_kept.get(before) != new.client_index
        if callers_own and not any(change.callers_own for change in new.changes):
            yield self._callers(role, new.client_index, is_compacted)
        # A revoked change (a policy switched off) is as much its edit as a new one.
        changes = new.changes or (() if callers_own else old.changes)
        for change in changes:
            if change.mode is Mode.AMORTIZE or self._is_demanded(new):
                yield self._caused(change, role, new.client_index)

    def _is_demanded(self, new: SentMessage) -> bool:
        return new.client_index is None or new.client_index in self._demanded

    def _removed(self, old: SentMessage, is_compacted: bool) -> Cause:
        role = str(old.message.get("role"))
        if old.client_index is None:
            return self._caused(old.changes[-1], role, None)
        place = self._client_kept.get(old.client_index, -1)
        change = self._dropped.get(place) or self._edited.get(place)
        if change is not None:
            return self._caused(change, role, place)
        return self._callers(role, None, is_compacted)

    def _inserted(self, new: SentMessage, is_compacted: bool) -> Cause:
        role = str(new.message.get("role"))
        if new.client_index is None:
            return self._caused(new.changes[-1], role, None)
        before = self._client_came_from.get(new.client_index, -1)
        change = self._dropped_before.get(before)
        if change is None and before >= 0:
            # It was edited beyond recognition, now or then: its calls were removed or restored.
            change = self._edited.get(new.client_index) or self._edited_before.get(before)
        if change is not None:
            return self._caused(change, role, new.client_index)
        return self._callers(role, new.client_index, is_compacted)

    def _caused(self, change: Change, role: str, message: int | None) -> Cause:
        if change.mode is Mode.FORGET:
            return Cause(change.cause, "forget", role, message)
        if change.callers_own and self._rules.trust != "name":
            return Cause(change.cause, "exact", role, message, withheld=True)
        return Cause(change.cause, "amortize", role, message)

    def _callers(self, role: str, message: int | None, is_compacted: bool) -> Cause:
        """Return the cause of a change that the caller made and didn't declare."""
        rule = COMPACTION if is_compacted else role
        mode: EditMode = "amortize" if self._rules.amortizes(rule) else "exact"
        cause = COMPACTION if is_compacted else "undeclared"
        return Cause(cause, mode, role, message, self._rules.withholds(rule))

    def _template(self, hunk: Hunk) -> Cause:
        """Return the cause if no message differs: the template, other tools or options, or a caller
        that left out a text of the answer."""
        if not self._same_context:
            return Cause("tools", "exact", "tools", None)
        thinking = self._strips_thinking(hunk)
        answer = None if thinking else self._left_out(hunk)
        if answer is not None:
            return self._callers("assistant", answer, False)
        rule = THINKING if thinking else "template"
        mode: EditMode = "amortize" if self._rules.amortizes(rule) else "exact"
        return Cause("template", mode, "template", None, self._rules.withholds(rule), thinking)


def _last_changes(prepared: Prepared) -> dict[int, Change]:
    """Return the last change of each client message that is sent edited."""
    return {
        entry.client_index: entry.changes[-1]
        for entry in prepared.sent
        if entry.client_index is not None and entry.changes
    }
