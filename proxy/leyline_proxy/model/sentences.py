"""Sentences of answers, by hash: they show that a later message list quotes an answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b

MAX_SENTENCES = 1024
"""Sentences of an answer that are remembered; the first."""

QUOTED_CHARACTERS = 240
"""Fewest characters, in whole sentences of one answer, that show that it is quoted."""

QUOTED_SHARE = 0.5
"""Smallest share of an answer's characters, too: who quotes less passes on a passage, not it."""

_SHORTEST = 16
"""Characters of the shortest sentence that counts; shorter ones are common."""

_SPLIT = re.compile(r"[\n\r]+|(?<=[.!?:;])\s+|(?<=[。！？；])")

Sentence = tuple[int, int]
"""Keyed hash of a sentence, and its length in characters."""


def sentences_of(
    text: str, key: bytes = b"", *, most: int | None = MAX_SENTENCES
) -> tuple[Sentence, ...]:
    """Return a text's sentences, each once: lines, cut after their stops, without outer space.

    Args:
        key: at most 64 bytes; without it, sentences can't be guessed from their hashes.
        most: number of sentences to return, the first; None for all.
    """
    found: dict[Sentence, None] = {}
    for sentence in _cut(text):
        digest = blake2b(sentence.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest()
        found[int.from_bytes(digest, "little"), len(sentence)] = None
        if len(found) == most:
            break
    return tuple(found)


def quotes_answer(answer: Iterable[Sentence], given: Collection[Sentence]) -> bool:
    """Return True if a message list has most of an answer, word for word, and at length.

    Args:
        answer: sentences of an answer.
        given: those of the list.
    """
    return _is_most(*_lengths(answer, given))


def retells(
    told: Iterable[Sentence], said: Iterable[Sentence], given: Collection[Sentence]
) -> bool:
    """Return True if a text has most of a conversation, word for word, of both its sides.

    Args:
        told: sentences of the user.
        said: those of the model.
        given: those of the text.
    """
    told_quoted, told_whole = _lengths(told, given)
    said_quoted, said_whole = _lengths(said, given)
    # Who repeats a task alone has not seen how it went on.
    both = said_quoted >= QUOTED_SHARE * said_whole > 0 and told_quoted >= QUOTED_SHARE * told_whole
    return both and _is_most(told_quoted + said_quoted, told_whole + said_whole)


def _lengths(text: Iterable[Sentence], given: Collection[Sentence]) -> tuple[int, int]:
    """Return the characters of a text that are in the given sentences, and all of them."""
    lengths = [(length, (digest, length) in given) for digest, length in text]
    quoted = sum(length for length, is_quoted in lengths if is_quoted)
    return quoted, sum(length for length, _ in lengths)


def _is_most(quoted: int, whole: int) -> bool:
    return quoted >= max(QUOTED_CHARACTERS, QUOTED_SHARE * whole)


def _cut(text: str) -> Iterator[str]:
    for piece in _SPLIT.split(text):
        sentence = piece.strip()
        if len(sentence) >= _SHORTEST:
            yield sentence
