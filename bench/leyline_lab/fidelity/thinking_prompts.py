"""Prompts of the recall task in which the assistant thinks and the thinking is stripped. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from leyline_lab.fidelity.recall_prompts import WORDS, ChatMessages, other_turns
from leyline_lab.fidelity.recall_task import (
    SYSTEM_PROMPT,
    Message,
    ask,
    choose,
    value,
)
from leyline_lab.fidelity.recall_words import FILES, KEYS
from leyline_lab.fidelity.thoughts import Thought

_FACTS = 3
"""Settings in the output that the assistant reads after it has thought."""


class Asked(StrEnum):
    """Subject of the question at the end."""

    THOUGHT = "thought"
    """The value that the assistant chose as it thought, right in front of its answer."""
    BEFORE_CALL = "thought before a call"
    """The same, but it thought in front of a call, and answered after the tool's output."""
    OUTPUT = "output"
    """A setting in that output, which stays in the prompt."""


@dataclass(frozen=True, slots=True)
class ThinkingPrompt:
    """A session in which the assistant thinks, then other turns, and a question."""

    before: ChatMessages
    """Up to the end of the turn with the thinking, which no message of a user follows yet."""
    then: ChatMessages
    """The other turns and the question."""
    answer: str


def draw_thinking(rng: Random, asked: Asked, turns: int) -> ThinkingPrompt:
    """Draw a prompt with ``turns`` other turns, half of them before the thinking, half after."""
    key, *keys = rng.sample(KEYS[:WORDS], k=1 + _FACTS)
    chosen = value(rng, WORDS)
    facts = {each: value(rng, WORDS) for each in keys}
    other = other_turns(rng, [key, *keys])
    early = [next(other) for _ in range(turns - turns // 2)]
    output = rng.choice(FILES), "\n".join(f"{each}={text}" for each, text in facts.items())
    turn = choose(key, Thought(f"{key}={chosen}"), None if asked is Asked.THOUGHT else output)
    late = [next(other) for _ in range(turns // 2)]
    wanted = rng.choice(keys) if asked is Asked.OUTPUT else key
    opening = [Message("system", SYSTEM_PROMPT), *(each for turn in early for each in turn)]
    rest = [*(each for turn in late for each in turn), ask(wanted)]
    return ThinkingPrompt(
        tuple(message.as_dict() for message in [*opening, *turn]),
        tuple(message.as_dict() for message in rest),
        facts.get(wanted, chosen),
    )
