"""The policy that removes the matches of a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from leyline_policies.builtin.patterns import (
    MATCH_BUDGET_S,
    Budget,
    Matcher,
    UserPattern,
    compile_pattern,
)
from leyline_policies.builtin.search import replaced
from leyline_policies.context import Context
from leyline_policies.conversation import INSTRUCTION_ROLES, map_text
from leyline_policies.kinds import Pattern
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_FLAGS = re.compile(r"\(\?([aiLmsux]+)\)")


@dataclass(frozen=True, slots=True)
class RemoveRegex:
    """Remove from the texts of messages what the patterns in ``remove`` match, one after another.

    A dot matches line breaks too. The newest ``keep_last`` messages stay whole. Only contents are
    searched, not the arguments of calls.

    After SWE-agent (``RemoveRegex`` in sweagent/agent/history_processors.py at 318f909). Unlike
    there the instructions (system, developer) stay, and of nested diffs the innermost are removed,
    or output full of opening tags would take for ever. To make a secret unknown to the model, use
    ``redact``: this policy only tidies up.
    """

    name: ClassVar[str] = "remove_regex"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    remove: tuple[Pattern, ...] = ("<diff>(?:(?!</?diff>).)*+</diff>",)
    keep_last: int = 0
    _compiled: tuple[UserPattern, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for an unusable pattern or a negative ``keep_last``."""
        if not self.remove:
            raise ValueError("remove=[] names no pattern; nothing would be removed")
        if self.keep_last < 0:
            raise ValueError(f"keep_last={self.keep_last} is negative; it must be 0 or more")
        compiled = tuple(compile_pattern(dot_matches_all(text)) for text in self.remove)
        object.__setattr__(self, "_compiled", compiled)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages without the matches. Raises PatternTimeoutError."""
        budget = Budget(MATCH_BUDGET_S)
        removal = _Removal(tuple(pattern.matcher(budget) for pattern in self._compiled))
        end = len(messages) - self.keep_last
        edited = context.each(messages[:end] if self.keep_last else messages, removal.message)
        edited = [*edited, *messages[end:]]
        return messages if edited == messages else edited


@dataclass(frozen=True, slots=True)
class _Removal:
    """One transform call."""

    matchers: tuple[Matcher, ...]

    def message(self, message: Message) -> Message:
        if message.get("role") in INSTRUCTION_ROLES or not message.get("content"):
            return message
        edited = map_text(message, self._text)
        if edited is message:
            return message
        return edit(message, content=edited["content"], cause="pattern")

    def _text(self, text: str) -> str:
        for matcher in self.matchers:
            text = replaced(text, [match.span() for match in matcher.matches(text)], "")
        return text


def dot_matches_all(pattern: str) -> str:
    """Return the pattern with the flag by which a dot matches line breaks."""
    own = _FLAGS.match(pattern)
    if own is None:
        return f"(?s){pattern}"
    return f"(?s{own[1].replace('s', '')}){pattern[own.end() :]}"
