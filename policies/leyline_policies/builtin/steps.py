"""Steps of an agent: an answer with what follows it, which stay or go together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leyline_policies.conversation import RESULT_ROLES, ToolCall
from leyline_policies.policy import Message


@dataclass(frozen=True, slots=True)
class Step:
    """The messages from ``start`` to before ``end``: an answer, and all up to the next one."""

    start: int
    end: int
    tokens: int
    spared: bool
    """True if it can't go as a whole: the user speaks in it, or it holds one side of a call."""

    def of(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages of the step."""
        return messages[self.start : self.end]


def steps_of(
    messages: Sequence[Message],
    tokens: Sequence[int],
    calls: Iterable[ToolCall],
    span: tuple[int, int],
) -> list[Step]:
    """Return the steps between two places; those that a call's results link are one.

    Args:
        tokens: those of each message.
        calls: of all messages.
        span: where the first step begins, at an answer, and where the last one ends.
    """
    start, end = span
    bounds = [at for at in range(start, end) if messages[at].get("role") == "assistant"]
    owner = {at: number for number, at in enumerate(bounds)}
    answers = [*bounds, end]
    links: set[int] = set()
    halves: set[int] = set()
    answered: set[int] = set()
    for call in calls:
        answered.update(call.results)
        if call.message not in owner:
            continue
        inside = [at for at in call.results if at < end]
        if len(inside) < max(1, len(call.results)):
            halves.add(call.message)
        number = owner[call.message]
        while inside and answers[number + 1] <= max(inside):
            number += 1
            links.add(bounds[number])
    steps: list[Step] = []
    for begin, stop in zip(bounds, answers[1:], strict=True):
        spared = begin in halves or any(
            _is_spared(messages[at], at in answered) for at in range(begin + 1, stop)
        )
        size = sum(tokens[begin:stop])
        if begin in links:
            last = steps.pop()
            begin, size, spared = last.start, size + last.tokens, spared or last.spared  # noqa: PLW2901
        steps.append(Step(begin, stop, size, spared))
    return steps


def _is_spared(message: Message, answers: bool) -> bool:
    """Return True for a message that is no answer to a call of its own step."""
    return message.get("role") not in RESULT_ROLES or not answers
