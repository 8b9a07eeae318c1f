"""Tokenisation of a prompt at the cost of its new part.

A tokenizer first cuts its input at special tokens and treats each piece separately, so pieces can
be tokenised once and remembered. In a chat a piece is about a message: an append of k tokens costs
O(k), plus splitting and joining per turn.

::

    text   <|im_start|> │ user↵Fix it. │ <|im_end|> │ ↵ │ <|im_start|> │ …
    pieces   special        remembered     special    ·      special
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from ..model.text_memory import NO_SESSION, Left, Reader, TextMemory
from .continuing import Beginnings
from .memoised.fragments import READER_BYTES

MAX_REMEMBERED_CHARS = 64 << 20
"""Characters of text whose tokens are remembered; the least recently used goes first."""

MAX_JOINED_BYTES = 96 << 20
"""Bytes of prompts that others may continue; the least recently used goes first."""

BYTES_PER_CHAR = 6
"""Approximate bytes per character of remembered text, with its tokens and their starts."""

_TOKEN_BYTES, _PIECE_BYTES = 8, 192

_LONG = 2048
"""Characters from which a text is tokenised as a batch of one: only batches let other threads run
meanwhile, the event loop's among them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one piece of text, and the character at which each begins."""

    ids: array[int]
    starts: array[int]


class Encoded:
    """A tokenised text: ids, and a map from characters to tokens.

    Args:
        before: another, whose first ``pieces`` pieces are the start of this one.
    """

    def __init__(self, before: Encoded | None = None, pieces: int = 0) -> None:
        self.ids: array[int] = array("q")
        self._pieces: list[Piece] = []
        self._offsets: list[int] = []
        self._token_offsets: list[int] = []
        self._asked: Sequence[int] = ()
        self._found: list[int] = []
        if before is not None and pieces:
            last = before._pieces[pieces - 1]
            self.ids = before.ids[: before._token_offsets[pieces - 1] + len(last.ids)]
            self._pieces = before._pieces[:pieces]
            self._offsets = before._offsets[:pieces]
            self._token_offsets = before._token_offsets[:pieces]
            # Before the start of the last piece, no other can come in between.
            count = bisect_left(before._asked, self._offsets[-1])
            self._asked, self._found = before._asked[:count], before._found[:count]

    @property
    def size(self) -> int:
        """Number of pieces."""
        return len(self._pieces)

    def add(self, piece: Piece, offset: int) -> None:
        """Append a piece that begins at character ``offset``."""
        self._pieces.append(piece)
        self._offsets.append(offset)
        self._token_offsets.append(len(self.ids))
        self.ids += piece.ids

    def tokens_at(self, chars: Sequence[int]) -> list[int]:
        """Return, for each of the sorted ``chars``, the first token that begins there or later.

        The caller must not change the list.
        """
        offsets, pieces, firsts = self._offsets, self._pieces, self._token_offsets
        if not pieces:
            return [0 for _ in chars]
        known = len(self._asked)
        same = known <= len(chars) and chars[:known] == self._asked
        found = self._found if same else []
        last = len(offsets) - 1
        index = max(0, bisect_right(offsets, chars[known - 1]) - 1) if same and known else 0
        for char in chars[len(found) :]:
            while index < last and offsets[index + 1] <= char:
                index += 1
            found.append(firsts[index] + bisect_left(pieces[index].starts, char - offsets[index]))
        self._asked, self._found = chars, found
        return found


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a text, prepared for joining.

    ::

        ↵       │ <|im_start|>user↵Fix it.<|im_end|> │ ↵
        head      core, already tokenised              tail
    """

    text: str
    head: str
    """Text up to the first special token: one piece with the text before."""
    core: Piece | None
    """Tokens from the first special token to the last; None if there is none, and all is head."""
    tail: str
    closed: bool
    """True if no special token can begin in here and end in the following text."""


class PieceTokenizer:
    """A tokenizer that remembers pieces, if its own rules allow that.

    Args:
        tokenizer_json: the ``tokenizer.json`` document. Special tokens that absorb neighbouring
            white space, and pre-tokenizers that treat the beginning of the text differently, make
            pieces depend on each other; then every text is tokenised as a whole.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        max_remembered_chars: int = MAX_REMEMBERED_CHARS,
        max_joined_bytes: int = MAX_JOINED_BYTES,
    ) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        document = json.loads(tokenizer_json)
        specials = _separable_specials(document)
        self.remembers = bool(specials)
        # Leftmost, then longest: the tokenizer's own search order for added tokens.
        names = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        half, extra = max_remembered_chars // 2, READER_BYTES // BYTES_PER_CHAR
        self._pieces: TextMemory[str, Piece] = TextMemory(half, reader_weight=extra)
        self._segments: TextMemory[str, Segment] = TextMemory(half, reader_weight=extra)
        self._joined: Beginnings[str, _Point] = Beginnings(max_joined_bytes)

    @property
    def remembered_chars(self) -> int:
        """Characters of text whose tokens are remembered now."""
        return self._pieces.weight + self._segments.weight

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session's texts and their tokens; see
        :meth:`~leyline_proxy.model.text_memory.TextMemory.forget`."""
        for memory in (self._pieces, self._segments, self._joined):
            memory.forget(tenant, session, demands)
        # The library keeps words of its own; it can't say whose.
        self._tokenizer.model._clear_cache()

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's texts."""
        memories = (self._pieces, self._segments, self._joined)
        return sum((each.left(tenant, session, demands) for each in memories), Left())

    def encode(self, text: str, reader: Reader = NO_SESSION) -> Encoded:
        """Return the token ids of ``text``; special tokens are recognised, none is added."""
        encoded = Encoded()
        for start, part in self._split(text):
            encoded.add(self.piece(part, reader) if self.remembers else self._tokenise(part), start)
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def join(self, texts: Iterable[str], reader: Reader = NO_SESSION) -> Encoded:
        """Return the token ids of the joined texts; each text joined before costs only a copy.

        Args:
            reader: the session whose prompt has the texts.
        """
        if not self.remembers:
            return self.encode("".join(texts))
        parts = list(texts)
        before = self._joined.find(parts, reader)
        join = _Join(self, before.value if before is not None else None, reader)
        done = len(before.items) if before is not None else 0
        # The last text comes after the messages, and won't be there the next time.
        place, point = len(parts) - 1, None
        rest = parts[done:]
        for number, (text, known) in enumerate(
            zip(rest, self._segments.find(rest, reader), strict=True), done
        ):
            if number == place:
                point = join.point()
            join.add(known or self._remembered(text, reader))
        if point is not None and place:
            weight = _TOKEN_BYTES * len(point.encoded.ids) + _PIECE_BYTES * point.pieces
            self._joined.put(parts[:place], point, weight, before, reader)
        return join.finish()

    def _remembered(self, text: str, reader: Reader) -> Segment:
        return self._segments.put(text, self.segment(text, reader), len(text), reader)

    def piece(self, part: str, reader: Reader = NO_SESSION) -> Piece:
        """Return the tokens of a text between special tokens, or of a special token."""
        (known,) = self._pieces.find((part,), reader)
        return known or self._pieces.put(part, self._tokenise(part), len(part), reader)

    def segment(self, text: str, reader: Reader = NO_SESSION) -> Segment:
        """Return the text prepared for joining. Only if :attr:`remembers`."""
        starts, ends = [], []
        for found in self._special.finditer(text) if self._special else ():
            starts.append(found.start())
            ends.append(found.end())
        closed = not any(
            text[len(text) - length :] in self._beginnings
            for length in range(1, min(self._longest, len(text) + 1))
        )
        if not starts:
            return Segment(text, text, None, "", closed)
        begin, end = starts[0], ends[-1]
        core = Piece(array("q"), array("q"))
        for offset, part in self._split(text[begin:end]):
            (known,) = self._pieces.find((part,), reader)
            piece = known or self._tokenise(part)
            core.ids.extend(piece.ids)
            core.starts.extend([offset + start for start in piece.starts])
        return Segment(text, text[:begin], core, text[end:], closed)

    def _split(self, text: str) -> Iterator[tuple[int, str]]:
        cursor = 0
        for found in self._special.finditer(text) if self._special else ():
            if found.start() > cursor:
                yield cursor, text[cursor : found.start()]
            yield found.start(), found[0]
            cursor = found.end()
        if cursor < len(text):
            yield cursor, text[cursor:]

    def _tokenise(self, part: str) -> Piece:
        if len(part) < _LONG:
            encoding = self._tokenizer.encode(part, add_special_tokens=False)
        else:
            (encoding,) = self._tokenizer.encode_batch([part], add_special_tokens=False)
        # One by one, because the list of all is made without a pause.
        places = map(encoding.token_to_chars, range(len(encoding)))
        starts = [place[0] for place in places if place is not None]
        return Piece(array("q", encoding.ids), array("q", starts))


