"""The policy that masks tool results outside a window of recent events."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.builtin.tool_results import check_numbers, result_stub
from leyline_policies.context import Context
from leyline_policies.policy import Message, Mode


@dataclass(frozen=True, slots=True)
class ObservationMasking:
    """Replace tool results older than the newest ``attention_window`` events by a placeholder.

    An event is a message; an assistant message that makes several calls counts once per call.

    The rule is OpenHands' ``ObservationMaskingCondenser`` (openhands-ai 0.62.0,
    memory/condenser/impl/observation_masking_condenser.py; window 100 from
    core/config/condenser_config.py). Different from it: a masked result stays the answer to its
    call, where OpenHands sends it as a user message and drops the call; and OpenHands counts
    events that never reach the model as well.
    """

    name: ClassVar[str] = "observation_masking"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    attention_window: int = 100
    placeholder: str = "<MASKED>"

    def __post_init__(self) -> None:
        """Raise ValueError for a window of no event."""
        check_numbers(1, attention_window=self.attention_window)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with the older tool results masked."""
        end = self._window_start(messages)
        if not end:
            return messages
        results = context.results(messages)
        return context.edited(messages, self._masked, results[: bisect_left(results, end)])

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

    def _masked(self, message: Message) -> Message:
        return result_stub(message, self.placeholder)
