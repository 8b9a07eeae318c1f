"""Prompts of the recall task for measurements: questions, sessions, and stripped thinking. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from random import Random
from typing import Any

from leyline_lab.fidelity.recall_task import (
    SYSTEM_PROMPT,
    Message,
    Mix,
    Note,
    Thought,
    Turn,
    ask,
    choose,
    filler,
    read,
    remark,
    session,
    value,
)
from leyline_lab.fidelity.recall_words import FILES, KEYS

ChatMessages = tuple[Mapping[str, Any], ...]

WORDS = 100
"""Number of words of each list that the shipped models know."""
FACTS = 4
"""Settings in the output that is cut."""
_LONG_OUTPUT = 320
"""Characters of a session's outputs, at least; a policy leaves 200 of them."""
_RECALLED_OUTPUT = 640
"""Characters of outputs that are recalled, at least: engines find copies of 64 tokens again."""


@dataclass(frozen=True, slots=True)
class RecallPrompt:
    """A session that reads a configuration and is later asked for one of its settings."""

    messages: ChatMessages
    """All up to the question."""
    output: int
    """Index of the message that is cut."""
    answer: str
    line: int
    """Line of the output that has the answer, from 0."""


class Asked(StrEnum):
    """The output that the question is about."""

    CUT = "cut"
    """The one that is cut."""
    EARLIER = "earlier"
    """One in front of it, which stays."""
    LATER = "later"
    """One after it, which stays."""


def draw_question(rng: Random, asked: Asked, note: Note, turns: int) -> RecallPrompt:
    """Draw a prompt with two outputs that show settings, of which one is cut.

    Args:
        asked: the output that the question is about. With ``CUT``, only the one is there.
        note: the assistant's remark on the output that is cut; on the other it says nothing.
        turns: number of other turns, a third of them at the end.
    """
    if asked is Asked.CUT:
        return draw_prompt(rng, note, turns)
    keys = rng.sample(KEYS[:WORDS], k=2 * FACTS)
    own, others = (
        {key: value(rng, WORDS) for key in part} for part in (keys[:FACTS], keys[FACTS:])
    )
    cut = read(rng.choice(FILES), _lines(own), remark(note, own))
    kept = read(rng.choice(FILES), _lines(others), remark(Note.SILENT, others))
    other = other_turns(rng, keys)
    third = turns // 3
    parts = [[each for _ in range(third) for each in next(other)] for _ in range(3)]
    first, second = (cut, kept) if asked is Asked.LATER else (kept, cut)
    question = rng.choice(keys[FACTS:])
    opening = [Message("system", SYSTEM_PROMPT), *parts[0]]
    messages = [*opening, *first, *parts[1], *second, *parts[2], ask(question)]
    place = len(opening) + (0 if first is cut else len(first) + len(parts[1])) + 2
    return RecallPrompt(
        tuple(message.as_dict() for message in messages),
        place,
        others[question],
        list(others).index(question),
    )


