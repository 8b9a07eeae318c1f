"""Random conversations made of messages, some of which are forgotten later on.

Every token belongs to a message, and keeps belonging to it. A forget takes whole messages out, or
names messages that earlier turns have cut out while what had read them stayed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from oracle_cases import Answer, draw_answer, draw_tokens
from oracle_engine import Edit, Treatment, edited_prompt


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, and the number of the message that each belongs to."""

    tokens: tuple[int, ...]
    messages: tuple[int, ...]

    def runs(self) -> list[tuple[int, int, int]]:
        """(message, start, end) of each run of one message's tokens."""
        found, start = [], 0
        for message, run in groupby(self.messages):
            end = start + len(list(run))
            found.append((message, start, end))
            start = end
        return found

    def answered(self, answer: Answer, message: int) -> Text:
        """With an answer, which is a message of its own."""
        count = len(answer.tokens)
        return Text((*self.tokens, *answer.tokens), (*self.messages, *[message] * count))


@dataclass(frozen=True, slots=True)
class ForgettingTurn:
    """Edits of the turn before, what is forgotten, and the prompt that comes of it."""

    edits: tuple[Edit, ...]
    treatments: tuple[Treatment, ...]
    tail: tuple[int, ...]
    named: tuple[int, ...]
    """Messages to forget that are nowhere any more."""
    forgotten: frozenset[int]
    """Those, and the messages that the edits forget."""
    prompt: Text
    answer: Answer
    spoken: int
    """The message that the answer is."""
    source: Text
    """The turn before, its answer included."""

    @property
    def whole(self) -> Text:
        """Prompt and answer."""
        return self.prompt.answered(self.answer, self.spoken)


@dataclass(frozen=True, slots=True)
class Tale:
    """A whole conversation."""

    opening: Text
    answer: Answer
    spoken: int
    """The message that the opening's answer is."""
    turns: tuple[ForgettingTurn, ...]


class _Teller:
    """Draws a conversation turn by turn."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._messages = 0
        self._gone: set[int] = set()
        self._struck: set[int] = set()
        self._paths: list[Text] = []

    def tale(self) -> Tale:
        """The whole of it."""
        rng = self._rng
        opening = Text((), ())
        while len(opening.tokens) < 160:
            opening = self._appended(opening, rng.randint(8, 50))
        answer, spoken = draw_answer(rng), self._new_message()
        self._paths.append(opening.answered(answer, spoken))
        turns = tuple(self._turn() for _ in range(rng.randint(2, 4)))
        return Tale(opening, answer, spoken, turns)

    def _new_message(self) -> int:
        self._messages += 1
        return self._messages - 1

    def _appended(self, text: Text, count: int) -> Text:
        message = self._new_message()
        tokens = (*text.tokens, *draw_tokens(self._rng, count))
        return Text(tokens, (*text.messages, *[message] * count))

    def _turn(self) -> ForgettingTurn:
        while True:
            turn = self._draw_turn()
            if 64 <= len(turn.prompt.tokens) <= 700 and self._shows(turn):
                break
        self._gone |= set(turn.source.messages) - set(turn.whole.messages)
        self._struck |= turn.forgotten
        self._paths.append(turn.whole)
        return turn

    def _draw_turn(self) -> ForgettingTurn:
        rng, source = self._rng, self._paths[-1]
        named: tuple[int, ...] = ()
        taken: list[tuple[Edit, Treatment]] = []
        lost = sorted(self._gone - self._struck)
        if rng.random() < 0.6:
            if lost and rng.random() < 0.45:
                named = tuple(rng.sample(lost, rng.randint(1, min(2, len(lost)))))
            else:
                taken = [(edit, Treatment.FORGET) for edit in self._taken_out(source)]
        victims = {source.messages[start] for (start, _, _), _ in taken}
        for _ in range(rng.randint(0 if taken or named else 1, 3)):
            edit = self._amortized(source)
            if all(_apart(edit, other) for other, _ in taken):
                taken.append((edit, Treatment.AMORTIZE))
        taken.sort()
        edits, tail = tuple(edit for edit, _ in taken), draw_tokens(rng, rng.choice([1, 7, 30]))
        return ForgettingTurn(
            edits,
            tuple(how for _, how in taken),
            tail,
            named,
            frozenset({*named, *victims}),
            self._edited(source, edits, tail),
            draw_answer(rng),
            self._new_message(),
            source,
        )

    def _taken_out(self, source: Text) -> list[Edit]:
        """Edits that take every token of one message out, perhaps for a stub."""
        victim = self._rng.choice(source.messages)
        stub = draw_tokens(self._rng, self._rng.choice([0, 3]))
        spans = [(start, end) for message, start, end in source.runs() if message == victim]
        return [(start, end, () if number else stub) for number, (start, end) in enumerate(spans)]

    def _amortized(self, source: Text) -> Edit:
        """A message cut out or shortened, or a new one put in."""
        rng = self._rng
        _, start, end = rng.choice(source.runs())
        match rng.choice(["cut", "cut", "shorten", "insert"]):
            case "cut":
                return (start, end, draw_tokens(rng, rng.choice([0, 0, 4])))
            case "shorten":
                return (rng.randint(start, end - 1), end, draw_tokens(rng, rng.choice([0, 2])))
            case _:
                return (start, start, draw_tokens(rng, 6))

    def _edited(self, source: Text, edits: Sequence[Edit], tail: Sequence[int]) -> Text:
        """Apply the edits to the source; new text in a message's place is that message's."""
        messages: list[int] = []
        at = 0
        for start, end, new in edits:
            owner = source.messages[start] if start < end else self._new_message()
            messages += [*source.messages[at:start], *[owner] * len(new)]
            at = end
        messages += [*source.messages[at:], *[self._new_message()] * len(tail)]
        return Text(tuple(edited_prompt(source.tokens, edits, tail)), tuple(messages))

    def _shows(self, turn: ForgettingTurn) -> bool:
        """Return True if the prompt leaves every earlier path no later than at its first edit."""
        first = turn.edits[0][0] if turn.edits else len(turn.source.tokens)
        return all(_common(turn.prompt.tokens, path.tokens) <= first for path in self._paths)


def _apart(left: Edit, right: Edit) -> bool:
    """Return True if two edits neither overlap nor begin at one place."""
    (start, end, _), (other_start, other_end, _) = sorted([left, right])
    return end <= other_start and start != other_start and other_start <= other_end


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def draw_tale(seed: int) -> Tale:
    """A conversation of an opening and two to four edited turns."""
    return _Teller(seed).tale()
