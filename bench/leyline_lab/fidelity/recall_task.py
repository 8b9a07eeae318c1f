"""The recall task: sessions in which a model reads settings with tools and is asked for them.

A session is a stream of turns. In some the assistant reads a configuration with a tool, in some it
runs a command, in others the user asks for a setting. The assistant answers with the value of a
setting that the session has shown, and looks up others with a tool first. So the reaction to a
question shows if a model still knows the value.

Everything here is pure: the same random generator gives the same session.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, Final

from leyline_lab.fidelity.recall_words import (
    FILES,
    GENERAL,
    KEYS,
    VALUES,
)

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


class Sight(StrEnum):
    """The later turns' view of a thought."""

    KEPT = "kept"
    """It stays in the prompt."""
    STRIPPED = "stripped"
    """Only its own turn has read it: a splice cuts it at the next message of the user."""
    NEVER = "never"
    """Nothing has read it: the prompt without it was prefilled."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The thinking of one assistant's message."""

    text: str
    sight: Sight = Sight.STRIPPED

    def __str__(self) -> str:
        """Return it as the thinking model's chat template shows it."""
        return f"{OPEN}{self.text}{CLOSE}"


STUB: Final = "[truncated]"
"""Stub in place of a tool output that was taken out of the history."""

SYSTEM_PROMPT: Final = "Answer from what the tools have shown. Look up what they have not."

TOOLS: Final[tuple[dict[str, Any], ...]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
            },
        },
    }
    for name, description, parameter in (
        ("read_config", "Read a configuration.", "name"),
        ("run", "Run a job.", "name"),
        ("lookup", "Find the line that begins so.", "line"),
    )
)
"""The tools of every session, in the form of an OpenAI request."""


class Note(StrEnum):
    """The assistant's remark after it has read a configuration."""

    SILENT = "silent"
    """Nothing about it: ``Done.``"""
    KEYS = "keys"
    """The names of the settings, without their values."""
    RESTATED = "restated"
    """The settings with their values."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Frequencies of events in a session, as shares between 0 and 1."""

    unknown: float = 0.2
    """Share of questions about settings that the session hasn't shown."""
    truncated: float = 0.12
    """Share of read configurations whose output is only :data:`STUB`."""
    hidden: float = 0.0
    """Share of read configurations that later turns can't see; see :class:`Hidden`."""
    counted: float = 0.0
    """Share of truncated or hidden outputs whose stub states the number of cut characters."""
    notes: tuple[float, float, float] = (0.3, 0.5, 0.2)
    """Shares of remarks after reading: silent, keys, restated."""
    shuffled: bool = True
    """True if settings are restated in another order than the output's."""
    system: float = 0.5
    """Share of sessions with :data:`SYSTEM_PROMPT`."""
    questions: float = 0.72
    """Share of turns in which the user asks, while there is something new to ask for."""
    shown: float = 0.25
    """Share of questions whose answer has the setting's name and value."""
    again: float = 0.25
    """Share of questions that may repeat earlier ones."""
    runs: float = 0.2
    """Share of the turns without a question that run a job, whose output has no settings."""
    choices: float = 0.0
    """Share of the turns without a question in which the assistant chooses a value as it thinks."""
    sights: tuple[float, float, float] = (0.3, 0.5, 0.2)
    """Shares of thoughts by :class:`Sight`: kept, stripped, never."""
    max_facts: int = 6
    """Settings per configuration."""
    output: int = 0
    """Characters of a read configuration's output, at least; lines without meaning fill it."""
    words: int = 0
    """Number of words used of each list of names and of values; values are then single words. 0 for
    all words and all kinds of values."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question for a setting, and facts of the right answer."""

    key: str
    value: str
    known: bool
    """True if the session has shown it; else it must be looked up."""
    source: int
    """Index of the turn that showed it; -1 if unknown."""
    hidden: bool = False
    """True if only the notes on a hidden output have it."""
    shown: bool = False
    """True if the answer names the setting, too."""
    chosen: bool = False
    """True if the assistant chose the value as it thought."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A tool output that later turns don't see."""

    after: int
    """Number of turns after its own that still see it."""
    stub: str = STUB
    """Text that all later turns see in its place."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; the model learns an assistant's."""

    role: str
    content: str
    call: tuple[str, dict[str, str]] | None = None
    """Name and arguments of a tool call; the message then has no content."""
    hidden: Hidden | None = None
    """Point at which the content becomes hidden; None for never."""
    question: Question | None = None
    """Question that this message answers, with the value or with a look-up."""
    thought: Thought | None = None
    """Thinking in front of the content or the call."""

    def as_dict(self, call_id: str = "call") -> dict[str, Any]:
        """Return the message in the form of an OpenAI request."""
        more = {"reasoning_content": self.thought.text} if self.thought else {}
        if self.call is None:
            named = {"tool_call_id": call_id} if self.role == "tool" else more
            return {"role": self.role, "content": self.content, **named}
        name, arguments = self.call
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        return {"role": self.role, "content": None, "tool_calls": [call], **more}


