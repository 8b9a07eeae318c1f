"""The conversations of the three-arm benchmark, and their edits. Pure.

A session is a long system prompt and six user turns, on four themes. It is built turn by turn
(``build``); then a word of the second turn is replaced with a synonym of another length and the
conversation is sent up to there (``edit``); then the whole edited conversation is sent
(``replay``)::

    build 6   system  t1 a1  t2 ─ word ──── a2  t3 a3 … t6
    edit      system  t1 a1  t2 ─ synonym ─                      word replaced: one gap
    replay    system  t1 a1  t2 ─ synonym ─ a2  t3 a3 … t6       from edit, then from build 6
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.contract import (
    ATTENTION_SINK,
    CopySegment,
    Directive,
    EditPayload,
    LineageRun,
    LiteralSegment,
    Segment,
    SourceRef,
    token_digest,
)

TURNS = 6
EDITED_TURN = 1
"""Index of the user turn with the replaced word."""
_SYSTEM_TOKENS = 6_400
_TURN_TOKENS = 1_745
_FULL_TOKENS = 17_000

_THEMES = (
    ("cooking", "risotto", "slow-cooked saffron paella", "consistency", "kitchen"),
    ("programming", "quicksort", "bottom-up merge sorting", "running time", "code base"),
    ("history", "feudalism", "early modern mercantilism", "chronology", "archive"),
    ("science", "osmosis", "facilitated membrane diffusion", "direction", "laboratory"),
)
_LEVELS = ("beginner", "student", "teacher", "hobbyist", "professional", "parent")
_FILLERS = (
    "Keep in mind that my {place} is small and that I have {n} minutes on a weekday.",
    "Last week I tried {n} times and the {aspect} came out differently each time.",
    "A {level} told me to start over after step {n}, which did not help with the {aspect}.",
    "Please explain step {n} as you would to a {level} who has never seen a {place}.",
    "I wrote down {n} notes about the {aspect}; tell me which of them a {level} may ignore.",
    "If the {place} were {n} times larger, would the {aspect} be easier for a {level}?",
)

_LONGEST_TOKEN = 8
"""Largest average number of characters per token of English."""


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of one session's parts."""

    system: int
    turn: int

    @classmethod
    def scaled(cls, scale: float) -> Size:
        """Return the workload of 17,000 tokens times ``scale``."""
        return cls(round(_SYSTEM_TOKENS * scale), round(_TURN_TOKENS * scale))

    @classmethod
    def prompt_tokens(cls, scale: float) -> int:
        """Return the approximate tokens of a whole conversation."""
        return round(_FULL_TOKENS * scale)


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation in tokens."""

    builds: tuple[tuple[int, ...], ...]
    """Prompts of the build phase, each with the one before as a prefix."""
    word: tuple[int, int]
    """Span of the word in the builds."""
    synonym: tuple[int, ...]

    @property
    def edit_end(self) -> int:
        """End of the edited turn's request, in the builds."""
        return len(self.builds[EDITED_TURN])

    @property
    def shift(self) -> int:
        """Distance by which everything after the word moves."""
        return len(self.synonym) - (self.word[1] - self.word[0])

    @property
    def edited(self) -> tuple[int, ...]:
        """Prompt of the edit phase."""
        return self._swapped(self.builds[EDITED_TURN])

    @property
    def replayed(self) -> tuple[int, ...]:
        """Prompt of the replay phase."""
        return self._swapped(self.builds[-1])

    def _swapped(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        start, end = self.word
        return tokens[:start] + self.synonym + tokens[end:]


@dataclass(frozen=True, slots=True)
class Script:
    """The texts of one session, to be tokenised separately."""

    system: str
    opening: tuple[str, str, str, str]
    """The edited turn: the text before the word, the word, its synonym, the text after it."""
    follow: str
    role: str
    answer: str
    turns: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts, in the order for :func:`assemble`."""
        return (self.system, *self.opening, self.follow, self.role, self.answer, *self.turns)


def write_script(seed: str, size: Size) -> Script:
    """Return the texts of one session; another seed gives other words throughout."""
    chance = random.Random(seed)
    theme, word, synonym, aspect, place = chance.choice(_THEMES)

    def filler(tokens: int) -> str:
        text = ""
        while len(text) < _LONGEST_TOKEN * tokens:
            text += " " + chance.choice(_FILLERS).format(
                place=place, aspect=aspect, n=chance.randrange(2, 97), level=chance.choice(_LEVELS)
            )
        return text

    return Script(
        system=f"System: Session {seed}. You know all about {theme}." + filler(size.system),
        opening=(
            f"\nUser: How do I get the {aspect} of",
            f" {word}",
            f" {synonym}",
            f" right when I'm a {chance.choice(_LEVELS)}?",
        ),
        follow="\nUser: And what else about it?",
        role="\nAssistant:",
        answer=f" Take your time, and write down the {aspect} you see.",
        turns=tuple(filler(size.turn) for _ in range(TURNS)),
    )


def assemble(size: Size, pieces: Sequence[list[int]]) -> Session:
    """Return a session from the tokens of a script's texts, cut to size.

    Raises:
        ValueError: too small for its own words, or a word and a synonym of equal length.
    """
    system, before, word, synonym, behind, follow, role, answer, *turns = pieces
    if len(word) == len(synonym):
        raise ValueError(f"word and synonym come to {len(word)} tokens each: nothing would move")
    prompt = _cut(system, size.system)
    builds: list[tuple[int, ...]] = []
    span = (0, 0)
    for turn, filler in enumerate(turns):
        opening = follow
        if turn == EDITED_TURN:
            opening = before + word + behind
            start = len(prompt) + len(before)
            span = (start, start + len(word))
        prompt = prompt + opening + _cut(filler, size.turn - len(opening)) + role
        builds.append(tuple(prompt))
        prompt = prompt + answer
    return Session(tuple(builds), span, tuple(synonym))


def _cut(tokens: list[int], length: int) -> list[int]:
    if not 0 < length <= len(tokens):
        raise ValueError("the scale is too small for the words of a turn")
    return tokens[:length]


@dataclass(frozen=True, slots=True)
class SessionName:
    """A session's identity in an engine. Only its scope sees its splices."""

    scope: str
    session: str

    def registered(self, turn: str) -> EditPayload:
        """Return the payload of a turn without an edit."""
        return EditPayload(session=self.session, scope=self.scope, turn=turn)


@dataclass(frozen=True, slots=True)
class Retained:
    """A turn that the engine keeps: its tokens with the generated ones, and its lineage map."""

    turn: str
    tokens: tuple[int, ...]
    lineage: tuple[LineageRun, ...] = ()

    @property
    def ref(self) -> SourceRef:
        """The reference for a payload."""
        return SourceRef(self.turn, len(self.tokens), token_digest(self.tokens))


@dataclass(frozen=True, slots=True)
class MustPrefill:
    """Tokens of one request that no source can provide."""

    replacements: int
    """Sum of the replacements that haven't been computed."""
    tail: int
    """Tokens after the last copy; the last token's logits are always needed."""
    sink: int
    """Positions of the attention sink that aren't in the exact prefix."""
    boundary: int
    """Tokens after a seam that the caller chose to compute again."""
    staged: int
    """Gaps between copies; each needs a separate forward."""

    @property
    def total(self) -> int:
        """All of these tokens."""
        return self.replacements + self.tail + self.sink + self.boundary


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    """One request of the splice arm."""

    payload: EditPayload
    must: MustPrefill


def edit_turn(session: Session, name: SessionName, last: Retained, boundary: int) -> WorkloadTurn:
    """Return the edit phase's request: from the last build, with one replacement.

    Args:
        name: of the session.
        last: the last build.
        boundary: number of tokens after the replacement to compute again.
    """
    start, end = session.word
    resumed = end + boundary
    gap = len(session.synonym) + boundary
    segments: tuple[Segment, ...] = (
        CopySegment(0, 0, start, 0),
        LiteralSegment(start, gap),
        CopySegment(0, resumed, session.edit_end, start + gap),
    )
    payload = EditPayload(
        session=name.session,
        scope=name.scope,
        turn="edit",
        sources=(last.ref,),
        directives=(Directive(start, end, session.synonym),),
        segments=segments,
    )
    return WorkloadTurn(payload, MustPrefill(len(session.synonym), 1, _sink(start), boundary, 1))


def replay_turn(
    session: Session, name: SessionName, last: Retained, edited: Retained, boundary: int
) -> WorkloadTurn:
    """Return the replay phase's request: the edit up to the edited turn, then the last build.

    Arguments as for :func:`edit_turn`; ``edited`` is the edit phase's request.
    """
    seam = len(session.edited)
    segments: list[Segment] = [CopySegment(0, 0, seam, 0)]
    if boundary:
        segments.append(LiteralSegment(seam, boundary))
    segments.append(
        CopySegment(1, session.edit_end + boundary, len(session.builds[-1]), seam + boundary)
    )
    payload = EditPayload(
        session=name.session,
        scope=name.scope,
        turn="replay",
        sources=(edited.ref, last.ref),
        segments=tuple(segments),
        lineage=edited.lineage,
    )
    must = MustPrefill(0, 1, _sink(seam), boundary, 1 if boundary else 0)
    return WorkloadTurn(payload, must)


def _sink(prefix: int) -> int:
    return max(0, ATTENTION_SINK - prefix)
