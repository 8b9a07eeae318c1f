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


def sentences_of(text: str, key: bytes = b"") -> tuple[Sentence, ...]:
    """Return a text's sentences, each once: lines, cut after their stops, without outer space.

    Args:
        key: at most 64 bytes; without it, sentences can't be guessed from their hashes.
    """
    found: dict[Sentence, None] = {}
    for sentence in _cut(text):
        digest = blake2b(sentence.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest()
        found[int.from_bytes(digest, "little"), len(sentence)] = None
        if len(found) == MAX_SENTENCES:
            break
    return tuple(found)


def quotes_answer(answer: Iterable[Sentence], given: Collection[Sentence]) -> bool:
    """Return True if a message list has most of an answer, word for word, and at length.

    Args:
        answer: sentences of an answer.
        given: those of the list.
    """
    lengths = [(length, (digest, length) in given) for digest, length in answer]
    quoted = sum(length for length, is_quoted in lengths if is_quoted)
    whole = sum(length for length, _ in lengths)
    return quoted >= max(QUOTED_CHARACTERS, QUOTED_SHARE * whole)


def _cut(text: str) -> Iterator[str]:
    for piece in _SPLIT.split(text):
        sentence = piece.strip()
        if len(sentence) >= _SHORTEST:
            yield sentence