Turn = tuple[Message, ...]


def ask(key: str, form: int = 0) -> Message:
    """Return a question for a setting's value, in one of three forms."""
    return Message("user", (f"What is `{key}=`?", f"Tell me `{key}=`.", f"`{key}=`?")[form])


def ask_to_show(key: str) -> Message:
    """Return a question for a setting with its name; the answer has the form of outputs."""
    return Message("user", f"Show `{key}=`.")


def read(name: str, output: str, remark: str, hidden: Hidden | None = None) -> Turn:
    """Return a turn in which the user has a configuration read, and the assistant remarks on it."""
    return (
        Message("user", f"Read `{name}`."),
        Message("assistant", "", call=("read_config", {"name": name})),
        Message("tool", output, hidden=hidden),
        Message("assistant", remark),
    )


def choose(key: str, thought: Thought, then: tuple[str, str] | None = None) -> Turn:
    """Return a turn in which the assistant chooses a setting's value, and says only its name.

    Args:
        key: the setting.
        thought: the choice, as the assistant thinks it.
        then: name and output of a configuration that it reads after it has thought; None for none.
    """
    said = remark(Note.KEYS, {key: ""})
    if then is None:
        return (Message("user", f"Choose `{key}=`."), Message("assistant", said, thought=thought))
    name, output = then
    return (
        Message("user", f"Choose `{key}=` and read `{name}`."),
        Message("assistant", "", call=("read_config", {"name": name}), thought=thought),
        Message("tool", output),
        Message("assistant", said),
    )


def remark(note: Note, facts: dict[str, str]) -> str:
    """Return the assistant's remark after reading ``facts``."""
    if note is Note.SILENT or not facts:
        return "Done."
    if note is Note.KEYS:
        return "Noted: " + ", ".join(f"`{key}=`" for key in facts) + "."
    return "\n".join(["Read:", *(f"{key}={value}" for key, value in facts.items())])


def counted_stub(output: str) -> str:
    """Return the stub that the policy ``truncate_older_than`` leaves with ``max_chars=0``."""
    return f"\n[{len(output)} characters cut]\n"


def filler(rng: Random) -> str:
    """Return a line without meaning: three to eight common words."""
    return " ".join(rng.choices(GENERAL, k=rng.randint(3, 8)))


def value(rng: Random, words: int = 0) -> str:
    """Return a setting's value: a word, a number, or a word followed by another or by a number.

    With ``words``, return one of the first so many words.
    """
    if words:
        return rng.choice(VALUES[:words])
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(VALUES)
    if kind < 0.75:
        return str(rng.randint(10, 9999))
    tail = rng.choice(VALUES) if kind < 0.9 else str(rng.randint(10, 99))
    return f"{rng.choice(VALUES)}-{tail}"


@dataclass(slots=True)
class _Known:
    value: str
    source: int
    note: Note
    hidden_after: int | None
    """Turn after which the output is hidden."""
    said: bool = False
    """True if an answer has said it since."""
    chosen: bool = False


