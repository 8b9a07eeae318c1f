"""Tokenising a prompt at the cost of what is new in it.

A tokenizer cuts its input at special tokens first and treats each piece on its own, so pieces can
be tokenised once and remembered. In a chat a piece is about a message: an append of k tokens costs
O(k), and what remains per turn is splitting and joining.

::

    text   <|im_start|> │ user↵Fix it. │ <|im_end|> │ ↵ │ <|im_start|> │ …
    pieces   special        remembered     special    ·      special
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

MAX_REMEMBERED_CHARS = 64 << 20
"""Text whose tokens are remembered, in characters; the least recently used pieces go first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one piece of text, and the character at which each begins."""

    ids: array[int]
    starts: array[int]


class Encoded:
    """A tokenised text: ids, and the way from characters to tokens."""

    def __init__(self, pieces: list[Piece], offsets: list[int]) -> None:
        self.ids: array[int] = array("q")
        self._pieces = pieces
        self._offsets = offsets
        self._token_offsets: list[int] = []
        for piece in pieces:
            self._token_offsets.append(len(self.ids))
            self.ids += piece.ids

    def token_at(self, char: int) -> int:
        """Index of the first token that begins at character ``char`` or behind it."""
        index = bisect_right(self._offsets, char) - 1
        if index < 0:
            return 0
        piece = self._pieces[index]
        return self._token_offsets[index] + bisect_left(piece.starts, char - self._offsets[index])


class PieceTokenizer:
    """A tokenizer that remembers pieces, where its own rules allow that.

    Args:
        tokenizer_json: the ``tokenizer.json`` document. Special tokens that swallow neighbouring
            white space, and pre-tokenizers that treat the beginning of the text differently, make
            pieces depend on each other; then every text is tokenised as a whole.
    """

    def __init__(
        self, tokenizer_json: str, *, max_remembered_chars: int = MAX_REMEMBERED_CHARS
    ) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        document = json.loads(tokenizer_json)
        specials = _separable_specials(document)
        self.remembers = bool(specials)
        # Leftmost, then longest: how the tokenizer itself looks for added tokens.
        names = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._known: OrderedDict[str, Piece] = OrderedDict()
        self._chars = 0
        self._max_chars = max_remembered_chars
        self._lock = Lock()

    @property
    def remembered_chars(self) -> int:
        """Characters of text whose tokens are remembered now."""
        return self._chars

    def encode(self, text: str) -> Encoded:
        """Token ids of ``text``; special tokens are recognised, none is added."""
        pieces: list[Piece] = []
        offsets: list[int] = []
        for start, part in self._split(text):
            pieces.append(self._piece(part))
            offsets.append(start)
        return Encoded(pieces, offsets)

    def _split(self, text: str) -> Iterator[tuple[int, str]]:
        cursor = 0
        for found in self._special.finditer(text) if self._special else ():
            if found.start() > cursor:
                yield cursor, text[cursor : found.start()]
            yield found.start(), found[0]
            cursor = found.end()
        if cursor < len(text):
            yield cursor, text[cursor:]

    def _piece(self, part: str) -> Piece:
        if not self.remembers:
            return self._tokenise(part)
        with self._lock:
            piece = self._known.get(part)
            if piece is not None:
                self._known.move_to_end(part)
                return piece
        piece = self._tokenise(part)
        with self._lock:
            if part not in self._known:
                self._known[part] = piece
                self._chars += len(part)
            while self._chars > self._max_chars:
                forgotten, _ = self._known.popitem(last=False)
                self._chars -= len(forgotten)
        return piece

    def _tokenise(self, part: str) -> Piece:
        encoding = self._tokenizer.encode(part, add_special_tokens=False)
        return Piece(array("q", encoding.ids), array("q", [start for start, _ in encoding.offsets]))


def _separable_specials(document: dict[str, Any]) -> list[str]:
    """Added tokens at which the text falls into independent pieces; none where it doesn't."""
    added = document.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return []
    normalizer, pre_tokenizer = document.get("normalizer"), document.get("pre_tokenizer")
    normalizes = normalizer is not None and normalizer.get("normalizers") != []
    if any(token.get("single_word") or (normalizes and token.get("normalized")) for token in added):
        return []
    if not (_position_free(normalizer) and _position_free(pre_tokenizer)):
        return []
    return [token["content"] for token in added]


def _position_free(step: dict[str, Any] | None) -> bool:
    """Whether a normalizer or pre-tokenizer treats a text's beginning like its middle."""
    if step is None:
        return True
    kind = step.get("type")
    if kind == "Sequence":
        inner = step.get("pretokenizers") or step.get("normalizers") or []
        return all(_position_free(part) for part in inner)
    if kind == "ByteLevel":
        return not step.get("add_prefix_space")
    if kind == "Split":
        return True
    return kind in {"NFC", "NFKC", "NFD", "NFKD", "Digits", "Punctuation", "Lowercase"}
