"""Text from tokens, one token at a time."""

from __future__ import annotations

from collections.abc import Callable

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns a growing token sequence into text without ever emitting half a character.

    A window of recent tokens is decoded again for each token, because a tokenizer may join
    tokens with spaces or bytes depending on their neighbours::

        tokens  … │ window start ── read so far ── new token │
                   text already known              text to emit
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._emitted = ""
        """Text of the window that has been emitted."""
        self._read = 0
        """Number of the window's tokens whose text has been emitted in full."""

    def feed(self, token: int) -> str:
        """Add a token; returns the text that is certain now, often one token's worth."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        # A trailing replacement character may be the first bytes of one that isn't complete.
        certain = text.removesuffix(_REPLACEMENT)
        fresh = certain[len(self._emitted) :]
        self._emitted += fresh
        if certain == text and fresh:
            self._advance()
        return fresh

    def flush(self) -> str:
        """Return the text still held back: bytes that never became a whole character."""
        text = self._decode(self._tokens) if self._tokens else ""
        fresh = text[len(self._emitted) :]
        self._emitted += fresh
        return fresh

    def _advance(self) -> None:
        """Drop tokens that the next one can't depend on; the last emitted ones stay."""
        del self._tokens[: self._read]
        self._emitted = self._decode(self._tokens)
        self._read = len(self._tokens)
