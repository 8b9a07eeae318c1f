"""Random sessions for a real server: what is edited, turn by turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from equality_kit import Played, PlayedSession, draw_tokens

from leyline_engine.contract import CopySegment, Directive, LiteralSegment


def draw_directives(rng: random.Random, source: Sequence[int], most: int) -> list[Directive]:
    """1 to ``most`` edits of a source: deletions, insertions, replacements, some adjacent.

    Each leaves the source at its start: the first token that comes differs from the one that was.
    """
    while True:
        cuts = sorted(rng.sample(range(len(source)), 2 * rng.randint(1, most)))
        drawn = [
            _draw_directive(rng, start, end)
            for start, end in zip(cuts[::2], cuts[1::2], strict=True)
        ]
        first = drawn[0]
        after = (*first.replacement, *source[first.end :])
        if first.start and after and after[0] != source[first.start]:
            return drawn


def _draw_directive(rng: random.Random, start: int, end: int) -> Directive:
    end = min(end, start + rng.choice([1, 5, 30, 90]))
    match rng.choice(["delete", "insert", "replace"]):
        case "delete":
            return Directive(start, end)
        case "insert":
            return Directive(start, start, draw_tokens(rng, rng.choice([1, 8, 70])))
        case _:
            return Directive(start, end, draw_tokens(rng, rng.choice([1, 8, end - start, 70])))


def play_random(session: PlayedSession, rng: random.Random, turns: int) -> Iterator[Played]:
    """An opening, then ``turns`` edits of the last turn or of an earlier one, or pieces of two."""
    yield session.open(draw_tokens(rng, rng.randint(250, 420)))
    for _ in range(turns):
        if len(session.turns) > 1 and rng.random() < 0.25:
            yield _compose(session, rng)
            continue
        source = session.turns[-1] if rng.random() < 0.7 else rng.choice(session.turns)
        # Four edits leave long copies between them oftener than eight do.
        directives = draw_directives(rng, source.tokens, rng.choice([1, 4, 8]))
        yield session.edit(source, directives, draw_tokens(rng, rng.choice([0, 1, 6, 40])))


def _compose(session: PlayedSession, rng: random.Random) -> Played:
    """The start of one turn, something new, a piece of another, and a tail."""
    one, two = rng.sample(session.turns, 2)
    prefix = rng.randint(40, 120)
    start = rng.randint(10, 60)
    end = rng.randint(start + 80, len(two.tokens) - 1)
    new, tail = draw_tokens(rng, rng.choice([3, 40])), draw_tokens(rng, rng.choice([1, 6]))
    prompt = (*one.tokens[:prefix], *new, *two.tokens[start:end], *tail)
    at = prefix + len(new)
    segments = (
        CopySegment(0, 0, prefix, 0),
        LiteralSegment(prefix, len(new)),
        CopySegment(1, start, end, at),
        LiteralSegment(at + end - start, len(tail)),
    )
    return session.compose([one, two], segments, prompt)