@dataclass(frozen=True, slots=True)
class _Point:
    """The state of a join, for another to continue."""

    encoded: Encoded
    """May contain more pieces."""
    pieces: int
    """Number of pieces joined by then."""
    length: int
    between: tuple[str, ...]
    between_at: int
    open: Segment | None


class _Join:
    """Joins segments; equal to tokenising the joined text.

    The text between the cores of two segments is one piece. A segment in which a special token may
    have begun is joined with the next.

    Args:
        point: the state to continue from.
    """

    def __init__(
        self, tokenizer: PieceTokenizer, point: _Point | None = None, reader: Reader = NO_SESSION
    ) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._encoded = Encoded(point.encoded, point.pieces) if point is not None else Encoded()
        self._length = point.length if point is not None else 0
        self._between: list[str] = [*point.between] if point is not None else []
        self._between_at = point.between_at if point is not None else 0
        self._open: Segment | None = point.open if point is not None else None

    def point(self) -> _Point:
        """Return the state of the join."""
        encoded = self._encoded
        between = tuple(self._between)
        return _Point(encoded, encoded.size, self._length, between, self._between_at, self._open)

    def add(self, segment: Segment) -> None:
        if self._open is not None:
            segment = self._tokenizer.segment(self._open.text + segment.text, self._reader)
        self._open = None if segment.closed else segment
        if segment.closed:
            self._append(segment)

    def finish(self) -> Encoded:
        if self._open is not None:
            self._append(self._open)
        if self._between:
            self._flush()
        return self._encoded

    def _append(self, segment: Segment) -> None:
        at = self._length
        self._length = end = at + len(segment.text)
        if segment.head:
            self._note(segment.head, at)
        if segment.core is not None:
            if self._between:
                self._flush()
            self._encoded.add(segment.core, at + len(segment.head))
            if segment.tail:
                self._between.append(segment.tail)
                self._between_at = end - len(segment.tail)

    def _note(self, text: str, at: int) -> None:
        if not self._between:
            self._between_at = at
        self._between.append(text)

    def _flush(self) -> None:
        between = self._between
        text = between[0] if len(between) == 1 else "".join(between)
        self._encoded.add(self._tokenizer.piece(text, self._reader), self._between_at)
        between.clear()


def _separable_specials(document: dict[str, Any]) -> list[str]:
    """Return added tokens that split the text into independent pieces; empty if they don't."""
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
    """Return True if a normalizer or pre-tokenizer treats a text's beginning like its middle."""
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
