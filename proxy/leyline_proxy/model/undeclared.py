"""Rules for edits that the caller didn't declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .fields import OPTIONS_FIELD, OptionError

UNDECLARED_KEYS = ("tool", "user", "assistant", "system", "template")
UNDECLARED_MODES = ("exact", "amortize")
THINKING = "thinking"
COMPACTION = "compaction"
OwnMode = Literal["amortize", "exact"]
"""The mode of edits that nobody declares, but that are known: a chat template that only strips the
model's own thinking, and a caller that puts a summary by the model in place of its history."""

Trust = Literal["name", "opening", "messages"]
"""The reason to count a turn of a session as part of the conversation that continues it.

name
    The caller names its session.
opening
    A harness gives one name to all requests of a task: a turn belongs to the conversation if the
        list has the turn's task and first answer.
messages
    Only the list itself. Anyone who sends the same list is in the session, so no KV may remember
    more than that, and the caller's own edits are exact.
"""


@dataclass(frozen=True, slots=True)
class UndeclaredRules:
    """Roles whose undeclared edits are amortised; all others are exact."""

    roles: frozenset[str] = frozenset()
    """Subset of ``UNDECLARED_KEYS``."""
    exact: frozenset[str] = frozenset()
    """Subset that is exact because somebody said so."""
    reasoning: OwnMode = "exact"
    """The mode of thinking that the template strips."""
    compaction: OwnMode = "exact"
    """The mode of a history that gives way to a summary which the model wrote in this session."""
    trust: Trust = "name"
    """The evidence that an earlier turn is part of this conversation."""

    @classmethod
    def parse(cls, items: Mapping[str, str] | Iterable[str]) -> UndeclaredRules:
        """Return rules from a mapping or from ``role=mode`` items.

        Raises:
            OptionError: an item without ``=``, an unknown role or an unknown mode.
        """
        pairs = items.items() if isinstance(items, Mapping) else [_split(item) for item in items]
        roles: dict[str, str] = {}
        param = f"{OPTIONS_FIELD}.undeclared"
        for role, mode in pairs:
            if role not in UNDECLARED_KEYS:
                known = ", ".join(UNDECLARED_KEYS)
                raise OptionError(param, f"undeclared: unknown role {role[:80]!r}; known: {known}.")
            if mode not in UNDECLARED_MODES:
                known = " or ".join(UNDECLARED_MODES)
                raise OptionError(f"{param}.{role}", f"undeclared: {role} must be {known}.")
            roles[role] = mode
        said = {mode: frozenset(r for r in roles if roles[r] == mode) for mode in UNDECLARED_MODES}
        return cls(said["amortize"], said["exact"])

    def amortizes(self, role: str) -> bool:
        """Return True if an undeclared edit of a ``role`` is amortised; ``template`` stands for the
        template's own edits, :data:`THINKING` for those that only strip thinking, and
        :data:`COMPACTION` for compactions."""
        return self.trust == "name" and self._has(role)

    def withholds(self, role: str) -> bool:
        """Return True if such an edit would be amortised, but for the session's uncertain name."""
        return self.trust != "name" and self._has(role)

    def _has(self, role: str) -> bool:
        if role == COMPACTION:
            return self.compaction == "amortize"
        if role == THINKING:
            # Who says nothing of the template's edits leaves it to ``reasoning``.
            said = "template" in self.exact
            return "template" in self.roles or (self.reasoning == "amortize" and not said)
        return {"developer": "system", "function": "tool"}.get(role, role) in self.roles


def _split(item: str) -> tuple[str, str]:
    role, separator, mode = item.partition("=")
    if not separator:
        raise OptionError(
            f"{OPTIONS_FIELD}.undeclared",
            f"undeclared: {item[:80]!r} must have the form role=mode.",
        )
    return role.strip(), mode.strip()
