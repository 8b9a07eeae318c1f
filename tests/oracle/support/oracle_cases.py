"""Random conversations: what is edited, turn by turn, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oracle_engine import Edit, Treatment, edited_prompt, kept_edits
from oracle_models import MODEL_NAMES, VOCAB

MAX_EDITS = 8
CI_CASES = 39
"""Random conversations per model in every run of the tests."""
NIGHTLY_BLOCKS = 10
_NIGHTLY_BLOCK = 80
_DECODED = 2


def ci_seeds(name: str) -> range:
    """The cases that every run of the tests plays on a model."""
    first = 1000 * MODEL_NAMES.index(name)
    return range(first, first + CI_CASES)


def nightly_seeds(name: str, block: int) -> range:
    """One of the ``NIGHTLY_BLOCKS`` blocks of cases that the nightly run plays on a model."""
    first = 1_000_000 + _NIGHTLY_BLOCK * (block + NIGHTLY_BLOCKS * MODEL_NAMES.index(name))
    return range(first, first + _NIGHTLY_BLOCK)


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
    """Edits of the turn before, and the prompt's text after them."""

    edits: tuple[Edit, ...]
    treatments: tuple[Treatment, ...]
    """One per edit."""
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

    def sources(self) -> Iterator[tuple[tuple[int, ...], EditedTurn]]:
        """Each edited turn with the tokens that it edits."""
        source = (*self.opening, *self.opening_answer.tokens)
        for turn in self.turns:
            yield source, turn
            source = (*edited_prompt(source, turn.edits, turn.tail), *turn.answer.tokens)


def draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def draw_answer(rng: random.Random) -> Answer:
    """Two tokens that are fed and one that is not."""
    return Answer(draw_tokens(rng, _DECODED), rng.randrange(VOCAB))


def draw_case(seed: int, *, min_edits: int = 1, max_turns: int = 3) -> Case:
    """A conversation of one opening and 1 to ``max_turns`` edited turns."""
    rng = random.Random(seed)
    opening, answer = draw_tokens(rng, rng.randint(150, 400)), draw_answer(rng)
    paths = [(*opening, *answer.tokens)]
    exact = len(paths[0])
    turns: list[EditedTurn] = []
    for index in range(rng.randint(1, max_turns)):
        turn = _draw_turn(rng, paths, exact, min_edits, kept_behind=0 if index else 24)
        paths.append((*edited_prompt(paths[-1], turn.edits, turn.tail), *turn.answer.tokens))
        exact = _exact_after(exact, turn, len(paths[-1]))
        turns.append(turn)
    return Case(seed, rng.choice([48, 64, 128, 512]), opening, answer, tuple(turns))


def _draw_turn(
    rng: random.Random,
    paths: Sequence[tuple[int, ...]],
    exact: int,
    min_edits: int,
    kept_behind: int,
) -> EditedTurn:
    """One edited turn; at least ``kept_behind`` tokens of the source are reused after its first
    edit, and ``exact`` of its leading tokens were never spliced."""
    while True:
        edits = _draw_edits(rng, len(paths[-1]), rng.randint(min_edits, MAX_EDITS))
        treatments = _draw_treatments(rng, edits, exact)
        tail = draw_tokens(rng, rng.choice([0, 1, 7, 30]))
        prompt = edited_prompt(paths[-1], edits, tail)
        kept = _kept_behind(edits, treatments, len(paths[-1]))
        if 64 <= len(prompt) <= 900 and kept >= kept_behind:
            turn = EditedTurn(
                edits, treatments, tail, rng.choice([0, 0, 0, 1, 5]), draw_answer(rng)
            )
            if _first_edit_shows(prompt, edits, paths):
                return turn


def _draw_treatments(
    rng: random.Random, edits: Sequence[Edit], exact: int
) -> tuple[Treatment, ...]:
    """Half of the turns only amortize; in the others the modes are mixed.

    A span is forgotten only where no spliced KV lies before it: there its first reader is its own
    first token, whatever an engine knows of earlier splices. After splices and by name:
    :mod:`oracle_messages`.
    """
    if rng.random() < 0.5:
        return (Treatment.AMORTIZE,) * len(edits)
    drawn: list[Treatment] = []
    for index, (start, _, _) in enumerate(edits):
        others = [Treatment.EXACT, *([Treatment.FORGET] * 2 if start <= exact else [])]
        # The first edit amortizes more often: after another one nothing is reused.
        drawn.append(rng.choice([Treatment.AMORTIZE] * (2 if index else 6) + others))
    return tuple(drawn)