def draw_prompt(rng: Random, note: Note, turns: int) -> RecallPrompt:
    """Draw a prompt with ``turns`` other turns, half of them before the output, half after."""
    keys = rng.sample(KEYS[:WORDS], k=FACTS)
    facts = {key: value(rng, WORDS) for key in keys}
    other = other_turns(rng, keys)
    early = [next(other) for _ in range(turns - turns // 2)]
    chunk = read(rng.choice(FILES), _lines(facts), remark(note, facts))
    late = [next(other) for _ in range(turns // 2)]
    asked = rng.choice(keys)
    opening = [Message("system", SYSTEM_PROMPT), *(each for turn in early for each in turn)]
    rest = [each for turn in late for each in turn]
    messages = [*opening, *chunk, *rest, ask(asked)]
    return RecallPrompt(
        tuple(message.as_dict() for message in messages),
        len(opening) + 2,
        facts[asked],
        keys.index(asked),
    )


@dataclass(frozen=True, slots=True)
class RecallStep:
    """One request of a session."""

    messages: ChatMessages
    answer: str | None = None
    """Value of the setting that its question asks for; None if the request asks for none."""
    key: str | None = None
    """Name of that setting."""


def recall_steps(seed: str, turns: int, *, long: bool = False) -> tuple[RecallStep, ...]:
    """Return the requests of a session that reads settings and is asked for them.

    Args:
        long: True for outputs that are worth a stub with an address, and whose KV is found again.
    """
    mix = Mix(
        unknown=0.0,
        truncated=0.0,
        notes=(0.4, 0.5, 0.1),
        max_facts=FACTS,
        output=_RECALLED_OUTPUT if long else 0,
        words=WORDS,
    )
    history: list[Mapping[str, Any]] = []
    steps: list[RecallStep] = []
    call = ""
    for turn in islice(session(Random(seed), mix), turns):
        for message in turn:
            if message.role == "assistant":
                question = message.question
                asked = (question.value, question.key) if question is not None else ()
                steps.append(RecallStep(tuple(history), *asked))
            if message.call is not None:
                call = f"call{len(history)}"
            history.append(message.as_dict(call))
    return tuple(steps)


def long_session(steps: int, seed: str = "trajectory") -> tuple[ChatMessages, ...]:
    """Return the requests of a session that reads long outputs and is asked for their settings."""
    rng = Random(seed)
    keys = list(rng.sample(KEYS[:WORDS], k=WORDS))
    open_facts: list[tuple[str, str]] = []
    history: list[Message] = [Message("system", SYSTEM_PROMPT)]
    requests: list[ChatMessages] = []

    def request() -> None:
        requests.append(tuple(message.as_dict() for message in history))

    while len(requests) < steps:
        if open_facts and (rng.random() < 0.4 or len(keys) < FACTS):
            key, text = open_facts.pop(rng.randrange(len(open_facts)))
            history.append(ask(key))
            request()
            history.append(Message("assistant", text))
            continue
        facts = {keys.pop(): value(rng, WORDS) for _ in range(2)} if len(keys) >= FACTS else {}
        asked, call, output, said = read(
            rng.choice(FILES), _long_output(rng, facts), remark(Note.KEYS, facts)
        )
        history.append(asked)
        request()
        history += [call, output]
        request()
        history.append(said)
        open_facts += facts.items()
    return tuple(requests[:steps])


def _long_output(rng: Random, facts: Mapping[str, str]) -> str:
    lines = _lines(facts).splitlines()
    while sum(map(len, lines)) < _LONG_OUTPUT:
        lines.insert(rng.randint(0, len(lines)), filler(rng))
    return "\n".join(lines)


def _lines(facts: Mapping[str, str]) -> str:
    return "\n".join(f"{key}={text}" for key, text in facts.items())


def other_turns(rng: Random, taken: Sequence[str]) -> Iterator[Turn]:
    """Yield turns of the task that don't name the settings ``taken``."""
    while True:
        for turn in session(rng, Mix(system=0.0, words=WORDS)):
            said = " ".join(f"{message.content} {message.call}" for message in turn)
            if not any(key in said for key in taken):
                yield turn
            if rng.random() < 0.1:  # another session begins: no setting runs out
                break


_FACTS = 3
"""Settings in the output that the assistant reads after it has thought."""


class ThoughtQuestion(StrEnum):
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


def draw_thinking(rng: Random, asked: ThoughtQuestion, turns: int) -> ThinkingPrompt:
    """Draw a prompt with ``turns`` other turns, half of them before the thinking, half after."""
    key, *keys = rng.sample(KEYS[:WORDS], k=1 + _FACTS)
    chosen = value(rng, WORDS)
    facts = {each: value(rng, WORDS) for each in keys}
    other = other_turns(rng, [key, *keys])
    early = [next(other) for _ in range(turns - turns // 2)]
    output = rng.choice(FILES), "\n".join(f"{each}={text}" for each, text in facts.items())
    turn = choose(
        key, Thought(f"{key}={chosen}"), None if asked is ThoughtQuestion.THOUGHT else output
    )
    late = [next(other) for _ in range(turns // 2)]
    wanted = rng.choice(keys) if asked is ThoughtQuestion.OUTPUT else key
    opening = [Message("system", SYSTEM_PROMPT), *(each for turn in early for each in turn)]
    rest = [*(each for turn in late for each in turn), ask(wanted)]
    return ThinkingPrompt(
        tuple(message.as_dict() for message in [*opening, *turn]),
        tuple(message.as_dict() for message in rest),
        facts.get(wanted, chosen),
    )
