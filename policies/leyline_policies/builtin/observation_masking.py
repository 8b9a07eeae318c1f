"""The policy that masks tool results outside a window of recent events."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.builtin.old_results import ClearedResults
from leyline_policies.builtin.tool_results import check_numbers
from leyline_policies.context import Context
from leyline_policies.policy import Message


@dataclass(frozen=True, slots=True)
class ObservationMasking(ClearedResults):
    """Replace tool results older than the newest ``attention_window`` events by a placeholder.

    An event is a message; an assistant message that makes several calls counts once per call.

    The rule is OpenHands' ``ObservationMaskingCondenser`` (openhands-ai 0.62.0,
    memory/condenser/impl/observation_masking_condenser.py; window 100 from
    core/config/condenser_config.py). Different from it: a masked result stays the answer to its
    call, where OpenHands sends it as a user message and drops the call; and OpenHands counts
    events that never reach the model as well.
    """

    name: ClassVar[str] = "observation_masking"

    attention_window: int = 100
    placeholder: str = "<MASKED>"

    def __post_init__(self) -> None:
        """Raise ValueError for a window of no event."""
        check_numbers(1, attention_window=self.attention_window)

    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        end = self._window_start(messages)
        results = context.results(messages) if end else ()
        return results[: bisect_left(results, end)]

    def _window_start(self, messages: list[Message]) -> int:
        """Return the start of the window; messages before it are outside."""
        left = self.attention_window
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            calls = message.get("tool_calls") if message.get("role") == "assistant" else None
            left -= len(calls) if calls else 1
            if left <= 0:
                return index
        return 0
