"""Who changed what: from the messages that a hunk touches to causes and modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leyline_engine.contract import Mode

from .diff import MessageDiff
from .options import UndeclaredRules
from .prepare import Change, Prepared, SentMessage
from .session import EditMode
from .token_diff import Hunk

STRICTNESS: dict[EditMode, int] = {"amortize": 0, "exact": 1, "forget": 2}
"""Where changes meet in one hunk, the strictest holds."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One change that a hunk carries."""

    cause: str
    mode: EditMode
    role: str
    message: int | None
    """Index in the caller's list of this turn."""


def strictest(causes: tuple[Cause, ...]) -> EditMode:
    """The mode of a hunk; a hunk without a cause is exact."""
    return max((cause.mode for cause in causes), key=STRICTNESS.__getitem__, default="exact")


class CauseFinder:
    """Explains hunks between a source's messages and this turn's."""

    def __init__(
        self, source: Prepared, turn: Prepared, messages: MessageDiff, rules: UndeclaredRules
    ) -> None:
        self._source = source
        self._turn = turn
        self._rules = rules
        self._new_of = {s.old: s.new for s in messages.steps if s.kind == "replaced"}
        self._old_of = {s.new: s.old for s in messages.steps if s.kind == "replaced"}
        self._dropped = {
            turn.client_fingerprint(item.client_index): item.change for item in turn.dropped
        }
        self._dropped_before = {
            source.client_fingerprint(item.client_index): item.change for item in source.dropped
        }

    def explain(self, hunk: Hunk) -> tuple[Cause, ...]:
        """The changes behind a hunk, each once."""
        found = dict.fromkeys(self._causes(hunk))
        return tuple(found) or (self._undeclared("template", "template", None),)

    def _causes(self, hunk: Hunk) -> Iterator[Cause]:
        for old in hunk.old_messages:
            new = self._new_of.get(old)
            if new is not None:
                yield from self._replaced(self._source.sent[old], self._turn.sent[new])
            else:
                yield self._removed(self._source.sent[old])
        for new in hunk.new_messages:
            if self._old_of.get(new) is None:
                yield self._inserted(self._turn.sent[new])

    def _replaced(self, old: SentMessage, new: SentMessage) -> Iterator[Cause]:
        role = str(new.message.get("role"))
        before = self._source.client_fingerprint(old.client_index)
        after = self._turn.client_fingerprint(new.client_index)
        declared = any(change.cause == "declared" for change in new.changes)
        if before != after and not declared:
            yield self._undeclared("undeclared", role, new.client_index)
        # A change that is gone again (a policy switched off) is as much its edit as a new one.
        changes = new.changes or (old.changes if before == after else ())
        for change in changes:
            yield self._caused(change, role, new.client_index)
        if before == after and not changes:
            yield self._undeclared("template", "template", None)

    def _removed(self, old: SentMessage) -> Cause:
        role = str(old.message.get("role"))
        if old.client_index is None:
            return self._made_by_policy(old, role)
        change = self._dropped.get(self._source.client_fingerprint(old.client_index))
        if change is not None:
            return self._caused(change, role, None)
        return self._undeclared("undeclared", role, None)

    def _inserted(self, new: SentMessage) -> Cause:
        role = str(new.message.get("role"))
        if new.client_index is None:
            return self._made_by_policy(new, role)
        change = self._dropped_before.get(self._turn.client_fingerprint(new.client_index))
        if change is not None:
            return self._caused(change, role, new.client_index)
        return self._undeclared("undeclared", role, new.client_index)

    def _made_by_policy(self, sent: SentMessage, role: str) -> Cause:
        return self._caused(sent.changes[-1], role, None)

    def _caused(self, change: Change, role: str, message: int | None) -> Cause:
        mode: EditMode = "forget" if change.mode is Mode.FORGET else "amortize"
        return Cause(change.cause, mode, role, message)

    def _undeclared(self, cause: str, role: str, message: int | None) -> Cause:
        mode: EditMode = "amortize" if self._rules.amortizes(role) else "exact"
        return Cause(cause, mode, role, message)
