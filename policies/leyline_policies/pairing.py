"""Calls and results of a whole list, computed again only if it doesn't continue another."""

from __future__ import annotations

from functools import cached_property

from leyline_policies.conversation import CallPairs, Part, ToolCall


class Pairing:
    """Calls with their results, and the places of results, oldest first; found when requested.

    Args:
        parts: each message's part in calling tools; not changed any more.
        before: the pairing of a list that this one begins with.
    """

    def __init__(self, parts: list[Part], before: Pairing | None = None) -> None:
        self.parts = parts
        self.before = before
        """The pairing before; for this turn only, or a session would hold all there ever were."""
        self._pairs: CallPairs | None = CallPairs() if before is None else before._hand_over()
        self._known = () if before is None else before.results
        self._from = 0 if before is None else len(before.parts)

    def leads_to(self, parts: list[Part]) -> bool:
        """Return True if ``parts`` begin with these, and this state wasn't continued before."""
        known = len(self.parts)
        return self._pairs is not None and known < len(parts) and parts[:known] == self.parts

    @cached_property
    def calls(self) -> tuple[ToolCall, ...]:
        """Every call in order."""
        return (self._pairs or CallPairs()).through(self.parts)

    @cached_property
    def results(self) -> tuple[int, ...]:
        """Indices of the messages that are results."""
        new = range(self._from, len(self.parts))
        return (*self._known, *(index for index in new if isinstance(self.parts[index], str)))

    def _hand_over(self) -> CallPairs | None:
        pairs, self._pairs = self._pairs, None
        return pairs