def _exact_after(exact: int, turn: EditedTurn, length: int) -> int:
    """The number of an edited turn's leading tokens that were never spliced, given its source's."""
    first = turn.edits[0][0]
    if exact < first:
        return exact
    return first if turn.treatments[0] is Treatment.AMORTIZE else length


def _kept_behind(edits: Sequence[Edit], treatments: Sequence[Treatment], length: int) -> int:
    """Source tokens after the first edit that are reused, less those that may fall below the
    sink."""
    kept = kept_edits(treatments)
    end = edits[kept][0] if kept < len(edits) else length
    cut = sum(stop - start for start, stop, _ in edits[:kept])
    return end - edits[0][0] - cut - max(0, 32 - edits[0][0])


def _first_edit_shows(
    prompt: Sequence[int], edits: Sequence[Edit], paths: Sequence[tuple[int, ...]]
) -> bool:
    """Return True if the prompt leaves every earlier turn's path no later than at its first edit.

    Where it doesn't, by a coincidence of tokens (the first token after a deletion equals the first
    deleted one, say), an engine may rightly take the exact prefix to be longer.
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
                written = rng.choice([1, 2, 9, 60, end - start])
                edits.append((start, end, draw_tokens(rng, written)))
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
    """300 tokens, and one edit at position 60 that moves the 240 after it by ``delta``."""
    rng = random.Random(seed)
    opening, answer = draw_tokens(rng, 300), draw_answer(rng)
    source = (*opening, *answer.tokens)
    tail = draw_tokens(rng, 5)
    while True:
        edit = (60, 60, draw_tokens(rng, delta)) if delta > 0 else (60, 60 - delta, ())
        if delta == 0:
            edit = (60, 70, draw_tokens(rng, 10))
        if _first_edit_shows(edited_prompt(source, (edit,), tail), (edit,), [source]):
            turn = EditedTurn((edit,), (Treatment.AMORTIZE,), tail, 0, answer)
            return Case(seed, 128, opening, answer, (turn,))
        opening = draw_tokens(rng, 300)
        source = (*opening, *answer.tokens)


def traits(case: Case) -> frozenset[str]:
    """The :data:`TRAITS` that a conversation exercises; from the edits alone."""
    found = {"several turns"} if len(case.turns) > 1 else set()
    for source, turn in case.sources():
        found |= _traits_of_turn(turn, len(source))
    return frozenset(found)


TRAITS = frozenset(
    {
        *(f"{count} edits in a turn" for count in range(1, MAX_EDITS + 1)),
        "insertion",
        "deletion",
        "replacement",
        "adjacent edits",
        "edit at the start",
        "edit at the end",
        "kept tokens moved back",
        "kept tokens moved forward",
        "kept tokens not moved",
        "several turns",
        "amortize and forget in a turn",
        "amortize and exact in a turn",
        "all three modes in a turn",
        "boundary recomputed",
    }
)
"""Everything that the cases of one run must exercise together."""


def _traits_of_turn(turn: EditedTurn, length: int) -> set[str]:
    found = {f"{len(turn.edits)} edits in a turn"}
    shift = 0
    ends = [start for start, _, _ in turn.edits[1:]] + [length]
    reused = kept_edits(turn.treatments)
    for index, ((start, end, new), stop) in enumerate(zip(turn.edits, ends, strict=True)):
        found.add("insertion" if start == end else "replacement" if new else "deletion")
        shift += len(new) - (end - start)
        if end == stop < length:
            found.add("adjacent edits")
        if index < reused and stop - end > turn.boundary and end + shift >= 32:
            direction = "not moved" if not shift else "moved forward" if shift > 0 else "moved back"
            found.add(f"kept tokens {direction}")
            if turn.boundary:
                found.add("boundary recomputed")
    if turn.edits[0][0] == 0:
        found.add("edit at the start")
    if turn.edits[-1][1] == length:
        found.add("edit at the end")
    return found | _mixtures(turn.treatments)


def _mixtures(treatments: Sequence[Treatment]) -> set[str]:
    """Mixed modes, where edits that amortize come before the others and so do take effect."""
    if treatments[0] is not Treatment.AMORTIZE:
        return set()
    others = {treatment.value for treatment in treatments} - {"amortize"}
    found = {f"amortize and {other} in a turn" for other in others}
    return found | ({"all three modes in a turn"} if len(others) == 2 else set())
