"""The policy that edits nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.policy import Message, Mode


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Send every message as it is."""

    name: ClassVar[str] = "keep_all"
    mode: ClassVar[Mode] = "amortize"
    edits: ClassVar[bool] = False

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Return the messages unchanged."""
        return list(messages)
