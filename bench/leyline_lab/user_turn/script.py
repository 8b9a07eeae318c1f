"""The conversations of the user-turn benchmark. Pure.

The user gives a task; the agent thinks, calls a tool, reads its output, and so on; it answers; the
user asks for a setting of the outputs, and the template strips all that was thought::

    user  Choose `depth=` and read `alpha`.
      assistant  <think> depth=… </think>  read_config(alpha)      ┐
      tool       3 lines of output. Choose `index=` and read …     ├ as many times as asked
    assistant  Noted: …                                            ┘
    user  What is `cache=`?                                        measured

A tool's output ends with what is to be done next, so that the model that ships, which knows only
short turns, goes on by itself. Its thinking, its calls and its answers are all its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from leyline_lab.fidelity.recall_words import (
    FILES,
    GENERAL,
    KEYS,
    VALUES,
)

_WORDS = 100
"""Names and values that the model that ships has seen."""
_SHOWN = 40
"""Names that only outputs have; the agent chooses among the others."""
MAX_USER_TURNS = _SHOWN
_LINES = 2
"""Lines without meaning per output."""
_LINE_WORDS = 8
_NEAR = 10
"""Number of last outputs of a loop of which one has the setting that is asked for."""


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """A task with a loop of calls, and the user's next message."""

    task: str
    outputs: tuple[str, ...]
    """One per call."""
    question: str
    """The user's message after the loop."""
    other_question: str
    """One that differs from its first word on; for the floor."""


def write_loops(seed: str, calls: int, user_turns: int) -> tuple[ToolLoop, ...]:
    """Return the loops of one session; another seed gives other words throughout.

    Raises:
        ValueError: more user turns than settings to ask for.
    """
    if user_turns > MAX_USER_TURNS:
        raise ValueError(f"at most {MAX_USER_TURNS} user turns: there are no more settings to ask")
    chance = random.Random(seed)
    names = chance.sample(KEYS[:_WORDS], _WORDS)
    shown, chosen = names[:_SHOWN], names[_SHOWN:]
    each = _SHOWN // user_turns
    return tuple(
        _loop(chance, calls, shown[number * each : (number + 1) * each], chosen)
        for number in range(user_turns)
    )


def _loop(chance: random.Random, calls: int, shown: list[str], chosen: list[str]) -> ToolLoop:
    steps = [
        f"Choose `{chance.choice(chosen)}=` and read `{chance.choice(FILES)}`."
        for _ in range(calls)
    ]
    # The last outputs have a setting each.
    settings = [*[""] * (calls - len(shown)), *shown][-calls:]
    outputs = []
    for setting, step in zip(settings, [*steps[1:], ""], strict=True):
        lines = [" ".join(chance.sample(GENERAL, _LINE_WORDS)) for _ in range(_LINES)]
        if setting:
            lines.insert(0, f"{setting}={chance.choice(VALUES[:_WORDS])}")
        outputs.append("\n".join([*lines, *([step] if step else [])]))
    asked = chance.choice([setting for setting in settings[-_NEAR:] if setting])
    return ToolLoop(steps[0], tuple(outputs), f"What is `{asked}=`?", f"Which is `{asked}=`?")
