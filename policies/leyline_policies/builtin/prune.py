"""The policy that clears tool results outside a protected amount of recent ones, in batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from leyline_policies.builtin.old_results import ClearedResults, of_tools
from leyline_policies.builtin.tool_results import check_numbers
from leyline_policies.context import Context
from leyline_policies.policy import Message


@dataclass(frozen=True, slots=True)
class Prune(ClearedResults):
    """Clear tool results older than the newest ``protect_tokens`` tokens of them, in batches.

    Whenever a user message follows an answer, results before the last ``recent_turns`` turns (a
    turn begins with a user message) are counted from the newest to the oldest. Those after the
    first ``protect_tokens`` become a placeholder if they hold more than ``minimum_tokens``. Cleared
    results stay so and aren't counted again: the prompt changes rarely, and then much. Results of
    ``exclude_tools`` stay and don't count. A session of one user message is never pruned.

    The rule is opencode's ``SessionCompaction.prune`` (anomalyco/opencode,
    packages/opencode/src/session/compaction.ts), which runs when a turn ends; here it is computed
    for every turn of the conversation from the messages alone. Different from it: tokens are
    counted, not estimated as a quarter of the characters; failed results count like others, which a
    chat message doesn't tell apart.
    """

    name: ClassVar[str] = "prune"

    protect_tokens: int = 40_000
    minimum_tokens: int = 20_000
    recent_turns: int = 2
    exclude_tools: tuple[str, ...] = ("skill",)
    placeholder: str = "[Old tool result content cleared]"

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is too small."""
        check_numbers(0, protect_tokens=self.protect_tokens, minimum_tokens=self.minimum_tokens)
        check_numbers(1, recent_turns=self.recent_turns)

    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        ends = self._ends_of_old(messages, context)
        if not ends:
            return ()
        # Names cost more than tokens, and few conversations are long enough to need them.
        found: Sequence[int] = [i for i in context.results(messages) if i < ends[-1]]
        if sum(self._tokens(messages, found, context)) <= self.minimum_tokens:
            return ()
        found = of_tools(found, messages, context, exclude=self.exclude_tools)
        cleared = self._cleared_count(found, self._tokens(messages, found, context), ends)
        return found[:cleared]

    def _ends_of_old(self, messages: list[Message], context: Context) -> list[int]:
        """Return, for each turn that ended, where the turns begin that were recent then."""
        users = context.users(messages)
        return [
            users[place - self.recent_turns]
            for place, user in enumerate(users)
            if place >= self.recent_turns and messages[user - 1].get("role") != "user"
        ]

    def _tokens(self, messages: list[Message], found: Sequence[int], context: Context) -> list[int]:
        """Return the tokens of each result; 0 for one that is cleared already."""
        tokens = context.each_tokens(messages)
        return [0 if messages[i].get("content") == self.placeholder else tokens[i] for i in found]

    def _cleared_count(self, found: Sequence[int], tokens: list[int], ends: list[int]) -> int:
        """Return how many results, the oldest, were cleared at the end of the turns."""
        before = [0, *accumulate(tokens)]  # tokens of all results before each
        cleared = reach = 0
        for end in ends:
            old = bisect_left(found, end)
            while reach < old and before[old] - before[reach] > self.protect_tokens:
                reach += 1
            if before[reach] - before[cleared] > self.minimum_tokens:
                cleared = reach
        return cleared
