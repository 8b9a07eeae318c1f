"""Random conversations: what is edited, turn by turn, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from oracle_engine import Edit, edited_prompt
from oracle_models import VOCAB

MAX_EDITS = 6
_DECODED = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens of a turn: fed ones, and a last one that is never fed."""

    fed: tuple[int, ...]
    unfed: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.fed, self.unfed)


@dataclass(frozen=True, slots=True)
class EditedTurn:
    """Edits of the turn before, and what the prompt has behind them."""

    edits: tuple[Edit, ...]
    tail: tuple[int, ...]
    boundary: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Case:
    """A whole conversation."""

    seed: int
    chunk_tokens: int
    opening: tuple[int, ...]
    opening_answer: Answer
    turns: tuple[EditedTurn, ...]


def draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def draw_answer(rng: random.Random) -> Answer:
    """Four tokens that are fed and one that is not."""
    return Answer(draw_tokens(rng, _DECODED), rng.randrange(VOCAB))


def draw_case(seed: int, *, min_edits: int = 1, max_turns: int = 3) -> Case:
    """A conversation of one opening and 1 to ``max_turns`` edited turns."""
    rng = random.Random(seed)
    opening, answer = draw_tokens(rng, rng.randint(150, 400)), draw_answer(rng)
    paths = [(*opening, *answer.tokens)]
    turns: list[EditedTurn] = []
    for index in range(rng.randint(1, max_turns)):
        turn = _draw_turn(rng, paths, min_edits, kept_behind=0 if index else 24)
        paths.append((*edited_prompt(paths[-1], turn.edits, turn.tail), *turn.answer.tokens))
        turns.append(turn)
    return Case(seed, rng.choice([48, 64, 128, 512]), opening, answer, tuple(turns))


def _draw_turn(
    rng: random.Random, paths: Sequence[tuple[int, ...]], min_edits: int, kept_behind: int
) -> EditedTurn:
    """One edited turn; at least ``kept_behind`` tokens of the source lie behind its first edit
    and far enough from the prompt's start to be reused."""
    while True:
        edits = _draw_edits(rng, len(paths[-1]), rng.randint(min_edits, MAX_EDITS))
        tail = draw_tokens(rng, rng.choice([0, 1, 7, 30]))
        prompt = edited_prompt(paths[-1], edits, tail)
        fits = 64 <= len(prompt) <= 900 and _kept_behind(edits, len(paths[-1])) >= kept_behind
        if fits and _first_edit_shows(prompt, edits, paths):
            return EditedTurn(edits, tail, rng.choice([0, 0, 0, 1, 5]), draw_answer(rng))


def _kept_behind(edits: Sequence[Edit], length: int) -> int:
    """Source tokens behind the first edit that stay, less what may fall below the sink."""
    kept = length - edits[0][0] - sum(end - start for start, end, _ in edits)
    return kept - max(0, 32 - edits[0][0])


def _first_edit_shows(
    prompt: Sequence[int], edits: Sequence[Edit], paths: Sequence[tuple[int, ...]]
) -> bool:
    """Whether the prompt leaves every earlier turn's path no later than at its first edit.

    Where it doesn't, by a coincidence of tokens (the first token behind a deletion equals the
    first deleted one, say), an engine may rightly take the exact prefix to be longer.
    """
    first = edits[0][0]
    return all(_common(prompt, path) <= first for path in paths)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _draw_edits(rng: random.Random, length: int, count: int) -> tuple[Edit, ...]:
    """Sorted edits without overlap: deletions, insertions, replacements, some adjacent."""
    cuts = sorted(rng.sample(range(length + 1), 2 * count))
    if rng.random() < 0.25:
        cuts[0] = 0
    if rng.random() < 0.25:
        cuts[-1] = length
    edits: list[Edit] = []
    for start, cut in zip(cuts[0::2], cuts[1::2], strict=True):
        end = cut if cut == length else min(cut, start + rng.choice([1, 4, 20, 80]))
        match rng.choice(["delete", "insert", "replace", "replace"]):
            case "delete":
                edits.append((start, end, ()))
            case "insert":
                edits.append((start, start, draw_tokens(rng, rng.choice([1, 2, 9, 60]))))
            case _:
                edits.append((start, end, draw_tokens(rng, rng.choice([1, 2, 9, 60]))))
    return _some_adjacent(rng, edits)


def _some_adjacent(rng: random.Random, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Let some edits begin where the one before them ends."""
    joined: list[Edit] = []
    for start, end, replacement in edits:
        if joined and joined[-1][1] > joined[-1][0] and rng.random() < 0.2:
            joined.append((joined[-1][1], end, replacement))
        else:
            joined.append((start, end, replacement))
    return tuple(joined)


def single_edit_case(seed: int, delta: int) -> Case:
    """300 tokens, and one edit at position 60 that moves the 240 behind it by ``delta``."""
    rng = random.Random(seed)
    opening, answer = draw_tokens(rng, 300), draw_answer(rng)
    source = (*opening, *answer.tokens)
    tail = draw_tokens(rng, 5)
    while True:
        edit = (60, 60, draw_tokens(rng, delta)) if delta > 0 else (60, 60 - delta, ())
        if delta == 0:
            edit = (60, 70, draw_tokens(rng, 10))
        if _first_edit_shows(edited_prompt(source, (edit,), tail), (edit,), [source]):
            return Case(seed, 128, opening, answer, (EditedTurn((edit,), tail, 0, answer),))
        opening = draw_tokens(rng, 300)
        source = (*opening, *answer.tokens)