@dataclass(slots=True)
class _Session:
    rng: Random
    mix: Mix
    keys: list[str]
    known: dict[str, _Known] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """Named settings whose values are hidden."""
    unseen: list[str] = field(default_factory=list)
    """Settings that were chosen in a thought that nothing has read."""
    turn: int = 0

    def read(self) -> Turn:
        rng, mix = self.rng, self.mix
        facts = self._facts()
        note = rng.choices(tuple(Note), weights=mix.notes)[0]
        truncated = rng.random() < mix.truncated
        after = None
        if not truncated and rng.random() < mix.hidden:
            after = rng.choice((0, 0, 1, 2, 4))
        if truncated and note is not Note.RESTATED:
            self.lost += facts
        else:
            end = self.turn + after if after is not None else None
            for key, text in facts.items():
                self.known[key] = _Known(text, self.turn, note, end)
        output = self._output(facts)
        stub = STUB
        if (truncated or after is not None) and mix.counted and rng.random() < mix.counted:
            stub = counted_stub(output)
        hidden = Hidden(after, stub) if after is not None else None
        shown = stub if truncated else output
        said = facts
        if mix.shuffled:
            said = dict(rng.sample(tuple(facts.items()), k=len(facts)))
        return read(rng.choice(FILES), shown, remark(note, said), hidden)

    def _facts(self) -> dict[str, str]:
        count = min(self.rng.randint(1, self.mix.max_facts), len(self.keys))
        return {self.keys.pop(): value(self.rng, self.mix.words) for _ in range(count)}

    def _output(self, facts: dict[str, str]) -> str:
        lines = [f"{key}={text}" for key, text in facts.items()]
        for _ in range(self.rng.choice((0, 0, 0, 1, 2, 4))):
            lines.insert(self.rng.randint(0, len(lines)), filler(self.rng))
        while sum(map(len, lines)) < self.mix.output:
            lines.insert(self.rng.randint(0, len(lines)), filler(self.rng))
        return "\n".join(lines)

    def choose(self) -> Turn:
        rng, key = self.rng, self.keys.pop()
        text = value(rng, self.mix.words)
        sight = rng.choices(tuple(Sight), weights=self.mix.sights)[0]
        if sight is Sight.NEVER:
            self.unseen.append(key)
        else:
            end = self.turn if sight is Sight.STRIPPED else None
            self.known[key] = _Known(text, self.turn, Note.KEYS, end, chosen=True)
        then = None
        if rng.random() < 0.4:
            facts = self._facts()
            for each, shown in facts.items():
                self.known[each] = _Known(shown, self.turn, Note.SILENT, None)
            then = rng.choice(FILES), self._output(facts)
        return choose(key, Thought(f"{key}={text}", sight), then)

    def run(self) -> Turn:
        output = "\n".join(filler(self.rng) for _ in range(self.rng.randint(1, 6)))
        name = self.rng.choice(FILES)
        return (
            Message("user", f"Run `{name}`."),
            Message("assistant", "", call=("run", {"name": name})),
            Message("tool", output),
            Message("assistant", "Done."),
        )

    def question(self) -> Turn:
        self._forget()
        if self.unseen and (not self.known or self.rng.random() < 0.5):
            return self._unknown(self.unseen.pop(), chosen=True)
        if not self.known or (self.keys and self.rng.random() < self.mix.unknown):
            lost = bool(self.lost) and self.rng.random() < 0.6
            return self._unknown(
                self.lost.pop(self.rng.randrange(len(self.lost))) if lost else self.keys.pop()
            )
        new = [key for key, fact in self.known.items() if not fact.said]
        again = not new or self.rng.random() < self.mix.again
        key = self.rng.choice(tuple(self.known) if again else new)
        fact = self.known[key]
        out_of_sight = fact.hidden_after is not None and self.turn > fact.hidden_after
        hidden = out_of_sight and fact.note is Note.KEYS and not fact.said
        fact.said = True
        user, shown = self._ask(key)
        answered = Question(key, fact.value, True, fact.source, hidden, shown, fact.chosen)
        return (user, Message("assistant", _answer(answered), question=answered))

    def _unknown(self, key: str, *, chosen: bool = False) -> Turn:
        text = value(self.rng, self.mix.words)
        self.known[key] = _Known(text, self.turn, Note.SILENT, None)
        user, shown = self._ask(key)
        unknown = Question(key, text, False, -1, shown=shown, chosen=chosen)
        return (
            user,
            Message("assistant", "", call=("lookup", {"line": f"{key}="}), question=unknown),
            Message("tool", f"{key}={text}"),
            Message("assistant", _answer(unknown)),
        )

    def _ask(self, key: str) -> tuple[Message, bool]:
        if self.rng.random() < self.mix.shown:
            return ask_to_show(key), True
        return ask(key, self.rng.randrange(3)), False

    def _forget(self) -> None:
        """Drop known settings that became hidden without a note."""
        gone = [
            key
            for key, fact in self.known.items()
            if fact.hidden_after is not None
            and self.turn > fact.hidden_after
            and fact.note is Note.SILENT
            and not fact.said
        ]
        for key in gone:
            del self.known[key]
        self.lost += gone


def _answer(question: Question) -> str:
    return f"{question.key}={question.value}" if question.shown else question.value


def session(rng: Random, mix: Mix) -> Iterator[Turn]:
    """Yield turns until the names of settings are used up; the first may be a system prompt.

    Args:
        rng: source of randomness, used as turns are taken.
        mix: frequencies of events.
    """
    keys = KEYS[: mix.words or None]
    state = _Session(rng, mix, rng.sample(keys, k=len(keys)))
    if rng.random() < mix.system:
        yield (Message("system", SYSTEM_PROMPT),)
        state.turn += 1
    while len(state.keys) > mix.max_facts:
        # With nothing new to ask for, most turns read.
        new = bool(state.unseen) or any(not fact.said for fact in state.known.values())
        if (state.known or state.unseen) and rng.random() < (mix.questions if new else mix.again):
            yield state.question()
        elif mix.choices and rng.random() < mix.choices:
            yield state.choose()
        elif rng.random() < mix.runs:
            yield state.run()
        else:
            yield state.read()
        state.turn += 1
